"""Record how long a training step takes on this GPU, with and without CUDA graphs: `python scripts/gpu_steps.py [CASE ...]`.

Each case is timed after a warm-up that records its graphs. `--deterministic false` allows any algorithm. To time several runs
that share the GPU, start as many with `--at-a-time NUMBER`; starting MPS is up to you. Rows of an earlier record with the same
case, settings and device are replaced. Kernels are counted where the host launches each of them.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from torch.profiler import ProfilerActivity, profile

from bitcycle.configuration import read_config
from bitcycle.device import device_name, synchronize
from bitcycle.errors import RunError
from bitcycle.files import markdown_table, read_csv, write_csv
from bitcycle.settings import SettingError, nearest
from bitcycle.training.compilation import wants_compilation
from bitcycle.training.environment import set_up_torch
from bitcycle.training.loop import Trainer
from bitcycle.training.plan import make_plan
from bitcycle.training.run_folder import RunFolder

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "results" / "summary" / "gpu_steps.csv"
COLUMNS = ("case", "cuda_graphs", "compile", "deterministic", "at_a_time", "ms", "kernels", "gpu_ms", "device", "torch")
IDENTITY = ("case", "cuda_graphs", "compile", "deterministic", "at_a_time", "device")
SMALL = ("dataset=cifar10_16", "model=resnet20", "training.steps=16000")
PARTIAL = ("dataset=cifar10", "model=resnet20_extra_skip", "training=partial", "quantizer=pact_binary")
CASES = {
    "ResNet-20, 16x16, static 8 bits": (*SMALL, "schedule=static", "schedule.q_max=8"),
    "ResNet-20, 16x16, RTH": (*SMALL, "schedule=RTH", "schedule.cycles=8", "schedule.q_min=3", "schedule.q_max=8"),
    "ResNet-20, 16x16, float": (*SMALL, "schedule=static", "quantizer=none"),
    "ResNet-20, 16x16, static 8 bits, codes": (
        *(*SMALL, "schedule=static", "schedule.q_max=8", "training.compute=codes"),
    ),
    "ResNet-20 with extra skips, 32x32, float": (*PARTIAL, "schedule=partial_pretrain", "schedule.split=1"),
    "ResNet-20 with extra skips, 32x32, 1 bit": (*PARTIAL, "schedule=partial_pretrain", "schedule.split=0"),
    "ResNet-74, 32x32, RTH": ("dataset=cifar10", "model=resnet74", "schedule=RTH"),
}
"""Name -> settings; batches of 128 images."""
WARM_UP, STEPS, PROFILED = 25, 100, 5


def measured(settings: Sequence[str]) -> dict[str, Any]:
    """What the run really uses of graphs and compiled quantizers, milliseconds of a step and, without graphs, the kernels that
    the host launches and the milliseconds that the GPU computes."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        plan = make_plan(read_config(compose("config", overrides=[*settings])))
    device = set_up_torch(plan.config.training)
    trainer = Trainer(replace(plan, folder=RunFolder(plan.folder.path, writes=False)), device)
    batches = trainer.task.batches(0)

    def steps(number: int) -> None:
        for _ in range(number):
            if trainer.phases.due(trainer.step):
                trainer.begin_phase()
            trainer.train_step(next(batches))
        synchronize(device)

    steps(WARM_UP)
    began = time.perf_counter()
    steps(STEPS)
    found: dict[str, Any] = {
        "cuda_graphs": str(trainer.graphs.is_used).lower(),
        "compile": str(wants_compilation(plan, device)).lower(),
        "ms": round(1000 * (time.perf_counter() - began) / STEPS, 2),
    }
    if not trainer.graphs.is_used:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            steps(PROFILED)
        launched = [event for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        found["kernels"] = round(len(launched) / PROFILED)
        found["gpu_ms"] = round(sum(event.time_range.elapsed_us() for event in launched) / 1000 / PROFILED, 2)
    trainer.close()
    return found


def main() -> None:
    """Measure cases in each way of computing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"default: all of {'; '.join(CASES)}")
    parser.add_argument("--deterministic", choices=("true", "false"), default="true", help="default: true")
    parser.add_argument("--at-a-time", type=int, default=1, help="number of such processes that you have started")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise RunError("PyTorch sees no CUDA device here: check the driver, `bitcycle doctor`")
    for case in given.cases or CASES:
        if case not in CASES:
            raise SettingError("CASE", case, "there is no such case", nearest(case, CASES))
        for graphs, compiled in (("false", "false"), ("false", "true"), ("true", "true")):
            chosen = {"deterministic": given.deterministic, "cuda_graphs": graphs, "compile": compiled}
            settings = [*CASES[case], *(f"training.{key}={value}" for key, value in chosen.items())]
            facts = {"device": device_name(torch.device("cuda")), "torch": torch.__version__}
            row = {"case": case, **chosen, "at_a_time": given.at_a_time, **measured(settings), **facts}
            print(row, flush=True)
            record({key: str(value) for key, value in row.items()})


def record(row: dict[str, str]) -> None:
    """Add a row to the record, in place of an earlier one of the same case, settings and device."""
    rows = {tuple(one[key] for key in IDENTITY): one for one in read_csv(RECORD, missing_ok=True)}
    rows[tuple(row[key] for key in IDENTITY)] = row
    write_csv(RECORD, list(COLUMNS), list(rows.values()))


def gpu_steps_table() -> str:
    """Milliseconds of a step as recorded, by case and way of computing."""
    rows = read_csv(RECORD)
    ways = {"cuda_graphs": "graphs", "compile": "compiled quantizers"}
    lines = [
        (
            row["case"],
            ", ".join(word for key, word in ways.items() if row[key] == "true") or "neither",
            "deterministic" if row["deterministic"] == "true" else "any",
            row["at_a_time"],
            row["ms"],
            row["kernels"] or "-",
            row["gpu_ms"] or "-",
        )
        for row in rows
    ]
    heads = ("run", "with", "algorithms", "runs at a time", "ms a step", "kernels", "ms on the GPU")
    devices = sorted({f"{row['device']}, PyTorch {row['torch']}" for row in rows})
    return f"{'; '.join(devices)}; batches of 128 images.\n\n{markdown_table(heads, lines)}"


if __name__ == "__main__":
    main()
