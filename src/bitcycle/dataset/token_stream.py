"""A text as batches of token sequences: parallel streams continued from batch to batch, or blocks in random order."""

import itertools
import random
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from bitcycle import distributed
from bitcycle.dataset.epoch import Epoch
from bitcycle.device import to_device
from bitcycle.randomness import derive

SHORT_SHARE, LENGTH_DEVIATION, MINIMUM_LENGTH = 0.05, 5.0, 5
"""Random lengths (Merity et al. 2018): probability of half the mean length, standard deviation, and minimum."""


class TokenBatch(NamedTuple):
    """Input tokens [T, N] and target tokens [T, N]; whether the inputs continue those of the previous batch."""

    inputs: Tensor
    targets: Tensor
    continues: bool

    @property
    def streams(self) -> int:
        """Number of streams N."""
        return self.inputs.shape[1]

    def share(self) -> "TokenBatch":
        """This process's shard of the streams or blocks."""
        inputs, targets = (distributed.local_shard(part, dim=1) for part in (self.inputs, self.targets))
        return TokenBatch(inputs, targets, self.continues)


class TokenStreams:
    """A text cut into streams of equal length, read in parallel in batches of T = `length` tokens per stream.

    The last batch of an epoch is shorter; the remainder of less than N tokens is dropped.
    """

    def __init__(self, tokens: Tensor, streams: int, length: int) -> None:
        each, self.count = len(tokens) // streams, streams
        self.tokens, self.length = tokens[: each * streams].view(streams, each).T.contiguous(), length
        self.epoch = stream_epoch(len(tokens), streams, length)

    def length_of(self, step: int) -> int:
        """Time steps of the batch of a training step, ignoring the end of the streams."""
        return self.length

    def of_epoch(self) -> Iterator[TokenBatch]:
        """Batches of an epoch."""
        return itertools.islice(self.starting_at(0), self.epoch.steps)

    def starting_at(self, step: int) -> Iterator[TokenBatch]:
        """Batches of steps `step`, `step` + 1, and so on without end."""
        last, start = len(self.tokens) - 1, 0
        for number in itertools.count():
            end = min(start + self.length_of(number), last)
            if number >= step:
                yield TokenBatch(self.tokens[start:end], self.tokens[start + 1 : end + 1], continues=start > 0)
            start = end if end < last else 0


class DrawnTokenStreams(TokenStreams):
    """Streams read repeatedly in batches of random length, which depends only on (seed, step).

        T = max(5, floor(z)),    z ~ Normal(L, 5), with probability 0.05 Normal(L / 2, 5);    less at the end of the streams

    An epoch has as many steps as the streams have batches of mean length, wherever it ends in the streams.

    Source: Merity et al. 2018, section 5, and released code, where an epoch ends with the streams instead.
    """

    def __init__(self, tokens: Tensor, streams: int, length: int, seed: int = 0) -> None:
        super().__init__(tokens, streams, length)
        self.seed = seed
        self.epoch = stream_epoch(len(tokens), streams, mean_length(length))

    def length_of(self, step: int) -> int:
        draw = random.Random(derive(self.seed, "length", step))
        middle = self.length if draw.random() >= SHORT_SHARE else self.length / 2
        return max(MINIMUM_LENGTH, int(draw.gauss(middle, LENGTH_DEVIATION)))


def mean_length(length: int) -> int:
    """Rounded mean of the random lengths around `length`; rounding down costs half a step on average.

    >>> mean_length(70)
    68
    """
    return max(MINIMUM_LENGTH, round((1 - SHORT_SHARE / 2) * length - 0.5))


def stream_epoch(tokens: int, streams: int, length: int) -> Epoch:
    """The epoch of streams; the last token of a stream is a target only."""
    return Epoch(max(0, tokens // streams - 1) * streams, length * streams)


class TokenBlocks:
    """A text cut into blocks of equal length without context, in an order that depends only on (seed, epoch).

    A batch has N = `count` blocks of T = `length` tokens. The remainder that fills no block is used in evaluation only.
    """

    def __init__(self, tokens: Tensor, count: int, length: int, seed: int = 0) -> None:
        self.epoch = block_epoch(len(tokens), count, length)
        blocks = self.epoch.samples // length
        self.inputs, self.targets = (tokens[i : i + blocks * length].view(blocks, length) for i in (0, 1))
        self.rest = tokens[blocks * length :]
        self.count, self.seed = count, seed

    def starting_at(self, step: int) -> Iterator[TokenBatch]:
        """Batches of steps `step`, `step` + 1, and so on without end."""
        for _, order in Epoch(len(self.inputs), self.count).shuffled(self.seed, step):
            numbers = to_device(order, self.inputs.device)
            yield TokenBatch(self.inputs[numbers].T, self.targets[numbers].T, continues=False)

    def of_epoch(self) -> Iterator[TokenBatch]:
        """All blocks in order, then the remainder as a shorter block."""
        for inputs, targets in zip(self.inputs.split(self.count), self.targets.split(self.count)):
            yield TokenBatch(inputs.T, targets.T, continues=False)
        if len(self.rest) > 1:
            yield TokenBatch(self.rest[:-1, None], self.rest[1:, None], continues=False)


def block_epoch(tokens: int, count: int, length: int) -> Epoch:
    """The epoch of blocks, in target tokens."""
    return Epoch(max(0, tokens - 1) // length * length, count * length)
