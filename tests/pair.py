"""Two processes on this machine that do the same things together, for tests: imported once, then forked.

As a program: `python -m tests.pair PORT FOLDER FUNCTION ...` calls functions of `tests.test_distributed` one after the other in a
pair of processes, each with FOLDER, and ends with the worse of their exit codes.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path

from bitcycle.training.distributed import process_group
from tests.conftest import ROOT

COUNT = 2


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def variables(rank: int, port: int) -> dict[str, str]:
    """What torchrun would tell a process."""
    words = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": COUNT, "LOCAL_WORLD_SIZE": COUNT, "MASTER_PORT": port}
    return {**{name: str(value) for name, value in words.items()}, "MASTER_ADDR": "127.0.0.1"}


def run_pair(folder: Path, *functions: str) -> subprocess.CompletedProcess[str]:
    """Call functions of `tests.test_distributed` in a pair of processes; their output is kept."""
    command = [sys.executable, "-m", "tests.pair", str(free_port()), str(folder), *functions]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def main() -> int:
    port, folder, *functions = sys.argv[1:]
    tests = importlib.import_module("tests.test_distributed")
    child = os.fork()
    os.environ.update(variables(1 if child == 0 else 0, int(port)))
    code = 0
    try:
        with process_group("cpu"):
            for function in functions:
                getattr(tests, function)(Path(folder))
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    if child == 0:
        os._exit(code)
    if code:
        os.kill(child, signal.SIGKILL)
    return max(code, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0)


if __name__ == "__main__":
    sys.exit(main())
