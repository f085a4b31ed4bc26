"""Every data set by its name."""

from __future__ import annotations

from bitcycle.dataset.base import DatasetOptions
from bitcycle.dataset.cifar import Cifar
from bitcycle.dataset.custom import CustomImages
from bitcycle.dataset.digits import Digits
from bitcycle.dataset.imagenet import ImageNet
from bitcycle.dataset.imagenet_mini import ImageNetMini
from bitcycle.dataset.voc import Voc2012, VocSmall

DATASETS: dict[str, type[DatasetOptions]] = {
    "cifar10": Cifar,
    "cifar100": Cifar,
    "digits": Digits,
    "imagenet": ImageNet,
    "imagenet_mini": ImageNetMini,
    "image_folder": CustomImages,
    "image_parquet": CustomImages,
    "voc2012": Voc2012,
    "voc_small": VocSmall,
}
"""Data set name -> its class of options; `conf/dataset/NAME.yaml` is the same."""
