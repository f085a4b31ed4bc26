"""Image datasets of one's own: what splits, labels and images may look like, and what is refused by name."""

from __future__ import annotations

import json
import multiprocessing
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch
from PIL import Image

from bitcycle.dataset.image_dataset import ImageBatches
from bitcycle.dataset.image_sets import CustomImages, ImageNet
from bitcycle.dataset.images import EncodedImage, Framing, decode
from bitcycle.errors import DataError
from bitcycle.settings import SettingError
from tests.dataset.test_dataset import CPU, picture, png, write_folders

IMAGES = [{"bytes": png(picture(0, index)), "path": f"{index}.png"} for index in range(4)]


def write(path, metadata: list[str] | None = None, **columns) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"image": IMAGES[: len(next(iter(columns.values())))], **columns})
    if metadata is not None:
        features = {"info": {"features": {"label": {"names": metadata, "_type": "ClassLabel"}}}}
        table = table.replace_schema_metadata({b"huggingface": json.dumps(features).encode()})
    parquet.write_table(table, path)


def folder_options(path, **settings) -> CustomImages:
    return CustomImages(name="image_folder", path=str(path), **settings)


def parquet_options(path, **settings) -> CustomImages:
    return CustomImages(name="image_parquet", path=str(path), **settings)


def test_a_test_split_that_lacks_a_class_keeps_the_numbers_of_the_others(tmp_path):
    write_folders(tmp_path / "train", {"cat": 3, "cow": 3, "dog": 3})
    write_folders(tmp_path / "test", {"cat": 2, "dog": 1})
    test = folder_options(tmp_path).load(tmp_path, seed=0).test
    assert test.labels.tolist() == [0, 0, 2]


def test_a_class_that_is_tested_only_is_refused(tmp_path):
    write_folders(tmp_path / "train", {"cat": 3, "dog": 3})
    write_folders(tmp_path / "test", {"cat": 2, "wolf": 1})
    with pytest.raises(DataError, match="training split lacks: wolf"):
        folder_options(tmp_path).load(tmp_path, seed=0)


def test_every_class_is_trained_and_tested_whatever_the_fraction(tmp_path):
    write_folders(tmp_path, {"cat": 2, "dog": 4})
    train, test, _ = folder_options(tmp_path, test_fraction=0.9).load(tmp_path, seed=0)
    assert (train.labels.tolist(), test.labels.tolist()) == ([0, 1], [0, 1, 1, 1])


def test_a_single_class_is_refused(tmp_path):
    write_folders(tmp_path, {"cat": 3})
    with pytest.raises(DataError, match=r"single class \(cat\)"):
        folder_options(tmp_path).info(tmp_path)


@pytest.mark.parametrize("names", [("train", "test"), ("Train/cat", "Train/dog", "Test/cat", "Test/dog")])
def test_splits_are_not_learned_as_classes(tmp_path, names):
    write_folders(tmp_path, dict.fromkeys(names, 3))
    with pytest.raises(
        DataError, match=r"only the folders (test, train|Test, Train)\. Sort the images into .*/train/CLASS"
    ):
        folder_options(tmp_path).info(tmp_path)


@pytest.mark.parametrize("name", ["Test/cat", "test"])
def test_test_images_that_are_not_found_are_named(tmp_path, caplog, name):
    write_folders(tmp_path, {"train/cat": 3, "train/dog": 3, name: 3})
    assert folder_options(tmp_path).info(tmp_path).test_samples == 2
    assert re.search(r"/(Test|test) is not used: .*/test/CLASS.* held out instead", caplog.text)


def test_a_class_may_have_the_name_of_a_split(tmp_path):
    write_folders(tmp_path, {"car": 3, "train": 3})
    assert folder_options(tmp_path).info(tmp_path).shape.classes == 2


