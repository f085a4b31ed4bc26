"""Caching of results that depend only on constant inputs, such as the features of a whole graph."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor


class LastResult:
    """The result of compute(), recomputed only if an input is another tensor or was modified in place, or `conditions` differ.

    A result is cached from the second consecutive call with the same inputs, so that outputs of other layers, which never
    recur, cost no memory. Nothing is cached for inputs that require a gradient. A copy of this object starts empty.
    """

    def __init__(self) -> None:
        self.inputs: list[weakref.ref[Tensor]] = []
        self.conditions: tuple[object, ...] = ()
        self.result: Tensor | None = None

    def __call__(self, compute: Callable[[], Tensor], *inputs: Tensor, conditions: tuple[object, ...] = ()) -> Tensor:
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or any(x.requires_grad for x in inputs):
            return compute()
        is_known = len(self.inputs) == len(inputs) and all(
            seen() is x for seen, x in zip(self.inputs, inputs, strict=True)
        )
        conditions = (*conditions, *(x._version for x in inputs))
        if not is_known or self.conditions != conditions:
            self.inputs, self.conditions, self.result = [weakref.ref(x) for x in inputs], conditions, None
        if not is_known:
            return compute()
        if self.result is None:
            self.result = compute()
        return self.result

    def __reduce__(self) -> tuple[type[LastResult], tuple[()]]:
        return LastResult, ()
