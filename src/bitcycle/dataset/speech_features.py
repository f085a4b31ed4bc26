"""Features of speech: logarithms of mel band energies, their first and second differences, normalised for each utterance.

    power      |DFT(w x)|^2 of windows of W samples, H samples apart, w the periodic Hann window, the DFT padded to a power of two
    mel        m(f) = 2595 log10(1 + f / 700); triangles whose corners are equally far apart in mel from 0 to half the rate
    log-mel    ln max(mel bands, FLOOR)
    difference d_t = sum_n n (c_{t+n} - c_{t-n}) / (2 sum_n n^2), n = 1, 2, the first and last frame repeated beyond the ends
    normalised (x - mean) / (std + 1e-5), mean and std (biased) of each feature over the frames of the utterance

HLHLp says nothing of its features; these are the usual ones (HTK's formulas, Young et al., The HTK Book, sections 5.4 and 5.9).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

FLOOR = 1e-8
"""About the energy that rounding to 16 bits leaves in a mel band: below it there is no signal."""
DIFFERENCE_WIDTH = 2
STD_FLOOR = 1e-5


def mel(frequency: float) -> float:
    """Hertz to mel.

    >>> round(mel(1000.0), 3)
    999.986
    """
    return 2595 * math.log10(1 + frequency / 700)


def mel_filters(bands: int, bins: int, sampling_rate: int) -> Tensor:
    """Weights [bins, bands] of the mel bands; bins are the frequencies from 0 to half the sampling rate, equally far apart."""
    top = mel(sampling_rate / 2)
    corners = 700 * (10 ** (torch.linspace(0, top, bands + 2, dtype=torch.float64) / 2595) - 1)
    frequencies = torch.linspace(0, sampling_rate / 2, bins, dtype=torch.float64)[:, None]
    rising = (frequencies - corners[:-2]) / (corners[1:-1] - corners[:-2])
    falling = (corners[2:] - frequencies) / (corners[2:] - corners[1:-1])
    return torch.minimum(rising, falling).clamp_min(0).float()


class LogMel:
    """Waveforms [S] to log-mel features [T, bands], T = 1 + floor((max(S, W) - W) / H).

    Args:
        sampling_rate: samples a second.
        bands: number of mel bands.
        window_ms, hop_ms: length of a window, and from one window to the next, in milliseconds.
    """

    def __init__(self, sampling_rate: int, bands: int = 40, window_ms: float = 25.0, hop_ms: float = 10.0) -> None:
        self.window, self.hop = samples_in(window_ms, sampling_rate), samples_in(hop_ms, sampling_rate)
        self.size = 1 << (self.window - 1).bit_length()
        self.taper = torch.hann_window(self.window, periodic=True)
        self.filters = mel_filters(bands, self.size // 2 + 1, sampling_rate)

    def frames(self, samples: int) -> int:
        """T, the number of frames of a waveform; one shorter than a window is padded to one."""
        return 1 + (max(samples, self.window) - self.window) // self.hop

    def __call__(self, waveform: Tensor) -> Tensor:
        if len(waveform) < self.window:
            waveform = torch.nn.functional.pad(waveform, (0, self.window - len(waveform)))
        windows = waveform.unfold(0, self.window, self.hop) * self.taper
        power = torch.fft.rfft(windows, self.size).abs().square()
        bands: Tensor = power @ self.filters
        return bands.clamp_min(FLOOR).log()


def samples_in(milliseconds: float, sampling_rate: int) -> int:
    """Whole samples in a time, at least one."""
    return max(1, round(milliseconds * sampling_rate / 1000))


def differences(x: Tensor, lengths: Tensor) -> Tensor:
    """The differences [N, T, F] of features [N, T, F] whose first `lengths` [N] frames are real; other frames are undefined."""
    frames = torch.arange(x.shape[1], device=x.device)
    last = (lengths.to(x.device) - 1).clamp_min(0)[:, None]
    total = torch.zeros_like(x)
    for distance in range(1, DIFFERENCE_WIDTH + 1):
        after, before = ((frames + sign * distance).clamp_min(0)[None].minimum(last) for sign in (1, -1))
        total += distance * (_take(x, after) - _take(x, before))
    return total / (2 * sum(distance**2 for distance in range(1, DIFFERENCE_WIDTH + 1)))


def _take(x: Tensor, frames: Tensor) -> Tensor:
    return x.gather(1, frames[:, :, None].expand(-1, -1, x.shape[2]))


def normalise(x: Tensor, lengths: Tensor) -> Tensor:
    """Features [N, T, F] normalised over the real frames of each utterance; the others become 0."""
    real = (torch.arange(x.shape[1], device=x.device) < lengths.to(x.device)[:, None])[:, :, None]
    count = lengths.to(x.device)[:, None, None].clamp_min(1)
    centred = torch.where(real, x - torch.where(real, x, 0).sum(1, keepdim=True) / count, 0)
    std = (centred.square().sum(1, keepdim=True) / count).sqrt()
    return centred / (std + STD_FLOOR)


def speech_features(log_mel: Tensor, lengths: Tensor) -> Tensor:
    """Log-mel features [N, T, B] with their first and second differences, normalised: [N, T, 3 B]."""
    first = differences(log_mel, lengths)
    return normalise(torch.cat([log_mel, first, differences(first, lengths)], 2), lengths)
