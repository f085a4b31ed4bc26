"""The user's cache: what is costly to make and the same for every run on this machine."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/bitcycle`, or `~/.cache/bitcycle`; created if it is missing, and safe to delete at any time.

    Raises:
        OSError: if it cannot be created.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    folder = Path(cache) / "bitcycle"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
