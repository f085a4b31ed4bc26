"""Utterances in memory, their features, and training batches in an order that depends only on (seed, epoch).

    power      |DFT(w x)|^2 of windows of W samples, H samples apart, w the periodic Hann window, the DFT padded to a power of two
    mel        m(f) = 2595 log10(1 + f / 700); triangular filters, corners equally spaced in mel from 0 to half the rate
    log-mel    ln max(mel bands, FLOOR)
    difference d_t = sum_n n (c_{t+n} - c_{t-n}) / (2 sum_n n^2), n = 1, 2, first and last frame repeated at the ends
    normalised (x - mean) / (std + 1e-5), mean and std (biased) of each feature over the frames of the utterance

HLHLp does not specify its features; these are the usual ones (Young et al., The HTK Book, sections 5.4 and 5.9).
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bitcycle.dataset.epoch import Epoch, epoch_order, grouped_order
from bitcycle.device import to_device
from bitcycle.randomness import derive

BANDS, WINDOW_MS, HOP_MS = 40, 25.0, 10.0
"""Mel bands of a frame, and length of and distance between the windows of frames."""
FLOOR = 1e-8
"""Approximate energy of 16-bit rounding noise in a mel band."""
DIFFERENCE_WIDTH = 2
STD_FLOOR = 1e-5


def mel_filters(bands: int, bins: int, sampling_rate: int) -> Tensor:
    """Weights [bins, bands] of the mel bands; bins are equally spaced frequencies from 0 to half the sampling rate."""
    top = 2595 * math.log10(1 + sampling_rate / 2 / 700)
    corners = 700 * (10 ** (torch.linspace(0, top, bands + 2, dtype=torch.float64) / 2595) - 1)
    frequencies = torch.linspace(0, sampling_rate / 2, bins, dtype=torch.float64)[:, None]
    rising = (frequencies - corners[:-2]) / (corners[1:-1] - corners[:-2])
    falling = (corners[2:] - frequencies) / (corners[2:] - corners[1:-1])
    return torch.minimum(rising, falling).clamp_min(0).float()


class LogMel:
    """Converts waveforms [S] to log-mel features [T, bands], T = 1 + floor((max(S, W) - W) / H)."""

    def __init__(self, sampling_rate: int, bands: int = BANDS) -> None:
        self.window, self.hop = (max(1, round(ms * sampling_rate / 1000)) for ms in (WINDOW_MS, HOP_MS))
        self.size = 1 << (self.window - 1).bit_length()
        self.taper = torch.hann_window(self.window, periodic=True)
        self.filters = mel_filters(bands, self.size // 2 + 1, sampling_rate)

    def frames(self, samples: int) -> int:
        """T, the number of frames of a waveform; shorter waveforms are padded to a window."""
        return 1 + (max(samples, self.window) - self.window) // self.hop

    def __call__(self, waveform: Tensor) -> Tensor:
        if len(waveform) < self.window:
            waveform = torch.nn.functional.pad(waveform, (0, self.window - len(waveform)))
        windows = waveform.unfold(0, self.window, self.hop) * self.taper
        power = torch.fft.rfft(windows, self.size).abs().square()
        bands: Tensor = power @ self.filters
        return bands.clamp_min(FLOOR).log()


def differences(x: Tensor, lengths: Tensor) -> Tensor:
    """Differences [N, T, F] of features [N, T, F] with `lengths` [N] valid frames; of other frames they are undefined."""
    frames = torch.arange(x.shape[1], device=x.device)
    last = (to_device(lengths, x.device) - 1).clamp_min(0)[:, None]

    def at(distance: int) -> Tensor:
        places = (frames + distance).clamp_min(0)[None].minimum(last)
        return x.gather(1, places[:, :, None].expand(-1, -1, x.shape[2]))

    distances = range(1, DIFFERENCE_WIDTH + 1)
    total = torch.stack([n * (at(n) - at(-n)) for n in distances]).sum(0)
    return total / (2 * sum(n**2 for n in distances))


def normalise(x: Tensor, lengths: Tensor) -> Tensor:
    """Normalise features [N, T, F] over the valid frames of each utterance; other frames become 0."""
    real = (torch.arange(x.shape[1], device=x.device) < to_device(lengths, x.device)[:, None])[:, :, None]
    count = to_device(lengths, x.device)[:, None, None].clamp_min(1)
    centred = torch.where(real, x - torch.where(real, x, 0).sum(1, keepdim=True) / count, 0)
    std = (centred.square().sum(1, keepdim=True) / count).sqrt()
    return centred / (std + STD_FLOOR)


def speech_features(log_mel: Tensor, lengths: Tensor) -> Tensor:
    """Log-mel features [N, T, B] with their first and second differences, normalised: [N, T, 3 B]."""
    first = differences(log_mel, lengths)
    return normalise(torch.cat([log_mel, first, differences(first, lengths)], 2), lengths)


BLANK = 0
"""CTC's blank symbol; characters are numbered from 1."""


