"""Every task by its name."""

from __future__ import annotations

from bitcycle.task.base import TaskOptions
from bitcycle.task.classification import ClassificationOptions
from bitcycle.task.detection import DetectionOptions
from bitcycle.task.entailment import EntailmentOptions
from bitcycle.task.language_modelling import BlockLanguageModellingOptions, LanguageModellingOptions
from bitcycle.task.node_classification import NodeClassificationOptions
from bitcycle.task.recommendation import RecommendationOptions
from bitcycle.task.speech_recognition import SpeechRecognitionOptions

TASKS: dict[str, type[TaskOptions]] = {
    "classification": ClassificationOptions,
    "entailment": EntailmentOptions,
    "recommendation": RecommendationOptions,
    "language_modelling": LanguageModellingOptions,
    "language_modelling_blocks": BlockLanguageModellingOptions,
    "speech_recognition": SpeechRecognitionOptions,
    "node_classification": NodeClassificationOptions,
    "detection": DetectionOptions,
}
"""Task name -> its class of options; `conf/task/NAME.yaml` is the same."""
