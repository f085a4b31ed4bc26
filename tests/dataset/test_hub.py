"""Data sets in the hub's layout, read by the library `datasets` without network."""

from __future__ import annotations

import io
import shutil
import socket

import datasets
import numpy as np
import pytest
import torch
from huggingface_hub import constants
from PIL import Image

from bitcycle.dataset import sources
from bitcycle.dataset.image_sets import HubImages
from bitcycle.dataset.sources import load_hub
from bitcycle.errors import DataError
from tests.conftest import configure


@pytest.fixture
def hub(tmp_path):
    """A folder as `huggingface_hub` would leave it: two splits of PNG images of one colour each, the class."""
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["dark", "light"])})
    folder = tmp_path / "hub"
    for split, count in (("train", 6), ("validation", 4)):
        rows = [{"image": {"bytes": png(200 * (row % 2)), "path": None}, "label": row % 2} for row in range(count)]
        (folder / "data").mkdir(parents=True, exist_ok=True)
        datasets.Dataset.from_list(rows, features).to_parquet(folder / "data" / f"{split}-00000-of-00001.parquet")
    return folder


def png(grey: int) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.full((8, 8, 3), grey, np.uint8)).save(stream, "png")
    return stream.getvalue()


def test_images_and_labels_of_a_folder_in_the_hubs_layout(hub, tmp_path):
    options = HubImages(name="hub", path="hub")
    info = options.info(tmp_path)
    assert (info.shape, info.train_samples, info.test_samples) == ((3, 8, 2), 6, 4)
    train, test, _ = options.load(tmp_path, seed=0)
    assert train.labels.tolist() == [0, 1, 0, 1, 0, 1] and len(test) == 4
    assert torch.equal(train.pixels[:, 0, 0, 0].long(), 200 * train.labels)


def test_splits_that_are_not_there(hub, tmp_path):
    with pytest.raises(DataError, match="has the splits train, validation, but not dev"):
        HubImages(name="hub", path="hub", test_split="dev").info(tmp_path)


def test_a_subset_of_a_folder_is_its_subfolder(hub, tmp_path):
    """Without it, all parquet files below the folder are one dataset."""
    shutil.copytree((hub / "data").rename(hub / "some"), hub / "more")
    assert HubImages(name="hub", path="hub").info(tmp_path).train_samples == 12
    assert HubImages(name="hub", path="hub", subset="more").info(tmp_path).train_samples == 6
    with pytest.raises(
        DataError, match=r"hub has no folder mroe of parquet files\. Check dataset\.path, dataset\.subset"
    ):
        HubImages(name="hub", path="hub", subset="mroe").info(tmp_path)


def test_a_name_that_the_hub_does_not_have(tmp_path, monkeypatch):
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *_, **__: (_ for _ in ()).throw(FileNotFoundError("no such\nthing"))
    )
    with pytest.raises(DataError, match=r"nobody/nothing cannot be loaded \(no such\).*Check dataset\.path") as error:
        HubImages(name="hub", path="nobody/nothing").info(tmp_path)
    assert "\n" not in str(error.value)


def test_command_line():
    options = configure("dataset=hub", "dataset.path=uoft-cs/cifar10", "dataset.label_column=label").dataset
    assert isinstance(options, HubImages) and options.path == "uoft-cs/cifar10"


def test_without_a_network_the_hub_is_not_asked_again_and_again(monkeypatch):
    asked = []

    def unknown(*arguments):
        asked.append(arguments)
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr(sources, "getproxies", dict)
    with pytest.raises(DataError, match=r"cannot be loaded .*[Oo]ffline"):
        load_hub("nobody/nothing-of-this-name", "Remedy.", [])
    assert len(asked) <= 1
    assert not constants.HF_HUB_OFFLINE