class SpeechBatch(NamedTuple):
    """Features [N, T, F], padded with zeros, symbols [N, L], padded with blanks, and lengths [N] of both, on the CPU."""

    features: Tensor
    lengths: Tensor
    targets: Tensor
    target_lengths: Tensor


class Utterances:
    """Log-mel features and transcripts. Characters outside the alphabet are left out of targets, and count as errors."""

    def __init__(self, log_mel: Sequence[Tensor], transcripts: Sequence[str], alphabet: Sequence[str]) -> None:
        numbers = {character: number for number, character in enumerate(alphabet, BLANK + 1)}
        encoded = [[numbers[character] for character in text if character in numbers] for text in transcripts]
        self.transcripts, self.log_mel = list(transcripts), list(log_mel)
        self.symbols = [torch.tensor(text, dtype=torch.int64) for text in encoded]
        self.lengths = torch.tensor([len(frames) for frames in log_mel])
        self.target_lengths = torch.tensor([len(text) for text in encoded])
        repeats = torch.tensor([sum(a == b for a, b in pairwise(text)) for text in encoded])
        self.needed_frames = self.target_lengths + repeats  # CTC has a blank between equal symbols

    def __len__(self) -> int:
        return len(self.transcripts)

    def to(self, device: torch.device) -> "Utterances":
        """Move features and symbols to a device; lengths stay on the CPU."""
        self.log_mel, self.symbols = ([part.to(device) for part in parts] for parts in (self.log_mel, self.symbols))
        return self

    def batch(self, indices: Tensor) -> SpeechBatch:
        """The utterances `indices` [N], on the device."""
        log_mel, targets = (
            pad_sequence([parts[index] for index in indices.tolist()], batch_first=True)
            for parts in (self.log_mel, self.symbols)
        )
        lengths, target_lengths = self.lengths[indices], self.target_lengths[indices]
        return SpeechBatch(speech_features(log_mel, lengths), lengths, targets, target_lengths)


class UtteranceBatches:
    """The infinite sequence of training batches, which can start at any step.

    The order of an epoch is random. Utterances of each `pool` consecutive batches are then sorted by length to reduce
    padding, and the batches are shuffled; a smaller last batch stays last. The order depends only on (seed, epoch).
    """

    def __init__(self, utterances: Utterances, batch_size: int, pool: int, seed: int) -> None:
        self.utterances, self.batch_size, self.pool, self.seed = utterances, batch_size, pool, seed
        self.epoch = Epoch(len(utterances), batch_size)

    def starting_at(self, step: int) -> Iterator[SpeechBatch]:
        """Batches of steps `step`, `step` + 1, and so on without end."""
        return (self.utterances.batch(indices) for _, indices in self.epoch.from_step(step, self.order))

    def order(self, epoch: int) -> list[Tensor]:
        """Utterance indices of each batch of an epoch."""
        if self.pool == 1:
            return list(epoch_order(len(self.utterances), self.seed, epoch).split(self.batch_size))
        mixing = derive(self.seed, "batches", epoch)
        return grouped_order(self.utterances.lengths, self.batch_size, self.pool, self.seed, epoch, mixing)
