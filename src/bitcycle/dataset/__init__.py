"""What it is trained on: labelled images from disk, in batches that follow from (seed, epoch, sample)."""

from bitcycle.dataset.base import DatasetInfo, DatasetOptions, Splits
from bitcycle.dataset.cifar import Cifar
from bitcycle.dataset.custom import CustomImages
from bitcycle.dataset.digits import Digits
from bitcycle.dataset.images import Images, StreamedImages
from bitcycle.dataset.pipeline import Batch, EvaluationBatches, TrainingBatches, batch_length, steps_per_epoch
from bitcycle.dataset.registry import DATASETS

__all__ = [
    "DATASETS",
    "Batch",
    "Cifar",
    "CustomImages",
    "DatasetInfo",
    "DatasetOptions",
    "Digits",
    "EvaluationBatches",
    "Images",
    "Splits",
    "StreamedImages",
    "TrainingBatches",
    "batch_length",
    "steps_per_epoch",
]
