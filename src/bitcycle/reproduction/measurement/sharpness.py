"""Epsilon-sharpness of the training loss at a network: `bitcycle sharpness RUN_FOLDER[@PHASE]`.

    r_i = eps (|(A^+ w)_i| + 1),   phi = 100 (max over |y_i| <= r_i of f(w + A y)  -  f(w)) / (1 + f(w))

f is the mean cross-entropy on training images without augmentation. A is the identity or, with `subspace=P`, a matrix
with P columns of independent normal numbers; A^+ is its pseudo-inverse. The maximum is approximated with 10 iterations
of L-BFGS-B from y = 0 or, if the gradient vanishes there, from a random y in a box of a thousandth of the size.
Batch-norm statistics are kept. w are the quantized weights, and w + A y is not quantized; the gates of DFQ are off and
no part of w. The implementation expresses y in units of r and scales f, which affects the path of L-BFGS-B but not the
maximum.

Source: Keskar et al. 2017, metric 2.1 and its settings (eps 1e-3 and 5e-4, 10 iterations, full space and 100 dimensions), which
HLHLp applies in its appendix H, whose text is not available. Difference: only `samples` images are used.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import numpy as np
import torch
from torch import Tensor

from bitcycle.layer.memory_format import channels_last
from bitcycle.randomness import derive
from bitcycle.reproduction.measurement.artifacts import Row
from bitcycle.reproduction.measurement.images import Measurement
from bitcycle.reproduction.measurement.job import Analysis, rounded, run_command
from bitcycle.reproduction.measurement.vector import assign, flatten
from bitcycle.settings import setting
from bitcycle.training.finished_run import FinishedRun

STEEP = 100.0
"""Largest absolute gradient at the start after scaling; makes L-BFGS-B search the corners of the box first."""
Function = Callable[[Tensor], tuple[float, Tensor]]
"""Vector -> value and gradient."""


@dataclass
class Sharpness(Analysis):
    """The sharpness of one network; a unit is a box size."""

    kind = "sharpness"
    columns = ("epsilon", "loss", "largest_loss", "sharpness_percent")

    epsilons: list[float] = setting([1e-3, 5e-4], "relative sizes of the box", minimum=1e-12)
    iterations: int = setting(10, "iterations of L-BFGS-B", minimum=1)
    subspace: Optional[int] = setting(None, "dimension of a random subspace; null: all weights", minimum=1)
    seed: int = setting(0, "seed of the subspace", minimum=0)
    samples: Optional[int] = setting(
        5000, "number of training images, taken in a fixed random order; null: all", minimum=1
    )

    def prepare(self, runs: Sequence[FinishedRun], device: torch.device) -> tuple[int, Row]:
        [run] = runs
        self.measure = Measurement(run, "train", self.samples, device)
        run.make_float()
        self.model = channels_last(run.model, device)
        self.parameters = self.measure.influential(self.model)
        self.weights = flatten(self.parameters).double()
        return len(self.epsilons), run.subject | {"samples": len(self.measure.images), "weights": len(self.weights)}

    def loss(self, weights: Tensor) -> tuple[float, Tensor]:
        """Training loss and its gradient."""
        assign(weights, self.parameters)
        loss, gradients = self.measure.loss_and_gradient(self.model, self.parameters)
        return loss, flatten(gradients)

    def rows(self, unit: int) -> list[Row]:
        epsilon, seed = self.epsilons[unit], derive(self.seed, "sharpness")
        found = find_sharpness(self.loss, self.weights, epsilon, self.iterations, self.matrix(), seed)
        numbers = (epsilon, found.loss, found.largest, found.sharpness)
        return [dict(zip(self.columns, map(rounded, numbers), strict=True))]

    def matrix(self) -> Tensor | None:
        """A: columns of normal numbers; None: the identity."""
        if self.subspace is None:
            return None
        generator = torch.Generator().manual_seed(derive(self.seed, "subspace"))
        drawn = torch.randn(len(self.weights), self.subspace, generator=generator, dtype=torch.float64)
        return drawn.to(self.weights.device)


class Maximum(NamedTuple):
    """The loss at the centre of a box, the largest loss found in the box, and the sharpness phi."""

    loss: float
    largest: float

    @property
    def sharpness(self) -> float:
        """phi, in percent."""
        return 100 * (self.largest - self.loss) / (1 + self.loss)


def find_sharpness(
    function: Function,
    weights: Tensor,
    epsilon: float,
    iterations: int = 10,
    matrix: Tensor | None = None,
    seed: int = 0,
) -> Maximum:
    """Maximize a function in the box of relative size `epsilon` around a weight vector w, float64 [n].

    `matrix` is A, float64 [n, p], None the identity; `seed` is that of the start that is used if the gradient vanishes.

    >>> found = find_sharpness(lambda w: (float(w @ w), 2 * w), torch.tensor([1.0], dtype=torch.float64), 0.5)
    >>> found.loss, found.largest, found.sharpness  # the box is 1 - 1 .. 1 + 1
    (1.0, 4.0, 150.0)
    """
    from scipy.optimize import minimize

    inner = weights if matrix is None else torch.linalg.lstsq(matrix, weights.unsqueeze(1)).solution.squeeze(1)
    radius = epsilon * (inner.abs() + 1)
    values: list[float] = []

    def slope_at(z: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The gradient of f with respect to z = y / r; appends the value of f to `values`."""
        y = radius * torch.from_numpy(z).to(weights)
        value, gradient = function(weights + (y if matrix is None else matrix @ y))
        values.append(value)
        by_y = gradient.double() if matrix is None else matrix.T @ gradient.double()
        return (radius * by_y).cpu().numpy()

    start = np.zeros(len(inner))
    steepest = float(np.abs(slope_at(start)).max())
    if steepest == 0:
        generator = torch.Generator().manual_seed(derive(seed, "start"))
        start = 1e-3 * (2 * torch.rand(len(inner), generator=generator, dtype=torch.float64).numpy() - 1)
        steepest = float(np.abs(slope_at(start)).max()) or 1.0
    factor = STEEP / steepest

    def descend(z: np.ndarray[Any, Any]) -> tuple[float, np.ndarray[Any, Any]]:
        slope = slope_at(z)
        return -factor * values[-1], -factor * slope

    options = {"maxiter": iterations, "ftol": 0.0, "gtol": 0.0}
    minimize(descend, start, jac=True, method="L-BFGS-B", bounds=[(-1, 1)] * len(inner), options=options)
    return Maximum(values[0], max(value for value in values if not math.isnan(value)))


if __name__ == "__main__":
    sys.exit(run_command(Sharpness, __doc__))
