"""Where the data of each preset lie: found without reading them, or missing with a remedy; downloads can be switched off."""

from __future__ import annotations

import pytest

from bitcycle.dataset import DATASETS
from bitcycle.dataset.sources import without_downloads
from bitcycle.errors import DataError
from tests.conftest import configure
from tests.made_data import GRAPHS, IMAGES, PAIRS, RATINGS, SPEECH, TEXT, VOC, with_made_data

OWN = {
    "hub": {"path": "owner/name"},
    "image_folder": {"path": "pictures"},
    "image_parquet": {"path": "pictures"},
    "ratings": {"path": "ratings.csv"},
    "sentence_pairs": {"path": "pairs"},
    "text": {"path": "text"},
}
"""Presets of the user's own data, with their required settings."""


@pytest.mark.parametrize("name", [name for name in DATASETS if name != "digits"])
def test_data_that_are_missing_have_no_place_and_a_remedy(name, tmp_path):
    options = DATASETS[name](**OWN.get(name, {}))
    assert options.place(tmp_path) is None
    remedy = str(options.absent(tmp_path))
    assert str(tmp_path) in remedy
    assert any(word in remedy for word in ("Put ", "Give ", "give "))
    with without_downloads(), pytest.raises(DataError):
        options.read(tmp_path) if name not in ("xnli", "sick", "sentence_pairs") else options.load(tmp_path, 0)
    assert not any(path.is_file() for path in tmp_path.rglob("*") if not path.name.endswith(".lock"))


def test_the_digits_are_part_of_a_package(tmp_path):
    assert DATASETS["digits"]().place(tmp_path).name == "sklearn"


@pytest.mark.parametrize(
    ("made", "settings"),
    [
        (IMAGES, ["dataset=image_folder", f"dataset.path={IMAGES}"]),
        (TEXT, ["dataset=text", f"dataset.path={TEXT}"]),
        (SPEECH, ["dataset=speech_manifest", f"data_root={SPEECH}"]),
        (GRAPHS, ["dataset=cora", f"data_root={GRAPHS}"]),
        (PAIRS, ["dataset=sentence_pairs", f"dataset.path={PAIRS}"]),
        (RATINGS, ["dataset=ratings", f"dataset.path={RATINGS}"]),
        (VOC, ["dataset=voc_small", f"data_root={VOC}"]),
    ],
)
def test_data_that_are_there_have_a_place(made, settings, tmp_path, monkeypatch):
    config = configure(*with_made_data(settings, tmp_path, monkeypatch))
    place = config.dataset.place(config.data_folder)
    assert place is not None and place.exists()
    with without_downloads():
        config.dataset.load(config.data_folder, 0)
