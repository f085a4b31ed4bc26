"""Stochastic weight averaging: the mean of weights taken at regular intervals late in a run, evaluated in addition.

    average := average + (weights - average) / (k + 1)        the k-th time, from 0

Batch norm statistics are then re-estimated in one pass over an epoch of training batches, in training mode at the bits
of the step, with momentum B / (seen + B) for a batch of B samples, which gives the mean over all samples. A layer that
processes a batch several times (in a block that DFQ computes for each option) counts each time. In a run with phases,
each phase has its own average.

Source: released code of CPT, train.py and util_swa.py, where it is off, as here; the paper does not use it. Differs
from the code in that times are fractions of the run, that the average starts from the model's running activation
statistics of quantizers (theirs start from zero) before the pass updates them, and that the pass uses the batches of
the current epoch. The cost of a run excludes this pass.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Optional, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bitcycle.settings import SettingError, Settings, setting

T = TypeVar("T")


@dataclass
class WeightAveragingOptions(Settings):
    """Options of weight averaging."""

    start: Optional[float] = setting(
        None,
        "fraction of the run after which weights are averaged (SWA), in each phase separately; null: never",
        minimum=0,
        maximum=1,
    )
    patience: Optional[int] = setting(
        None,
        "average once a validation is worse than the best before the last n (NT-ASGD; Merity et al. 2018: n = 5)",
        minimum=1,
    )
    every: float = setting(
        0.01828125, "fraction of the run between averaged weights (released code: 1,170 steps)", minimum=0, maximum=1
    )

    def validate(self) -> None:
        if self.start is not None and self.patience is not None:
            problem = f"conflicts with start={self.start}; each determines when averaging begins"
            raise SettingError("patience", self.patience, problem, "set only one of them")

    def due(self, step: int, total_steps: int, begun: bool = False) -> bool:
        """Whether the weights after `step` of `total_steps` steps enter the average, which may have `begun`."""
        period = max(1, round(self.every * total_steps))
        if self.patience is not None:
            return begun and step % period == 0
        if self.start is None:
            return False
        first = max(1, round(self.start * total_steps))
        return step >= first and (step - first) % period == 0

    def begins(self, validations: Sequence[float], higher_is_better: bool) -> bool:
        """Whether averaging begins after the last of these validations.

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
    """Running average of weights, stored as a state dict of the model."""

    def __init__(self) -> None:
        self.count, self.state = 0, dict[str, Tensor]()

    @torch.no_grad()
    def add(self, model: nn.Module) -> None:
        """Add the model's current weights to the average; all other state is copied from the model."""
        state = {name: value.detach().clone() for name, value in model.state_dict().items()}
        if self.count:
            for name, _ in model.named_parameters(remove_duplicate=False):
                state[name] = self.state[name].to(state[name].device).lerp(state[name], 1 / (self.count + 1))
        self.state, self.count = state, self.count + 1

    @contextmanager
    def in_place_of(self, model: nn.Module, keep: bool = False) -> Iterator[None]:
        """Context in which the model has the averaged weights; `keep` keeps changes of them. Its own are restored."""
        own = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(self.state)
        try:
            yield
            if keep:
                self.state = {name: value.clone() for name, value in model.state_dict().items()}
        finally:
            model.load_state_dict(own)

    def state_dict(self) -> dict[str, Any]:
        """Count and average, for a checkpoint."""
        return {"count": self.count, "state": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.count, self.state = state["count"], state["state"]


def estimated_layers(model: nn.Module) -> list[_BatchNorm]:
    """Batch norm layers whose statistics are re-estimated; frozen layers are excluded."""
    norms = (module for module in model.modules() if isinstance(module, _BatchNorm))
    return [module for module in norms if module.training and module.track_running_stats]


@torch.no_grad()
def estimate_statistics(model: nn.Module, batches: Iterable[T], forward: Callable[[T], object]) -> None:
    """Re-estimate the running statistics of batch norm layers in training mode; `forward` passes a batch through the model."""
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
        for batch in batches:
            forward(batch)
    finally:
        for hook in hooks:
            hook.remove()
        for layer, momentum in zip(layers, momenta):
            layer.momentum = momentum
