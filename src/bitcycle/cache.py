"""The user's cache: what is costly to make and the same for every run on this machine."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/bitcycle`, or `~/.cache/bitcycle`; created if it is missing, and safe to delete at any time.

    Raises:
        OSError: if it cannot be created.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    folder = Path(cache) / "bitcycle"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@functools.cache
def code_digest() -> str:
    """Identifies the Python code of this package."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


_remembered: dict[str, Any] = {}


def remembered(kind: str, identity: str, make: Callable[[], T]) -> T:
    """What `make` returns: made once for each identity and version of the code, then read from memory or `cache_folder`.

    Args:
        kind: names the files.
        identity: everything that the result depends on, as text, but for the code of this package.
        make: its result can be pickled and is not changed by anybody.
    """
    name = f"{kind}-{hashlib.sha256(f'{code_digest()} {identity}'.encode()).hexdigest()[:32]}.pickle"
    if name not in _remembered:
        _remembered[name] = _from_disk(name, make)
    found: T = _remembered[name]
    return found


def _from_disk(name: str, make: Callable[[], T]) -> T:
    try:
        file = cache_folder() / name
    except OSError:  # without a home directory nothing is cached
        return make()
    with contextlib.suppress(Exception):  # not there, or not whole; pickle raises whatever it likes
        found: T = pickle.loads(file.read_bytes())
        return found
    made = make()
    temporary = file.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):  # a full disk costs time, nothing else
        temporary.write_bytes(pickle.dumps(made))
        os.replace(temporary, file)
    return made
