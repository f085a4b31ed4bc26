"""Locks on open files that are released when the process ends, on all operating systems."""

import sys
from typing import IO, Any

if sys.platform == "win32":
    import msvcrt

    def try_lock(stream: IO[Any], shared: bool = False) -> bool:
        """Lock a file until it is closed; False if another process holds it. Shared locks are not supported on Windows."""
        stream.seek(0)  # locks one byte, which need not exist
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
