"""Detection data: Pascal VOC's layout, ImageNet's proxy, batches of like shape."""

from __future__ import annotations

import itertools
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from bitcycle.dataset import detection, sources
from bitcycle.dataset.detection import DetectionBatches, DetectionDatasetOptions, Voc2012, VocSmall
from bitcycle.dataset.epoch import grouped_order
from bitcycle.dataset.image_dataset import ImageBatches
from bitcycle.dataset.image_sets import ImageNet, ImageNetMini
from bitcycle.dataset.sources import unpack_to_cache
from bitcycle.errors import DataError
from bitcycle.settings import SettingError
from bitcycle.task.anchors import NOTHING
from tests.dataset.test_dataset import write_parquet
from tests.detection_cases import write_voc, write_voc_small

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data_root(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    write_voc_small(root)
    return root


def small(**options) -> VocSmall:
    return VocSmall(shorter_side=48, longer_side=64, **options)


# ------------------------------------------------------------------------------------------------------------- the data


def test_sizes_are_known_without_data(tmp_path):
    assert Voc2012().info(tmp_path) == ((3, 640, 832, 20), 5717, 5823)
    assert small().info(tmp_path) == ((3, 64, 96, 3), 70, 25)
    assert small(train_samples=256, test_samples=9).info(tmp_path)[1:] == (70, 9)
    assert Voc2012(validation=0.1).info(tmp_path)[1:] == (5145, 5823)


def test_annotations_are_read_as_they_stand(data_root):
    image = VocSmall().read(data_root).train[2]
    assert (image.width, image.height) == (64, 40)
    assert image.boxes.tolist() == []
    image = VocSmall().read(data_root).train[0]
    assert image.boxes.tolist() == [[4.0, 4.0, 36.0, 36.0], [8.0, 8.0, 24.0, 28.0]]
    assert image.labels.tolist() == [0, 1]


def test_the_archive_gives_what_the_folder_gives(data_root, tmp_path):
    (tmp_path / "voc-small").mkdir()
    with tarfile.open(tmp_path / "voc-small" / "VOCdevkit-small.tar", "w") as tar:
        tar.add(data_root / "voc-small" / "VOCdevkit", "VOCdevkit")
    packed, unpacked = (small().load(root, seed=0) for root in (tmp_path, data_root))
    for split in ("train", "validation", "test"):
        batches = [
            next(iter(DetectionBatches(getattr(splits, split), small(), 3, 0, CPU))) for splits in (packed, unpacked)
        ]
        for one, other in zip(*batches, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_the_official_layout_of_voc_2012_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(Voc2012, "sizes", (6, 4))
    write_voc(tmp_path / "VOCdevkit" / "VOC2012", {"train": 6, "val": 4}, detection.VOC_CLASSES)
    options = Voc2012(validation=0.3, shorter_side=48, longer_side=64)
    splits = options.load(tmp_path, seed=0)
    assert [len(split) for split in splits] == [4, 4, 2]
    assert len(Voc2012(train_samples=3).load(tmp_path, seed=0).train) == 3
    assert {image.image.origin for image in splits.train}.isdisjoint(image.image.origin for image in splits.validation)
    monkeypatch.setattr(Voc2012, "sizes", (5, 4))
    with pytest.raises(DataError, match=r"has 6, 4 training and test images; the complete voc2012 has 5, 4"):
        options.load(tmp_path, seed=0)


def test_missing_data_are_an_error_that_says_what_to_put_where(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"voc_small is not in .*VOCdevkit-small\.tar"):
        VocSmall().read(tmp_path)

    def no_network(*arguments, **keywords):
        raise OSError("no network")

    monkeypatch.setattr(sources, "urlopen", no_network)
    with pytest.raises(DataError, match=r"no network.*VOCdevkit/VOC2012.*voc_small is a small proxy"):
        Voc2012().read(tmp_path)


@pytest.mark.parametrize(
    ("annotation", "problem"),
    [
        ("<annotation>", "cannot use"),
        ("<annotation></annotation>", "cannot use"),
        ("<size><width>9</width><height>9</height></size>", "cannot use"),
        ("CLASS", "the class 'boat' is none of "),
        ("BOX", "ends before it begins"),
    ],
)
def test_damaged_annotations_are_named(tmp_path, annotation, problem):
    folder = tmp_path / "voc-small" / "VOCdevkit" / "VOC2007"
    write_voc(folder, {"train": 1, "val": 1, "test": 1}, VocSmall().class_names)
    source = folder / "Annotations" / "2012_000000.xml"
    if annotation == "CLASS":
        annotation = source.read_text().replace("Platelets", "boat")
    if annotation == "BOX":
        annotation = source.read_text().replace("<xmin>5<", "<xmin>50<")
    source.write_text(annotation.removeprefix("<size>") if annotation.startswith("<size>") else annotation)
    with pytest.raises(DataError, match=problem):
        VocSmall().read(tmp_path)
    source.unlink()
    with pytest.raises(DataError, match=r"cannot use .*Download the dataset again"):
        VocSmall().read(tmp_path)


def test_an_image_that_is_not_as_annotated_is_refused(tmp_path):
    folder = tmp_path / "voc-small" / "VOCdevkit" / "VOC2007"
    write_voc(folder, {"train": 1, "val": 1, "test": 1}, VocSmall().class_names)
    Image.new("RGB", (10, 10)).save(folder / "JPEGImages" / "2012_000000.jpg")
    train = detection.read_split(tmp_path / "voc-small", "2007", "train", VocSmall().class_names)
    with pytest.raises(DataError, match="has 10x10 pixels, its annotation 64x48"):
        next(iter(DetectionBatches(train, small(), 1, 0, CPU)))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"longer_side": 300}, "is less than shorter_side=320"),
        ({"validation": 0.1}, "has a validation split"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, problem):
    with pytest.raises(SettingError, match=problem):
        VocSmall(**options)


