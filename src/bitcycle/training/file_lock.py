"""Locks on open files that end with the process, on every operating system."""

from __future__ import annotations

import sys
from typing import IO, Any

if sys.platform == "win32":
    import msvcrt

    def try_lock(stream: IO[Any], shared: bool = False) -> bool:
        """Lock a file until it is closed; False if another process holds it. There are no shared locks here."""
        stream.seek(0)  # one byte is locked, which need not exist
        try:
            msvcrt.locking(stream.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True
else:
    import fcntl

    def try_lock(stream: IO[Any], shared: bool = False) -> bool:
        """Lock a file until it is closed; False if another process holds it, unless both locks are shared."""
        try:
            fcntl.flock(stream, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
