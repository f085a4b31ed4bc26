"""Training data, in batches that depend only on (seed, epoch, sample)."""

from bitcycle.dataset.base import DatasetInfo, DatasetOptions, Splits
from bitcycle.dataset.detection import Voc2012, VocSmall
from bitcycle.dataset.graph import Citation, Ogbn
from bitcycle.dataset.image_sets import Cifar, CifarSmall, CustomImages, Digits, HubImages, ImageNet, ImageNetMini
from bitcycle.dataset.interactions import MovieLens, Ratings
from bitcycle.dataset.sentence_pairs import SentencePairFolder, Sick, Xnli
from bitcycle.dataset.speech import Fsdd, SpeechManifest
from bitcycle.dataset.text import OwnText, PennTreebank, WikiText, WikiTextSmall

__all__ = ["DATASETS", "DatasetInfo", "DatasetOptions", "Splits"]

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
"""Dataset name -> its options class, as in `conf/dataset/NAME.yaml`."""
