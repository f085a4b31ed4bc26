"""The environment of a run: versions, commit and machine."""

import os
import platform
import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from bitcycle import distributed
from bitcycle.cpp_extension import cpu_entry

PACKAGES = ("bitcycle", "torch", "torchvision", "torchmetrics", "numpy", "hydra-core", "omegaconf")
COMMIT_VARIABLE = "BITCYCLE_COMMIT"
"""Environment variable with the commit of a copy without git history (docs/sweeps.md, offline machines)."""


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Versions of libraries, the commit of this repository and whether it is modified, processor and threads."""
    return {
        "python": sys.version.split()[0],
        "packages": {package: _version(package) for package in PACKAGES},
        "commit": commit(),
        "uncommitted": _git("diff", "HEAD", "--stat"),
        "platform": platform.platform(),
        "processor": processor(device),
        "threads": torch.get_num_threads(),
        "processes": distributed.world_size(),
        "device": str(device),
    }


def processor(device: torch.device) -> str:
    """The name of the GPU or CPU in use."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()


def commit() -> str | None:
    """The commit of this repository; in a copy without git history, the value of COMMIT_VARIABLE."""
    return os.environ.get(COMMIT_VARIABLE) or _git("rev-parse", "HEAD")


@cache
def _cpu_name() -> str:
    return cpu_entry("model name") or platform.processor() or platform.machine()  # these give fewer details


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    """The output of git for the repository of this file; None outside a repository or without git."""
    try:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
