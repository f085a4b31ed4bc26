"""Optional dependencies, imported on first use; if one is missing, the error names the packages to install and their extra."""

import importlib
import re
from importlib.metadata import PackageNotFoundError, requires
from typing import Any

from bitcycle.errors import RunError

_DISTRIBUTIONS = {"PIL": "pillow", "sklearn": "scikit-learn"}
"""Module -> the distribution that contains it, where their names differ."""


def require(module: str, extra: str) -> Any:
    """The module, imported now. Raises RunError if it is not installed; names the packages of its extra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RunError(f"{module} is not installed: {install_command(extra)} (the extra {extra})") from error


def install_command(extra: str) -> str:
    """The command that installs the packages of an extra of bitcycle."""
    packages = [package for package, extras in _declared() if extra in extras]
    return f"pip install {_quoted(packages)}" if packages else "install the packages that pyproject.toml lists"


def explain_missing(error: ModuleNotFoundError) -> str | None:
    """The sentence about a module that is not installed, with the extras that include it; None if none does."""
    module = (error.name or "").split(".")[0]
    distribution = _DISTRIBUTIONS.get(module, module).lower()
    including = [(package, extras) for package, extras in _declared() if _name(package) == distribution and extras]
    if not including:
        return None
    extras = sorted({extra for _, extras in including for extra in extras} - {"all", "dev"})
    which = f"the extra {extras[0]} includes" if len(extras) == 1 else f"the extras {', '.join(extras)} include"
    return f"{module} is not installed: pip install {_quoted([including[0][0]])} ({which} it)"


def _declared() -> list[tuple[str, set[str]]]:
    """Each requirement of bitcycle with the extras that it belongs to."""
    try:
        lines = [line.partition(";") for line in requires("bitcycle") or []]
    except PackageNotFoundError:  # a source tree that is not installed
        return []
    return [(package.strip(), set(re.findall(r"extra == ['\"]([\w-]+)['\"]", marker))) for package, _, marker in lines]


def _name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower()


def _quoted(packages: list[str]) -> str:
    return " ".join(map(repr, packages))
