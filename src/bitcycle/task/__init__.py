"""What is learned: loss, metrics and batches of a task, behind one small interface."""

from bitcycle.task.base import Task
from bitcycle.task.classification import Classification, ClassificationOptions

__all__ = ["Classification", "ClassificationOptions", "Task"]
