"""What is learned: loss, metrics and batches of a task, behind one small interface."""

from bitcycle.task.base import Outcome, Task
from bitcycle.task.classification import Classification, ClassificationOptions

__all__ = ["Classification", "ClassificationOptions", "Outcome", "Task"]
