"""Time of a training step beside other work: alone, beside busy processes, and several runs at once.

Each run is a process of its own, as started from a shell, with the threads that the command chooses. Time is wall-clock time, as
other programs are what is measured. The three situations take turns, so that what else the machine does affects all of them; how
much of it that was while one run was alone is recorded.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bitcycle.benchmark.measure import summarise
from bitcycle.threads import allowed_cores

NETWORKS = ("resnet8", "resnet20")
AT_ONCE = 3
ROUNDS = 7
SECONDS = 1.5
LIMITS = {"busy": 2.6, "at_once": 3.5}
"""Largest times of a step relative to one alone: beside as many busy processes as cores a fair share is 2, of three runs 3."""
_BUSY = "while True: pass"


def measure_contention(
    names: Sequence[str] = NETWORKS, rounds: int = ROUNDS, seconds: float = SECONDS
) -> dict[str, Any]:
    """For each network, the time of a step alone, beside one busy process per core, and of the slowest of several runs at once,
    as in `summarise`; and how many cores other programs used beside the run alone (None: unknown)."""
    found: dict[str, Any] = {}
    for name in names:
        times: dict[str, list[float]] = {"alone": [], "busy": [], "at_once": []}
        others: list[float] = []
        with _runs(name, AT_ONCE) as runs:
            for _ in range(rounds):
                start, used = time.perf_counter(), _cpu_seconds()
                [(step, own)] = _steps(runs[:1], seconds)
                others.append(max(0.0, _cpu_seconds() - used - own) / (time.perf_counter() - start))
                times["alone"].append(step)
                with _busy(allowed_cores()):
                    times["busy"].append(_steps(runs[:1], seconds)[0][0])
                times["at_once"].append(max(step for step, _ in _steps(runs, seconds)))
        found[name] = {**summarise(times, "alone"), "others": round(statistics.median(others), 2)}
    return {"cores": allowed_cores(), "runs_at_once": AT_ONCE, "networks": found}


def _cpu_seconds() -> float:
    """Seconds for which the cores of this machine have computed since it started; 0 where the system does not say so."""
    try:
        first = Path("/proc/stat").read_text().split("\n", 1)[0]
    except OSError:
        return 0.0
    user, nice, system, _idle, _waiting, *interrupts = map(int, first.split()[1:8])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


@contextmanager
def _runs(name: str, number: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that are about to time steps of a network."""
    command = [sys.executable, "-m", __name__, name]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    processes = [subprocess.Popen(command, text=True, **pipes) for _ in range(number)]
    try:
        for process in processes:
            _answer(process)  # it has warmed up
        yield processes
    finally:
        _end(processes)


def _steps(runs: Sequence[subprocess.Popen[str]], seconds: float) -> list[tuple[float, float]]:
    """Let runs train at the same time: median seconds of a step, and seconds of CPU time, of each."""
    for process in runs:
        assert process.stdin is not None
        process.stdin.write(f"{seconds}\n")
        process.stdin.flush()
    return [_answer(process) for process in runs]


def _answer(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


@contextmanager
def _busy(number: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(number)]
    try:
        yield
    finally:
        _end(processes)


def _end(processes: Sequence[subprocess.Popen[Any]]) -> None:
    for process in processes:
        process.kill()
        process.wait()


def main() -> None:
    """Warm up one network, say so, and for each line with a number of seconds train for so long and print two times."""
    import torch

    from bitcycle.benchmark.networks import VARIANTS, Step, networks

    step = Step(networks(False)[sys.argv[1]], VARIANTS["static 8"], torch.device("cpu"))
    for _ in range(5):
        step()
    print("null", flush=True)
    for line in sys.stdin:
        times: list[float] = []
        end, used = time.perf_counter() + float(line), time.process_time()
        while time.perf_counter() < end or len(times) < 3:
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
        print(json.dumps([statistics.median(times), time.process_time() - used]), flush=True)


if __name__ == "__main__":
    main()
