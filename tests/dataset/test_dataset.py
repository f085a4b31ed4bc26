"""Datasets: real files in every published layout, and batches that follow from (seed, epoch, sample)."""

from __future__ import annotations

import io
import itertools
import json
import pickle
import random

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch
from PIL import Image

from bitcycle.dataset import image_sets as cifar
from bitcycle.dataset import images
from bitcycle.dataset.epoch import Epoch
from bitcycle.dataset.image_dataset import ImageBatches
from bitcycle.dataset.image_sets import Cifar, CifarSmall, CustomImages, Digits
from bitcycle.dataset.images import Images, random_box
from bitcycle.errors import DataError
from bitcycle.settings import SettingError

CPU = torch.device("cpu")


def picture(label: int, index: int, size: tuple[int, int] = (32, 32), mode: str = "RGB") -> Image.Image:
    shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
    pixels = np.random.default_rng([label, index]).integers(0, 256, shape, dtype=np.uint8)
    return Image.fromarray(pixels, mode)


def png(image: Image.Image, kind: str = "png") -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind)
    return stream.getvalue()


def write_folders(folder, counts: dict[str, int], **options) -> None:
    for label, (name, count) in enumerate(counts.items()):
        (folder / name).mkdir(parents=True)
        for index in range(count):
            picture(label, index, **options).save(folder / name / f"{index}.png")


def write_parquet(path, labels: list[int], image_column="img", label_column="label", kind="png") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    images = [
        {"bytes": png(picture(max(label, 0), index), kind), "path": f"{index}.png"}
        for index, label in enumerate(labels)
    ]
    names = ["cat", "dog", *map(str, range(2, 10))]
    features = {"info": {"features": {label_column: {"names": names, "_type": "ClassLabel"}}}}
    table = pa.table({image_column: images, label_column: labels})
    parquet.write_table(table.replace_schema_metadata({b"huggingface": json.dumps(features).encode()}), path)


@pytest.fixture
def small_cifar(monkeypatch):
    """CIFAR with two images a class, so that its layouts can be written in a moment."""
    monkeypatch.setattr(cifar, "TRAIN_SAMPLES", 20)
    monkeypatch.setattr(cifar, "TEST_SAMPLES", 10)
    monkeypatch.setattr("torchvision.datasets.CIFAR10._check_integrity", lambda _: True)
    monkeypatch.setattr("torchvision.datasets.CIFAR10._load_meta", lambda _: None)


TRAIN_LABELS, TEST_LABELS = list(range(10)) * 2, list(range(10))


@pytest.mark.parametrize("layout", ["hub", "snapshot", "official", "folders"])
def test_cifar_layouts_hold_the_same_images(tmp_path, small_cifar, layout):
    root = tmp_path / "cifar10"
    expected = torch.stack(
        [torch.from_numpy(np.array(picture(label, index))) for index, label in enumerate(TRAIN_LABELS)]
    )
    if layout in ("hub", "snapshot"):
        sub = "data" if layout == "hub" else "plain_text"
        write_parquet(root / sub / "train-00000-of-00001.parquet", TRAIN_LABELS)
        write_parquet(root / sub / "test-00000-of-00001.parquet", TEST_LABELS)
    elif layout == "official":
        folder = root / "cifar-10-batches-py"
        folder.mkdir(parents=True)
        flat = expected.permute(0, 3, 1, 2).reshape(20, -1).numpy()
        for batch in range(5):
            part = slice(4 * batch, 4 * batch + 4)
            (folder / f"data_batch_{batch + 1}").write_bytes(
                pickle.dumps({"data": flat[part], "labels": TRAIN_LABELS[part]})
            )
        (folder / "test_batch").write_bytes(pickle.dumps({"data": flat[:10], "labels": TEST_LABELS}))
    else:
        write_folders(root / "train", {str(label): 2 for label in range(10)})
        write_folders(root / "test", {str(label): 1 for label in range(10)})
        expected = torch.stack(
            [torch.from_numpy(np.array(picture(label, index))) for label in range(10) for index in range(2)]
        )
    train, test, _ = Cifar(name="cifar10").load(tmp_path, seed=0)
    assert torch.equal(train.pixels, expected)
    assert (len(train), len(test)) == (20, 10)
    assert Cifar(name="cifar10").remark(tmp_path) == ""