def test_parquet_splits_number_their_classes_alike(tmp_path):
    write(tmp_path / "train-0.parquet", ["cat", "dog"], label=[0, 1, 1])
    write(tmp_path / "test-0.parquet", ["dog", "cat"], label=[0, 1])
    with pytest.raises(
        DataError,
        match=r"test-0.*has other class numbers in label \(dog, cat|train-0.*other class numbers in label \(cat, dog",
    ):
        parquet_options(tmp_path).load(tmp_path, seed=0)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"label": [0, -1, 1]}, "1 negative labels"),
        ({"label": [0, None, 1]}, "lacks 1 labels"),
        ({"image_id": [7, 8, 9], "kind": [0, 1, 0]}, r"\['image_id', 'kind'\]: 2 could be the labels"),
        ({"caption": ["a", "b", "c"]}, "none could be the labels"),
        ({"boxes": [[1], [2], [3]]}, "none could be the labels"),
        (
            {"id": [0, 1, 2], "label": ["cat", "dog", "cat"]},
            "column label of .* has values of type string, not integers",
        ),
        ({"label": [3, 1_000_000, 3]}, "column label of .* has the label 1000000, which is no class number"),
    ],
    ids=[
        "negative",
        "missing",
        "ambiguous",
        "no integers",
        "lists of integers",
        "names besides numbers",
        "identifiers",
    ],
)
def test_parquet_labels_that_are_refused(tmp_path, columns, words):
    write(tmp_path / "train-0.parquet", **columns)
    with pytest.raises(DataError, match=words):
        parquet_options(tmp_path).load(tmp_path, seed=0)


@pytest.mark.parametrize("empty", ["train", "test"])
def test_a_parquet_split_without_rows_is_named(tmp_path, empty):
    """The library answered that a batch size must be greater than 0."""
    for split in ("train", "test"):
        write(tmp_path / f"{split}-0.parquet", label=[] if split == empty else [0, 1, 1])
    with pytest.raises(DataError, match=f"{empty}-0.parquet has no rows. Remove it"):
        parquet_options(tmp_path).load(tmp_path, seed=0)


def test_images_that_are_not_square_need_a_size(tmp_path):
    """It was an error of missing data, though a setting is missing."""
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for index in range(2):
            Image.new("L", (12, 8)).save(tmp_path / name / f"{index}.png")
    with pytest.raises(SettingError, match=r"image_size=null: .*12 x 8 pixels.* Remedy: .*dataset.image_size=8"):
        folder_options(tmp_path).info(tmp_path)
    assert folder_options(tmp_path, image_size=8).load(tmp_path, seed=0).train.pixels.shape[1:3] == (8, 8)


def test_training_images_of_one_class_are_named(tmp_path, caplog):
    write_folders(tmp_path, {"cat": 4, "dog": 4})
    folder_options(tmp_path).load(tmp_path, seed=0)
    assert not caplog.text
    folder_options(tmp_path, train_samples=1).load(tmp_path, seed=0)
    assert "all 1 training images belong to class" in caplog.text


@pytest.mark.parametrize(
    ("labels", "words"), [([1, 2, 1], "class 0; .* of 3 classes, which are numbered from 0"), ([0, 1, 1], "")]
)
def test_a_class_without_training_images_is_named(tmp_path, caplog, labels, words):
    """Labels from 1 gave the network an output that nothing trains, without a word."""
    write(tmp_path / "train-0.parquet", label=labels)
    write(tmp_path / "test-0.parquet", label=labels[:1] * 3)
    parquet_options(tmp_path).load(tmp_path, seed=0)
    assert re.search(words, caplog.text) if words else not caplog.text


def test_the_label_column_can_be_named(tmp_path):
    columns = {"image_id": [7, 8, 9], "kind": [0, 1, 0]}
    for split in ("train", "test"):
        write(tmp_path / f"{split}-0.parquet", **columns)
    assert parquet_options(tmp_path, label_column="kind").load(tmp_path, seed=0).train.labels.tolist() == [0, 1, 0]
    with pytest.raises(DataError, match="colour is not one of them"):
        parquet_options(tmp_path, label_column="colour").load(tmp_path, seed=0)


def encoded(image: Image.Image) -> EncodedImage:
    return EncodedImage("picture.png", lambda: png(image))


def test_sixteen_bits_become_eight_over_the_whole_range():
    values = np.array([[0, 257, 65535]] * 3, dtype=np.uint16)
    pixels = decode(encoded(Image.fromarray(values)), 1, Framing(3, 3))
    assert pixels[0, :, 0].tolist() == [0, 1, 255]


