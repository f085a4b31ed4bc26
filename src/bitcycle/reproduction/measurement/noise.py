"""Error rates of a trained speech recognizer on noisy recordings: `bitcycle noise RUN_FOLDER`.

For each signal-to-noise ratio (SNR), each recording x of the test split is mixed with noise n derived from (seed,
noise, number of the recording), and its features are recomputed:

    y = x + n sqrt( P_x / (P_n 10^(SNR / 10)) ),   P = mean square over the recording, SNR in dB

| noise | n |
|---|---|
| white | independent normal samples |
| pink | white noise with amplitudes divided by sqrt(frequency): -3 dB per octave |
| babble | sum of eight speech recordings of equal power, each repeated, with a random start |
| speech_shaped | white noise with the average power spectrum of speech recordings |
| modulated | speech_shaped times 1 + sin(2 pi 2 Hz t + phase) |
| hum | 50 Hz and its first nine overtones, amplitudes 1 / k, random phases |
| a folder of recordings | random excerpt of a random recording, repeated if it is too short |

The result has one row for the clean recordings and one for each noise and SNR; the papers report the mean over the
latter. HLHLp tests on Aurora-4 (section 4.3, table 5), which adds recorded car, babble, restaurant, street, airport and
train noise to WSJ. Noises and SNRs here are ours, so the results are not Aurora-4 results.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bitcycle.dataset.speech import SpeechDatasetOptions, file_recording
from bitcycle.dataset.utterances import LogMel, Utterances
from bitcycle.errors import DataError, RunError
from bitcycle.layer.memory_format import channels_last
from bitcycle.randomness import derive
from bitcycle.reproduction.measurement.artifacts import CLEAN, Row
from bitcycle.reproduction.measurement.job import Analysis, run_command
from bitcycle.settings import SettingError, setting
from bitcycle.task.speech_recognition import SpeechEvaluation, SpeechRecognitionOptions
from bitcycle.training.finished_run import FinishedRun

Noise = Callable[[int, torch.Generator], Tensor]
"""(samples, generator) -> noise [samples]."""
NAMES = ("white", "pink", "babble", "speech_shaped", "modulated", "hum")
DRAWN_PER_NOISE = 200
"""Number of training recordings from which babble and speech-shaped noise are made."""
TALKERS = 8
SWELLS = 2.0
"""Frequency of modulated noise in Hz."""
MAINS = 50.0
"""Frequency of hum in Hz."""
SUFFIXES = {".wav", ".flac", ".sph", ".wv1", ".wv2", ".ogg"}
SPECTRUM_SIZE = 512
LOUDEST = 60.0
"""Absolute SNRs in dB from here on are refused: YAML reads 5:15 without quotation marks as 5 x 60 + 15."""


def mix(signal: Tensor, noise: Tensor, snr_db: float) -> Tensor:
    """Mix signal and noise [S] at a signal-to-noise ratio of `snr_db`, in float64; a silent signal stays silent. Raises
    DataError if the noise is silent."""
    x, n = signal.double(), noise.double()
    signal_power, noise_power = x.square().mean(), n.square().mean()
    if noise_power == 0:
        raise DataError(
            "a noise is silent and cannot be scaled to a signal-to-noise ratio; use recordings without silence"
        )
    return (x + n * (signal_power / (noise_power * 10 ** (snr_db / 10))).sqrt()).to(signal.dtype)


def make_noise(name: str, sampling_rate: int, speech: Sequence[Tensor]) -> Noise:
    """The noise `name`: one of `NAMES`, made of recordings of `speech` if necessary, or a folder of recordings. Raises DataError
    for a folder without recordings, or an unknown name."""
    made: dict[str, Callable[[], Noise]] = {
        "white": lambda: _white,
        "pink": lambda: _pink,
        "babble": lambda: _babble(speech),
        "speech_shaped": lambda: _speech_shaped(speech),
        "modulated": lambda: _modulated(_speech_shaped(speech), sampling_rate),
        "hum": lambda: _hum(sampling_rate),
    }
    return made.get(name, lambda: _folder(Path(name).expanduser(), sampling_rate))()


def _white(samples: int, generator: torch.Generator) -> Tensor:
    return torch.randn(samples, generator=generator, dtype=torch.float64)


def _shaped(samples: int, generator: torch.Generator, amplitude: Callable[[Tensor], Tensor]) -> Tensor:
    """White noise filtered with an amplitude response; frequencies are fractions of the sampling rate."""
    spectrum = torch.fft.rfft(_white(samples, generator))
    frequencies = torch.arange(len(spectrum), dtype=torch.float64) / samples
    found: Tensor = torch.fft.irfft(spectrum * amplitude(frequencies), samples)
    return found


def _pink(samples: int, generator: torch.Generator) -> Tensor:
    if samples == 1:  # only the frequency 0
        return _white(samples, generator)
    return _shaped(samples, generator, lambda frequencies: torch.where(frequencies > 0, frequencies, math.inf).rsqrt())


def _speech_shaped(speech: Sequence[Tensor]) -> Noise:
    power = torch.zeros(SPECTRUM_SIZE // 2 + 1, dtype=torch.float64)
    taper = torch.hann_window(SPECTRUM_SIZE, dtype=torch.float64)
    for recording in speech:
        padded = torch.nn.functional.pad(recording.double(), (0, max(0, SPECTRUM_SIZE - len(recording))))
        windows = padded.unfold(0, SPECTRUM_SIZE, SPECTRUM_SIZE // 2) * taper
        power += torch.fft.rfft(windows).abs().square().sum(0)
    amplitudes, places = power.sqrt(), np.arange(len(power)) / SPECTRUM_SIZE

    def between(frequencies: Tensor) -> Tensor:
        return torch.from_numpy(np.interp(frequencies, places, amplitudes))

    return lambda samples, generator: _shaped(samples, generator, between)


def _modulated(noise: Noise, sampling_rate: int) -> Noise:
    def modulated(samples: int, generator: torch.Generator) -> Tensor:
        phase = 2 * math.pi * torch.rand((), generator=generator, dtype=torch.float64)
        step = 2 * math.pi * SWELLS / sampling_rate
        swell = 1 + torch.sin(step * torch.arange(samples, dtype=torch.float64) + phase)
        return noise(samples, generator) * swell

    return modulated


def _hum(sampling_rate: int) -> Noise:
    """Mains hum: its frequency and the overtones below the Nyquist frequency."""
    step, overtones = 2 * math.pi * MAINS / sampling_rate, range(1, 11)

    def hum(samples: int, generator: torch.Generator) -> Tensor:
        time = torch.arange(samples, dtype=torch.float64)
        heard = [k for k in overtones if k * MAINS < sampling_rate / 2]
        phases = 2 * math.pi * torch.rand(len(heard), generator=generator, dtype=torch.float64)
        return torch.stack([torch.sin(k * step * time + phase) / k for k, phase in zip(heard, phases)]).sum(0)

    return hum


def _babble(speech: Sequence[Tensor]) -> Noise:
    spoken = [recording.double() for recording in speech if recording.abs().max() > 0]

    def babble(samples: int, generator: torch.Generator) -> Tensor:
        total = torch.zeros(samples, dtype=torch.float64)
        for _ in range(TALKERS):
            recording = spoken[_draw(len(spoken), generator)]
            places = (torch.arange(samples) + _draw(len(recording), generator)) % len(recording)
            total += recording[places] / recording.square().mean().sqrt()
        return total

    return babble


def _folder(folder: Path, sampling_rate: int) -> Noise:
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES) if folder.is_dir() else []
    if not files:
        raise DataError(f"{folder} is neither one of the noises {', '.join(NAMES)} nor a folder of recordings")
    recordings = [file_recording(path, "").waveform(sampling_rate) for path in files]

    def piece(samples: int, generator: torch.Generator) -> Tensor:
        recording = recordings[_draw(len(recordings), generator)]
        start = _draw(max(1, len(recording) - samples + 1), generator)
        return recording[(torch.arange(samples) + start) % len(recording)].double()

    return piece


def _draw(count: int, generator: torch.Generator) -> int:
    """A random integer in 0, ..., count - 1."""
    return int(torch.randint(count, (), generator=generator))


@dataclass
class NoiseTest(Analysis):
    """The test of one run; a unit is a noise at an SNR, and the first unit the clean recordings. Raises RunError if the task
    of the run is not speech recognition; DataError if recordings are missing, or a noise is unknown."""

    kind = "noise"
    columns = ("noise", "snr_db", "cer_percent", "wer_percent")

    noises: list[str] = setting(list(NAMES), f"{', '.join(NAMES)}, or folders of recordings; []: clean only")
    snr: list[str] = setting(
        ["5:15"], "SNR in dB: 10, or 5:15 to draw it for each recording (Aurora-4's range, from memory)"
    )
    seed: int = setting(0, "seed of the noise", minimum=0)

    def validate(self) -> None:
        for ratio in self.snr:
            read_snr(ratio)

    def prepare(self, runs: Sequence[FinishedRun], device: torch.device) -> tuple[int, Row]:
        [run] = runs
        config = run.plan.config
        if not isinstance(config.dataset, SpeechDatasetOptions):
            problem = f"dataset={config.dataset.name}: {run.folder.path} is not a run of speech recognition"
            raise RunError(f"{problem}. Remedy: choose another run")
        self.dataset = config.dataset
        splits = self.dataset.load(config.data_folder, config.seed)
        self.alphabet = self.dataset.alphabet(config.data_folder)
        rate = self.dataset.sampling_rate
        self.recordings = splits.test
        self.waveforms = [recording.waveform(rate) for recording in splits.test]
        speech = [recording.waveform(rate) for recording in splits.train[:DRAWN_PER_NOISE]]
        self.made = {name: make_noise(name, rate, speech) for name in self.noises}
        self.conditions = [(CLEAN, ""), *((name, snr) for name in self.made for snr in self.snr)]
        task = config.task
        assert isinstance(task, SpeechRecognitionOptions)
        self.evaluation, self.device = SpeechEvaluation(task, self.alphabet), device
        self.model = channels_last(run.model, device)
        facts = {"bits": run.bits, "utterances": len(self.recordings)}
        return len(self.conditions), run.subject | facts

    def rows(self, unit: int) -> list[Row]:
        name, snr = self.conditions[unit]
        noisy = self.waveforms if name == CLEAN else self.noisy(name, self.made[name], read_snr(snr))
        rates = self.measure(noisy)
        return [{"noise": name, "snr_db": snr, "cer_percent": rates["test_cer"], "wer_percent": rates["test_wer"]}]

    def noisy(self, name: str, noise: Noise, snr_db: tuple[float, float]) -> Iterator[Tensor]:
        """The test recordings with noise, each at an SNR drawn uniformly between two bounds."""
        low, high = snr_db
        for number, waveform in enumerate(self.waveforms):
            generator = torch.Generator().manual_seed(derive(self.seed, "noise", name, number))
            ratio = low + (high - low) * float(torch.rand((), generator=generator, dtype=torch.float64))
            yield mix(waveform, noise(len(waveform), generator), ratio)

    def measure(self, waveforms: Iterator[Tensor] | Sequence[Tensor]) -> dict[str, float]:
        """`test_cer` and `test_wer` in percent for waveforms of the test recordings."""
        log_mel = LogMel(self.dataset.sampling_rate)
        texts = [recording.transcript for recording in self.recordings]
        utterances = Utterances([log_mel(waveform) for waveform in waveforms], texts, self.alphabet).to(self.device)
        return self.evaluation.measure(self.model, utterances, "test")


def read_snr(text: str) -> tuple[float, float]:
    """Parse an SNR in dB; returns lower and upper bound. Raises SettingError if the text is not an SNR, or too large."""
    low, _, high = text.partition(":")
    try:
        bounds = float(low), float(high or low)
    except ValueError:
        raise SettingError("snr", text, "is not an SNR in dB", "write 10, or 5:15 for random SNRs in between") from None
    if not all(abs(bound) < LOUDEST for bound in bounds):
        remedy = f'use less than {LOUDEST:g}; in a sweep file, a range has quotation marks: "5:15"'
        raise SettingError("snr", text, "is too large in dB", remedy)
    if bounds[0] > bounds[1]:
        raise SettingError("snr", text, "has its bounds in the wrong order", f"write {high}:{low}")
    return bounds


if __name__ == "__main__":
    sys.exit(run_command(NoiseTest, __doc__))
