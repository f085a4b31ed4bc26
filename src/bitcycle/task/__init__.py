"""Tasks: loss, metrics and batches behind a common interface."""

from bitcycle.task.base import Sample, StepOutput, Task, TaskOptions, TaskSetup
from bitcycle.task.classification import Classification, ClassificationOptions
from bitcycle.task.registry import TASKS
from bitcycle.task.speech_recognition import SpeechEvaluation, SpeechRecognition, SpeechRecognitionOptions

__all__ = [
    "TASKS",
    "Classification",
    "ClassificationOptions",
    "Sample",
    "SpeechEvaluation",
    "SpeechRecognition",
    "SpeechRecognitionOptions",
    "StepOutput",
    "Task",
    "TaskOptions",
    "TaskSetup",
]
