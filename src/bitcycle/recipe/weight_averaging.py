"""Stochastic weight averaging: the mean of the weights at regular intervals late in a run, evaluated alongside the weights.

    average := average + (weights - average) / (k + 1)        the k-th time, from 0

after which the statistics of batch norm are re-estimated, in one pass over an epoch's training batches in training mode at the
bits of the step, with momentum B / (seen + B) for a batch of B samples: their plain mean over all samples. A layer
that sees a batch several times, as one in a block that DFQ computes for each option, counts each time. In a run in phases every
phase has an average of its own.

Source: released code of CPT, train.py and util_swa.py, where it is off, as here; the paper does not use it. Differs from the code
in that times are fractions of the run, that the average takes the quantizers' running statistics of the activations over from
the weights (theirs start from zero) before the pass moves them, and that the pass has the batches of the current epoch. The
cost of a run leaves the pass out.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bitcycle.settings import SettingError, Settings, setting
from bitcycle.task import Task


@dataclass
class WeightAveragingOptions(Settings):
    """When weights are averaged."""

    start: Optional[float] = setting(
        None,
        "fraction of the run after which weights are averaged (SWA), in each phase separately; null: never",
        minimum=0,
        maximum=1,
    )
    patience: Optional[int] = setting(
        None,
        "average once a validation is worse than the best of all but this many before it (NT-ASGD; Merity et al. 2018: 5)",
        minimum=1,
    )
    every: float = setting(
        0.01828125, "fraction of the run between averaged weights (released code: 1,170 steps)", minimum=0, maximum=1
    )

    def validate(self) -> None:
        if self.start is not None and self.patience is not None:
            problem = f"and start={self.start} both say when averaging begins"
            raise SettingError("patience", self.patience, problem, "leave one of them out")

    def due(self, step: int, total_steps: int, begun: bool = False) -> bool:
        """Whether the weights after `step` steps, of a run of `total_steps`, belong to the average, which has `begun` or not."""
        period = max(1, round(self.every * total_steps))
        if self.patience is not None:
            return begun and step % period == 0
        if self.start is None:
            return False
        first = max(1, round(self.start * total_steps))
        return step >= first and (step - first) % period == 0

    def begins(self, validations: Sequence[float], higher_is_better: bool) -> bool:
        """Whether the last validation of all so far is one that averaging begins after.

            v_t worse than the best of v_0 ... v_(t - n - 1),   n = patience

        Source: Merity et al. 2018, algorithm 1.

        >>> options = WeightAveragingOptions(patience=2)
        >>> values = [9.0, 8.0, 8.5, 8.2, 8.1]
        >>> [options.begins(values[:count], higher_is_better=False) for count in range(1, 6)]
        [False, False, False, False, True]
        """
        if self.patience is None or len(validations) < self.patience + 2:
            return False
        sign = 1 if higher_is_better else -1
        *earlier, last = (sign * value for value in validations)
        return last < max(earlier[: -self.patience])


class WeightAverage:
    """The average so far, as a state dict of the model that it belongs to."""

    def __init__(self) -> None:
        self.count, self.state = 0, dict[str, Tensor]()

    @torch.no_grad()
    def add(self, model: nn.Module) -> None:
        """Include the model's current weights in the average; everything else is copied from the model."""
        state = {name: value.detach().clone() for name, value in model.state_dict().items()}
        if self.count:
            for name, _ in model.named_parameters(remove_duplicate=False):
                state[name] = self.state[name].lerp(state[name], 1 / (self.count + 1))
        self.state = state
        self.count += 1

    @contextmanager
    def in_place_of(self, model: nn.Module, keep: bool = False) -> Iterator[None]:
        """Context in which the model has the averaged weights (changes are stored with `keep`); restored afterwards."""
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


def estimated_layers(model: nn.Module) -> list[_BatchNorm]:
    """The layers whose statistics are re-estimated; frozen ones are excluded."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    return [module for module in norms if module.training]


@torch.no_grad()
def estimate_statistics(task: Task, model: nn.Module, steps: Iterable[int], batches: Iterable[Any]) -> None:
    """Re-estimate the running statistics of batch norm on the `batches` of `steps`; the model is in training mode."""
    layers = estimated_layers(model)
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
