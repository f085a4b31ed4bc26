"""Time of a training step beside other work: alone, beside busy processes, and several runs at once.

Each run is a process of its own, as started from a shell, with the threads that the command chooses. Time is wall-clock time, as
other programs are what is measured.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from bitcycle.threads import allowed_cores

NETWORKS = ("resnet8", "resnet20")
AT_ONCE = 3
SECONDS = 8.0
LIMITS = {"busy": 2.6, "at_once": 3.5}
"""Largest times of a step relative to one alone: beside as many busy processes as cores a fair share is 2, of three runs 3."""
_BUSY = "while True: pass"


def measure_contention(names: Sequence[str] = NETWORKS, seconds: float = SECONDS) -> dict[str, Any]:
    """For each network, the milliseconds of a step alone, beside one busy process per core, and of several runs at once; medians
    over steps, and of the runs at once the slowest."""
    found: dict[str, Any] = {}
    for name in names:
        alone = _steps(name, 1, seconds)[0]
        with _busy(allowed_cores()):
            beside = _steps(name, 1, seconds)[0]
        together = _steps(name, AT_ONCE, seconds)
        again = _steps(name, 1, seconds)[0]  # the machine may have changed meanwhile
        best = min(alone, again)
        found[name] = {
            "alone_ms": round(best, 3),
            "busy": round(beside / best, 3),
            "at_once": round(max(together) / best, 3),
        }
    return {"cores": allowed_cores(), "runs_at_once": AT_ONCE, "networks": found}


def _steps(name: str, runs: int, seconds: float) -> list[float]:
    """Median milliseconds of a step in each of `runs` processes that run at the same time."""
    command = [sys.executable, "-m", __name__, name, str(seconds)]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ)
        for _ in range(runs)
    ]
    for process in processes:  # all of them are warm before the first one is timed
        assert process.stdout is not None
        process.stdout.readline()
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    return [float(json.loads(process.communicate()[0])) for process in processes]


@contextmanager
def _busy(number: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    """Time steps of one network: warm up, say so, wait for a line, then time steps for a number of seconds."""
    import torch

    from bitcycle.benchmark.networks import VARIANTS, Step, networks

    name, seconds = sys.argv[1], float(sys.argv[2])
    step = Step(networks(False)[name], VARIANTS["static 8"], torch.device("cpu"))
    times: list[float] = []
    for _ in range(5):
        step()
    print("ready", flush=True)
    sys.stdin.readline()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        start = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - start))
    print(json.dumps(statistics.median(times)))


if __name__ == "__main__":
    main()
