"""How well a trained network still recognises speech when there is noise: `python -m bitcycle.analysis.noise RUN_FOLDER`.

Each recording of the test split gets noise of its own, which follows from (seed, noise, number of the recording), at each ratio
of signal to noise; features are computed anew. `noise.csv` in the run folder has a row for the recordings as they are, one for
each noise and ratio, and the mean of all that have noise. HLHLp tests on Aurora-4 (section 4.3, table 5), for which this
stands in: noises and ratios are ours (`noises.py`), and the numbers are none of Aurora-4.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from bitcycle.analysis.finished_run import FinishedRun, load_run
from bitcycle.analysis.noises import NAMES, Noise, make_noise, mix
from bitcycle.dataset import SpeechDatasetOptions, Utterances
from bitcycle.errors import DataError, RunError
from bitcycle.randomness import derive
from bitcycle.task import SpeechEvaluation, SpeechRecognitionOptions
from bitcycle.training.checkpoint import write_atomically

COLUMNS = ("noise", "snr_db", "cer_percent", "wer_percent", "utterances", "decoder", "bits", "seed", "dataset", "scale")
DEFAULT_SNRS = ("5:15",)
"""Aurora-4's range, drawn evenly for each recording (semantics reference; recalled, not quoted)."""
DRAWN_PER_NOISE = 200
"""Recordings of the training split that babble and speech-shaped noise are made of."""


class NoiseTest:
    """The test of one run.

    Args:
        run: a finished run of speech recognition.
        seed: of the noise.
        decoder: for words: greedy or prefix; None: as the run's.

    Raises:
        RunError: if the run learned something else.
        DataError: if the recordings are missing.
    """

    def __init__(self, run: FinishedRun, seed: int = 0, decoder: str | None = None) -> None:
        config = run.plan.config
        if not isinstance(config.dataset, SpeechDatasetOptions):
            raise RunError(f"{run.folder.path} has learned from {config.dataset.name}, which holds no speech")
        self.run, self.dataset, self.seed = run, config.dataset, seed
        splits = self.dataset.load(config.data_folder)
        self.alphabet = self.dataset.alphabet(config.data_folder)
        rate = self.dataset.sampling_rate
        self.recordings = splits.test
        self.waveforms = [recording.waveform(rate) for recording in splits.test]
        self.speech = [recording.waveform(rate) for recording in splits.train[:DRAWN_PER_NOISE]]
        options = config.task if decoder is None else replace(config.task, decoder=decoder)
        assert isinstance(options, SpeechRecognitionOptions)
        self.decoder = options.decoder
        transcripts = [recording.transcript for recording in splits.train]
        self.evaluation = SpeechEvaluation(options, self.alphabet, transcripts)

    def noisy(self, name: str, noise: Noise, snr_db: tuple[float, float]) -> Iterator[Tensor]:
        """The test recordings with noise, at a ratio between two bounds that is drawn for each."""
        low, high = snr_db
        for number, waveform in enumerate(self.waveforms):
            generator = torch.Generator().manual_seed(derive(self.seed, "noise", name, number))
            ratio = low + (high - low) * float(torch.rand((), generator=generator, dtype=torch.float64))
            yield mix(waveform, noise(len(waveform), generator), ratio)

    def measure(self, waveforms: Iterator[Tensor] | Sequence[Tensor]) -> dict[str, float]:
        """`test_cer` and `test_wer` in percent of the test recordings, given as waveforms."""
        log_mel = self.dataset.log_mel
        texts = [recording.transcript for recording in self.recordings]
        utterances = Utterances([log_mel(waveform) for waveform in waveforms], texts, self.alphabet)
        return self.evaluation.measure(self.run.model, utterances, "test")

    def row(self, name: str, snr_db: str, values: dict[str, float]) -> dict[str, Any]:
        """One row of the table."""
        config = self.run.plan.config
        return {
            "noise": name,
            "snr_db": snr_db,
            "cer_percent": values["test_cer"],
            "wer_percent": values["test_wer"],
            "utterances": len(self.recordings),
            "decoder": self.decoder,
            "bits": f"{self.run.precision.weight}/{self.run.precision.activation}",
            "seed": self.seed,
            "dataset": config.dataset.name,
            "scale": config.scale,
        }


