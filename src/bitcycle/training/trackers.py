"""Experiment trackers, Weights & Biases and TensorBoard, with bits, learning rate, cost, loss and accuracy of a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from bitcycle.optional_imports import require
from bitcycle.recipe.options import LoggingOptions


class Tracker(Protocol):
    """A destination for copies of the metrics."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record numbers after `step` optimizer steps."""

    def close(self) -> None:
        """Finish recording."""


class RunLabels(NamedTuple):
    """Labels of a run in a tracker.

    Attributes:
        id: unique, and unchanged when the run is resumed.
        name: readable name, such as resnet74-RTH-seed0.
        group: group of runs, such as the item of a sweep; may be empty.
        tags: tags for filtering.
    """

    id: str
    name: str
    group: str
    tags: tuple[str, ...]


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


class WandbTracker:
    """Weights & Biases; offline by default, so that nothing leaves the machine. Raises RunError if wandb is not installed."""

    def __init__(self, options: LoggingOptions, folder: Path, labels: RunLabels, config: dict[str, Any]) -> None:
        self.run = require("wandb", "wandb").init(
            entity=options.wandb_entity,
            project=options.wandb_project,
            dir=str(folder),
            id=labels.id,
            name=labels.name,
            group=labels.group or None,
            tags=labels.tags,
            resume="allow",
            mode=options.wandb,
            config=config,
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        self.run.finish()


class TensorBoardTracker:
    """TensorBoard event files in the run folder; events after the checkpoint that a run resumes from are hidden. Raises
    RunError if tensorboard is not installed."""

    def __init__(self, folder: Path, first_step: int) -> None:
        require("tensorboard", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1 if first_step else None)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()
