"""Stochastic weight averaging: the mean of the weights at regular moments late in a run, evaluated beside the weights.

    average := average + (weights - average) / (k + 1)        the k-th time, from 0

after which the statistics of batch norm are estimated anew, in one pass over an epoch's training batches in training mode at the
bits of the step, with momentum B / (seen + B) for a batch of B samples: their plain mean over all samples. A layer
that sees a batch several times, as one in a block that DFQ computes for each option, counts each time. In a run in phases every
phase has an average of its own.

Source: released code of CPT, train.py and util_swa.py, where it is off, as here; the paper does not use it. Differs from the code
in that times are fractions of the run, that the average takes the quantizers' running statistics of the activations over from
the weights (theirs start from zero) before the pass moves them, and that the pass has the batches of the current epoch. The
cost of a run leaves the pass out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bitcycle.settings import Settings, setting
from bitcycle.task import Task


@dataclass
class WeightAveragingOptions(Settings):
    """When weights are averaged."""

    start: Optional[float] = setting(
        None,
        "fraction of the run after which weights are averaged (SWA), in each phase anew; null: never",
        minimum=0,
        maximum=1,
    )
    every: float = setting(
        0.01828125, "fraction of the run between averaged weights (released code: 1,170 steps)", minimum=0, maximum=1
    )

    def due(self, step: int, total_steps: int) -> bool:
        """Whether the weights after `step` steps, of a run of `total_steps`, belong to the average."""
        if self.start is None:
            return False
        first, period = max(1, round(self.start * total_steps)), max(1, round(self.every * total_steps))
        return step >= first and (step - first) % period == 0


class WeightAverage:
    """The average so far, as a state dict of the model that it belongs to."""

    def __init__(self) -> None:
        self.count, self.state = 0, dict[str, Tensor]()

    @torch.no_grad()
    def add(self, model: nn.Module) -> None:
        """Take the model's present weights into the average; everything else is the present model's."""
        state = {name: value.detach().clone() for name, value in model.state_dict().items()}
        if self.count:
            for name, _ in model.named_parameters(remove_duplicate=False):
                state[name] = self.state[name].lerp(state[name], 1 / (self.count + 1))
        self.state = state
        self.count += 1

    @contextmanager
    def in_place_of(self, model: nn.Module, keep: bool = False) -> Iterator[None]:
        """Let the model be the average; `keep` what happens to it meanwhile. Afterwards it is what it was."""
        own = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(self.state)
        try:
            yield
            if keep:
                self.state = {name: value.clone() for name, value in model.state_dict().items()}
        finally:
            model.load_state_dict(own)

    def state_dict(self) -> dict[str, Any]:
        """Number and average, for a checkpoint."""
        return {"count": self.count, "state": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.count, self.state = state["count"], state["state"]


@torch.no_grad()
def estimate_statistics(task: Task, model: nn.Module, steps: Iterable[int], batches: Iterable[Any]) -> None:
    """Estimate the running statistics of batch norm anew on the `batches` of `steps`; the model is in training mode."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    layers = [module for module in norms if module.training]  # frozen ones keep what they have
    if not layers:
        return
    momenta, seen = [layer.momentum for layer in layers], Counter[_BatchNorm]()

    def weigh(layer: _BatchNorm, arguments: tuple[Tensor, ...]) -> None:
        samples = len(arguments[0])
        seen[layer] += samples
        layer.momentum = samples / seen[layer]

    hooks = [layer.register_forward_pre_hook(weigh) for layer in layers]
    for layer in layers:
        layer.reset_running_stats()
    try:
        for _, batch in zip(steps, batches):
            task.train(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
        for layer, momentum in zip(layers, momenta):
            layer.momentum = momentum
