"""Metrics of a run: written as JSON lines, and optionally copied to Weights & Biases and TensorBoard."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bitcycle.errors import RunError
from bitcycle.layer import PrecisionController
from bitcycle.optional_imports import require
from bitcycle.training.plan import Plan

FOLLOWED = ("precision", "learning_rate", "cost")
"""Values that trackers receive at every step, and therefore not as part of records."""


class JsonLines:
    """An append-only file with one JSON object per line, which can be truncated to the state at a checkpoint."""

    def __init__(self, path: Path | None, keep_bytes: int = 0) -> None:
        """Open the file and truncate it to `keep_bytes`; None discards all records. Raises RunError if the file is shorter."""
        if path is None:
            self.stream = open(os.devnull, "ab")
            return
        path.touch()
        size = path.stat().st_size
        if size < keep_bytes:
            raise RunError(
                f"{path} has {size} bytes, but {keep_bytes} were written before the checkpoint: it was truncated or deleted. "
                f"Restore it, or delete the folder {path.parent} to start over."
            )
        os.truncate(path, keep_bytes)
        self.stream = open(path, "ab")

    def write(self, record: dict[str, Any]) -> None:
        """Append a record. Raises RunError if the disk is full."""
        try:
            self.stream.write(json.dumps(record).encode() + b"\n")
            self.stream.flush()
        except OSError as error:
            raise RunError(
                f"cannot write {self.stream.name}: {error}. Free space and run the same command again."
            ) from error

    def position(self) -> int:
        """Length of the file on disk in bytes."""
        os.fsync(self.stream.fileno())
        return self.stream.tell()

    def close(self) -> None:
        """Close the file."""
        self.stream.close()


def wandb_id(plan: Plan) -> str:
    """The id of a run at Weights & Biases; of a preliminary run, that of the run that it belongs to, and its own name: it is not
    the run that has the same settings."""
    folder, seed_and_scale = plan.folder.path, f"seed{plan.config.seed}-{plan.config.scale}"
    if folder.name.startswith("seed="):
        return f"{plan.hash}-{seed_and_scale}"
    return f"{folder.parent.parent.name.rpartition('-')[2]}-{seed_and_scale}-{folder.name}"


class WandbTracker:
    """Weights & Biases; if the group is a sweep's PAPER/ITEM, PAPER is also a tag. Raises RunError if wandb is not installed, or
    does not begin a run, as without a login."""

    def __init__(self, plan: Plan) -> None:
        config, options = plan.config, plan.config.logging
        paper = [options.group.split("/")[0]] if "/" in options.group else []
        wandb = require("wandb", "wandb")
        try:
            self.run = wandb.init(
                project=options.wandb_project,
                dir=str(plan.folder.path),
                id=wandb_id(plan),  # the same when the run is resumed
                name=f"{config.model.name}-{config.schedule.name}-seed{config.seed}",
                group=options.group or None,
                tags=list(dict.fromkeys([*paper, config.scale, config.quantizer.name, *options.tags])),
                resume="allow",
                mode=options.wandb,
                config=asdict(config),
            )
        except wandb.Error as error:
            remedy = "log in with `wandb login`, or set logging.wandb=offline"
            raise RunError(f"logging.wandb={options.wandb}: {str(error).rstrip('.')}. Remedy: {remedy}.") from error

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        self.run.finish()


class TensorBoardTracker:
    """TensorBoard event files in the run folder; hides events after the checkpoint, or all earlier ones if there is none. Raises
    RunError without tensorboard."""

    def __init__(self, folder: Path, first_step: int) -> None:
        require("tensorboard", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1 if first_step else 0)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


Tracker = WandbTracker | TensorBoardTracker
"""A destination for copies of the metrics."""


class MetricsLog:
    """Writes records to metrics.jsonl and their numbers to the trackers."""

    def __init__(self, lines: JsonLines, trackers: Sequence[Tracker]) -> None:
        self.lines, self.trackers = lines, trackers

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Record `values` after `step` optimizer steps; `kind` is train, evaluation, observation, phase or
        initial_weights."""
        self.lines.write({"kind": kind, "step": step, **values})
        followed = {name: value for name, value in values.items() if name not in FOLLOWED}
        for tracker in self.trackers:
            tracker.write(step, numbers(followed, f"{kind}/"))

    def follow(self, step: int, rate: float, controller: PrecisionController) -> None:
        """Send bits, learning rate and accumulated cost of a step to the trackers, but not to metrics.jsonl."""
        if not self.trackers:
            return
        cost = controller.cost()
        precision = controller.precision._asdict() if controller.precision else {}
        shown = {"gbitops": cost.gbitops, "relative_to_static": cost.relative_to_static, "energy_j": cost.energy_j}
        values = numbers({"bits": precision, "cost": shown, "learning_rate": rate})
        for tracker in self.trackers:
            tracker.write(step, values)

    def close(self) -> None:
        """Close file and trackers."""
        self.lines.close()
        for tracker in self.trackers:
            tracker.close()


def open_metrics(plan: Plan, first_step: int, keep_bytes: int) -> MetricsLog:
    """metrics.jsonl, truncated to `keep_bytes`, and the trackers of a run that continues after `first_step` steps."""
    if not plan.folder.writes:
        return MetricsLog(JsonLines(None), [])
    options, trackers = plan.config.logging, list[Tracker]()
    if options.wandb != "disabled":
        trackers.append(WandbTracker(plan))
    if options.tensorboard:
        trackers.append(TensorBoardTracker(plan.folder.path, first_step))
    return MetricsLog(JsonLines(plan.folder.metrics, keep_bytes), trackers)


def numbers(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Flatten nested values to path -> number.

    >>> numbers({"bits": {"weight": 8, "gradient": 8}, "note": "none", "loss": 1.5})
    {'bits/weight': 8.0, 'bits/gradient': 8.0, 'loss': 1.5}
    """
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= numbers(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)):
            found[f"{prefix}{name}"] = float(value)
    return found