@pytest.mark.parametrize(
    ("size", "scaled", "padded"),
    [
        ((500, 375), (608, 811), (640, 832)),
        ((375, 500), (811, 608), (832, 640)),
        ((500, 150), (307, 1024), (320, 1056)),
    ],
)
def test_sizes_of_images(size, scaled, padded):
    options = DetectionDatasetOptions("any")
    assert options.scaled_size(*size) == scaled
    assert tuple(map(options.padded, scaled)) == padded


def test_pixels_are_normalised_first_and_padded_with_zeros_then(data_root):
    images = VocSmall().read(data_root).train[:2]  # 64x48 and 48x64, which stay as they are
    batch = next(iter(DetectionBatches(images, small(), 2, 0, CPU)))
    assert batch.images.shape == (2, 3, 96, 96)
    assert batch.images.is_contiguous(memory_format=torch.channels_last)
    assert batch.sizes == ((64, 48), (48, 64))
    assert (batch.images[0, :, 64:] == 0).all() and (batch.images[0, :, :, 48:] == 0).all()
    pixels = np.array(
        Image.open(data_root / "voc-small/VOCdevkit/VOC2007/JPEGImages/2012_000000.jpg"), dtype=np.float32
    )
    expected = (pixels / 255 - np.array([0.485, 0.456, 0.406])) / np.array([0.229, 0.224, 0.225])
    np.testing.assert_allclose(batch.images[1, :, :48, :64].permute(1, 2, 0), expected, atol=1e-5)
    assert batch.labels.tolist() == [[NOTHING, NOTHING], [0, 1]] or batch.labels.shape[1] == 2
    scaled = next(iter(DetectionBatches(images[:1], VocSmall(shorter_side=96, longer_side=128), 1, 0, CPU)))
    assert scaled.boxes[0, 0].tolist() == [8.0, 8.0, 72.0, 72.0]


def test_epochs_go_through_all_images_in_groups_of_like_shape():
    ratios = torch.tensor([1.5, 0.7, 1.5, 0.7, 1.5, 0.7, 1.5, 0.7, 1.5])
    epochs = [groups_of(ratios, epoch) for epoch in range(20)]
    for groups in epochs:
        assert [len(group) for group in groups] == [2, 2, 2, 2, 1]
        assert sorted(itertools.chain(*groups)) == list(range(9))
        assert sum(len(set(ratios[group].tolist())) > 1 for group in groups) <= 1
    assert len({str(groups) for groups in epochs}) == 20
    assert epochs[4] == groups_of(ratios, 4)
    assert len({groups[-1][0] for groups in epochs}) > 3


def groups_of(ratios: torch.Tensor, epoch: int) -> list[list[int]]:
    return [batch.tolist() for batch in grouped_order(ratios, 2, 9, seed=3, epoch=epoch, mixing=epoch)]


def test_fewer_samples_than_a_batch_are_one_batch():
    """There was an empty batch before it, and the first step raised."""
    (batch,) = grouped_order(torch.tensor([0.7, 1.5, 0.7]), 4, 3, seed=0, epoch=0, mixing=0)
    assert sorted(batch.tolist()) == [0, 1, 2]


