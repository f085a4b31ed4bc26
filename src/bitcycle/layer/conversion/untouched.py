"""A forward pass that leaves nothing behind: modules with copies of their state, and random generators that are reset."""

import copy
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bitcycle.randomness import random_state_kept


@contextmanager
def untouched(model: nn.Module, parameters: bool = False) -> Iterator[None]:
    """Context after which `model` and the random state are those of before.

    Within it, the attributes of each module (modes, counters, caches), its buffers, and tensors and generators in its lists,
    dictionaries and queues are copies. Parameters are copied only if `parameters` is true, as they are large and few networks
    change them in their forward pass. Objects of other classes are not copied.
    """
    modules = list(model.modules())
    before = [dict(vars(module)) for module in modules]
    copies: dict[int, Any] = {}
    with random_state_kept():
        try:
            for module in modules:
                vars(module).update({name: _copied(value, parameters, copies) for name, value in vars(module).items()})
            yield
        finally:
            for module, attributes in zip(modules, before):
                vars(module).clear()
                vars(module).update(attributes)


def _copied(value: Any, parameters: bool, copies: dict[int, Any]) -> Any:
    """A copy of a tensor, a generator, or a container with copies of them; anything else itself. `copies` has what has been
    copied, by id, so that what is shared stays so."""
    if id(value) in copies:
        return copies[id(value)]
    new: Any = value
    if isinstance(value, nn.Parameter):
        new = nn.Parameter(value.detach().clone(), value.requires_grad) if parameters else value
    elif type(value) is Tensor:
        new = value.detach().clone().requires_grad_(value.requires_grad)
    elif isinstance(value, torch.Generator):
        new = value.clone_state()
    elif isinstance(value, list | dict | deque):
        new = copies[id(value)] = copy.copy(value)
        for key in value if isinstance(value, dict) else range(len(value)):
            new[key] = _copied(value[key], parameters, copies)
    elif isinstance(value, set):
        new = copy.copy(value)
    elif type(value) is tuple:
        new = tuple(_copied(part, parameters, copies) for part in value)
    copies[id(value)] = new
    return new
