"""Optional dependencies, imported on first use; if one is missing, the error names the packages to install and their extra."""

import importlib
import re
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from typing import TYPE_CHECKING, Any

from bitcycle.errors import RunError

if TYPE_CHECKING:
    from packaging.requirements import Requirement

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


def extras() -> "dict[str, list[Requirement]]":
    """Extra of bitcycle -> the packages that it needs with this version of Python; empty for a tree that is not installed."""
    try:
        declared = metadata("bitcycle").get_all("Provides-Extra") or []
    except PackageNotFoundError:
        return {}
    return {extra: _requirements("bitcycle", extra) for extra in declared}


def _requirements(package: str, extra: str) -> "list[Requirement]":
    """The packages that an extra of an installed package adds."""
    from packaging.requirements import Requirement  # a requirement of Hydra

    found = []
    for line in requires(package) or []:
        marker = (one := Requirement(line)).marker
        if marker is not None and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""}):
            found.append(one)
    return found


def lacking(requirement: "Requirement") -> list[str]:
    """The packages that must be installed or updated for a requirement, including those of its own extras."""
    try:
        installed = version(requirement.name)
    except PackageNotFoundError:
        return [requirement.name]
    if not requirement.specifier.contains(installed, prereleases=True):
        return [f"{requirement.name}{requirement.specifier}, not {installed}"]
    own = [one for extra in sorted(requirement.extras) for one in _requirements(requirement.name, extra)]
    return [name for one in own for name in lacking(one)]
