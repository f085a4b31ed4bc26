"""C++ operators, compiled once for this machine against the installed PyTorch and kept in the user's cache.

They run in PyTorch's threads: the same OpenMP library, with the number of threads set by `torch.set_num_threads`.
"""

import contextlib
import functools
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

from bitcycle.cache import cache_folder

logger = logging.getLogger(__name__)

_FLAGS = (
    *("-O3", "-std=c++20", "-shared", "-fPIC", "-fopenmp", "-march=native", "-mprefer-vector-width=512"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
_FOLDER = Path(torch.__file__).parent


@functools.cache
def operators(source: Path, instructions: tuple[str, ...] = ()) -> Any | None:
    """The operators of a C++ file, `torch.ops.bitcycle`; None, with a log message, if they are unavailable.

    The file registers its functions in the library `bitcycle`; quoted includes are part of it. `instructions` are CPU features
    that it requires, by their Linux names, e.g. avx512_vnni.
    """
    try:
        load(source, instructions)
    except OSError as error:
        logger.info("%s is not used (%s); PyTorch computes the same, more slowly", source.name, error)
        return None
    return torch.ops.bitcycle


def load(source: Path, instructions: tuple[str, ...] = ()) -> None:
    """Compile a C++ file if necessary, and register its operators. Raises OSError with the reason if that is impossible."""
    missing = set(instructions) - _cpu_instructions()
    if missing:
        raise OSError(f"this CPU lacks {', '.join(sorted(missing))}")
    torch.ops.load_library(str(_compiled(source)))


@functools.cache
def _cpu_instructions() -> frozenset[str]:
    return frozenset(cpu_entry("flags", "Features").split())


def cpu_entry(*names: str) -> str:
    """The first entry of /proc/cpuinfo with one of these names; empty if there is none, as on other systems than Linux."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(names):
                return line.split(":", 1)[1].strip()
    return ""


def is_compiled(source: Path) -> bool:
    """Whether the operators of a C++ file are already compiled in the user's cache."""
    try:
        return _target(source, _compiler()).exists()
    except OSError:
        return False


def _compiler() -> str:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None or platform.system() != "Linux":
        raise OSError("no C++ compiler (g++) found")
    return compiler


def _target(source: Path, compiler: str) -> Path:
    parts = _texts(source)
    parts += [_output(compiler, "--version"), torch.__version__, *sorted(_cpu_instructions()), *_FLAGS, *_linked()]
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return cache_folder() / f"{source.stem}-{name}.so"


def _compiled(source: Path) -> Path:
    compiler = _compiler()
    target = _target(source, compiler)
    if not target.exists():
        logger.info("compiling %s for this machine (once)", source.name)
        with tempfile.TemporaryDirectory(dir=target.parent) as unfinished:
            library = Path(unfinished) / target.name
            headers = [f"-I{_FOLDER / 'include' / part}" for part in (".", "torch/csrc/api/include")]
            _output(compiler, *_FLAGS, *headers, str(source), "-o", str(library), *_linked())
            os.replace(library, target)  # atomic, as other processes may load it
    return target


def _texts(source: Path) -> list[str]:
    """The text of a file and of its includes from this package."""
    text = source.read_text()
    included = re.findall(r'^#include "(.+)"', text, flags=re.MULTILINE)
    return [text, *(part for name in included for part in _texts(source.parent / name))]


def _linked() -> list[str]:
    """PyTorch's libraries, including its OpenMP library so that there is only one thread pool."""
    folder = _FOLDER / "lib"
    return [f"-L{folder}", "-lc10", "-ltorch_cpu", *(str(path) for path in sorted(folder.glob("libgomp*.so*"))[:1])]


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason, _, _ = done.stderr.strip().partition("\n")
        raise OSError(f"{Path(command[0]).name} failed: {reason}")
    return done.stdout
