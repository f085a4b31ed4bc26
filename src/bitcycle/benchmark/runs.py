"""Throughput of the data pipeline, and of short runs in parallel, per hour."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bitcycle.benchmark.measure import timed
from bitcycle.dataset import DATASETS
from bitcycle.dataset.image_dataset import ImageBatches
from bitcycle.dataset.images import Images
from bitcycle.files import write_json

ROOT = Path(__file__).parents[3]
RUN = ["dataset=digits", "model=resnet8", "scale=smoke", "schedule=RTH", "training.steps=200", "training.threads=1"]


def images_per_second(device: torch.device, batches: int = 40, batch_size: int = 128) -> float:
    """Images per second of the data pipeline alone, with CIFAR-10's size, augmentation and normalisation."""
    pixels = torch.randint(0, 256, (10_000, 32, 32, 3), dtype=torch.uint8)
    images = Images(pixels, torch.zeros(len(pixels), dtype=torch.int64))
    sequence = ImageBatches(images, DATASETS["cifar10"](), batch_size, 0, device).starting_at(0)  # type: ignore[arg-type]
    for _ in range(3):
        next(sequence)
    return batches * batch_size / timed(lambda: [next(sequence) for _ in range(batches)], device)


def runs_per_hour(at_a_time: tuple[int, ...]) -> dict[str, Any]:
    """Finished runs per hour by number of parallel processes: seeds of a smoke run of 200 steps, with Python's
    startup."""
    rates = {str(number): _per_hour(number, [[f"seed={seed}"] for seed in range(number)]) for number in at_a_time}
    return {"run": " ".join(RUN), "at_a_time": rates}


def sweep_runs_per_hour(runs: int = 8, at_a_time: int = 2) -> dict[str, Any]:
    """Finished runs per hour of a sweep of such runs with a shared fork server and `at_a_time` workers."""
    seeds = f"seed={','.join(map(str, range(runs)))}"
    rate = _per_hour(runs, [["-m", seeds, f"hydra.launcher.workers={at_a_time}"]])
    return {"runs": runs, "at_a_time": at_a_time, "an_hour": rate}


def _per_hour(runs: int, several: Sequence[Sequence[str]]) -> float:
    """Finished runs per hour if commands with these arguments, in addition to RUN, train `runs` of them in parallel."""
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        commands = [[sys.executable, "train.py", *given, *RUN, f"results_root={folder}"] for given in several]
        for process in [subprocess.Popen(command, cwd=ROOT, **quiet) for command in commands]:
            _, errors = process.communicate()
            if process.returncode:
                raise RuntimeError(f"a run of the benchmark failed: {errors.decode().strip()}")
        return round(3600 * runs / (time.perf_counter() - start), 1)


def write(path: Path, record: dict[str, Any]) -> None:
    """Save the record of a benchmark."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, record)
