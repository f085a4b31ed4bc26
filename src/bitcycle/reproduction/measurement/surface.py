"""Loss surface around a network along two random directions: `bitcycle surface RUN_FOLDER`.

    L(x, y) = loss(w + x d + y e),   d_k := d_k ||w_k|| / (||d_k|| + 1e-10)   for every filter k, likewise for e

d and e are independent and normal, derived from (seed, name of the parameter), so that networks of one architecture get
the same directions before normalization. A filter is an index of the first dimension of a weight with at least two
dimensions, such as a row of a linear layer. One-dimensional parameters (biases, scale and shift of batch norm, trained
parameters of quantizers) have direction 0, and running statistics are kept. x and y range from -extent to extent, both
included.

Source: Li et al. 2018, sections 4 and 5 and their released code with `--xignore biasbn --xnorm filter`, which CPT follows in
figures 2 and 6 without further details; hence grid, images and precision are options. Difference: by default, a
quantized network is evaluated with its quantizers at the precision of its last evaluation while its master weights are
moved; stored quantization steps and activation ranges stay those of the trained network. `precision=float` moves the
quantized weights and quantizes nothing.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor, nn

from bitcycle.layer.memory_format import channels_last
from bitcycle.precision import FLOAT
from bitcycle.randomness import derive
from bitcycle.reproduction.measurement.artifacts import Row
from bitcycle.reproduction.measurement.images import Measurement
from bitcycle.reproduction.measurement.job import Analysis, rounded, run_command
from bitcycle.settings import SettingError, setting
from bitcycle.training.finished_run import FinishedRun

TINY = 1e-10
AXES = ("x", "y")


@dataclass
class Surface(Analysis):
    """The loss surface of one network; a unit is a row of the grid, with constant y."""

    kind = "surface"
    columns = (*AXES, "loss", "error_percent")

    points: int = setting(51, "grid points per axis; odd, so that the network itself is a grid point", minimum=3)
    extent: float = setting(1.0, "both axes range from -extent to extent, in units of the filter norms", minimum=1e-6)
    seed: int = setting(0, "seed of the two directions", minimum=0)
    split: str = setting("train", "images; train: without augmentation", choices=("train", "test"))
    samples: Optional[int] = setting(5000, "number of images, taken in a fixed random order; null: all", minimum=1)
    precision: str = setting(
        "run",
        "run: quantizers at the precision of the last evaluation; float: move the quantized weights, no quantization",
        choices=("run", "float"),
    )

    def validate(self) -> None:
        if self.points % 2 == 0:
            problem = "must be odd, so that the network itself is a grid point"
            raise SettingError("points", self.points, problem, f"use {self.points + 1}")

    def prepare(self, runs: Sequence[FinishedRun], device: torch.device) -> tuple[int, Row]:
        [run] = runs
        self.measure = Measurement(run, self.split, self.samples, device)
        if self.precision == "float":
            run.make_float()
        self.model = channels_last(run.model, device)
        self.weights = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.directions = [directions(self.model, self.seed, axis) for axis in AXES]
        bits = run.bits if self.precision == "run" else [FLOAT, FLOAT]
        return self.points, run.subject | {"samples": len(self.measure.images), "bits": bits}

    def place(self, index: int) -> float:
        """The coordinate of a grid point on its axis, from -extent to extent and exactly 0 in the middle."""
        middle = (self.points - 1) // 2
        return self.extent * (index - middle) / middle

    def rows(self, unit: int) -> list[Row]:
        y = self.place(unit)
        return [self.point(self.place(index), y) for index in range(self.points)]

    @torch.no_grad()
    def point(self, x: float, y: float) -> Row:
        """Loss and error at one point; the network keeps the weights of this point."""
        one, other = self.directions
        for name, parameter in self.model.named_parameters():
            parameter.copy_(self.weights[name] + x * one[name] + y * other[name])
        loss, error = self.measure(self.model)
        return {"x": rounded(x), "y": rounded(y), "loss": rounded(loss), "error_percent": rounded(error)}


def directions(model: nn.Module, seed: int, axis: str) -> dict[str, Tensor]:
    """A filter-normalized direction (axis x or y) for each parameter, on the device of the parameter."""
    found = {}
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(derive(seed, "direction", axis, name))
        drawn = torch.randn(parameter.shape, generator=generator).to(parameter)
        found[name] = filter_normalised(drawn, parameter.detach())
    return found


def filter_normalised(direction: Tensor, weight: Tensor) -> Tensor:
    """Scale the filters of a direction to the norms of the weight's filters; 0 for fewer than two dimensions.

    >>> filter_normalised(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 10.0]]))
    tensor([[6., 8.]])
    """
    if weight.dim() < 2:
        return torch.zeros_like(weight)
    lengths, wanted = (tensor.flatten(1).norm(dim=1) for tensor in (direction, weight))
    scale: Tensor = wanted / (lengths + TINY)
    return direction * scale.view(-1, *[1] * (weight.dim() - 1))


if __name__ == "__main__":
    sys.exit(run_command(Surface, __doc__))
