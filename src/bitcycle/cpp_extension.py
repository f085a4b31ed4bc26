"""Machine code of our own: a C++ file of this package, compiled once for this machine and kept in the user's cache."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from bitcycle.cache import cache_folder

logger = logging.getLogger(__name__)

_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread")


@functools.cache
def library(source: Path, instructions: tuple[str, ...] = (), flags: tuple[str, ...] = ()) -> ctypes.CDLL | None:
    """The functions of a C++ file; None, with a line in the log, where they cannot be had.

    Args:
        source: the file; its functions are extern "C".
        instructions: what the CPU must be able to do, as Linux names it, e.g. avx512_vnni.
        flags: of the compiler, beside those for a library.
    """
    try:
        missing = set(instructions) - _cpu_instructions()
        if missing:
            raise OSError(f"this CPU lacks {', '.join(sorted(missing))}")
        return ctypes.CDLL(str(_compiled(source, (*_FLAGS, *flags))))
    except OSError as error:
        logger.info("%s is not used (%s): the same is computed in float32, more slowly", source.name, error)
        return None


def _cpu_instructions() -> set[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return set(line.split(":", 1)[1].split())
    return set()


def _compiled(source: Path, flags: tuple[str, ...]) -> Path:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise OSError("no C++ compiler (g++) found")
    version = _output(compiler, "--version")
    name = hashlib.sha256("\0".join([source.read_text(), version, *flags]).encode()).hexdigest()[:16]
    folder = cache_folder()
    target = folder / f"{source.stem}-{name}.so"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=folder) as unfinished:
            library = Path(unfinished) / target.name
            _output(compiler, *flags, str(source), "-o", str(library))
            os.replace(library, target)  # at once: other processes may want it, too
    return target


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{Path(command[0]).name} failed: {done.stderr.strip().splitlines()[:1]}")
    return done.stdout