def test_any_step_can_be_the_first_with_or_without_memory(data_root):
    train = VocSmall().read(data_root).train[:7]
    expected = list(itertools.islice(_batches(train).starting_at(0), 9))
    for step, options in ((0, {"memory_gib": 0, "workers": 0}), (5, {}), (6, {"memory_gib": 0, "workers": 1})):
        found = list(itertools.islice(_batches(train, **options).starting_at(step), 9 - step))
        for one, other in zip(found, expected[step:], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def _batches(images, **options) -> DetectionBatches:
    return DetectionBatches(images, small(flip=True, **options), 3, 5, CPU)


def test_a_flip_takes_the_boxes_along(data_root):
    train = VocSmall().read(data_root).train[:1]
    plain = next(_plain(train))
    flipped = next(batch for batch in _batches(train).starting_at(0) if not torch.equal(batch.images, plain.images))
    torch.testing.assert_close(flipped.images[..., :48, :64], plain.images[..., :48, :64].flip(3))
    assert flipped.boxes[0, 0].tolist() == [64 - 36.0, 4.0, 64 - 4.0, 36.0]


def _plain(images):
    return iter(DetectionBatches(images, small(), 1, 0, CPU))


# ---------------------------------------------------------------------------------------------- ImageNet and its proxy


def write_imagenet_mini(folder, classes: int = 100) -> None:
    for label in range(classes):
        picture = Image.fromarray(np.random.default_rng(label).integers(0, 256, (20, 24, 3), dtype=np.uint8))
        for split in ("train", "val"):
            (folder / split / f"n{label:08}").mkdir(parents=True)
            picture.save(folder / split / f"n{label:08}" / f"n{label:08}_name.JPEG")


def test_the_stand_in_for_imagenet_is_read_from_folder_and_archive(tmp_path):
    write_imagenet_mini(tmp_path / "unpacked" / "imagenet-mini")
    (tmp_path / "packed" / "imagenet-mini").mkdir(parents=True)
    with tarfile.open(tmp_path / "packed" / "imagenet-mini" / "imagenet-mini.tar", "w") as tar:
        tar.add(tmp_path / "unpacked" / "imagenet-mini", "imagenet-mini")
    options = ImageNetMini(image_size=16, resize=18, workers=0, train_samples=256, test_samples=7)
    assert options.info(tmp_path) == ((3, 16, 100), 100, 7)
    found = []
    for kind in ("unpacked", "packed"):
        splits = options.load(tmp_path / kind, seed=0)
        assert (len(splits.train), len(splits.test)) == (100, 7)
        found.append(next(ImageBatches(splits.train, options, 8, 0, CPU).starting_at(3)))
    torch.testing.assert_close(*found, rtol=0, atol=0)
    with pytest.raises(DataError, match=r"imagenet_mini is not in .*imagenet-mini\.tar"):
        options.load(tmp_path, seed=0)
    write_imagenet_mini(tmp_path / "fewer" / "imagenet-mini", classes=3)
    with pytest.raises(
        DataError, match="has 3, 3 training and validation images; the complete imagenet_mini has 100, 100"
    ):
        options.load(tmp_path / "fewer", seed=0)


def test_imagenet_below_the_home_folder_and_in_grey(tmp_path, monkeypatch):
    write_imagenet_mini(tmp_path / "mine")
    monkeypatch.setenv("HOME", str(tmp_path))
    options = {"path": "~/mine", "image_size": 16, "resize": 18, "random_crop": False}
    assert len(ImageNetMini(**options).load(tmp_path / "elsewhere", seed=0).train) == 100
    grey = ImageNetMini(**options, channels=1, mean=[0.5], std=[0.5])
    assert grey.info(tmp_path).shape == (1, 16, 100)
    with pytest.raises(DataError, match=r"in colour, but .* dataset.channels is 1"):
        grey.load(tmp_path, seed=0)


def test_imagenet_itself_is_read_in_its_official_layout(tmp_path, monkeypatch):
    write_imagenet_mini(tmp_path / "imagenet", classes=4)
    monkeypatch.setattr(ImageNet, "sizes", (1000, 4, 4))
    splits = ImageNet(workers=0).load(tmp_path, seed=0)
    assert splits.train.labels.tolist() == splits.test.labels.tolist() == [0, 1, 2, 3]


def test_imagenet_in_the_hubs_layout(tmp_path, monkeypatch):
    """train and validation; the labels of test are -1 there."""
    for split, labels in (("train", [0, 1, 1]), ("validation", [1, 0]), ("test", [-1, -1])):
        write_parquet(tmp_path / "imagenet" / "data" / f"{split}-00000-of-00001.parquet", labels)
    monkeypatch.setattr(ImageNet, "sizes", (1000, 3, 2))
    splits = ImageNet(workers=0).load(tmp_path, seed=0)
    assert (splits.train.labels.tolist(), splits.test.labels.tolist()) == ([0, 1, 1], [1, 0])


def test_a_damaged_archive_is_named(tmp_path):
    (tmp_path / "archive.tar").write_bytes(b"torn")
    with pytest.raises(DataError, match=r"cannot unpack .*archive\.tar.*[Dd]ownload it again"):
        unpack_to_cache(tmp_path / "archive.tar")
