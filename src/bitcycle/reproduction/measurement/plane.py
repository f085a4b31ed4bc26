"""The plane through three networks: `bitcycle plane RUN_FOLDER RUN_FOLDER RUN_FOLDER[@PHASE]`.

    u = (w2 - w1) / ||w2 - w1||,   v = v' / ||v'||,   v' = (w3 - w1) - <w3 - w1, u> u        (Gram-Schmidt)
    dx = ||w2 - w1||,   dy = <w3 - w1, v>,   P(i, j) = w1 + i dx u + j dy v

for i and j from -margin to 1 + margin. The networks lie at (0, 0), (dx, 0) and (<w3 - w1, u>, dy). Each also has a row,
as the grid may not include it. The plane is spanned by the quantized weights of the networks, and its points are not
quantized. Running statistics of batch norm are re-estimated at each point, on training images.

Source: Garipov et al. 2018, section A.1 and their released code, which HLHLp follows in figure 1 without further
details; its w1 is the float network. Unlike in that code, batch norm sees images without augmentation, so that their
order has no effect.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Optional

import torch
from torch import Tensor, nn

from bitcycle.errors import RunError
from bitcycle.layer.memory_format import channels_last
from bitcycle.reproduction.measurement.artifacts import Row
from bitcycle.reproduction.measurement.images import Measurement
from bitcycle.reproduction.measurement.job import Analysis, rounded, run_command
from bitcycle.reproduction.measurement.vector import assign, flatten
from bitcycle.settings import setting
from bitcycle.training.finished_run import FinishedRun


@dataclass
class Plane(Analysis):
    """The plane through three networks of one architecture; the first unit is the networks, the others are grid rows. Raises
    RunError if the networks differ in parameters or dataset, or lie on a line."""

    kind = "plane"
    columns = ("network", "x", "y", "loss", "error_percent")
    networks = 3

    points: int = setting(21, "grid points per axis", minimum=2)
    margin: float = setting(0.2, "extent of the grid beyond the networks, relative to dx and dy", minimum=0)
    split: str = setting("test", "images; train: without augmentation", choices=("train", "test"))
    samples: Optional[int] = setting(None, "number of images, taken in a fixed random order; null: all", minimum=1)
    batch_norm_samples: Optional[int] = setting(
        5000, "number of training images for batch-norm statistics at each point; null: all", minimum=1
    )

    def prepare(self, runs: Sequence[FinishedRun], device: torch.device) -> tuple[int, Row]:
        for run in runs:
            run.make_float()
        shapes = [[(name, p.shape) for name, p in shared(run.model).items()] for run in runs]
        names = ["{model} on {dataset}".format(**run.subject) for run in runs]
        if len(set(names)) > 1 or any(shape != shapes[0] for shape in shapes):
            raise RunError(f"the three networks must have the same model and dataset; given: {'; '.join(names)}")
        self.measure = Measurement(runs[-1], self.split, self.samples, device)
        self.training = Measurement(runs[-1], "train", self.batch_norm_samples, device)
        self.model = channels_last(runs[0].model, device)
        self.basis = plane_through(*(flatten(shared(run.model).values()).to(device) for run in runs))
        return 1 + self.points, runs[-1].subject | {
            "places": [[float(rounded(value)) for value in place] for place in self.basis.places],
            "samples": len(self.measure.images),
            "batch_norm_samples": len(self.training.images),
        }

    def rows(self, unit: int) -> list[Row]:
        if unit == 0:
            return [self.point(x, y, str(number)) for number, (x, y) in enumerate(self.basis.places, 1)]
        (_, _), (dx, _), (_, dy) = self.basis.places
        y = self.share(unit - 1) * dy
        return [self.point(self.share(index) * dx, y) for index in range(self.points)]

    def share(self, index: int) -> float:
        """Relative coordinate of a grid point on its axis, from -margin to 1 + margin."""
        return -self.margin + (1 + 2 * self.margin) * index / (self.points - 1)

    @torch.no_grad()
    def point(self, x: float, y: float, network: str = "") -> Row:
        """Loss and error at the coordinates (x, y); `network` is the number of the network at this point, if any."""
        assign(self.basis.at(x, y), shared(self.model).values())
        self.training.estimate_batch_norm(self.model)
        loss, error = self.measure(self.model)
        numbers = (rounded(value) for value in (x, y, loss, error))
        return dict(zip(self.columns, (network, *numbers), strict=True))


class Basis(NamedTuple):
    """An orthonormal basis (float64 vectors) of the plane through three vectors, and the coordinates of these."""

    origin: Tensor
    u: Tensor
    v: Tensor
    places: tuple[tuple[float, float], tuple[float, float], tuple[float, float]]

    def at(self, x: float, y: float) -> Tensor:
        """The vector at the coordinates (x, y)."""
        return self.origin + x * self.u + y * self.v


def plane_through(first: Tensor, second: Tensor, third: Tensor) -> Basis:
    """The plane through three vectors, in float64. Raises RunError if the vectors lie on a line."""
    one, two, three = (vector.double() for vector in (first, second, third))
    u, third_side = two - one, three - one
    dx = float(u.norm())
    u = u / max(dx, torch.finfo(torch.float64).tiny)
    along = float(third_side @ u)
    v = third_side - along * u
    v = v - (v @ u) * u  # again, to remove the rounding error of the first projection
    dy = float(v.norm())
    if min(dx, dy) <= 1e-9 * float(third_side.norm()) or dx == 0:
        raise RunError("the three networks lie on a line and define no plane; give three different networks")
    return Basis(one, u, v / dy, ((0.0, 0.0), (dx, 0.0), (along, dy)))


def shared(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a network without those of quantizers, which a float network does not have."""
    return {name: parameter for name, parameter in model.named_parameters() if "quantizer" not in name}


if __name__ == "__main__":
    sys.exit(run_command(Plane, __doc__))
