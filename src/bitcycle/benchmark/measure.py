"""Comparable measurements of time and memory of one step.

Variants are timed in turn, one step each, round after round, so that whatever else the machine does meets all of them; the first
rounds, in which kernels are compiled and memory is allocated, are left out. A ratio is the median of the rounds' ratios. On a
CPU with one thread time is that of the processor, which other programs cannot take; else it is wall-clock time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

Action = Callable[[], Any]


def clock_name(device: torch.device) -> str:
    """The kind of time that is measured."""
    return "processor" if device.type == "cpu" and torch.get_num_threads() == 1 else "wall"


def timed(action: Action, device: torch.device) -> float:
    """Seconds that `action` takes on the device."""
    now = time.process_time if clock_name(device) == "processor" else time.perf_counter
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = now()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize()
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
    """For each action the median in ms, and the median and the quartiles of its ratio to `reference` in the same round."""
    found = {}
    for name, values in seconds.items():
        ratios = [mine / other for mine, other in zip(values, seconds[reference], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        ratio = {"ratio": round(middle, 4), "ratio_low": round(low, 4), "ratio_high": round(high, 4)}
        found[name] = {"ms": round(1e3 * statistics.median(values), 4), **ratio, "rounds": len(values)}
    return found


def peak_bytes(action: Action, device: torch.device) -> int:
    """The most memory that `action` allocates beyond what was allocated before."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        action()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        action()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    allocated = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    return peak


def copy_bandwidth(device: torch.device, elements: int = 2**24) -> float:
    """Bytes a second, read and written, of a copy of float32 numbers: the limit of what a quantizer can reach."""
    source = torch.rand(elements, device=device)
    target = torch.empty_like(source)
    seconds = interleaved({"copy": lambda: target.copy_(source)}, 9, device)["copy"]
    return 2 * source.numel() * source.element_size() / statistics.median(seconds)
