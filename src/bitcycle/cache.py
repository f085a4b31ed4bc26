"""The user's cache of results that are costly to compute and shared by all runs on this machine."""

import functools
import hashlib
import logging
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from bitcycle.files import digest_of, write_atomically

logger = logging.getLogger(__name__)

T = TypeVar("T")


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/bitcycle`, or `~/.cache/bitcycle`; created if missing, safe to delete at any time. Raises OSError if
    it cannot be created."""
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    except RuntimeError as error:  # a container whose user has no home folder
        raise FileNotFoundError(f"{error} Remedy: set XDG_CACHE_HOME.") from error
    folder = Path(cache) / "bitcycle"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@functools.cache
def code_digest() -> str:
    """A digest of the Python code and YAML files of this package."""
    files = sorted(Path(__file__).parent.rglob("*"))
    return digest_of(file for file in files if file.suffix in (".py", ".yaml"))


_in_memory: dict[str, Any] = {}


def cached(kind: str, identity: str, make: Callable[[], T]) -> T:
    """The result of `make`, computed once per identity and version of the code, then read from memory or `cache_folder`.

    `kind` names the files; `identity` is everything that the result depends on except the code of this package. The result must
    be picklable and must not be modified.
    """
    name = f"{kind}-{hashlib.sha256(f'{code_digest()} {identity}'.encode()).hexdigest()[:32]}.pickle"
    if name not in _in_memory:
        _in_memory[name] = cached_file(
            name,
            make,
            read=lambda file: pickle.loads(file.read_bytes()),
            write=lambda stream, made: stream.write(pickle.dumps(made)),
        )
    found: T = _in_memory[name]
    return found


def cached_file(name: str, make: Callable[[], T], read: Callable[[Path], T], write: Callable[[Any, T], Any]) -> T:
    """The result of `make`, stored in the file `name` of `cache_folder` and read from there if the file is intact.

    The name must identify everything that the result depends on; `read` raises any exception if the file is damaged, and `write`
    gets a binary stream. A cache that cannot be written only costs time.
    """
    try:
        file = cache_folder() / name
    except OSError as error:
        logger.info("%s is not cached: %s", name, error)
        return make()
    try:
        if file.is_file():
            return read(file)
    except Exception as error:  # pickle can raise anything
        logger.info("%s cannot be read and is recomputed: %s", file, error)
    made = make()
    try:
        write_atomically(file, lambda stream: write(stream, made))  # as other processes may read it
    except OSError as error:
        logger.info("%s is not cached: %s", name, error)
    return made
