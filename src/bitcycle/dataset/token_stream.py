"""A text as batches of token sequences: several streams that go on from batch to batch, or blocks in random order."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from bitcycle import distributed
from bitcycle.dataset.epoch import Epoch
from bitcycle.randomness import derive

SHORT_SHARE, LENGTH_DEVIATION, MINIMUM_LENGTH = 0.05, 5.0, 5
"""Of drawn lengths (Merity et al. 2018): how many are around half of the length, their deviation, and the least of all."""


class TokenBatch(NamedTuple):
    """Tokens [T, N] and those that follow each of them [T, N]; whether `inputs` go on from those of the batch before."""

    inputs: Tensor
    targets: Tensor
    continues: bool

    @property
    def streams(self) -> int:
        """N."""
        return self.inputs.shape[1]

    def share(self) -> TokenBatch:
        """The streams or blocks of this process, if several share the batch."""
        inputs, targets = (distributed.local_shard(part, dim=1) for part in (self.inputs, self.targets))
        return TokenBatch(inputs, targets, self.continues)


class TokenStreams:
    """A text cut into streams of equal length, read side by side from their beginning, some tokens at a time.

    The last batch of an epoch is shorter; tokens that fill no stream are left out (fewer than there are streams).

    Args:
        tokens: int64 [tokens].
        streams: N.
        length: T, tokens of each stream in a batch.
    """

    def __init__(self, tokens: Tensor, streams: int, length: int) -> None:
        each, self.count = len(tokens) // streams, streams
        self.tokens, self.length = tokens[: each * streams].view(streams, each).T.contiguous(), length
        self.epoch = stream_epoch(len(tokens), streams, length)

    def length_of(self, step: int) -> int:
        """Time steps of the batch of a training step, were the streams without end."""
        return self.length

    def of_epoch(self) -> Iterator[TokenBatch]:
        """The batches of an epoch."""
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
    """Streams read in batches of drawn length, again and again from the beginning; lengths follow from (seed, step).

        T = max(5, floor(z)),    z ~ Normal(L, 5), with probability 0.05 Normal(L / 2, 5);    less at the end of the streams

    An epoch is as many steps as the streams have batches of the mean length, wherever the reading then is.

    Source: Merity et al. 2018, section 5; their released code. Differs from the code in the end of an epoch, which there is
    that of the streams.

    Args:
        tokens: int64 [tokens].
        streams: N.
        length: L.
        seed: of the lengths.
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
    """The mean of lengths drawn around `length`, rounded; half a step is lost by rounding down each of them.

    >>> mean_length(70)
    68
    """
    return max(MINIMUM_LENGTH, round((1 - SHORT_SHARE / 2) * length - 0.5))


def stream_epoch(tokens: int, streams: int, length: int) -> Epoch:
    """How an epoch of streams is divided: the last token of a stream is predicted and not read."""
    return Epoch(max(0, tokens // streams - 1) * streams, length * streams)


class TokenBlocks:
    """A text cut into blocks of equal length, each of which is read from nothing, in an order that follows from (seed, epoch).

    What is left at the end and fills no block is read in evaluation only.

    Args:
        tokens: int64 [tokens].
        count: N, blocks of a batch.
        length: T.
        seed: of the order.
    """

    def __init__(self, tokens: Tensor, count: int, length: int, seed: int = 0) -> None:
        blocks = (len(tokens) - 1) // length
        self.inputs, self.targets = (tokens[i : i + blocks * length].view(blocks, length) for i in (0, 1))
        self.rest = tokens[blocks * length :]
        self.count, self.seed = count, seed
        self.epoch = block_epoch(len(tokens), count, length)

    def starting_at(self, step: int) -> Iterator[TokenBatch]:
        """Batches of steps `step`, `step` + 1, and so on without end."""
        for _, order in Epoch(len(self.inputs), self.count).shuffled(self.seed, step):
            numbers = order.to(self.inputs.device)
            yield TokenBatch(self.inputs[numbers].T, self.targets[numbers].T, continues=False)

    def of_epoch(self) -> Iterator[TokenBatch]:
        """All blocks in order, then what is left, as a shorter one."""
        for inputs, targets in zip(self.inputs.split(self.count), self.targets.split(self.count)):
            yield TokenBatch(inputs.T, targets.T, continues=False)
        if len(self.rest) > 1:
            yield TokenBatch(self.rest[:-1, None], self.rest[1:, None], continues=False)


def block_epoch(tokens: int, count: int, length: int) -> Epoch:
    """How an epoch of blocks is divided, in tokens that are predicted."""
    return Epoch(max(0, tokens - 1) // length * length, count * length)
