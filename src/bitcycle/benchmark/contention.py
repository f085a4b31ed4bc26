"""Time of a training step beside other work: alone, beside busy processes, and several runs at once.

Each run is a process of its own, with the threads that the command chooses. Time is wall-clock time, as
other programs are what is measured.
"""

import multiprocessing
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from bitcycle.benchmark.measure import timed
from bitcycle.benchmark.networks import VARIANTS, Step, networks
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
        ratios = {"busy": beside / best, "at_once": max(together) / best}
        found[name] = {"alone_ms": round(best, 3), **{key: round(ratio, 3) for key, ratio in ratios.items()}}
    return {"cores": allowed_cores(), "runs_at_once": AT_ONCE, "networks": found}


def _steps(name: str, runs: int, seconds: float) -> list[float]:
    """Median milliseconds of a step in each of `runs` processes that run at the same time."""
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, ProcessPoolExecutor(runs, context) as pool:
        return list(pool.map(_median, [name] * runs, [seconds] * runs, [manager.Barrier(runs)] * runs))


def _median(name: str, seconds: float, all_warm: threading.Barrier) -> float:
    """Median milliseconds of a step of one network; timing begins when all processes are warm."""
    device = torch.device("cpu")
    step, times = Step(networks(False)[name], VARIANTS["static 8"], device), list[float]()
    for _ in range(5):
        step()
    all_warm.wait()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        times.append(1e3 * timed(step, device, "wall"))
    return statistics.median(times)


@contextmanager
def _busy(number: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
