"""Metrics of a run: written as JSON lines, and optionally copied to trackers (`trackers.py`)."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bitcycle.errors import RunError
from bitcycle.layer import PrecisionController
from bitcycle.training.trackers import Tracker, numbers

FOLLOWED = ("precision", "learning_rate", "cost")
"""Values that trackers receive at every step, and therefore not as part of records."""


class JsonLines:
    """An append-only file with one JSON object per line, which can be truncated to the state at a checkpoint."""

    def __init__(self, path: Path, keep_bytes: int = 0) -> None:
        """Open the file and truncate it to `keep_bytes`. Raises RunError if it is shorter, for example after being edited or
        deleted."""
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


class NoLines(JsonLines):
    """Discards the records of a process that does not write."""

    def __init__(self) -> None:
        pass

    def write(self, record: dict[str, Any]) -> None:
        pass

    def position(self) -> int:
        return 0

    def close(self) -> None:
        pass


class MetricsLog:
    """Writes records to metrics.jsonl and their numbers to the trackers."""

    def __init__(self, lines: JsonLines, trackers: Sequence[Tracker]) -> None:
        self.lines, self.trackers = lines, trackers

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Record `values` after `step` optimizer steps; `kind` is train, evaluation, observation or phase."""
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

    def position(self) -> int:
        """Number of bytes of metrics.jsonl on disk."""
        return self.lines.position()

    def close(self) -> None:
        """Close file and trackers."""
        self.lines.close()
        for tracker in self.trackers:
            tracker.close()
