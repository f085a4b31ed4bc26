"""A run as a separate process with its own session, output and exit code; its crash does not affect other runs.

On Linux without a GPU, runs are forked from multiprocessing's fork server, which has imported their modules, as this can take
longer than a run. When the sweep's process ends, even by SIGKILL, each run saves a checkpoint and stops.
"""

import atexit
import contextlib
import multiprocessing
import os
import runpy
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

PRELOAD = [
    *("bitcycle.sweep.preload", "bitcycle.train_command"),
    *("torch._meta_registrations", "torch._dynamo", "torch.utils.flop_counter", "torchvision", "torchmetrics"),
    *("datasets", "sklearn.datasets", "pandas", "transformers.models.bert.modeling_bert"),
]
"""Modules that runs import, some of them lazily; missing packages are skipped. The server computes nothing, as neither
compute threads nor CUDA survive a fork; runs on a GPU are started in new interpreters."""

PRIORITY_VARIABLE = "BITCYCLE_PRIORITY"
"""Environment variable with the scheduling priority of a forked run."""
NICENESS = {"idle": 19, "low": 10, "normal": 0}
"""Priority -> niceness. idle: only CPU time that no other process uses; low: a tenth of a normal process's share."""


def start(command: Sequence[str], output: Path, environment: Mapping[str, str], method: str) -> BaseProcess:
    """Start a run (script or `-m` module, with arguments) with a file for its output and additional environment variables; its
    exit code is negative if a signal killed it. `method` is forkserver or, for a new interpreter, spawn."""
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(PRELOAD)
    arguments = (list(command), str(output), {**os.environ, **environment})
    process: BaseProcess = context.Process(target=_become, args=arguments)  # type: ignore[attr-defined]
    process.start()
    return process


def _become(command: Sequence[str], output: str, environment: Mapping[str, str]) -> None:
    """Turn this process into the run: set up what an interpreter that a shell starts would have, then run the command."""
    if hasattr(os, "setsid"):
        os.setsid()
    with open(os.devnull, "rb") as nothing, open(output, "ab") as stream:
        for file, descriptor in ((nothing, 0), (stream, 1), (stream, 2)):
            os.dup2(file.fileno(), descriptor)
    sys.stdin = open(0)
    multiprocessing.set_start_method(None, force=True)  # workers would be started as this process was
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
        atexit._run_exitfuncs()  # multiprocessing skips them


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
    """Lower the priority of this process, a session leader, unless its priority is lower already."""
    os.nice(max(NICENESS[priority] - os.nice(0), 0))
    if sys.platform == "linux":
        if priority == "idle":
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        _share_of_session(os.getpid(), os.nice(0))


def restore(pid: int) -> None:
    """Restore the normal priority of a session leader as far as permissions allow."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError):
        os.sched_setscheduler(pid, os.SCHED_OTHER, os.sched_param(0))
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, 0)
    _share_of_session(pid, 0)


def _share_of_session(pid: int, niceness: int) -> None:
    """Set the niceness of a session: Linux divides CPU time among sessions, and process niceness acts only inside."""
    with contextlib.suppress(OSError):  # no such file, or more than the permitted ten changes per second
        Path(f"/proc/{pid}/autogroup").write_text(str(niceness))
