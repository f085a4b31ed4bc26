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

from bitcycle.sweep import priority


class Forked:
    """A run in progress, used as a subprocess.Popen is; see `local.Start` for the arguments."""

    def __init__(self, command: Sequence[str], output: Path, environment: Mapping[str, str]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["bitcycle.sweep.preload"])
        self._process = context.Process(
            target=_become, args=(list(command), str(output), {**os.environ, **environment})
        )
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
    if chosen := environment.get(priority.PRIORITY_VARIABLE):
        priority.lower(chosen)
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
