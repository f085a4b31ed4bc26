"""Utterances in memory, and training batches of them whose order follows from (seed, epoch)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bitcycle.dataset.epoch import Epoch, epoch_order
from bitcycle.dataset.speech_features import speech_features
from bitcycle.randomness import derive

BLANK = 0
"""The symbol of CTC that stands for nothing; characters are numbered from 1."""


class SpeechBatch(NamedTuple):
    """Features [N, T, F] of utterances, padded with zeros; symbols [N, L], padded with blanks; how much of each is real.

    Lengths [N] lie on the CPU, where PyTorch's CTC wants them.
    """

    features: Tensor
    lengths: Tensor
    targets: Tensor
    target_lengths: Tensor


class Utterances:
    """Utterances as log-mel features, kept once in memory, and transcripts.

    Args:
        log_mel: features [T, B] of each utterance.
        transcripts: what is said.
        alphabet: the characters that have a symbol; others are left out of the targets, and count as errors of recognition.
    """

    def __init__(self, log_mel: Sequence[Tensor], transcripts: Sequence[str], alphabet: Sequence[str]) -> None:
        numbers = {character: number for number, character in enumerate(alphabet, BLANK + 1)}
        encoded = [[numbers[character] for character in text if character in numbers] for text in transcripts]
        self.transcripts, self.log_mel = list(transcripts), list(log_mel)
        self.symbols = [torch.tensor(text, dtype=torch.int64) for text in encoded]
        self.lengths = torch.tensor([len(frames) for frames in log_mel])
        self.target_lengths = torch.tensor([len(text) for text in encoded])

    def __len__(self) -> int:
        return len(self.transcripts)

    def to(self, device: torch.device) -> Utterances:
        """The same with features and symbols on a device; lengths stay."""
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
    """The endless sequence of training batches, startable at any step.

    The order of an epoch is random. Of `pool` batches after each other in this order, the utterances are then sorted by length,
    so that little is padded, and the batches are put into a random order again; the smaller last batch stays the last. All
    of this follows from (seed, epoch).

    Args:
        utterances: the training utterances.
        batch_size: utterances a step.
        pool: batches among which utterances are sorted by length; 1 leaves the order random.
        seed: of the order.
    """

    def __init__(self, utterances: Utterances, batch_size: int, pool: int, seed: int) -> None:
        self.utterances, self.batch_size, self.pool, self.seed = utterances, batch_size, pool, seed
        self.epoch = Epoch(len(utterances), batch_size)

    def starting_at(self, step: int) -> Iterator[SpeechBatch]:
        """Batches of steps `step`, `step` + 1, and so on without end."""
        return (self.utterances.batch(indices) for _, indices in self.epoch.from_step(step, self.order))

    def order(self, epoch: int) -> list[Tensor]:
        """The utterances of each batch of an epoch."""
        order = epoch_order(len(self.utterances), self.seed, epoch)
        if self.pool == 1:
            return list(order.split(self.batch_size))
        full = len(order) // self.batch_size * self.batch_size
        batches: list[Tensor] = []
        for pool in order[:full].split(self.batch_size * self.pool):
            by_length = pool[self.utterances.lengths[pool].argsort(stable=True)]
            batches += by_length.split(self.batch_size)
        generator = torch.Generator().manual_seed(derive(self.seed, "batches", epoch))
        mixed = [batches[place] for place in torch.randperm(len(batches), generator=generator).tolist()]
        return mixed if full == len(order) else [*mixed, order[full:]]
