"""Following the forward passes of modules, also of those called as `module.forward(x)`, which PyTorch's hooks do not see."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn

Before = Callable[[tuple[Any, ...], dict[str, Any]], None]
After = Callable[[tuple[Any, ...], dict[str, Any], Any], None]


@contextmanager
def followed(module: nn.Module, before: Before, after: After | None = None) -> Iterator[None]:
    """Context in which `before(arguments, keywords)` runs before each forward pass of a module, and `after(arguments, keywords,
    output)` after it, with None as the output of one that failed. A scripted module runs as it is."""
    if isinstance(module, torch.jit.ScriptModule):
        yield
        return
    attributes, forward = vars(module), module.forward
    own = attributes.get("forward")

    @wraps(forward)
    def follow(*arguments: Any, **keywords: Any) -> Any:
        output = None
        before(arguments, keywords)
        try:
            output = forward(*arguments, **keywords)
            return output
        finally:
            if after is not None:
                after(arguments, keywords, output)

    attributes["forward"] = follow
    try:
        yield
    finally:
        del attributes["forward"]
        if own is not None:
            attributes["forward"] = own
