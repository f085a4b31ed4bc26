"""Properties of a network for planning, kept in the user's cache, as building and tracing take seconds."""

import warnings
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from bitcycle.cache import cached
from bitcycle.dataset import DatasetInfo
from bitcycle.hardware import Workload, trace
from bitcycle.layer import Choices, Gates, LayerRule, conversion_plan, quantize_model
from bitcycle.model import ModelOptions
from bitcycle.quantizer import NoQuantizer, QuantizerOptions, Sbm
from bitcycle.schedule import Dfq, Schedule
from bitcycle.settings import Settings
from bitcycle.shapes import Shape
from bitcycle.task import TaskOptions


@dataclass(frozen=True)
class ConvertedNetwork:
    """A converted network and its operations; `choices` may have another cost target."""

    parameters: int
    layers: tuple[LayerRule, ...]
    choices: Choices | None
    workload: Workload
    warnings: tuple[str, ...]


def blocks(options: ModelOptions, shape: Shape) -> tuple[str | None, int]:
    """The family of a network's blocks, which schedules need, and their number."""

    def make() -> tuple[str | None, int]:
        model = options.build(shape)
        return getattr(model, "block_family", None), len(getattr(model, "block_names", ()))

    identity = _identity(options, shape)
    return cached("blocks", identity, make) if _is_ours(options) else make()


def network(
    options: ModelOptions, info: DatasetInfo, task: TaskOptions, quantizer: QuantizerOptions, schedule: Schedule
) -> ConvertedNetwork:
    """The converted network. Raises SettingError if quantizer, schedule and network are incompatible."""

    def make() -> ConvertedNetwork:
        model = options.build(info.shape)
        layers = tuple(conversion_plan(model, quantizer, schedule))
        parameters = _parameters(model)  # before conversion, which adds gates in place
        # a float run is counted as SBM at 32 bits
        counted = Sbm(float_layers=quantizer.float_layers) if isinstance(quantizer, NoQuantizer) else quantizer
        converted = quantize_model(model, counted, schedule=schedule)
        gated = [module for module in converted.modules() if isinstance(module, Gates)]
        parameters += sum(map(_parameters, gated))
        choices, sample = gated[0].choices if gated else None, task.sample(info)
        tensors = [leaf for leaf in tree_leaves(sample.arguments) if isinstance(leaf, torch.Tensor)]
        [device] = {tensor.device for tensor in tensors}
        with warnings.catch_warnings(record=True) as caught:
            try:
                workload = trace(converted.to(device), *sample.arguments, samples=sample.samples)
            except Exception as error:  # of the forward pass of a user's network
                shapes = " and ".join(str(list(tensor.shape)) for tensor in tensors)
                error.add_note(f"model={options.name} failed on a sample of the dataset, of shape {shapes}")
                raise
        messages = tuple(str(warning.message) for warning in caught)
        return ConvertedNetwork(parameters, layers, choices, workload, messages)

    are_ours = all(map(_is_ours, (options, task, quantizer, schedule.options)))
    gates = schedule.options if isinstance(schedule.options, Dfq) else None  # all targets have the same network
    identity = _identity(options, info, task, quantizer, gates and replace(gates, target=0.0))
    found = cached("network", identity, make) if are_ours else make()
    for warning in found.warnings:
        warnings.warn(warning, stacklevel=2)
    return found


def _is_ours(options: object) -> bool:
    """Whether the code behind the options is part of this package, and thus of the cache version."""
    return type(options).__module__.startswith("bitcycle.")


def _identity(*parts: object) -> str:
    words = [
        f"{type(part).__name__}: {sorted(vars(part).items()) if isinstance(part, Settings) else part!r}"
        for part in parts
    ]
    return f"torch {torch.__version__} {words}"


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
