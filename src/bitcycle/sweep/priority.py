"""The priority of a run against other processes of the machine."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

PRIORITY_VARIABLE = "BITCYCLE_PRIORITY"
"""Environment variable with the priority of a run that is about to start."""

NICENESS = {"idle": 19, "low": 10, "normal": 0}
PRIORITIES = tuple(NICENESS)
"""idle: gets the time that nobody else wants; low: a tenth of what a normal process gets."""


def lower(priority: str) -> None:
    """Give this process, which leads a session, one of `PRIORITIES`, unless it has a lower one already."""
    os.nice(max(NICENESS[priority] - os.nice(0), 0))
    if sys.platform == "linux":
        if priority == "idle":
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        _share_of_session(os.getpid(), os.nice(0))


def restore(pid: int) -> None:
    """Give a session leader the normal priority again, as far as the system lets us."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(pid, os.SCHED_OTHER, os.sched_param(0))
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, 0)
    _share_of_session(pid, 0)


def _share_of_session(pid: int, niceness: int) -> None:
    """Linux deals out time to sessions first, and niceness counts within one: the session needs a niceness of its own."""
    with contextlib.suppress(OSError):  # not there, or set a moment ago: the system allows it ten times a second
        Path(f"/proc/{pid}/autogroup").write_text(str(niceness))
