"""Every task by its name."""

from __future__ import annotations

from bitcycle.task.base import TaskOptions
from bitcycle.task.classification import ClassificationOptions
from bitcycle.task.node_classification import NodeClassificationOptions

TASKS: dict[str, type[TaskOptions]] = {
    "classification": ClassificationOptions,
    "node_classification": NodeClassificationOptions,
}
"""Task name -> its class of options; `conf/task/NAME.yaml` is the same."""
