"""The part of the training images that is held out for choosing: disjoint, the same for a seed, of all classes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitcycle.dataset.base import validation_size
from bitcycle.dataset.image_dataset import ImageBatches, validation_mask
from bitcycle.dataset.image_sets import CustomImages, Digits
from bitcycle.settings import SettingError
from tests.dataset.test_dataset import CPU, write_folders


def rows(images) -> set[bytes]:
    return {bytes(pixels.numpy().tobytes()) for pixels in images.pixels}


def test_off_by_default(tmp_path):
    assert Digits().load(tmp_path, seed=0).validation is None


@pytest.mark.parametrize("more", [{}, {"train_samples": 300}])
def test_training_images_are_divided(tmp_path, more):
    options = Digits(validation=0.2, **more)
    whole = Digits(**more).load(tmp_path, seed=0).train
    train, _, validation = options.load(tmp_path, seed=0)
    assert len(validation) == round(0.2 * len(whole))
    assert len(train) == options.info(tmp_path).train_samples == len(whole) - len(validation)
    assert rows(train) | rows(validation) == rows(whole)
    assert not rows(train) & rows(validation)
    counts = [torch.bincount(images.labels, minlength=10) for images in (whole, validation)]
    assert ((counts[1] - 0.2 * counts[0]).abs() < 1).all()


def test_the_seed_says_which_images_are_held_out(tmp_path):
    options = Digits(validation=0.1)
    first, again, other = (options.load(tmp_path, seed) for seed in (0, 0, 1))
    assert all(torch.equal(a.pixels, b.pixels) for a, b in zip(first, again, strict=True))
    assert rows(first.validation) != rows(other.validation)


@settings(max_examples=30)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.floats(0.01, 0.9), st.integers(0, 99))
def test_shares_of_classes_are_as_near_as_whole_numbers_allow(sizes, share, seed):
    labels = torch.cat([torch.full((size,), label) for label, size in enumerate(sizes)])
    count = validation_size(len(labels), share)
    mask = validation_mask(labels, count, seed)
    assert mask.sum() == count
    for label, size in enumerate(sizes):
        assert abs(int(mask[labels == label].sum()) - size * count / len(labels)) < 1


def test_held_out_images_are_not_cropped_at_random(tmp_path):
    write_folders(tmp_path, {"a": 10, "b": 10}, size=(40, 30))
    options = CustomImages(
        name="image_folder", path=str(tmp_path), image_size=16, random_crop=True, validation=0.25, workers=0
    )
    train, _, validation = options.load(tmp_path, seed=0)
    assert train.framing.random_crop
    plain = CustomImages(name="image_folder", path=str(tmp_path), image_size=16, validation=0.25)
    expected = plain.load(tmp_path, seed=0).validation
    batches = [next(iter(ImageBatches(images, options, 9, 0, CPU))).inputs for images in (validation, expected)]
    assert torch.equal(*batches)


def test_too_much_is_refused(tmp_path):
    with pytest.raises(SettingError, match=r"use 0.9 or less"):
        Digits(validation=1.0)
    with pytest.raises(SettingError, match="leaves none of 1 training samples"):
        Digits(validation=0.9, train_samples=1).info(tmp_path)
