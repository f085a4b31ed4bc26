"""Two processes on this machine that do the same things together, for tests: imported once, then forked.

As a program: `python -m tests.pair FOLDER ALONE TOGETHER ...` calls functions of
`tests.training.test_distributed` with FOLDER, the first one in this process alone, the others one after the other in a pair of
processes, and ends with the worse of their exit codes.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from bitcycle.sweep import forkserver
from bitcycle.train_command import main as train
from bitcycle.training.processes import process_group
from tests.conftest import ROOT

COUNT = 2
PATIENCE = 900
"""Seconds after which a process is ended that waits for another one for ever."""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def variables(rank: int, port: int) -> dict[str, str]:
    """What torchrun would tell a process."""
    words = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": COUNT, "LOCAL_WORLD_SIZE": COUNT, "MASTER_PORT": port}
    return {**{name: str(value) for name, value in words.items()}, "MASTER_ADDR": "127.0.0.1"}


def run_pair(folder: Path, *functions: str) -> subprocess.CompletedProcess[str]:
    """This file as a program, with its output."""
    command = [sys.executable, "-m", "tests.pair", str(folder), *functions]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE + 20)


def fork_pair(action: Callable[[], int]) -> list[int]:
    """The process ids of a pair that ends with the exit code of an action."""
    port, children = free_port(), []
    sys.stderr.flush()
    for rank in range(COUNT):
        child = os.fork()
        if child:
            children.append(child)
            continue
        code = 1
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        try:
            os.environ.update(variables(rank, port))
            code = action()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return children


def fork_training(log: Path, *overrides: str) -> list[int]:
    """The process ids of a pair that runs `python train.py OVERRIDES` and prints into LOG.0 and LOG.1."""

    def action() -> int:
        output = os.open(f"{log}.{os.environ['RANK']}", os.O_WRONLY | os.O_CREAT)
        for stream in (1, 2):
            os.dup2(output, stream)
        sys.argv = ["train.py", *overrides]
        return train(ROOT / "conf")

    return fork_pair(action)


def exit_codes(children: list[int]) -> list[int]:
    """How the processes of a pair have ended; one that fails ends the others, as torchrun has it."""
    codes = dict.fromkeys(children, 0)
    for _ in children:
        child, status = os.wait()
        codes[child] = os.waitstatus_to_exitcode(status)
    return list(codes.values())


def main() -> int:
    folder, alone, *together = sys.argv[1:]
    for name in forkserver.PRELOAD:  # what every process of a pair would import otherwise, for seconds
        if not name.startswith("bitcycle"):
            importlib.import_module(name)
    tests = importlib.import_module("tests.training.test_distributed")
    signal.alarm(PATIENCE)  # not faulthandler, which would hang in the children
    getattr(tests, alone)(Path(folder))

    def action() -> int:
        with process_group("cpu"):
            for function in together:
                getattr(tests, function)(Path(folder))
        return 0

    return max(map(abs, exit_codes(fork_pair(action))))


if __name__ == "__main__":
    sys.exit(main())
