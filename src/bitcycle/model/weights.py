"""Weights from files, read without executing code from them."""

import pickle
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from bitcycle.settings import SettingError

UNREADABLE = (OSError, RuntimeError, EOFError, ValueError, LookupError, pickle.UnpicklingError, SafetensorError)
"""What reading a damaged file of weights may raise."""


def read_weights(file: Path, field: str) -> dict[str, Tensor]:
    """Weights by name: of a checkpoint of this project, a saved state dict, or a safetensors file. Raises SettingError about
    `field` if the file cannot be read or holds something else."""
    try:
        tensors_only = partial(torch.load, map_location="cpu", weights_only=True)
        state: Any = (load_file if file.suffix == ".safetensors" else tensors_only)(file)
    except UNREADABLE as error:
        problem = f"cannot be read as weights ({type(error).__name__}: {str(error).splitlines()[0]})"
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
