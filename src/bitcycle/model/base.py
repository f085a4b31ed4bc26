"""Base class of model options, which build a network for data of a given kind."""

from dataclasses import dataclass
from typing import Any, ClassVar, Optional

import torch
from torch import nn

from bitcycle.settings import MISSING, SettingError, Settings, setting
from bitcycle.shapes import ImageShape, Shape


@dataclass
class ModelOptions(Settings):
    """Options that every model has."""

    takes: ClassVar[type] = ImageShape
    """Type of data that the network takes: the type of the `shape` argument of `check` and `build`."""
    smallest_image: ClassVar[int] = 1
    """Side of the smallest images that it takes, in pixels."""

    name: str = setting(MISSING, "the network's name, as in model=NAME")
    initial_weights: Optional[str] = setting(
        None, "folder of a finished run, or checkpoint file, with initial weights; null: random", content=True
    )
    initial_classifier: str = setting(
        "fitting",
        "classifier of initial_weights: fitting (loaded if it has as many classes), random (never loaded), refused"
        " (error if it has not as many)",
        choices=("fitting", "random", "refused"),
    )

    def check(self, shape: Any) -> None:
        """Raise SettingError if this network cannot take data of this shape."""
        if isinstance(shape, ImageShape) and shape.size < self.smallest_image:
            cifar = ", or a CIFAR network such as model=resnet20" if self.smallest_image >= 32 else ""
            remedy = f"use images of {self.smallest_image} pixels or more{cifar}"
            raise SettingError("name", self.name, f"cannot take images of {shape.size} pixels", remedy)

    def build(self, shape: Any) -> nn.Module:
        """Return the float network for this shape, initialised from PyTorch's global generator."""
        raise NotImplementedError


def check_kind(options: ModelOptions, dataset: str, shape: Shape) -> None:
    """Raise SettingError if a network cannot take the data of a dataset, of another type or of an unsupported size."""
    if not isinstance(shape, options.takes):
        problem = f"does not accept the data of dataset={dataset}"
        fitting = "omit model= for the default of the dataset, or see `python train.py --help` for others"
        raise SettingError("name", options.name, problem, fitting)
    options.check(shape)


def build_seeded(options: ModelOptions, shape: Shape, seed: int) -> nn.Module:
    """`options.build(shape)` with weights that depend only on `seed`; the global generator is unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return options.build(shape)


def shortcut(in_channels: int, channels: int, stride: int = 1) -> nn.Module:
    """The skip connection of a block: the identity, or a 1x1 convolution with batch norm where width or size change."""
    if stride == 1 and in_channels == channels:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(in_channels, channels, 1, stride=stride, bias=False), nn.BatchNorm2d(channels))


class FloatLinear(nn.Linear):
    """A linear layer that is never quantized, whatever the quantizer's rule for float layers."""

    stays_float = True
    """Suppresses the warning about layers without a quantized counterpart."""
