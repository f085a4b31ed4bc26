"""Libraries that only some domains need: imported when they are used, and named with their extra when they are missing."""

from __future__ import annotations

import importlib
from typing import Any

from bitcycle.errors import RunError


def require(module: str, extra: str) -> Any:
    """The module, imported now.

    Raises:
        RunError: if it is not installed; names the extra that has it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RunError(f"{module} is not installed: pip install 'bitcycle[{extra}]'") from error
