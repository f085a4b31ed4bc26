"""What every model configuration provides: a network for inputs of a given kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Optional

import torch
from torch import nn

from bitcycle.settings import MISSING, Settings, setting


class ImageShape(NamedTuple):
    """What a data set asks of an image classifier: channels, height = width in pixels, number of classes."""

    channels: int
    size: int
    classes: int


@dataclass
class ModelOptions(Settings):
    """Options that every model has."""

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

    def check(self, shape: ImageShape) -> None:
        """Raise SettingError where this network cannot take such images."""

    def build(self, shape: ImageShape) -> nn.Module:
        """The float network for such images, freshly initialised from PyTorch's global generator."""
        raise NotImplementedError


def build_seeded(options: ModelOptions, shape: ImageShape, seed: int) -> nn.Module:
    """`options.build(shape)` with weights that depend on `seed` alone; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return options.build(shape)
