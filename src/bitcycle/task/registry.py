"""Every task by its name."""

from __future__ import annotations

from bitcycle.task.base import TaskOptions
from bitcycle.task.classification import ClassificationOptions
from bitcycle.task.detection import DetectionOptions

TASKS: dict[str, type[TaskOptions]] = {
    "classification": ClassificationOptions,
    "detection": DetectionOptions,
}
"""Task name -> its class of options; `conf/task/NAME.yaml` is the same."""