def test_lossy_copies_of_cifar_are_told_apart(tmp_path, small_cifar):
    """Results of images re-encoded as JPEG stood beside published ones as if they were the official images'."""
    for split, labels in (("train", TRAIN_LABELS), ("test", TEST_LABELS)):
        write_parquet(tmp_path / "cifar10" / f"{split}-0.parquet", labels, kind="jpeg")
    assert Cifar(name="cifar10").remark(tmp_path) == "re-encoded as JPEG"
    assert CifarSmall(name="cifar10_16").remark(tmp_path) == "", "a proxy anyway"


def test_cifar_at_16_pixels_is_the_mean_of_cifar_over_2x2_pixels(tmp_path, small_cifar):
    for split, labels in (("train", TRAIN_LABELS), ("test", TEST_LABELS)):
        write_parquet(tmp_path / "cifar10" / f"{split}-0.parquet", labels)
    train, test, _ = CifarSmall(name="cifar10_16", train_samples=10).load(tmp_path, seed=0)
    assert (len(train), len(test)) == (10, 10)
    chosen = Cifar(name="cifar10", train_samples=10).load(tmp_path, seed=0)[0]
    means = chosen.pixels.double().reshape(10, 16, 2, 16, 2, 3).mean((2, 4))
    assert torch.equal(train.pixels, (means + 0.5).floor().byte())


def test_cifar_refuses_another_data_set_in_its_place(tmp_path):
    write_parquet(tmp_path / "cifar10" / "train-0.parquet", [0, 1])
    write_parquet(tmp_path / "cifar10" / "test-0.parquet", [0, 1])
    with pytest.raises(
        DataError, match=r"has 2, 2, 2, 1 training images, test images, distinct labels .* 50000, 10000, 10, 9"
    ):
        Cifar(name="cifar10").load(tmp_path, seed=0)


def test_seeds_draw_their_own_images_if_asked(tmp_path):
    """All seeds shared one subset, so that intervals over seeds did not cover other images."""

    def drawn(seed: int, **options) -> torch.Tensor:
        return Digits(train_samples=100, **options).load(tmp_path, seed=seed).train.pixels

    shared, own = drawn(0), [drawn(seed, draw="by_seed") for seed in (0, 1)]
    assert torch.equal(shared, drawn(1)), "by default, as in all recorded runs"
    assert torch.equal(own[0], drawn(0, draw="by_seed")) and not torch.equal(own[0], own[1])
    assert not torch.equal(own[0], shared) and len(own[0]) == 100
    whole = [Digits(draw="by_seed").load(tmp_path, seed=seed).train.pixels for seed in (0, 1)]
    assert torch.equal(*whole), "without train_samples there is nothing to draw"


def test_half_of_the_classes_at_16_pixels(tmp_path, small_cifar):
    """Labels of a part were those of the whole again once training images had been chosen."""
    for split, labels in (("train", TRAIN_LABELS), ("test", TEST_LABELS)):
        write_parquet(tmp_path / "cifar10" / f"{split}-0.parquet", labels)
    options = CifarSmall(name="cifar10_16", part="second_classes", train_samples=8)
    assert set(options.load(tmp_path, seed=0).train.labels.tolist()) <= set(range(5))


def test_damaged_official_files_are_refused(tmp_path):
    """By the checksums that torchvision has."""
    (tmp_path / "cifar10" / "cifar-10-batches-py").mkdir(parents=True)
    (tmp_path / "cifar10" / "cifar-10-batches-py" / "test_batch").write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(DataError, match=r"found or corrupted.*unpack the official archive again"):
        Cifar(name="cifar10").load(tmp_path, seed=0)


def test_missing_cifar_is_looked_for_at_the_hub(tmp_path, small_cifar, monkeypatch):
    for split, labels in (("train", TRAIN_LABELS), ("test", TEST_LABELS)):
        write_parquet(tmp_path / "hub" / f"{split}-0.parquet", labels)
    load, asked = datasets.load_dataset, []

    def from_folder(name, *arguments, **options):
        asked.append(name)
        return load("parquet", data_dir=str(tmp_path / "hub"))

    monkeypatch.setattr(datasets, "load_dataset", from_folder)
    train, test, _ = Cifar(name="cifar10").load(tmp_path / "data", seed=0)
    assert asked == ["uoft-cs/cifar10"] and (len(train), len(test)) == (20, 10)


def test_missing_cifar_says_what_to_do(tmp_path):
    with pytest.raises(DataError, match=r"uoft-cs/cifar100 cannot be loaded.*BITCYCLE_DATA"):
        Cifar(name="cifar100").load(tmp_path, seed=0)


