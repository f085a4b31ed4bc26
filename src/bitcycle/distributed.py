"""Data-parallel training: the shard of a batch that each process computes, and the collectives between processes.

Every process computes a contiguous shard of each batch. While a batch is `sharded`, quantizers and batch norm use statistics of
the whole batch (extrema, sums, element indices), so that values and noise equal those of a single process. With one process
everything here is a no-op. For the setup of the process group see `training.processes`.

Tensors of a shard have shape [samples, ...] or, for time-major sequences, [steps * samples, ...].
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class Shard(NamedTuple):
    """A contiguous part of a batch: index of its first sample, number of samples, and samples of the whole batch."""

    first: int
    samples: int
    total: int


_shard: Shard | None = None  # not a context variable: on a GPU, gradients are computed in another thread


def world_size() -> int:
    """Number of processes that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Index of this process, from 0; process 0 writes files."""
    return dist.get_rank() if world_size() > 1 else 0


def local_world_size() -> int:
    """Number of processes on this machine, from torchrun's environment."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if world_size() > 1 else 1


def shard_of(samples: int, process: int, processes: int) -> Shard:
    """The shard of a batch of `samples` for a process; shard sizes differ by at most one.

    Process 0 takes all of a batch with fewer samples than processes (the last one of an evaluation).

    >>> [shard_of(7, process, 2) for process in range(2)]
    [Shard(first=0, samples=3, total=7), Shard(first=3, samples=4, total=7)]
    """
    if samples < processes:
        return Shard(0, 0 if process else samples, samples)
    first, end = (samples * number // processes for number in (process, process + 1))
    return Shard(first, end - first, samples)


def local_shard(x: Tensor, dim: int = 0) -> Tensor:
    """This process's shard of a batch x with samples along dimension `dim`."""
    shard = shard_of(x.shape[dim], rank(), world_size())
    return x.narrow(dim, shard.first, shard.samples)


def whole(x: Tensor, samples: int, dim: int) -> Tensor:
    """The inverse of `local_shard` for a batch of `samples`; a collective that all processes must call."""
    everything = x.new_zeros([samples if place == dim % x.dim() else size for place, size in enumerate(x.shape)])
    local_shard(everything, dim).copy_(x)
    return all_sum(everything)


def local_batches(samples: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Indices 0 .. `samples`-1 in batches of `size`: (whole batch, this process's shard), without empty shards."""
    for batch in torch.arange(samples).split(size):
        if len(mine := local_shard(batch)):
            yield batch, mine


@contextmanager
def sharded(samples: int) -> Iterator[None]:
    """Context in which this process computes its shard of a batch of `samples`, or all of it if it is too small."""
    global _shard
    number = world_size()
    before, _shard = _shard, shard_of(samples, rank(), number) if 1 < number <= samples else None
    try:
        yield
    finally:
        _shard = before


def current_shard() -> Shard | None:
    """The current shard; None: this process has the whole batch."""
    return _shard


def weighted(mean: Tensor) -> Tensor:
    """This shard's contribution to the mean over the batch, which is the sum over all processes."""
    return mean if _shard is None else mean * (_shard.samples / _shard.total)


def batch_means(*means: Tensor) -> tuple[Tensor, ...]:
    """Means over the whole batch of scalars that are means over this shard."""
    return means if _shard is None else all_sum(weighted(torch.stack([mean.detach() for mean in means]))).unbind()


def ratio(part: Tensor, of: Tensor) -> Tensor:
    """part / of over the whole batch, for counts in this shard; 0 if the batch has none."""
    part, of = (part, of) if _shard is None else all_sum(torch.stack([part, of])).unbind()
    return part / of.clamp_min(1)


def all_sum(x: Tensor) -> Tensor:
    """The sum of a tensor over all processes, bitwise identical in all of them."""
    x = x.detach().clone()
    if world_size() > 1:
        dist.all_reduce(x)
    return x


def all_max(x: Tensor) -> Tensor:
    """Elementwise maximum over the shards of the batch; x itself if this process has the whole batch."""
    if _shard is None:
        return x
    x = x.detach().clone()
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return x


def all_min_max(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Elementwise minimum of `low` and maximum of `high` over the shards of the batch, in one message."""
    if _shard is None:
        return low, high
    negative, high = all_max(torch.stack([-low, high])).unbind()
    return -negative, high


def all_gather(x: Tensor) -> Tensor:
    """Tensors of all processes, [processes, ...]; implemented as a sum of padded tensors, which all backends
    support."""
    everything = x.new_zeros(world_size(), *x.shape)
    everything[rank()] = x.detach()
    dist.all_reduce(everything)
    return everything


def first_element(x: Tensor) -> Tensor | None:
    """Offset from an element's index in x to its index in the whole batch, modulo 2^32 as int32; None: 0.

    A scalar, or [rows, 1, ...] for a sequence.
    """
    if _shard is None:
        return None
    steps, features = len(x) // _shard.samples, x.numel() // len(x)
    missing = torch.arange(steps, device=x.device) * (_shard.total - _shard.samples) + _shard.first
    missing = ((missing * features + (1 << 31)) % (1 << 32) - (1 << 31)).to(torch.int32)
    return missing[0] if steps == 1 else missing.repeat_interleave(_shard.samples).view(-1, *[1] * (x.dim() - 1))


def elements_of_batch(x: Tensor) -> int:
    """Number of elements of the whole batch, of which x is this process's shard."""
    return x.numel() if _shard is None else x.numel() // _shard.samples * _shard.total


def pick(x: Tensor, numbers: Tensor) -> Tensor:
    """Elements with indices `numbers` of the whole batch, of which x is this process's shard."""
    vector = x.reshape(-1)
    if _shard is None:
        return vector[numbers]
    features = x.numel() // len(x)
    step, place = numbers // (_shard.total * features), numbers % (_shard.total * features) - _shard.first * features
    inside = (place >= 0) & (place < _shard.samples * features)
    here = torch.where(inside, step * _shard.samples * features + place, 0)
    return all_sum(torch.where(inside, vector[here], 0))


def all_items(mine: list[T]) -> list[T]:
    """The picklable items of all processes, in the order of the processes."""
    parts = [mine] * world_size()
    if world_size() > 1:
        dist.all_gather_object(parts, mine)
    return [item for part in parts for item in part]


def broadcast(value: int) -> int:
    """Broadcast the value of process 0 to all processes."""
    if world_size() == 1:
        return value
    message = torch.tensor(value)  # on the CPU, so that no process waits for a GPU
    dist.broadcast(message, 0)
    return int(message)


def barrier() -> None:
    """Return when all processes have called it."""
    if world_size() > 1:
        dist.all_reduce(torch.zeros(()))  # completes only when all processes take part
