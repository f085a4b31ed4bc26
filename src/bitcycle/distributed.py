"""Several processes that train one network together: which part of a batch each takes, and what it hears from the others.

Every process takes a contiguous shard of each batch. While a batch is `sharded`, what quantizers and batch norm need to know of
it (smallest and largest values, sums, the number of an element) is that of the whole batch, so that values and noise are those
of one process. With one process nothing here does or costs anything. How processes find each other is said in
`training.distributed`.

Tensors of a shard are [samples, ...] or, of sequences whose steps come first, [steps * samples, ...].
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class Shard(NamedTuple):
    """A contiguous part of a batch: its first sample, how many it has, and the samples of the whole batch."""

    first: int
    samples: int
    total: int


_shard: Shard | None = None  # no context variable: on a GPU, gradients are computed in another thread


def world_size() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """The number of this process, from 0; process 0 writes."""
    return dist.get_rank() if world_size() > 1 else 0


def local_world_size() -> int:
    """How many of the processes are on this machine, as torchrun says it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if world_size() > 1 else 1


def shard_of(samples: int, process: int, processes: int) -> Shard:
    """The shard of a batch of `samples` that a process takes; shards differ by one sample at most.

    Process 0 takes all of a batch that has not one for each (the last one of an evaluation).

    >>> [shard_of(7, process, 2) for process in range(2)]
    [Shard(first=0, samples=3, total=7), Shard(first=3, samples=4, total=7)]
    """
    if samples < processes:
        return Shard(0, 0 if process else samples, samples)
    first, end = (samples * number // processes for number in (process, process + 1))
    return Shard(first, end - first, samples)


def local_shard(x: Tensor, dim: int = 0) -> Tensor:
    """The shard of this process of the samples of a batch, which are counted along a dimension of x."""
    shard = shard_of(x.shape[dim], rank(), world_size())
    return x.narrow(dim, shard.first, shard.samples)


def whole(x: Tensor, samples: int, dim: int) -> Tensor:
    """The inverse of `local_shard`, for a batch of `samples`; all processes have to ask for it."""
    everything = x.new_zeros([samples if place == dim % x.dim() else size for place, size in enumerate(x.shape)])
    local_shard(everything, dim).copy_(x)
    return all_sum(everything)


def local_batches(samples: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The numbers 0 .. `samples`-1 in batches of `size`: of each batch all, and this process's, unless it has none."""
    for batch in torch.arange(samples).split(size):
        if len(mine := local_shard(batch)):
            yield batch, mine


@contextmanager
def sharded(samples: int) -> Iterator[None]:
    """What is computed inside belongs to a batch of `samples`, of which this process has its shard, or all if it is too small."""
    global _shard
    number = world_size()
    before, _shard = _shard, shard_of(samples, rank(), number) if 1 < number <= samples else None
    try:
        yield
    finally:
        _shard = before


def current_shard() -> Shard | None:
    """The shard that is worked on now; None: the whole batch is here."""
    return _shard


def weighted(mean: Tensor) -> Tensor:
    """The part that the mean over this shard has in the mean over the batch; the parts of all processes add up to it."""
    return mean if _shard is None else mean * (_shard.samples / _shard.total)


def batch_means(*means: Tensor) -> tuple[Tensor, ...]:
    """Scalars that are means over this shard, as means over the whole batch."""
    return means if _shard is None else all_sum(weighted(torch.stack([mean.detach() for mean in means]))).unbind()


def ratio(part: Tensor, of: Tensor) -> Tensor:
    """part / of, two counts in this shard, of the whole batch; 0 of nothing."""
    part, of = (part, of) if _shard is None else all_sum(torch.stack([part, of])).unbind()
    return part / of.clamp_min(1)


def all_sum(x: Tensor) -> Tensor:
    """The sum of the tensors that all processes have, the same bits in all of them."""
    x = x.detach().clone()
    if world_size() > 1:
        dist.all_reduce(x)
    return x


def all_max(x: Tensor) -> Tensor:
    """The largest of each element over the shards of the batch; x itself where the whole batch is here."""
    if _shard is None:
        return x
    x = x.detach().clone()
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return x


def all_min_max(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest `low` and largest `high` of each element over the shards of the batch, in one message."""
    negative, high = all_max(torch.stack([-low, high])).unbind()
    return -negative, high


def all_gather(x: Tensor) -> Tensor:
    """The tensors of all processes, [processes, ...]; kinds of process groups differ in what else gathers."""
    everything = x.new_zeros(world_size(), *x.shape)
    everything[rank()] = x.detach()
    dist.all_reduce(everything)
    return everything


def first_element(x: Tensor) -> Tensor | None:
    """What the number of each element of x is less than in the whole batch, modulo 2^32 as int32; None: 0.

    A scalar, or [rows, 1, ...] of a sequence.
    """
    if _shard is None:
        return None
    steps, features = len(x) // _shard.samples, x.numel() // len(x)
    missing = torch.arange(steps, device=x.device) * (_shard.total - _shard.samples) + _shard.first
    missing = ((missing * features + (1 << 31)) % (1 << 32) - (1 << 31)).to(torch.int32)
    return missing[0] if steps == 1 else missing.repeat_interleave(_shard.samples).view(-1, *[1] * (x.dim() - 1))


def elements_of_batch(x: Tensor) -> int:
    """Elements of the whole batch, of which x has those of this shard."""
    return x.numel() if _shard is None else x.numel() // _shard.samples * _shard.total


def pick(x: Tensor, numbers: Tensor) -> Tensor:
    """The elements `numbers` of the whole batch, of which x has those of this shard."""
    vector = x.reshape(-1)
    if _shard is None:
        return vector[numbers]
    features = x.numel() // len(x)
    step, place = numbers // (_shard.total * features), numbers % (_shard.total * features) - _shard.first * features
    inside = (place >= 0) & (place < _shard.samples * features)
    here = torch.where(inside, step * _shard.samples * features + place, 0)
    return all_sum(torch.where(inside, vector[here], 0))


def all_items(mine: list[T]) -> list[T]:
    """The items that all processes have, in their order; anything that can be pickled."""
    parts = [mine] * world_size()
    if world_size() > 1:
        dist.all_gather_object(parts, mine)
    return [item for part in parts for item in part]


def broadcast(value: int) -> int:
    """What process 0 says, in all processes."""
    if world_size() == 1:
        return value
    message = torch.tensor(value)  # on the CPU, where no process waits for a GPU
    dist.broadcast(message, 0)
    return int(message)


def barrier() -> None:
    """Return when all processes have come here."""
    if world_size() > 1:
        dist.all_reduce(torch.zeros(()))  # the sum needs all of them
