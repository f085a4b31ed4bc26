"""Tasks: loss, metrics and batches behind a common interface."""

from bitcycle.settings import Preset, registry
from bitcycle.task.base import Sample, StepOutput, Task, TaskOptions, TaskSetup
from bitcycle.task.classification import Classification, ClassificationOptions
from bitcycle.task.detection import DetectionOptions
from bitcycle.task.entailment import EntailmentOptions
from bitcycle.task.language_modelling import BlockLanguageModellingOptions, LanguageModellingOptions
from bitcycle.task.node_classification import NodeClassificationOptions
from bitcycle.task.recommendation import RecommendationOptions
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

TASKS: dict[str, Preset[TaskOptions]] = registry(
    {
        "classification": Preset(
            ClassificationOptions, "image classification: cross-entropy, top-1 and top-5 accuracy"
        ),
        "detection": Preset(
            DetectionOptions,
            "object detection: focal loss and smooth L1, mean average precision",
            "Better Schedules, section 4.2 and released code, cpt_voc",
        ),
        "entailment": Preset(
            EntailmentOptions, "entailment of sentence pairs: cross-entropy, accuracy on the test pairs"
        ),
        "language_modelling": Preset(
            LanguageModellingOptions,
            "language modelling: perplexity, on parallel streams through the text",
            "Better Schedules, section 4.4 and released code, cpt_ptb",
        ),
        "language_modelling_blocks": Preset(
            BlockLanguageModellingOptions,
            "language modelling: perplexity, on blocks of text in random order",
            "FracTrain, appendix D; CPT, section 4.3",
        ),
        "node_classification": Preset(
            NodeClassificationOptions,
            "node classification: accuracy on the official test and validation nodes",
            "Better Schedules, section 4.3",
        ),
        "recommendation": Preset(
            RecommendationOptions,
            "recommendation: chosen against random items, hit rate of the held-out item among the best 10",
        ),
        "speech_recognition": Preset(
            SpeechRecognitionOptions, "speech recognition by CTC: character and word error rate", "HLHLp, section 4.3"
        ),
    }
)
"""Task name -> its options."""
