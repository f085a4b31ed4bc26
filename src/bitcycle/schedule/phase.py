"""Phases: stretches of a run with a learning rate and starting weights of their own. The trainer executes them as they are."""

from __future__ import annotations

from dataclasses import dataclass

STARTS = ("previous", "best", "flattest")


@dataclass(frozen=True)
class Phase:
    """One stretch of a run. A run without phases is a single one with all defaults.

    Attributes:
        start, steps: its first step and its length.
        rate_factor: times the learning rate of the run's recipe.
        rate_ratio: (a, b): the rate is also multiplied by D_a / D_b, the geometric mean over the layers of the optimal
            quantization step at a bits divided by that at b bits, of the weights that the phase starts from.
        constant_rate: the rate does not follow the recipe's shape, it stays at what it is at first.
        start_from: weights at the end of the phase before (previous), those with its best validation (best), or, of its
            `candidates` best by validation, those with the smallest Tr(sqrt v) (flattest).
        candidates: among how many weights of the phase before `flattest` chooses.
        optimizer_moments: that Tr(sqrt v) is that of the optimizer's own second moments instead of ones that the trainer tracks.
        keep_optimizer: momentum and moments of the phase before stay.
        reset_batch_norm: running statistics are reset.
        carry_quantized: starts from the quantized values of the weights instead of the float master weights.
    """

    start: int
    steps: int
    rate_factor: float = 1.0
    rate_ratio: tuple[int, int] | None = None
    constant_rate: bool = False
    start_from: str = "previous"
    candidates: int = 5
    optimizer_moments: bool = False
    keep_optimizer: bool = False
    reset_batch_norm: bool = False
    carry_quantized: bool = False

    @property
    def kept(self) -> int:
        """How many weights of the phase before must be kept until this one begins."""
        return {"previous": 0, "best": 1, "flattest": self.candidates}[self.start_from]

    @property
    def end(self) -> int:
        """The step after the last one."""
        return self.start + self.steps
