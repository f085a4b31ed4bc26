"""Location of configuration files, sweeps and published numbers: top level of a checkout, or inside the package."""

from pathlib import Path


def resource_root() -> Path:
    """The folder with `conf`, `sweeps`, `results/published` and `results/summary` of this installation. Raises
    FileNotFoundError if there is no such folder."""
    package = Path(__file__).resolve().parent
    for root in (package / "resources", package.parents[1]):  # wheel; checkout
        if (root / "conf" / "config.yaml").is_file():
            return root
    raise FileNotFoundError(
        f"{package} has no configuration files: neither resources/conf in it nor conf two folders above it. "
        "Install the package again, or run it from a checkout."
    )
