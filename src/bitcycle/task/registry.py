"""Every task by its name."""

from __future__ import annotations

from bitcycle.task.base import TaskOptions
from bitcycle.task.classification import ClassificationOptions
from bitcycle.task.language_modelling import BlockLanguageModellingOptions, LanguageModellingOptions
from bitcycle.task.speech_recognition import SpeechRecognitionOptions

TASKS: dict[str, type[TaskOptions]] = {
    "classification": ClassificationOptions,
    "language_modelling": LanguageModellingOptions,
    "language_modelling_blocks": BlockLanguageModellingOptions,
    "speech_recognition": SpeechRecognitionOptions,
}
"""Task name -> its class of options; `conf/task/NAME.yaml` is the same."""