def noise_test(
    run: FinishedRun,
    noises: Sequence[str] = NAMES,
    snrs: Sequence[str] = DEFAULT_SNRS,
    seed: int = 0,
    decoder: str | None = None,
) -> list[dict[str, Any]]:
    """The table of one run: a row without noise, one for each noise and ratio, and their mean.

    Args:
        run: a finished run of speech recognition.
        noises: names, see `noises.py`, or folders of recordings.
        snrs: ratios of signal to noise in dB, as `10`, or bounds between which they are drawn, as `5:15`.
        seed: of the noise.
        decoder: for words: greedy or prefix; None: as the run's.

    Raises:
        RunError: if the run learned something else.
        DataError: if recordings are missing, or a noise is unknown.
        ValueError: for a ratio that is none.
    """
    test, ranges = NoiseTest(run, seed, decoder), {snr: read_snr(snr) for snr in snrs}
    made = {name: make_noise(name, test.dataset.sampling_rate, test.speech) for name in noises}
    rows = [test.row("none", "", test.measure(test.waveforms))]
    console = Console(stderr=True)
    conditions = [(name, snr) for name in made for snr in ranges]
    shown = track(conditions, "noise", console=console, disable=not console.is_terminal)
    noisy = [test.measure(test.noisy(name, made[name], ranges[snr])) for name, snr in shown]
    rows += [test.row(*condition, values) for condition, values in zip(conditions, noisy, strict=True)]
    if noisy:
        mean = {key: round(sum(values[key] for values in noisy) / len(noisy), 4) for key in ("test_cer", "test_wer")}
        rows.append(test.row("mean", "", mean))
    return rows


def read_snr(text: str) -> tuple[float, float]:
    """The bounds of a ratio in dB.

    Raises:
        ValueError: if it is none.

    >>> read_snr("10"), read_snr("5:15")
    ((10.0, 10.0), (5.0, 15.0))
    """
    low, _, high = text.partition(":")
    try:
        bounds = float(low), float(high or low)
    except ValueError:
        raise ValueError(f"--snr {text} is no ratio in dB; write 10, or 5:15 for ratios drawn in between") from None
    if bounds[0] > bounds[1]:
        raise ValueError(f"--snr {text} has its bounds the wrong way round; write {high}:{low}")
    return bounds


def as_csv(rows: Sequence[dict[str, Any]]) -> str:
    """A table as CSV text."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m bitcycle.analysis.noise", description="Recognition of speech with noise, of a finished run."
    )
    made.add_argument("run_folder", help="folder of a finished run; its name ends with seed=N")
    made.add_argument(
        "--noises",
        nargs="*",
        default=list(NAMES),
        help=f"of {', '.join(NAMES)}, or folders of recordings; none: clean only",
    )
    made.add_argument(
        "--snr",
        nargs="+",
        default=list(DEFAULT_SNRS),
        help="dB, as 10, or 5:15 for one drawn for each recording (default)",
    )
    made.add_argument("--seed", type=int, default=0, help="of the noise (default 0)")
    made.add_argument("--decoder", choices=("greedy", "prefix"), help="for words; default: the run's")
    made.add_argument("--data-root", help="where the data lie, if not where they lay")
    made.add_argument("--output", type=Path, help="CSV file; default: noise.csv in the run folder")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    options = parser().parse_args(arguments)
    try:
        run = load_run(options.run_folder, options.data_root)
        rows = noise_test(run, options.noises, options.snr, options.seed, options.decoder)
    except (RunError, DataError, ValueError) as error:
        print(error, file=sys.stderr)
        return 3 if isinstance(error, DataError) else 1 if isinstance(error, RunError) else 2
    output = options.output or run.folder.path / "noise.csv"
    write_atomically(output, lambda stream: stream.write(as_csv(rows).encode()))
    print(as_csv(rows), end="")
    print(f"{output}: noise mixed in by us, not Aurora-4", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
