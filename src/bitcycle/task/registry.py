"""Every task by its name."""

from __future__ import annotations

from bitcycle.task.base import TaskOptions
from bitcycle.task.classification import ClassificationOptions

TASKS: dict[str, type[TaskOptions]] = {
    "classification": ClassificationOptions,
}
"""Task name -> its class of options; `conf/task/NAME.yaml` is the same."""
