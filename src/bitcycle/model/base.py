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
    """The kind of data of the network; `check` and `build` receive a description of this kind."""

    name: str = setting(MISSING, "the network's name, as in model=NAME")
    initial_weights: Optional[str] = setting(
        None,
        "folder of a finished run, or checkpoint file, whose weights training begins from; null: random",
        content=True,
    )
    initial_classifier: str = setting(
        "fitting",
        "the classifier of initial_weights: fitting (taken if it has as many classes), random (not taken), refused (if it"
        " has not as many)",
        choices=("fitting", "random", "refused"),
    )

    def check(self, shape: Any) -> None:
        """Raise SettingError if this network cannot take such data."""

    def build(self, shape: Any) -> nn.Module:
        """The float network for such data, freshly initialised from PyTorch's global generator."""
        raise NotImplementedError


def check_kind(options: ModelOptions, dataset: str, shape: Shape) -> None:
    """Check that a network can take the data of a data set.

    Raises:
        SettingError: for data of another kind, or of a size that it cannot take.
    """
    if not isinstance(shape, options.takes):
        problem = f"is not made for the data of dataset={dataset}"
        fitting = "leave model= out for the data set's own, or see `python train.py --help` for others"
        raise SettingError("name", options.name, problem, fitting)
    options.check(shape)


def build_seeded(options: ModelOptions, shape: Shape, seed: int) -> nn.Module:
    """`options.build(shape)` with weights that depend only on `seed`; the global generator is unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return options.build(shape)
