"""Time of a training step beside other work: alone, beside busy processes, and several runs at once.

Each run is a process of its own, as started from a shell, with the threads that the command chooses. Time is wall-clock time, as
other programs are what is measured. The situations take turns, so that what else the machine does affects all of them; how
much of it that was while one run was alone is recorded.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bitcycle.benchmark.measure import summarise
from bitcycle.threads import allowed_cores, fair_share, users_threads

NETWORKS = ("resnet8", "resnet20")
AT_ONCE = 3
ROUNDS = 7
SECONDS = 1.5
OWN_WAITING = {"GOMP_SPINCOUNT": "300000", "KMP_BLOCKTIME": "200"}
"""What GNU OpenMP and LLVM's do unless told otherwise."""
_BUSY = "while True: pass"


def measure_contention(
    names: Sequence[str] = NETWORKS, rounds: int = ROUNDS, seconds: float = SECONDS
) -> dict[str, Any]:
    """For each network, the time of a step alone, alone with OpenMP's own waiting ("spinning"), beside one busy process per core,
    and of the slowest of several runs at once, as in `summarise`; and how many cores other programs used beside the run alone."""
    found: dict[str, Any] = {}
    for name in names:
        times: dict[str, list[float]] = {"alone": [], "spinning": [], "busy": [], "at_once": []}
        others: list[float] = []
        with _runs(name, 1) as alone, _runs(name, 1, OWN_WAITING) as spinning, _runs(name, AT_ONCE) as runs:
            for turn in range(rounds):
                # what runs first follows the several runs at once, and is slower for it
                for kind, run in sorted({"alone": alone, "spinning": spinning}.items(), reverse=turn % 2 == 1):
                    start, used = time.perf_counter(), _cpu_seconds()
                    [(step, own)] = _steps(run, seconds)
                    times[kind].append(step)
                    others.append(max(0.0, _cpu_seconds() - used - own) / (time.perf_counter() - start))
                with _busy(allowed_cores()):
                    times["busy"].append(_steps(alone, seconds)[0][0])
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
def _runs(
    name: str, number: int, waiting: Mapping[str, str] = MappingProxyType({})
) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that are about to time steps of a network, with the threads of runs that start together."""
    command = [sys.executable, "-m", __name__, name, str(number)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    pipes["env"] = os.environ | waiting
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

    name, runs = sys.argv[1], int(sys.argv[2])
    if runs > 1 and users_threads() is None:
        torch.set_num_threads(min(torch.get_num_threads(), fair_share(runs)))
    step = Step(networks(False)[name], VARIANTS["static 8"], torch.device("cpu"))
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
