"""Small data in the official layouts, made where a case of the settings table names one of these words."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from bitcycle.dataset.graph import GRAPH_SIZES
from tests.conftest import plan
from tests.graph_data import TINY, write_citation
from tests.speech_data import write_manifests
from tests.text_data import write_text

WEIGHTS, IMAGES, TEXT, SPEECH, GRAPHS = "WEIGHTS", "IMAGES", "TEXT", "SPEECH", "GRAPHS"
PAIRS, RATINGS, VOC = "PAIRS", "RATINGS", "VOC"


def _weights(path: Path, patch: pytest.MonkeyPatch) -> None:
    other = plan("dataset=digits", "model=resnet8", "scale=smoke", "quantizer=none", "seed=1")
    torch.save(other.build_model().state_dict(), path)


def _images(path: Path, patch: pytest.MonkeyPatch) -> None:
    from tests.dataset.test_dataset import write_folders

    write_folders(path, {"cat": 30, "dog": 30}, size=(9, 9))


def _text(path: Path, patch: pytest.MonkeyPatch) -> None:
    write_text(path)


def _speech(path: Path, patch: pytest.MonkeyPatch) -> None:
    write_manifests(path, train=24)


def _graphs(path: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(GRAPH_SIZES, "cora", TINY)
    write_citation(path)


def _pairs(path: Path, patch: pytest.MonkeyPatch) -> None:
    from tests.task.test_entailment import write_pairs

    patch.setenv("XDG_CACHE_HOME", str(path.parent / "cache"))
    write_pairs(path, {"train": 260, "validation": 24, "test": 130})


def _ratings(path: Path, patch: pytest.MonkeyPatch) -> None:
    from tests.task.test_recommendation import write_ratings

    write_ratings(path)


def _voc(path: Path, patch: pytest.MonkeyPatch) -> None:
    from tests.detection_cases import write_voc_small

    write_voc_small(path)


MAKERS: dict[str, tuple[str, Callable[[Path, pytest.MonkeyPatch], None]]] = {
    WEIGHTS: ("weights.pt", _weights),
    IMAGES: ("images", _images),
    TEXT: ("text", _text),
    SPEECH: ("recordings", _speech),
    GRAPHS: ("graphs", _graphs),
    PAIRS: ("pairs", _pairs),
    RATINGS: ("ratings.csv", _ratings),
    VOC: ("voc", _voc),
}
"""Word -> the name of a file or folder, and what makes it."""


def with_made_data(overrides: Sequence[str], folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    """Overrides whose words stand for data, with the paths of data that are made below `folder`."""
    named = {word for word in MAKERS for part in overrides if re.search(rf"=(.*/)?{word}\b", part)}
    for word in named:
        name, make = MAKERS[word]
        make(folder / name, patch)
    return placed(overrides, folder)


def placed(overrides: Sequence[str], folder: Path) -> list[str]:
    """Overrides whose words stand for data, with the paths of data that lie below `folder`."""
    return [
        re.sub(rf"\b({'|'.join(MAKERS)})\b", lambda word: str(folder / MAKERS[word[0]][0]), part) for part in overrides
    ]
