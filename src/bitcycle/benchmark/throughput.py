"""Time of each quantizer relative to reading and writing its tensor once; throughput of the data pipeline and of short runs."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bitcycle.benchmark.measure import copy_bandwidth, interleaved, summarise, timed
from bitcycle.dataset import DATASETS
from bitcycle.dataset.image_dataset import ImageBatches
from bitcycle.dataset.images import Images
from bitcycle.files import write_json
from bitcycle.quantizer import QUANTIZERS, NoQuantizer, compiler_works, encode_bits
from bitcycle.quantizer.base import INITIAL_BITS, QuantizerOptions

ACTIVATION = (128, 16, 32, 32)
WEIGHT = (512, 512, 3, 3)


def measure_quantizers(repetitions: int, device: torch.device) -> dict[str, Any]:
    """For each quantizer and role: ms per tensor, and this time as a multiple of the limit (a copy)."""
    bandwidth, compile = copy_bandwidth(device), compiler_works(device.type)
    found: dict[str, Any] = {"copy_gb_per_s": round(bandwidth / 1e9, 2), "roles": {}}
    for role, shape in (("weight", WEIGHT), ("activation", ACTIVATION), ("gradient", ACTIVATION)):
        x = torch.randn(shape, device=device).contiguous(memory_format=torch.channels_last)
        actions = {"copy": lambda x=x: x.clone(memory_format=torch.preserve_format)}
        for name, quantizer in QUANTIZERS.items():
            bits = [number for number in quantizer().bits(role) if number <= INITIAL_BITS]
            if quantizer.kind is not NoQuantizer and bits:
                actions[name] = _action(quantizer(), role, x, max(bits), compile, device)
        with torch.no_grad():
            times = summarise(interleaved(actions, repetitions, device), "copy")
        limit = 1e3 * 2 * x.numel() * x.element_size() / bandwidth
        found["roles"][role] = {
            "shape": list(shape),
            "limit_ms": round(limit, 4),
            "quantizers": {name: {**time, "of_limit": round(time["ms"] / limit, 2)} for name, time in times.items()},
        }
    return found


def _action(
    options: QuantizerOptions, role: str, x: torch.Tensor, number: int, compile: bool, device: torch.device
) -> Any:
    """A function that quantizes x once."""
    bits = torch.tensor(encode_bits(number), device=device)
    if role == "gradient":
        key = torch.tensor(5, dtype=torch.int32, device=device)
        gradient = options.gradient(compile).to(device)
        return lambda: gradient.quantize(x, bits, key, key)
    module = getattr(options, role)(compile)
    module = module.to(device).train()
    module.prepare(x, encode_bits(number))
    return lambda: module(x, bits)


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
