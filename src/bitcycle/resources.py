"""Configuration files, sweeps and published numbers: in a checkout at its top level, in an installed package inside it."""

from __future__ import annotations

from pathlib import Path


def resource_root() -> Path:
    """The folder that holds `conf`, `sweeps`, `results/published` and `results/summary` of this copy of bitcycle.

    Raises:
        FileNotFoundError: if this copy of the package has neither.
    """
    package = Path(__file__).resolve().parent
    for root in (package / "resources", package.parents[1]):  # of a wheel; of a checkout, whose src/bitcycle this is
        if (root / "conf" / "config.yaml").is_file():
            return root
    raise FileNotFoundError(
        f"{package} has no configuration files: neither resources/conf in it nor conf two folders above it. "
        "Install the package again, or run it from a checkout."
    )
