"""The user's cache: what is costly to make and the same for every run on this machine."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

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
    return kept(
        name,
        make,
        lambda file: pickle.loads(file.read_bytes()),
        lambda file, made: file.write_bytes(pickle.dumps(made)),
    )


def kept(name: str, make: Callable[[], T], read: Callable[[Path], T], write: Callable[[Path, T], Any]) -> T:
    """What `make` returns, kept in the file `name` of `cache_folder` and read from there if it is whole.

    A cache that cannot be written costs time, nothing else.

    Args:
        name: of the file; says everything that the result depends on.
        make: makes it.
        read, write: read it from a file, raising any exception where that is damaged, and write it to one.
    """
    try:
        file = cache_folder() / name
    except OSError as error:
        logger.info("%s is not kept: %s", name, error)
        return make()
    try:
        if file.is_file():
            return read(file)
    except Exception as error:  # pickle raises whatever it likes
        logger.info("%s cannot be read and is made again: %s", file, error)
    made = make()
    try:
        with tempfile.TemporaryDirectory(dir=file.parent) as unfinished:
            write(Path(unfinished) / name, made)
            os.replace(Path(unfinished) / name, file)  # at once: other processes may look for it
    except OSError as error:
        logger.info("%s is not kept: %s", name, error)
    return made
