"""Tasks: loss, metrics and batches behind a common interface."""

from bitcycle.presets import Presets
from bitcycle.task.base import Sample, StepOutput, Task, TaskOptions, TaskSetup

__all__ = ["TASKS", "Sample", "StepOutput", "Task", "TaskOptions", "TaskSetup"]

TASKS: Presets[TaskOptions] = Presets("task")
"""Task name -> its options."""