def test_unreadable_image_is_named(tmp_path):
    write_folders(tmp_path, {"cat": 3, "dog": 3})
    (tmp_path / "dog" / "1.png").write_bytes(b"not an image")
    with pytest.raises(DataError, match=r"dog/1\.png.*Replace it"):
        CustomImages(name="image_folder", path=str(tmp_path)).load(tmp_path, seed=0)


def test_damaged_parquet_is_named(tmp_path):
    (tmp_path / "train-0.parquet").write_bytes(b"PAR1 torn")
    with pytest.raises(DataError, match=rf"{tmp_path} cannot be loaded \(.*magic bytes"):
        CustomImages(name="image_parquet", path=str(tmp_path)).load(tmp_path, seed=0)


@pytest.fixture
def pixels_are_kept(monkeypatch, tmp_path):
    """The user's cache for small datasets, too; in a folder of the test."""
    monkeypatch.setattr(images, "WORTH_KEEPING", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "bitcycle"


def load_folders(folder, **options):
    return CustomImages(name="image_folder", path=str(folder), image_size=8, **options).load(folder, seed=0)


def test_images_are_decoded_once_on_a_machine(tmp_path, monkeypatch, pixels_are_kept):
    write_folders(tmp_path / "data", {"cat": 5, "dog": 5})
    decoded = load_folders(tmp_path / "data")
    assert len(list(pixels_are_kept.glob("pixels-*.npy"))) == 2

    with monkeypatch.context() as patch:
        patch.setattr(images, "decode", lambda *_: pytest.fail("decoded a second time"))
        again = load_folders(tmp_path / "data")
    assert torch.equal(again.train.pixels, decoded.train.pixels) and torch.equal(again.test.pixels, decoded.test.pixels)


def test_kept_images_are_never_out_of_date(tmp_path, pixels_are_kept):
    write_folders(tmp_path / "data", {"cat": 5, "dog": 5})
    before = load_folders(tmp_path / "data")
    assert not torch.equal(load_folders(tmp_path / "data", resize=32).train.pixels, before.train.pixels)
    for index in range(5):
        picture(7, index).save(tmp_path / "data" / "cat" / f"{index}.png")
    after = load_folders(tmp_path / "data")
    is_cat = before.train.labels == 0
    assert not torch.equal(before.train.pixels[is_cat], after.train.pixels[is_cat])
    assert torch.equal(before.train.pixels[~is_cat], after.train.pixels[~is_cat])


@pytest.mark.parametrize("damage", [b"", b"\x93NUMPY torn"])
def test_damaged_kept_images_are_decoded_anew(tmp_path, pixels_are_kept, damage):
    write_folders(tmp_path / "data", {"cat": 5, "dog": 5})
    decoded = load_folders(tmp_path / "data")
    for file in pixels_are_kept.glob("pixels-*.npy"):
        file.write_bytes(damage)
    for _ in range(2):  # the second finds what the first has repaired
        assert torch.equal(load_folders(tmp_path / "data").train.pixels, decoded.train.pixels)
    assert all(np.load(file).shape[1:] == (8, 8, 3) for file in pixels_are_kept.glob("pixels-*.npy"))


def test_without_a_cache_images_are_decoded(tmp_path, monkeypatch, pixels_are_kept):
    (tmp_path / "cache").write_text("a file where the cache's folder should be")
    write_folders(tmp_path / "data", {"cat": 5, "dog": 5})
    assert len(load_folders(tmp_path / "data").train) == 8


@pytest.mark.parametrize("memory_gib", [4.0, 0.0], ids=["in memory", "streamed"])
@pytest.mark.parametrize("workers", [0, 2])
def test_class_folders_of_any_size(tmp_path, memory_gib, workers):
    write_folders(tmp_path / "train", {"cat": 5, "dog": 4}, size=(40, 50))
    write_folders(tmp_path / "val", {"cat": 2, "dog": 1}, size=(64, 30))
    options = CustomImages(
        name="image_folder", path=str(tmp_path), image_size=24, memory_gib=memory_gib, workers=workers
    )
    info = options.info(tmp_path)
    assert (info.shape, info.train_samples, info.test_samples) == ((3, 24, 2), 9, 3)
    train, test, _ = options.load(tmp_path, seed=0)
    reference = CustomImages(name="image_folder", path=str(tmp_path), image_size=24).load(tmp_path, seed=0).train
    (batch,) = itertools.islice(ImageBatches(train, options, 100, 0, CPU), 1)
    (expected,) = itertools.islice(ImageBatches(reference, options, 100, 0, CPU), 1)
    assert torch.equal(batch.inputs, expected.inputs)
    assert batch.targets.tolist() == [0] * 5 + [1] * 4
    assert len(test) == 3


def test_folder_without_test_split_is_split_in_the_same_way_every_time(tmp_path):
    write_folders(tmp_path, {"a": 10, "b": 5}, mode="L")
    options = CustomImages(name="image_folder", path=str(tmp_path))
    train, test, _ = options.load(tmp_path, seed=0)
    assert options.info(tmp_path).shape == (1, 32, 2)
    assert torch.bincount(test.labels).tolist() == [2, 1]
    assert torch.bincount(train.labels).tolist() == [8, 4]
    assert torch.equal(test.pixels, options.load(tmp_path, seed=0).test.pixels)
    joined = torch.cat([train.pixels, test.pixels]).flatten(1)
    assert len(joined.unique(dim=0)) == 15


def test_parquet_of_ones_own(tmp_path):
    write_parquet(tmp_path / "mine" / "train-0.parquet", [0, 1, 1], "picture", "kind")
    write_parquet(tmp_path / "mine" / "validation-0.parquet", [1], "picture", "kind")
    train, test, _ = CustomImages(name="image_parquet", path="mine", label_column="kind").load(tmp_path, seed=0)
    assert train.labels.tolist() == [0, 1, 1]
    assert len(test) == 1


@pytest.mark.parametrize(("path", "words"), [("absent", "is not a folder"), (".", "no images in class subfolders")])
def test_wrong_folder(tmp_path, path, words):
    with pytest.raises(DataError, match=words):
        CustomImages(name="image_folder", path=path).load(tmp_path, seed=0)


def test_digits_are_real_and_split_by_class(tmp_path):
    train, test, _ = Digits().load(tmp_path, seed=0)
    info = Digits().info(tmp_path)
    assert (len(train), len(test)) == (info.train_samples, info.test_samples) == (1438, 359)
    assert train.labels.unique().tolist() == list(range(10))
    pixels = train.pixels.float() / 255
    assert pixels.mean().item() == pytest.approx(Digits().mean[0], abs=5e-4)
    assert pixels.std().item() == pytest.approx(Digits().std[0], abs=5e-4)


def test_subsets_are_fixed_and_checked(tmp_path):
    small = Digits(train_samples=100, test_samples=50)
    train, test, _ = small.load(tmp_path, seed=0)
    assert (len(train), len(test)) == (100, 50)
    assert torch.equal(train.pixels, small.load(tmp_path, seed=0).train.pixels)
    with pytest.raises(SettingError, match="at most 1438"):
        Digits(train_samples=2000).info(tmp_path)
    with pytest.raises(SettingError, match="one per channel"):
        Digits(mean=[0.1, 0.2]).info(tmp_path)


def batches(seed: int, start: int, count: int, options=None, workers_images: Images | None = None):
    pixels = torch.arange(50 * 6 * 6, dtype=torch.int64).remainder(251).to(torch.uint8).view(50, 6, 6, 1)
    images = workers_images or Images(pixels, torch.arange(50))
    source = ImageBatches(images, options or Digits(crop_padding=2, flip=True), 16, seed, CPU)
    return list(itertools.islice(source.starting_at(start), count))


def test_any_step_can_be_the_first():
    whole = batches(seed=1, start=0, count=12)
    for start in (1, 3, 4, 7):  # an epoch has four steps
        for expected, batch in zip(whole[start:], batches(seed=1, start=start, count=12 - start), strict=True):
            assert torch.equal(batch.inputs, expected.inputs)
            assert torch.equal(batch.targets, expected.targets)


def test_an_epoch_holds_every_sample_once_and_epochs_and_seeds_differ():
    first, second = batches(0, 0, 4), batches(0, 4, 4)
    labels = [torch.cat([batch.targets for batch in epoch]) for epoch in (first, second)]
    assert all(label.sort().values.tolist() == list(range(50)) for label in labels)
    assert [len(batch.targets) for batch in first] == [16, 16, 16, 2]
    assert not torch.equal(*labels)
    assert not torch.equal(first[0].targets, batches(1, 0, 1)[0].targets)


def test_augmentation_is_a_crop_of_the_padded_image_or_its_mirror():
    options = Digits(crop_padding=2, flip=True, mean=[0.0], std=[1 / 255])
    pixels = torch.randint(1, 255, (50, 6, 6, 1), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    source = ImageBatches(Images(pixels, torch.arange(50)), options, 50, 0, CPU)
    seen = set()
    for batch in itertools.islice(source.starting_at(0), 40):
        for image, label in zip(batch.inputs, batch.targets.tolist(), strict=True):
            padded = torch.nn.functional.pad(pixels[label, :, :, 0].float(), (2, 2, 2, 2))
            places = [
                (mirrored, row, column)
                for mirrored in (False, True)
                for row in range(5)
                for column in range(5)
                if torch.equal(image[0].flip(1) if mirrored else image[0], padded[row : row + 6, column : column + 6])
            ]
            assert places, "not a crop of its image"
            seen.update(places)
    assert len(seen) == 2 * 5 * 5  # every crop and mirror occurs


def test_augmentation_does_not_depend_on_the_batch():
    """The crop of a sample follows from seed, epoch and sample: another batch size gives the same images."""
    pixels = torch.randint(0, 255, (40, 6, 6, 1), dtype=torch.uint8)
    found = []
    for size in (8, 20):
        source = ImageBatches(Images(pixels, torch.arange(40)), Digits(crop_padding=2), size, 3, CPU)
        epoch = list(itertools.islice(source.starting_at(0), 40 // size))
        order = torch.cat([batch.targets for batch in epoch]).argsort()
        found.append(torch.cat([batch.inputs for batch in epoch])[order])
    assert torch.equal(*found)


def test_inputs_are_normalised_and_channels_last(tmp_path):
    splits = Digits().load(tmp_path, seed=0)
    batch = next(iter(ImageBatches(splits.train, Digits(), len(splits.train), 0, CPU)))
    assert batch.inputs.mean().abs() < 0.01
    assert batch.inputs.std().item() == pytest.approx(1, abs=0.01)
    three = torch.zeros(4, 5, 5, 3, dtype=torch.uint8)
    batch = next(iter(ImageBatches(Images(three, torch.zeros(4, dtype=torch.long)), Cifar(name="cifar10"), 4, 0, CPU)))
    assert batch.inputs.is_contiguous(memory_format=torch.channels_last)


def test_batch_lengths():
    epoch = Epoch(50, 16)
    assert [epoch.samples_of(step) for step in range(6)] == [16, 16, 16, 2, 16, 16]
    assert [epoch.samples_before(step) for step in range(6)] == [0, 16, 32, 48, 50, 66]
    cifar = Epoch(50_000, 128)
    assert (cifar.steps, cifar.samples_of(390)) == (391, 80)


def crops(tmp_path, start: int, count: int, workers: int = 0, seed: int = 0):
    if not (tmp_path / "train").exists():
        write_folders(tmp_path / "train", {"cat": 6, "dog": 5}, size=(40, 50))
        write_folders(tmp_path / "val", {"cat": 2, "dog": 1}, size=(64, 30))
    options = CustomImages(
        name="image_folder", path=str(tmp_path), image_size=16, random_crop=True, flip=True, workers=workers
    )
    source = ImageBatches(options.load(tmp_path, seed=0).train, options, 4, seed, CPU)
    return torch.cat([batch.inputs for batch in itertools.islice(source.starting_at(start), count)])


def test_random_crops_follow_from_seed_epoch_and_sample(tmp_path):
    whole = crops(tmp_path, 0, 6)  # two epochs of three steps: 4 + 4 + 3 images
    assert torch.equal(crops(tmp_path, 2, 4), whole[8:])
    assert torch.equal(crops(tmp_path, 0, 6, workers=2), whole)
    assert not torch.equal(crops(tmp_path, 0, 6, seed=1), whole)
    assert len(whole.flatten(1).unique(dim=0)) == 22  # the second epoch has other crops


def test_random_boxes_lie_within_the_image_and_fill_the_range():
    generator = random.Random(0)
    boxes = [random_box(60, 40, generator) for _ in range(4000)]
    areas = [(right - left) * (bottom - top) / 2400 for left, top, right, bottom in boxes]
    ratios = [(right - left) / (bottom - top) for left, top, right, bottom in boxes]
    assert all(left >= 0 and top >= 0 and right <= 60 and bottom <= 40 for left, top, right, bottom in boxes)
    assert min(areas) < 0.1
    assert max(areas) > 0.8
    assert 0.65 < min(ratios) < 0.8
    assert 1.25 < max(ratios) < 1.5
