"""Every data set by its name."""

from __future__ import annotations

from bitcycle.dataset.base import DatasetOptions
from bitcycle.dataset.cifar import Cifar
from bitcycle.dataset.custom import CustomImages
from bitcycle.dataset.digits import Digits
from bitcycle.dataset.fsdd import Fsdd
from bitcycle.dataset.imagenet import ImageNet
from bitcycle.dataset.own_text import OwnText
from bitcycle.dataset.penn_treebank import PennTreebank
from bitcycle.dataset.speech_manifest import SpeechManifest
from bitcycle.dataset.wikitext import WikiText, WikiTextSmall

DATASETS: dict[str, type[DatasetOptions]] = {
    "cifar10": Cifar,
    "cifar100": Cifar,
    "digits": Digits,
    "imagenet": ImageNet,
    "image_folder": CustomImages,
    "image_parquet": CustomImages,
    "fsdd": Fsdd,
    "speech_manifest": SpeechManifest,
    "ptb": PennTreebank,
    "wikitext2": WikiText,
    "wikitext103": WikiText,
    "wikitext2_small": WikiTextSmall,
    "text": OwnText,
}
"""Data set name -> its class of options; `conf/dataset/NAME.yaml` is the same."""