def test_floating_point_pixels_are_refused(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for index in range(2):
            Image.fromarray(np.ones((8, 8), dtype=np.float32)).save(tmp_path / name / f"{index}.tif")
    with pytest.raises(DataError, match="floating-point pixels"):
        folder_options(tmp_path).load(tmp_path, seed=0)


def test_colour_is_never_lost_unasked(tmp_path):
    write_folders(tmp_path, {"a": 3}, mode="L")
    write_folders(tmp_path, {"b": 3})
    with pytest.raises(DataError, match=r"in colour, but the first image is greyscale.*; set dataset.channels=3"):
        folder_options(tmp_path).load(tmp_path, seed=0)
    options = folder_options(tmp_path, channels=3)
    assert options.info(tmp_path).shape.channels == 3
    assert options.load(tmp_path, seed=0).train.pixels.shape[-1] == 3


@pytest.mark.parametrize(
    ("settings", "field"),
    [({"channels": 2}, "channels"), ({"image_size": 64, "resize": 32}, "resize"), ({"image_size": 100_000}, "image_s")],
)
def test_settings_that_no_image_can_meet(settings, field):
    with pytest.raises(SettingError, match=field):
        folder_options("anywhere", **settings)


def test_images_are_not_scaled_below_the_size_of_the_first(tmp_path):
    write_folders(tmp_path, {"cat": 3, "cow": 3})
    with pytest.raises(SettingError, match="resize=4: is smaller than the crop"):
        folder_options(tmp_path, resize=4).info(tmp_path)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_image_of_a_stream_is_one_line(tmp_path, workers):
    write_folders(tmp_path, {"cat": 4, "dog": 4})
    for path in tmp_path.glob("dog/*.png"):
        path.write_bytes(b"not an image")
    train = folder_options(tmp_path, memory_gib=0, workers=workers).load(tmp_path, seed=0).train
    with pytest.raises(DataError) as caught:
        next(ImageBatches(train, folder_options(tmp_path), 6, 0, CPU).starting_at(0))
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"cannot read the image {tmp_path}/dog/")
    assert "it is no image. Replace it" in str(caught.value)  # and not the address of an object
    assert not multiprocessing.active_children()  # the workers end with the error, not when the memory is collected


@pytest.mark.parametrize("cell", [None, {"bytes": None, "path": None}])
def test_a_row_without_an_image_is_named(tmp_path, cell):
    images = [*IMAGES[:2], cell, IMAGES[3]]
    for split in ("train", "test"):
        parquet.write_table(pa.table({"image": images, "label": [0, 1, 0, 1]}), tmp_path / f"{split}-0.parquet")
    with pytest.raises(
        DataError, match=r"cannot read the image row 2 of .*, train: it has neither bytes nor a path\. "
    ):
        parquet_options(tmp_path).load(tmp_path, seed=0)


def test_an_image_that_pillow_refuses_for_its_size_is_named(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)  # Pillow refuses twice as many
    with pytest.raises(
        DataError, match=r"cannot read the image picture\.png: Image size \(1024 pixels\).*attack\. Replace"
    ):
        decode(encoded(picture(0, 0)), 3, Framing(8, 8))


def test_only_what_is_used_is_decoded(tmp_path):
    write_folders(tmp_path, {"cat": 20, "dog": 20})
    whole = folder_options(tmp_path, train_samples=1, test_samples=1, test_fraction=0.5)
    kept = whole.load(tmp_path, seed=0)
    used = {tuple(images.pixels.flatten().tolist()) for images in kept[:2]}
    assert len(used) == 2
    for label, name in enumerate(("cat", "dog")):
        for index in range(20):
            looked_at = index == 0 or tuple(np.asarray(picture(label, index)).flatten().tolist()) in used
            if not looked_at:  # the first image says how large they all are
                (tmp_path / name / f"{index}.png").write_bytes(b"not an image")
    again = whole.load(tmp_path, seed=0)
    assert torch.equal(again.train.pixels, kept.train.pixels)
    assert len(list(ImageBatches(again.test, whole, 4, 0, CPU))) == 1


def test_imagenet_is_never_replaced(tmp_path):
    assert ImageNet().info(tmp_path) == ((3, 224, 1000), 1_281_167, 50_000)
    with pytest.raises(DataError, match=r"image-net\.org"):
        ImageNet().load(tmp_path, seed=0)
    write_folders(tmp_path / "imagenet" / "train", {"n01": 2})
    write_folders(tmp_path / "imagenet" / "val", {"n01": 1})
    with pytest.raises(
        DataError, match="has 2, 1 training and validation images; the complete imagenet has 1281167, 50000"
    ):
        ImageNet().load(tmp_path, seed=0)
