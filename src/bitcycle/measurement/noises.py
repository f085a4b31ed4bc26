"""Noises for recordings of speech, and mixing at a given ratio of signal to noise.

    y = x + n sqrt( P_x / (P_n 10^(SNR / 10)) ),   P = mean square over the recording, SNR in dB

| noise | n |
|---|---|
| white | normal, independent samples |
| pink | white, its amplitudes divided by sqrt(frequency): 3 dB less for each octave |
| speech_shaped | white with the mean amplitudes of recordings of speech |
| babble | the sum of eight recordings of speech of equal power, each repeated from a random place on |
| modulated | speech_shaped times 1 + sin(2 pi 2 Hz t + phase) |
| hum | 50 Hz and its first nine overtones, amplitudes 1 / k, random phases |

A folder of recordings is a noise, too: a random piece of a random one. Aurora-4 mixes its own recordings of car, babble,
restaurant, street, airport and train into WSJ: the noises here are ours, and results with them are none of Aurora-4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from bitcycle.dataset.audio import file_recording
from bitcycle.errors import DataError

Noise = Callable[[int, torch.Generator], Tensor]
"""(samples, generator) -> noise [samples]."""
NAMES = ("white", "pink", "babble", "speech_shaped", "modulated", "hum")
TALKERS = 8
SUFFIXES = {".wav", ".flac", ".sph", ".wv1", ".wv2", ".ogg"}
SPECTRUM_SIZE = 512


def mix(signal: Tensor, noise: Tensor, snr_db: float) -> Tensor:
    """Signal and noise [S] at `snr_db`; float64 inside.

    Raises:
        ValueError: for noise without power. A silent signal stays silent.

    >>> mixed = mix(torch.tensor([1.0, -1.0]), torch.tensor([3.0, 3.0]), snr_db=0)
    >>> mixed.tolist()
    [2.0, 0.0]
    """
    x, n = signal.double(), noise.double()
    signal_power, noise_power = x.square().mean(), n.square().mean()
    if noise_power == 0:
        raise ValueError("the noise is silent: no factor brings it to a ratio of signal to noise")
    return (x + n * (signal_power / (noise_power * 10 ** (snr_db / 10))).sqrt()).to(signal.dtype)


def make_noise(name: str, sampling_rate: int, speech: Sequence[Tensor]) -> Noise:
    """The noise `name`: one of `NAMES`, or a folder of recordings at `sampling_rate`.

    Args:
        name: of the noise.
        sampling_rate: samples a second.
        speech: recordings (of the training split) that babble and speech-shaped noise are made of.

    Raises:
        DataError: for a folder without recordings, or an unknown name.
    """
    if name == "white":
        return white
    if name == "pink":
        return pink
    if name == "babble":
        return Babble(speech)
    if name == "speech_shaped":
        return SpeechShaped(speech)
    if name == "modulated":
        return Modulated(SpeechShaped(speech), sampling_rate)
    if name == "hum":
        return Hum(sampling_rate)
    return Folder(Path(name).expanduser(), sampling_rate)


def white(samples: int, generator: torch.Generator) -> Tensor:
    """Normal, independent samples."""
    return torch.randn(samples, generator=generator, dtype=torch.float64)


def shaped(samples: int, generator: torch.Generator, amplitude: Callable[[Tensor], Tensor]) -> Tensor:
    """White noise whose spectrum is multiplied by `amplitude` of the frequencies, given as a share of the sampling rate."""
    spectrum = torch.fft.rfft(white(samples, generator))
    frequencies = torch.arange(len(spectrum), dtype=torch.float64) / samples
    found: Tensor = torch.fft.irfft(spectrum * amplitude(frequencies), samples)
    return found


def pink(samples: int, generator: torch.Generator) -> Tensor:
    """Noise of the same power in each octave, without a constant part."""
    if samples == 1:  # nothing but a constant part
        return white(samples, generator)
    return shaped(samples, generator, _inverse_root)


def _inverse_root(frequencies: Tensor) -> Tensor:
    return torch.where(frequencies > 0, frequencies, math.inf).rsqrt()


class SpeechShaped:
    """Noise with the mean amplitude spectrum of recordings."""

    def __init__(self, speech: Sequence[Tensor]) -> None:
        power = torch.zeros(SPECTRUM_SIZE // 2 + 1, dtype=torch.float64)
        taper = torch.hann_window(SPECTRUM_SIZE, dtype=torch.float64)
        for recording in speech:
            missing = max(0, SPECTRUM_SIZE - len(recording))
            padded = torch.nn.functional.pad(recording.double(), (0, missing))
            windows = padded.unfold(0, SPECTRUM_SIZE, SPECTRUM_SIZE // 2) * taper
            power += torch.fft.rfft(windows).abs().square().sum(0)
        self.amplitudes = power.sqrt()

    def __call__(self, samples: int, generator: torch.Generator) -> Tensor:
        return shaped(samples, generator, self._amplitude)

    def _amplitude(self, frequencies: Tensor) -> Tensor:
        """The amplitude spectrum, linear between its points."""
        places = frequencies * SPECTRUM_SIZE
        low = places.floor().long().clamp_max(len(self.amplitudes) - 2)
        share = places - low
        return self.amplitudes[low] * (1 - share) + self.amplitudes[low + 1] * share


class Modulated:
    """A noise that swells and fades twice a second."""

    def __init__(self, noise: Noise, sampling_rate: int, frequency: float = 2.0) -> None:
        self.noise, self.step = noise, 2 * math.pi * frequency / sampling_rate

    def __call__(self, samples: int, generator: torch.Generator) -> Tensor:
        phase = 2 * math.pi * torch.rand((), generator=generator, dtype=torch.float64)
        swell = 1 + torch.sin(self.step * torch.arange(samples, dtype=torch.float64) + phase)
        return self.noise(samples, generator) * swell


class Hum:
    """Mains hum: 50 Hz and overtones below half the sampling rate."""

    def __init__(self, sampling_rate: int, frequency: float = 50.0, tones: int = 10) -> None:
        self.sampling_rate = sampling_rate
        self.tones = [k for k in range(1, tones + 1) if k * frequency < sampling_rate / 2]
        self.step = 2 * math.pi * frequency / sampling_rate

    def __call__(self, samples: int, generator: torch.Generator) -> Tensor:
        time = torch.arange(samples, dtype=torch.float64)
        phases = 2 * math.pi * torch.rand(len(self.tones), generator=generator, dtype=torch.float64)
        tones = [torch.sin(k * self.step * time + phase) / k for k, phase in zip(self.tones, phases)]
        return torch.stack(tones).sum(0)


class Babble:
    """Eight people who talk at once."""

    def __init__(self, speech: Sequence[Tensor]) -> None:
        self.speech = [recording.double() for recording in speech if recording.abs().max() > 0]

    def __call__(self, samples: int, generator: torch.Generator) -> Tensor:
        total = torch.zeros(samples, dtype=torch.float64)
        for _ in range(TALKERS):
            recording = self.speech[_draw(len(self.speech), generator)]
            places = (torch.arange(samples) + _draw(len(recording), generator)) % len(recording)
            total += recording[places] / recording.square().mean().sqrt()
        return total


class Folder:
    """A random piece of a random recording, repeated where it is too short."""

    def __init__(self, folder: Path, sampling_rate: int) -> None:
        files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES) if folder.is_dir() else []
        if not files:
            raise DataError(f"{folder} is neither one of the noises {', '.join(NAMES)} nor a folder of recordings")
        self.recordings = [file_recording(path, "").waveform(sampling_rate) for path in files]

    def __call__(self, samples: int, generator: torch.Generator) -> Tensor:
        recording = self.recordings[_draw(len(self.recordings), generator)]
        start = _draw(max(1, len(recording) - samples + 1), generator)
        return recording[(torch.arange(samples) + start) % len(recording)].double()


def _draw(count: int, generator: torch.Generator) -> int:
    """One of 0 .. count-1."""
    return int(torch.randint(count, (), generator=generator))
