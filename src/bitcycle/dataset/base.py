"""What every data set provides, whatever its kind: what it holds, known without reading it where that is possible."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple, Optional

from bitcycle.settings import MISSING, Settings, setting
from bitcycle.shapes import Shape

logger = logging.getLogger(__name__)


class DatasetInfo(NamedTuple):
    """What a data set asks of a network, and the sizes of its splits in samples.

    A sample is what the data set counts: an image, a graph's node, a token, a pair of sentences, a user's rating, an utterance.
    """

    shape: Shape
    train_samples: int
    test_samples: int


@dataclass
class DatasetOptions(Settings):
    """Options that every data set has; a kind of data (images, text, graphs, ...) derives a class with its own from this."""

    has_validation: ClassVar[bool] = False
    """Whether the data set comes with a split for choosing, so that nothing needs to be held out of the training data."""

    name: str = setting(MISSING, "the data set's name, as in dataset=NAME")
    train_samples: Optional[int] = setting(
        None, "train on so many samples (images, sequences, sentences, users, utterances) only; null: all", minimum=1
    )
    test_samples: Optional[int] = setting(None, "evaluate on so many samples only; null: all", minimum=1)
    validation: Optional[float] = setting(
        None,
        "share of the training samples held out for choosing weights, by the run's seed, and evaluated too; null: 0.1 where the"
        " run chooses and the data set has no such split, else 0",
        minimum=0,
        maximum=0.9,
    )

    def info(self, data_root: Path) -> DatasetInfo:
        """What is used of the data set. Reads no data where the official one is of a known size.

        Raises:
            SettingError: for options that it cannot satisfy.
            DataError: if its size has to be read and the data are missing.
        """
        raise NotImplementedError
