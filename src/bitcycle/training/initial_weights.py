"""Training from the weights of another run: float pre-training, then quantized retraining (FracTrain, section 4.5).

The parameters and buffers of the float network are loaded before conversion; states of quantizers and gates are not
loaded. The name of the run depends on the content of these weights, not on their path.
"""

import hashlib
import logging
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn

from bitcycle.layer import convertible_layers
from bitcycle.model import ModelOptions
from bitcycle.model.base import read_weights
from bitcycle.settings import SettingError
from bitcycle.training.run_folder import RunFolder

logger = logging.getLogger(__name__)

FIELD = "initial_weights"


def weights_file(path: str, field: str = FIELD) -> Path:
    """The checkpoint file of `path`: itself, or that of a finished run's folder. Raises SettingError about `field` if there is
    none."""
    given = Path(path).expanduser()
    if given.is_file():
        return given
    folder = RunFolder(given)
    remedy = "give a checkpoint file, or the folder of a finished run (its name ends with seed=N)"
    if not given.is_dir():
        raise SettingError(field, path, "no such file or folder", remedy)
    if folder.state() == "resumable":
        raise SettingError(field, path, "this run is not finished", "finish it by running its command again")
    if not folder.checkpoint.last.is_file():
        raise SettingError(field, path, "this folder has no checkpoint of a run", remedy)
    return folder.checkpoint.last


def content_digest(path: str, field: str = FIELD) -> str:
    """A digest of names and values of all weights in a checkpoint. Raises SettingError about `field` if it cannot be read."""
    file = weights_file(path, field).resolve()
    return _digest(str(file), file.stat().st_mtime_ns, field)


@lru_cache(maxsize=8)
def _digest(path: str, changed: int, field: str) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(read_weights(Path(path), field).items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def load_initial_weights(options: ModelOptions, model: nn.Module) -> None:
    """Load `options.initial_weights`, if given, into the float model. Raises SettingError if the weights do not fit the model."""
    if options.initial_weights is None:
        return
    fitting, left_out = fitting_weights(options, model)
    model.load_state_dict(fitting, strict=False)
    logger.info("initial weights from %s", options.initial_weights)
    if left_out:
        logger.info("the classifier starts with random weights: %s are not loaded", ", ".join(left_out))


def fitting_weights(options: ModelOptions, model: nn.Module) -> tuple[dict[str, Tensor], list[str]]:
    """The initial weights for the float model, and the classifier weights left out. Raises SettingError if they do not fit."""
    if options.initial_weights is None:
        return {}, []
    expected = model.state_dict()
    file = weights_file(options.initial_weights)
    found = read_weights(file, FIELD)
    found = _without_gates(found, model)
    layers = convertible_layers(model)
    name = next((name for name in reversed(layers) if isinstance(layers[name], nn.Linear)), "")
    classifier = [key for key in expected if name and key.startswith(f"{name}.")]
    other = [key for key in expected if key in found and found[key].shape != expected[key].shape]
    problems = [
        *(f"{key} is missing" for key in expected if key not in found),
        *(f"{key} is not in the network" for key in found if key not in expected and not _of_quantizer(key, layers)),
        *(_shapes(key, found, expected) for key in other if key not in classifier),
    ]
    if problems:
        problem, remedy = f"does not fit {options.name}: {problems[0]}", "give weights of the same network"
        raise SettingError(FIELD, options.initial_weights, problem, remedy)
    if other and options.initial_classifier == "refused":
        problem = f"has a different number of classes: {_shapes(other[0], found, expected)}"
        remedy = "set model.initial_classifier=fitting to start with a random classifier"
        raise SettingError(FIELD, options.initial_weights, problem, remedy)
    left_out = classifier if other or options.initial_classifier == "random" else []
    return {key: found[key] for key in expected if key not in left_out}, left_out


def _without_gates(found: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Weights of a gated network (dfq, fractrain) under the names of the original network."""
    if not any(key.startswith("gates.") for key in found) or hasattr(model, "gates"):
        return found
    names = {f"{name}.block.": f"{name}." for name in getattr(model, "block_names", ())}
    plain = {}
    for key, value in found.items():
        inside = next((name for name in names if key.startswith(name)), None)
        plain[names[inside] + key[len(inside) :] if inside is not None else key] = value
    return {key: value for key, value in plain.items() if not key.startswith("gates.")}


def _of_quantizer(name: str, layers: dict[str, nn.Module]) -> bool:
    """Whether this name belongs to a quantizer module of a convertible layer."""
    return any(name.startswith(f"{layer}.") and "." in name[len(layer) + 1 :] for layer in layers)


def _shapes(name: str, found: dict[str, Tensor], expected: dict[str, Tensor]) -> str:
    return f"{name} is {list(found[name].shape)} instead of {list(expected[name].shape)}"
