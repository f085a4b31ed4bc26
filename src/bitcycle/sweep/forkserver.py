"""Runs forked by multiprocessing's fork server, which has imported what they need: importing takes longer than a small run.

A run is a process of its own all the same, with its own session, output and exit code, and its crash stops no other. When the
sweep has gone, even killed, each run saves a checkpoint and stops.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import runpy
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

PRELOAD = [
    *("bitcycle.sweep.preload", "bitcycle.command"),
    *("torch._meta_registrations", "torch._dynamo", "torch.utils.flop_counter", "torchvision", "torchmetrics"),
    *("datasets", "sklearn.datasets", "pandas", "transformers.models.bert.modeling_bert"),
]
"""What runs import, some of it only on the way; one that is not installed is left out. The server computes nothing, as neither
the threads of a computation nor CUDA survive a fork: runs on a GPU are started without it."""

PRIORITY_VARIABLE = "BITCYCLE_PRIORITY"
"""Environment variable with the priority of a forked run against other processes of the machine."""
NICENESS = {"idle": 19, "low": 10, "normal": 0}
"""idle: gets the time that nobody else wants; low: a tenth of what a normal process gets."""


class Forked:
    """A run in progress, used as a subprocess.Popen is; see `local.Start` for the arguments."""

    def __init__(self, command: Sequence[str], output: Path, environment: Mapping[str, str]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        arguments = (list(command), str(output), {**os.environ, **environment})
        self._process = context.Process(target=_become, args=arguments)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it goes on."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def _become(command: Sequence[str], output: str, environment: Mapping[str, str]) -> None:
    """Be the run: what a new interpreter would do."""
    os.setsid()
    with open(os.devnull, "rb") as nothing, open(output, "ab") as stream:
        for file, descriptor in ((nothing, 0), (stream, 1), (stream, 2)):
            os.dup2(file.fileno(), descriptor)
    sys.stdin = open(0)
    os.environ.clear()
    os.environ.update(environment)
    if chosen := environment.get(PRIORITY_VARIABLE):
        lower(chosen)
    if "torch" in sys.modules and (threads := environment.get("OMP_NUM_THREADS")):
        sys.modules["torch"].set_num_threads(int(threads))  # the variable was read when PyTorch was imported
    threading.Thread(target=_stop_after_parent, daemon=True).start()
    try:
        _run(command)
    finally:
        atexit._run_exitfuncs()  # which multiprocessing leaves out


def _run(command: Sequence[str]) -> None:
    if command[0] == "-m":
        sys.argv[1:] = command[2:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = command
        sys.path.insert(0, str(Path(command[0]).parent))
        runpy.run_path(command[0], run_name="__main__")


def _stop_after_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def lower(priority: str) -> None:
    """Give this process, which leads a session, one of the priorities, unless it has a lower one already."""
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
