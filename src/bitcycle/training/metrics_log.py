"""Metrics of a run: JSON lines are the truth; Weights & Biases and TensorBoard get a copy where asked for."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Protocol

from bitcycle.errors import RunError
from bitcycle.optional_imports import require
from bitcycle.training.options import LoggingOptions


class Sink(Protocol):
    """Somewhere a copy of the metrics goes."""

    def write(self, step: int, values: dict[str, float]) -> None:
        """Record numbers of a step."""

    def close(self) -> None:
        """Finish."""


class JsonLines:
    """An append-only file of JSON objects, one a line, that can be cut back to where a checkpoint was taken."""

    def __init__(self, path: Path, keep_bytes: int = 0) -> None:
        """Open the file and cut it back to `keep_bytes`.

        Raises:
            RunError: if it is shorter than that, as when somebody has edited or deleted it.
        """
        path.touch()
        size = path.stat().st_size
        if size < keep_bytes:
            raise RunError(
                f"{path} holds {size} bytes, but {keep_bytes} were written before the checkpoint: it has been cut or deleted. "
                f"Put it back, or delete the folder {path.parent} to start anew."
            )
        os.truncate(path, keep_bytes)
        self.stream = open(path, "ab")

    def write(self, record: dict[str, Any]) -> None:
        """Append a record.

        Raises:
            RunError: if the disk is full.
        """
        try:
            self.stream.write(json.dumps(record).encode() + b"\n")
            self.stream.flush()
        except OSError as error:
            raise RunError(
                f"cannot write {self.stream.name}: {error}. Free space and run the same command again."
            ) from error

    def position(self) -> int:
        """Length of the file, on disk, in bytes."""
        os.fsync(self.stream.fileno())
        return self.stream.tell()

    def close(self) -> None:
        """Close the file."""
        self.stream.close()


class NoLines(JsonLines):
    """Takes the records of a process that leaves all writing to another one."""

    def __init__(self) -> None:
        pass

    def write(self, record: dict[str, Any]) -> None:
        pass

    def position(self) -> int:
        return 0

    def close(self) -> None:
        pass


class WandbSink:
    """Weights & Biases; offline unless asked, so that nothing leaves the machine."""

    def __init__(self, options: LoggingOptions, folder: Path, run_id: str, config: dict[str, Any]) -> None:
        wandb = require("wandb", "wandb")
        self.run = wandb.init(
            project=options.wandb_project,
            dir=str(folder),
            id=run_id,
            name=run_id,
            resume="allow",
            mode="offline" if options.wandb == "offline" else "online",
            config=config,
        )

    def write(self, step: int, values: dict[str, float]) -> None:
        self.run.log(values, step=step)

    def close(self) -> None:
        self.run.finish()


class TensorBoardSink:
    """TensorBoard event files in the run folder."""

    def __init__(self, folder: Path) -> None:
        require("tensorboard", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"))

    def write(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class MetricsLog:
    """Writes records to metrics.jsonl and their numbers to the optional sinks.

    Args:
        lines: metrics.jsonl, cut back to the checkpoint that the run resumes from.
        sinks: where copies go.
    """

    def __init__(self, lines: JsonLines, sinks: list[Sink]) -> None:
        self.lines, self.sinks = lines, sinks

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Record `values` of the moment after `step` optimizer steps; `kind` is train, evaluation or phase."""
        self.lines.write({"kind": kind, "step": step, **values})
        numbers = {f"{kind}/{name}": float(value) for name, value in values.items() if isinstance(value, (int, float))}
        for sink in self.sinks:
            sink.write(step, numbers)

    def position(self) -> int:
        """Bytes of metrics.jsonl that are safely on disk."""
        return self.lines.position()

    def close(self) -> None:
        """Finish file and sinks."""
        self.lines.close()
        for sink in self.sinks:
            sink.close()
