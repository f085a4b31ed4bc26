"""How well a trained network still recognises speech when there is noise: `python -m bitcycle.measurement.noise RUN_FOLDER`.

Each recording of the test split gets noise of its own, which follows from (seed, noise, number of the recording), at each ratio
of signal to noise; features are recomputed. There is a row for the recordings as they are, and one for each noise and ratio;
the papers' number is the mean over the latter. HLHLp tests on Aurora-4 (section 4.3, table 5), for which this
stands in: noises and ratios are ours (`noises.py`), and the numbers are none of Aurora-4.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Optional

import torch
from torch import Tensor

from bitcycle.dataset import SpeechDatasetOptions, Utterances
from bitcycle.errors import RunError
from bitcycle.measurement.artifacts import Row
from bitcycle.measurement.command import run_command
from bitcycle.measurement.finished_run import FinishedRun
from bitcycle.measurement.job import Analysis, AnalysisOptions
from bitcycle.measurement.noises import NAMES, Noise, make_noise, mix
from bitcycle.randomness import derive
from bitcycle.settings import SettingError, setting
from bitcycle.task import SpeechEvaluation, SpeechRecognitionOptions

CLEAN = "none"
DRAWN_PER_NOISE = 200
"""Recordings of the training split that babble and speech-shaped noise are made of."""


@dataclass
class NoiseOptions(AnalysisOptions):
    """Options of a test with noise."""

    kind = "noise"

    noises: list[str] = setting(list(NAMES), f"of {', '.join(NAMES)}, or folders of recordings; []: clean only")
    snr: list[str] = setting(
        ["5:15"], "dB, as 10, or 5:15 for one drawn for each recording (Aurora-4's range, recalled)"
    )
    seed: int = setting(0, "of the noise", minimum=0)
    decoder: Optional[str] = setting(None, "for words: greedy or prefix; null: the run's", choices=("greedy", "prefix"))

    def validate(self) -> None:
        for ratio in self.snr:
            read_snr(ratio)

    def prepare(self, runs: Sequence[FinishedRun], device: torch.device) -> NoiseTest:
        return NoiseTest(runs[0], self)


class NoiseTest(Analysis):
    """The test of one run; a unit is a noise at a ratio, the first one the recordings as they are.

    Args:
        run: a finished run of speech recognition.
        options: noises, ratios, seed and decoder.

    Raises:
        RunError: if the run learned something else.
        DataError: if recordings are missing, or a noise is unknown.
    """

    columns = ("noise", "snr_db", "cer_percent", "wer_percent")

    def __init__(self, run: FinishedRun, options: NoiseOptions | None = None) -> None:
        config, options = run.plan.config, options or NoiseOptions()
        if not isinstance(config.dataset, SpeechDatasetOptions):
            raise RunError(f"{run.folder.path} has learned from {config.dataset.name}, which holds no speech")
        self.run, self.dataset, self.seed = run, config.dataset, options.seed
        splits = self.dataset.load(config.data_folder)
        self.alphabet = self.dataset.alphabet(config.data_folder)
        rate = self.dataset.sampling_rate
        self.recordings = splits.test
        self.waveforms = [recording.waveform(rate) for recording in splits.test]
        speech = [recording.waveform(rate) for recording in splits.train[:DRAWN_PER_NOISE]]
        self.noises = {name: make_noise(name, rate, speech) for name in options.noises}
        self.conditions = [(CLEAN, ""), *((name, snr) for name in self.noises for snr in options.snr)]
        self.units = len(self.conditions)
        task = config.task
        assert isinstance(task, SpeechRecognitionOptions)
        task = task if options.decoder is None else replace(task, decoder=options.decoder)
        transcripts = [recording.transcript for recording in splits.train]
        self.evaluation = SpeechEvaluation(task, self.alphabet, transcripts)
        self.facts: dict[str, Any] = {
            "utterances": len(self.recordings),
            "decoder": task.decoder,
            "bits": [run.precision.weight, run.precision.activation],
            "dataset": config.dataset.name,
            "model": config.model.name,
        }

    def rows(self, unit: int) -> list[Row]:
        name, snr = self.conditions[unit]
        noisy = self.waveforms if name == CLEAN else self.noisy(name, self.noises[name], read_snr(snr))
        rates = self.measure(noisy)
        return [{"noise": name, "snr_db": snr, "cer_percent": rates["test_cer"], "wer_percent": rates["test_wer"]}]

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


def read_snr(text: str) -> tuple[float, float]:
    """The bounds of a ratio in dB.

    Raises:
        SettingError (a ValueError): if it is none.

    >>> read_snr("10"), read_snr("5:15")
    ((10.0, 10.0), (5.0, 15.0))
    """
    low, _, high = text.partition(":")
    try:
        bounds = float(low), float(high or low)
    except ValueError:
        raise SettingError("snr", text, "is no ratio in dB", "write 10, or 5:15 for ratios drawn in between") from None
    if bounds[0] > bounds[1]:
        raise SettingError("snr", text, "has its bounds the wrong way round", f"write {high}:{low}")
    return bounds


if __name__ == "__main__":
    sys.exit(run_command(NoiseOptions, __doc__))
