"""How the training samples of an epoch are divided into steps."""

from __future__ import annotations

from typing import NamedTuple


class Epoch(NamedTuple):
    """A pass over the training data: its samples, and those of a full step; the last, smaller step is kept.

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
        """Samples of all steps before `step`."""
        epochs, position = divmod(step, self.steps)
        return epochs * self.samples + position * self.samples_per_step
