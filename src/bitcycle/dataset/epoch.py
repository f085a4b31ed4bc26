"""Division of an epoch's training samples into steps, and their order."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from torch import Tensor

from bitcycle.dataset.base import permutation
from bitcycle.randomness import derive

B = TypeVar("B")


class Epoch(NamedTuple):
    """A pass over the training data: number of samples, and samples per step; a smaller last step is kept.

    >>> epoch = Epoch(samples=50, samples_per_step=16)
    >>> epoch.steps, epoch.samples_of(3), epoch.samples_before(5)
    (4, 2, 66)
    """

    samples: int
    samples_per_step: int

    @property
    def steps(self) -> int:
        """Steps in an epoch."""
        return -(-self.samples // self.samples_per_step)

    def samples_of(self, step: int) -> int:
        """Samples of `step`, counted from 0 over all epochs."""
        return min(self.samples_per_step, self.samples - step % self.steps * self.samples_per_step)

    def samples_before(self, step: int) -> int:
        """Total samples of all steps before `step`."""
        epochs, position = divmod(step, self.steps)
        return epochs * self.samples + position * self.samples_per_step

    def shuffled(self, seed: int, step: int) -> Iterator[tuple[int, Tensor]]:
        """Yield epoch and sample indices of steps `step`, `step` + 1, ..., in the order of `epoch_order`."""
        return self.from_step(step, lambda epoch: epoch_order(self.samples, seed, epoch).split(self.samples_per_step))

    def from_step(self, step: int, batches_of: Callable[[int], Sequence[B]]) -> Iterator[tuple[int, B]]:
        """Yield epoch and batch of steps `step`, `step` + 1, ...; `batches_of` returns all batches of an epoch."""
        epoch, position = divmod(step, self.steps)
        while True:
            for batch in batches_of(epoch)[position:]:
                yield epoch, batch
            epoch, position = epoch + 1, 0


def epoch_order(samples: int, seed: int, epoch: int) -> Tensor:
    """The order of the samples in an epoch, a permutation of 0 .. samples-1."""
    return permutation(samples, derive(seed, "order", epoch))


def grouped_order(values: Tensor, batch_size: int, pool: int, seed: int, epoch: int, mixing: int) -> list[Tensor]:
    """Batches of an epoch, each of samples with similar values: full batches in random order, a smaller one last.

    Of each `pool` consecutive batches of `epoch_order`, the samples are sorted by value; `mixing` seeds the order of batches.
    """
    order = epoch_order(len(values), seed, epoch)
    full = len(order) // batch_size * batch_size
    if not full:
        return [order]  # splitting no samples gives an empty batch
    pools = [part[values[part].argsort(stable=True)] for part in order[:full].split(batch_size * pool)]
    batches = [batch for part in pools for batch in part.split(batch_size)]
    mixed = [batches[place] for place in permutation(len(batches), mixing).tolist()]
    return mixed if full == len(order) else [*mixed, order[full:]]
