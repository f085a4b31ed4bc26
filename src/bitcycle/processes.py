"""Several processes that train one network together: which part of a batch each takes, and what it hears from the others.

Every process takes a contiguous share of each batch. While a batch is `sharing`, what quantizers and batch norm need to know of
it (smallest and largest values, sums, the number of an element) is that of the whole batch, so that values and noise are those
of one process. With one process nothing here does or costs anything. How processes find each other is said in
`training.distributed`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Share(NamedTuple):
    """A contiguous part of a batch: its first sample, how many it has, and the samples of the whole batch."""

    first: int
    samples: int
    total: int


_share: Share | None = None  # no context variable: on a GPU, gradients are computed in another thread


def count() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """The number of this process, from 0; process 0 writes."""
    return dist.get_rank() if count() > 1 else 0


def local_count() -> int:
    """How many of the processes are on this machine, as torchrun says it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if count() > 1 else 1


def share_of(samples: int, process: int, processes: int) -> Share:
    """The share of a batch of so many samples that a process takes; shares differ by one sample at most.

    >>> [share_of(7, process, 2) for process in range(2)]
    [Share(first=0, samples=3, total=7), Share(first=3, samples=4, total=7)]
    """
    first, end = (samples * number // processes for number in (process, process + 1))
    return Share(first, end - first, samples)


def own(indices: Tensor) -> Tensor:
    """The share of this process of the samples of a batch."""
    share = share_of(len(indices), rank(), count())
    return indices[share.first : share.first + share.samples]


@contextmanager
def sharing(samples: int) -> Iterator[None]:
    """What is computed inside belongs to a batch of so many samples, of which this process has its share."""
    global _share
    before, _share = _share, share_of(samples, rank(), count()) if count() > 1 else None
    try:
        yield
    finally:
        _share = before


def current_share() -> Share | None:
    """The share that is worked on now; None: the whole batch is here."""
    return _share


def weighted(mean: Tensor) -> Tensor:
    """The part that the mean over this share has in the mean over the batch; the parts of all processes add up to it."""
    return mean if _share is None else mean * (_share.samples / _share.total)


def batch_means(*means: Tensor) -> tuple[Tensor, ...]:
    """Scalars that are means over this share, as means over the whole batch."""
    return means if _share is None else total(weighted(torch.stack([mean.detach() for mean in means]))).unbind()


def total(x: Tensor) -> Tensor:
    """The sum of the tensors that all processes have, the same bits in all of them."""
    x = x.detach().clone()
    dist.all_reduce(x)
    return x


def largest(x: Tensor) -> Tensor:
    """The largest of each element over the shares of the batch; x itself where the whole batch is here."""
    if _share is None:
        return x
    x = x.detach().clone()
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return x


def extremes(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest `low` and largest `high` of each element over the shares of the batch, in one message."""
    negative, high = largest(torch.stack([-low, high])).unbind()
    return -negative, high


def gathered(x: Tensor) -> Tensor:
    """The tensors of all processes, [processes, ...]; kinds of process groups differ in what else gathers."""
    everything = x.new_zeros(count(), *x.shape)
    everything[rank()] = x.detach()
    dist.all_reduce(everything)
    return everything


def first_element(x: Tensor) -> Tensor | None:
    """The number, in the whole batch, of the first element of x [samples, ...], modulo 2^32 as int32; None: 0."""
    if _share is None:
        return None
    number = _share.first * (x.numel() // _share.samples)
    return torch.full((), (number + (1 << 31)) % (1 << 32) - (1 << 31), dtype=torch.int32, device=x.device)


def elements_of_batch(vector: Tensor) -> int:
    """Elements of the whole batch, of which `vector` has those of this share."""
    return len(vector) if _share is None else len(vector) // _share.samples * _share.total


def pick(vector: Tensor, numbers: Tensor) -> Tensor:
    """The elements `numbers` of the whole batch, of which `vector` has those of this share."""
    if _share is None:
        return vector[numbers]
    here = numbers - len(vector) // _share.samples * _share.first
    inside = (here >= 0) & (here < len(vector))
    return total(torch.where(inside, vector[here.clamp(0, len(vector) - 1)], 0))


def agreed(value: int) -> int:
    """What process 0 says, in all processes."""
    if count() == 1:
        return value
    message = torch.tensor(value)  # on the CPU, where no process waits for a GPU
    dist.broadcast(message, 0)
    return int(message)


def wait_for_all() -> None:
    """Return when all processes have come here."""
    if count() > 1:
        dist.all_reduce(torch.zeros(()))  # the sum needs all of them
