"""What is learned: loss, metrics and batches of a task, behind one small interface."""

from bitcycle.task.base import Outcome, Sample, Task, TaskOptions, TaskSetup
from bitcycle.task.classification import Classification, ClassificationOptions
from bitcycle.task.registry import TASKS

__all__ = [
    "TASKS",
    "Classification",
    "ClassificationOptions",
    "Outcome",
    "Sample",
    "Task",
    "TaskOptions",
    "TaskSetup",
]
