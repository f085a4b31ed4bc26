"""What it is trained on: data from disk, in batches that follow from (seed, epoch, sample)."""

from bitcycle.dataset.base import DatasetInfo, DatasetOptions
from bitcycle.dataset.cifar import Cifar
from bitcycle.dataset.custom import CustomImages
from bitcycle.dataset.digits import Digits
from bitcycle.dataset.epoch import Epoch
from bitcycle.dataset.image_dataset import ImageDatasetOptions, Splits
from bitcycle.dataset.images import Images, StreamedImages
from bitcycle.dataset.pipeline import Batch, EvaluationBatches, TrainingBatches
from bitcycle.dataset.registry import DATASETS
from bitcycle.dataset.speech_dataset import SpeechDatasetOptions, SpeechSplits
from bitcycle.dataset.text import Text, TextDatasetOptions
from bitcycle.dataset.utterances import BLANK, SpeechBatch, UtteranceBatches, Utterances

__all__ = [
    "BLANK",
    "DATASETS",
    "Batch",
    "Cifar",
    "CustomImages",
    "DatasetInfo",
    "DatasetOptions",
    "Digits",
    "Epoch",
    "EvaluationBatches",
    "ImageDatasetOptions",
    "Images",
    "SpeechBatch",
    "SpeechDatasetOptions",
    "SpeechSplits",
    "Splits",
    "StreamedImages",
    "Text",
    "TextDatasetOptions",
    "TrainingBatches",
    "UtteranceBatches",
    "Utterances",
]
