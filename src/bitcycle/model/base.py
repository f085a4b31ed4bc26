"""Base class of model options, which build a network for data of a given kind, and weights from files, read without executing
code from them."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Optional

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from bitcycle.errors import UNREADABLE
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


def read_weights(file: Path, field: str) -> dict[str, Tensor]:
    """Weights by name: of a checkpoint of this project, a saved state dict, or a safetensors file. Raises SettingError about
    `field` if the file cannot be read or holds something else."""
    try:
        tensors_only = partial(torch.load, map_location="cpu", weights_only=True)
        state: Any = (load_file if file.suffix == ".safetensors" else tensors_only)(file)
    except (*UNREADABLE, SafetensorError) as error:
        reason = str(error).split("\n")[0].split(". ")[0] or "the file ends too early"
        problem = f"cannot be read as weights ({type(error).__name__}: {reason})"
        remedy = "give a file of plain tensors, written by torch.save or safetensors"
        raise SettingError(field, file, problem, remedy) from error
    weights = state.get("model", state) if isinstance(state, dict) else None
    if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise SettingError(field, file, "contains no weights", "give a checkpoint, or a saved state dict")
    return weights


def load_weights(model: nn.Module, found: Mapping[str, Tensor], field: str, path: str, remedy: str) -> None:
    """Load the weights that the model has. Raises SettingError naming one that is missing or of another shape."""
    expected = model.state_dict()
    for name, value in expected.items():
        if name not in found or found[name].shape != value.shape:
            there = f"is {list(found[name].shape)}" if name in found else "is missing"
            problem = f"does not fit this network: {name} {there} instead of {list(value.shape)}"
            raise SettingError(field, path, problem, remedy)
    model.load_state_dict({name: found[name] for name in expected})
