"""Puts configuration files, sweeps and published numbers, which stand at the top of the repository, into the wheel."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

RESOURCES = (
    "conf/**/*.yaml",
    "sweeps/**/*.yaml",
    "results/published/**/*.csv",
    "results/published/**/*.yaml",
    "results/summary/*.csv",
    "results/manifest/*/*.csv",
)


class BuildWithResources(build_py):
    """Copies them to where `bitcycle.files.resource_root` looks; an editable installation finds them where they are."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        root = Path(__file__).parent
        target = Path(self.build_lib) / "bitcycle" / "resources"
        shutil.rmtree(target, ignore_errors=True)
        for path in (path.relative_to(root) for pattern in RESOURCES for path in root.glob(pattern)):
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / path, target / path)


setup(cmdclass={"build_py": BuildWithResources})
