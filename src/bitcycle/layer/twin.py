"""Modules of a model in other classes, with the same parameters, buffers, settings and hooks."""

import copy
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

M = TypeVar("M")
_OWN = ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules", "_load_state_dict_post_hooks")
"""What a twin may add to without changing the original; hooks are shared, so that their handles remove them."""

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def twin_of(module: nn.Module, kind: type[nn.Module]) -> Any:
    """A module of class `kind` in the state of `module`: the same tensors, so that existing optimizers stay valid."""
    twin = kind.__new__(kind)
    twin.__dict__.update(module.__dict__, **{name: copy.copy(module.__dict__[name]) for name in _OWN})
    return twin


def modules_of(model: nn.Module, kind: type[M]) -> list[M]:
    """The modules of a class within a model."""
    return [module for module in model.modules() if isinstance(module, kind)]


def replace_modules(model: nn.Module, replacement: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """The model with `replacement(module)`, which may be the module itself, in place of each module; shared ones stay shared.
    References in attributes and in plain lists, tuples and dictionaries follow."""
    found = {module: replacement(module) for module in model.modules()}
    for parent in found.values():
        new = {name: found[x] for name, x in parent._modules.items() if x in found and found[x] is not x}
        if new:  # a scripted module, none of whose parts is replaced, has another kind of dictionary
            parent._modules.update(new)
        for name, value in vars(parent).items():
            if name not in _OF_EVERY_MODULE and any(found.get(x, x) is not x for x in _modules_in(value)):
                vars(parent)[name] = tree_map_only(nn.Module, lambda x: found.get(x, x), value)
    return found[model]


def replace_kinds(model: nn.Module, twins: Mapping[type[nn.Module], type[nn.Module]]) -> nn.Module:
    """The model with a twin of class `twins[kind]` in place of each module of exactly that kind."""
    return replace_modules(model, lambda m: twin_of(m, twins[type(m)]) if type(m) in twins else m)


def _modules_in(value: Any) -> list[nn.Module]:
    if not isinstance(value, nn.Module | list | tuple | dict):
        return []
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, nn.Module)]
