"""What it is trained on: data from disk, in batches that follow from (seed, epoch, sample)."""

from bitcycle.dataset.base import DatasetInfo, DatasetOptions
from bitcycle.dataset.cifar import Cifar, CifarSmall
from bitcycle.dataset.citation import Citation
from bitcycle.dataset.corpora import OwnText, PennTreebank, WikiText, WikiTextSmall
from bitcycle.dataset.custom import CustomImages, HubImages
from bitcycle.dataset.digits import Digits
from bitcycle.dataset.epoch import Epoch
from bitcycle.dataset.fsdd import Fsdd
from bitcycle.dataset.image_dataset import ImageDatasetOptions, Splits
from bitcycle.dataset.imagenet import ImageNet, ImageNetMini
from bitcycle.dataset.images import Images
from bitcycle.dataset.interactions import HeldOut, InteractionOptions, Interactions, InteractionSplits
from bitcycle.dataset.movielens import MovieLens, Ratings
from bitcycle.dataset.nli import SentencePairFolder, Sick, Xnli
from bitcycle.dataset.ogbn import Ogbn
from bitcycle.dataset.pipeline import Batch, EvaluationBatches, TrainingBatches
from bitcycle.dataset.sentence_pairs import SentencePairOptions, TokenPairs
from bitcycle.dataset.speech_dataset import SpeechDatasetOptions, SpeechSplits
from bitcycle.dataset.speech_manifest import SpeechManifest
from bitcycle.dataset.text import Text, TextDatasetOptions
from bitcycle.dataset.utterances import BLANK, SpeechBatch, UtteranceBatches, Utterances
from bitcycle.dataset.voc import Voc2012, VocSmall

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
    "HeldOut",
    "ImageDatasetOptions",
    "Images",
    "InteractionOptions",
    "InteractionSplits",
    "Interactions",
    "MovieLens",
    "Ratings",
    "SentencePairFolder",
    "SentencePairOptions",
    "Sick",
    "SpeechBatch",
    "SpeechDatasetOptions",
    "SpeechSplits",
    "Splits",
    "Text",
    "TextDatasetOptions",
    "TokenPairs",
    "TrainingBatches",
    "UtteranceBatches",
    "Utterances",
    "Xnli",
]
