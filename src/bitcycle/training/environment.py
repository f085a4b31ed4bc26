"""The environment of a run: versions, commit, machine, the memory allocator, and the settings of PyTorch."""

import ctypes
import functools
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from bitcycle import distributed
from bitcycle.cpp.extension import cpu_entry
from bitcycle.device import allow_tf32, choose_device, device_name, tf32_allowed
from bitcycle.recipe.options import TrainingOptions

PACKAGES = ("bitcycle", "torch", "torchvision", "torchmetrics", "numpy", "hydra-core", "omegaconf")
COMMIT_VARIABLE = "BITCYCLE_COMMIT"
"""Environment variable with the commit of a copy without git history (docs/sweeps.md, offline machines)."""


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Versions of libraries, the commit of this repository and whether it is modified, processor, threads, and
    whether float32 products may be rounded to TF32."""
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
        "tf32": tf32_allowed(),
    }


def processor(device: torch.device) -> str:
    """The name of the GPU or CPU in use."""
    # the last two give fewer details
    return device_name(device) or cpu_entry("model name") or platform.processor() or platform.machine()


def instruction_set() -> str:
    """The widest instructions of this CPU that products use: `avx512 vnni` (8-bit products), `avx512`, `avx2`, or `` elsewhere.
    Processors of one name can differ in them, and PyTorch can be told to use others."""
    flags = set((cpu_entry("flags") or "").split())
    found = {"avx512 vnni": "avx512_vnni", "avx512": "avx512f", "avx2": "avx2"}
    widest = next((name for name, flag in found.items() if flag in flags), "")
    capability = os.environ.get("ATEN_CPU_CAPABILITY", widest)
    return widest if widest.startswith(capability) else f"{capability} forced on a CPU with {widest}"


def commit() -> str | None:
    """The commit of this repository; in a copy without git history, the value of COMMIT_VARIABLE."""
    return os.environ.get(COMMIT_VARIABLE) or _git("rev-parse", "HEAD")


@functools.cache
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@functools.cache
def _git(*arguments: str) -> str | None:
    """The output of git for the repository of this file, once per process, which has loaded the code of that time; None outside
    a repository or without git."""
    try:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
"""Parameters of mallopt (malloc.h of the GNU C library)."""
_NEVER, _GROWTH = 2**31 - 1, 2**26


@functools.cache
def keep_freed_memory() -> bool:
    """Make the C library's allocator keep freed memory; returns whether this is supported.

    By default the GNU C library returns large blocks to the system and requests them again several times per step. Clearing and
    mapping these pages took a tenth of the time of a quantized step on a CPU (ResNet-20, 128 images, 30,000 page faults per
    step). The process holds its peak amount of memory until it ends. Other C libraries and systems are unaffected.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # not the GNU C library
        return False
    settings = {_TRIM_THRESHOLD: _NEVER, _TOP_PAD: _GROWTH, _MMAP_MAX: 0}
    return all(mallopt(parameter, value) == 1 for parameter, value in settings.items())


def set_up_torch(options: TrainingOptions) -> torch.device:
    """Choose the device and make its computations reproducible. Raises RunError if a GPU is requested but not available."""
    device = choose_device(options.device)
    allow_tf32(options.tf32)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if device.type == "cpu":
        keep_freed_memory()
    if options.deterministic and device.type != "cpu":  # all operations used here are deterministic on a CPU
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        memory: Any = torch.utils.deterministic
        memory.fill_uninitialized_memory = False  # it would write every torch.empty, whose values nothing here reads
        torch.backends.cudnn.benchmark = False
    return device


@contextmanager
def threads_kept() -> Iterator[None]:
    """Context after which PyTorch has as many threads as before, for the next run of this process."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)
