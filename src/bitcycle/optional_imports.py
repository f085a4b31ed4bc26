"""Optional dependencies, imported on first use; if one is missing, the error names the packages to install and their extra."""

import importlib
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
    packages = " ".join(map(_quoted, extras().get(extra, ())))
    return f"pip install {packages}" if packages else "install the packages that pyproject.toml lists"


def explain_missing(error: ModuleNotFoundError) -> str | None:
    """The sentence about a module that is not installed, with the extras that include it; None if none does."""
    module = (error.name or "").split(".")[0]
    distribution = _DISTRIBUTIONS.get(module, module).lower()
    including = {extra: one for extra, needed in extras().items() for one in needed if one.name.lower() == distribution}
    if not including:
        return None
    names = sorted(including.keys() - {"all", "dev"})
    which = f"the extra {names[0]} includes" if len(names) == 1 else f"the extras {', '.join(names)} include"
    return f"{module} is not installed: pip install {_quoted(next(iter(including.values())))} ({which} it)"


def _quoted(requirement: "Requirement") -> str:
    """A requirement as an argument of pip, without its condition."""
    return repr(str(requirement).partition(";")[0])


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
