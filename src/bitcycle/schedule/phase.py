"""Phases of a run, each with its own learning rate and starting weights. The trainer executes them."""

from dataclasses import dataclass

STARTS = ("previous", "best", "flattest")


@dataclass(frozen=True)
class Phase:
    """One phase of a run. A run without phases is a single one with all defaults.

    Attributes:
        start, steps: first step and length.
        rate_factor: factor of the recipe's learning rate.
        rate_ratio: (a, b): the rate is also multiplied by D_a / D_b, the geometric mean over the layers of the optimal
            quantization step at a bits divided by that at b bits, for the starting weights of the phase.
        constant_rate: keep the initial rate instead of following the recipe.
        start_from: weights at the end of the previous phase (previous), those with its best validation (best), or, of its
            `candidates` best by validation, those with the smallest Tr(sqrt v) (flattest).
        candidates: number of weights of the previous phase that `flattest` chooses from.
        optimizer_moments: compute Tr(sqrt v) from the optimizer's second moments instead of tracked ones.
        keep_optimizer: keep momentum and moments of the previous phase.
        reset_batch_norm: reset running statistics.
        carry_quantized: start from the quantized values of the weights instead of the float master weights.
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
        """Number of weights of the previous phase to keep until this one begins."""
        return {"previous": 0, "best": 1, "flattest": self.candidates}[self.start_from]

    @property
    def end(self) -> int:
        """The step after the last one."""
        return self.start + self.steps
