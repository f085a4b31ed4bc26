"""Every data set by its name."""

from __future__ import annotations

from bitcycle.dataset.base import DatasetOptions
from bitcycle.dataset.cifar import Cifar
from bitcycle.dataset.cifar_small import CifarSmall
from bitcycle.dataset.citation import Citation
from bitcycle.dataset.custom import CustomImages
from bitcycle.dataset.digits import Digits
from bitcycle.dataset.fsdd import Fsdd
from bitcycle.dataset.hub import HubImages
from bitcycle.dataset.imagenet import ImageNet
from bitcycle.dataset.imagenet_mini import ImageNetMini
from bitcycle.dataset.movielens import MovieLens, Ratings
from bitcycle.dataset.nli import SentencePairFolder, Sick, Xnli
from bitcycle.dataset.ogbn import Ogbn
from bitcycle.dataset.own_text import OwnText
from bitcycle.dataset.penn_treebank import PennTreebank
from bitcycle.dataset.speech_manifest import SpeechManifest
from bitcycle.dataset.voc import Voc2012, VocSmall
from bitcycle.dataset.wikitext import WikiText, WikiTextSmall

DATASETS: dict[str, type[DatasetOptions]] = {
    "cifar10": Cifar,
    "cifar100": Cifar,
    "cifar10_16": CifarSmall,
    "digits": Digits,
    "imagenet": ImageNet,
    "imagenet_mini": ImageNetMini,
    "image_folder": CustomImages,
    "image_parquet": CustomImages,
    "hub": HubImages,
    "xnli": Xnli,
    "sick": Sick,
    "sentence_pairs": SentencePairFolder,
    "movielens_20m": MovieLens,
    "movielens_100k": MovieLens,
    "ratings": Ratings,
    "fsdd": Fsdd,
    "speech_manifest": SpeechManifest,
    "ptb": PennTreebank,
    "wikitext2": WikiText,
    "wikitext103": WikiText,
    "wikitext2_small": WikiTextSmall,
    "text": OwnText,
    "ogbn_arxiv": Ogbn,
    "ogbn_products": Ogbn,
    "cora": Citation,
    "citeseer": Citation,
    "voc2012": Voc2012,
    "voc_small": VocSmall,
}
"""Data set name -> its class of options; `conf/dataset/NAME.yaml` is the same."""
