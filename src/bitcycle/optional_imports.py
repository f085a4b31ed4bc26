"""Optional dependencies, imported on first use; if one is missing, the error names the packages to install."""

import importlib
import re
from importlib.metadata import PackageNotFoundError, requires
from typing import Any

from bitcycle.errors import RunError


def require(module: str, extra: str) -> Any:
    """The module, imported now. Raises RunError if it is not installed; names the packages of its extra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RunError(f"{module} is not installed: {install_command(extra)}") from error


def install_command(extra: str) -> str:
    """The command that installs the packages of an extra of bitcycle."""
    try:
        declared = [re.split(r"\s*;\s*", line) for line in requires("bitcycle") or []]
    except PackageNotFoundError:  # a source tree that is not installed
        declared = []
    wanted = [package for package, *marker in declared if re.search(rf"extra == ['\"]{extra}['\"]", " ".join(marker))]
    return f"pip install {' '.join(map(repr, wanted)) if wanted else f'the packages of the extra {extra} in pyproject.toml'}"
