"""Comparable measurements of time and memory per step.

Variants are interleaved, one step each per round, so that other load on the machine affects all of them. Warm-up
rounds, in which kernels are compiled and memory is allocated, are excluded. A ratio is the median of the ratios of all
rounds. With one CPU thread, time is processor time, which excludes other programs; otherwise it is wall-clock time.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bitcycle.device import synchronize

Action = Callable[[], Any]


def clock_name(device: torch.device) -> str:
    """Kind of time that is measured: processor or wall."""
    return "processor" if device.type == "cpu" and torch.get_num_threads() == 1 else "wall"


def timed(action: Action, device: torch.device, clock: str = "") -> float:
    """Run `action` and return the seconds it takes on the device, of the clock processor or wall; default: `clock_name`."""
    now = time.process_time if (clock or clock_name(device)) == "processor" else time.perf_counter
    synchronize(device)
    start = now()
    action()
    synchronize(device)
    return now() - start


def interleaved(
    actions: Mapping[str, Action], repetitions: int, device: torch.device, warm_up: int = 2
) -> dict[str, list[float]]:
    """Seconds of each action in each of `repetitions` rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for round_number in range(warm_up + repetitions):
        for name, action in actions.items():
            elapsed = timed(action, device)
            if round_number >= warm_up:
                seconds[name].append(elapsed)
    return seconds


def summarise(seconds: Mapping[str, list[float]], reference: str) -> dict[str, dict[str, float]]:
    """For each action, the median in ms, and median and quartiles of the ratio to `reference` in the same round."""
    found = {}
    for name, values in seconds.items():
        ratios = [mine / other for mine, other in zip(values, seconds[reference], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        ratio = {"ratio": round(middle, 4), "ratio_low": round(low, 4), "ratio_high": round(high, 4)}
        found[name] = {"ms": round(1e3 * statistics.median(values), 4), **ratio, "rounds": len(values)}
    return found


def peak_bytes(action: Action, device: torch.device) -> int:
    """Peak memory that `action` allocates in addition to what is already allocated, in bytes."""
    if device.type not in ("cpu", "mps"):  # Metal does not count them
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        action()
        return torch.accelerator.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        action()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    allocated = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    return peak


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second read and written by a copy of float32 numbers: the upper bound for a quantizer."""
    source = torch.rand(2**24, device=device)
    target = torch.empty_like(source)
    seconds = interleaved({"copy": lambda: target.copy_(source)}, 9, device)["copy"]
    return 2 * source.numel() * source.element_size() / statistics.median(seconds)
