"""Image datasets: class folders, parquet files in the hub's layout, datasets of the hub, ImageNet, CIFAR and digits.

ImageNet (ILSVRC 2012): 1,281,167 training and 50,000 validation images of 1000 classes, in class folders `train/` and `val/`,
or as the hub's `ILSVRC/imagenet-1k`. It requires registration and is never downloaded without being requested.

CIFAR: 50,000 training and 10,000 test images of 32x32 pixels. Searched under `data_root` as the official Python files,
Hugging Face parquet files, or class folders; otherwise loaded as `uoft-cs/cifar10` or `uoft-cs/cifar100` from the cache
of `datasets` or the hub.

Digits: 1,797 greyscale images of 8x8 pixels, included in scikit-learn, the test half of the UCI "Optical Recognition of
Handwritten Digits" data. Four fifths of each class are training, one fifth test images; the split is fixed for all
runs.
"""

import itertools
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, Optional

import torch
from torch import Tensor

from bitcycle.dataset.base import DatasetInfo, Splits, check_whole, logger, missing
from bitcycle.dataset.image_dataset import ImageDatasetOptions
from bitcycle.dataset.image_sources import REMEDY, hold_out, read_folders, read_hub_images
from bitcycle.dataset.images import GREY_MODES, MEAN, STD, DecodingOptions, EncodedImages, Framing, Images, open_image
from bitcycle.dataset.sources import has_parquet, unpack_to_cache
from bitcycle.errors import UNREADABLE, DataError
from bitcycle.optional_imports import install_command
from bitcycle.settings import MISSING, SettingError, setting
from bitcycle.shapes import ImageShape

HUB = "ILSVRC/imagenet-1k"


@dataclass
class CustomImages(ImageDatasetOptions, DecodingOptions):
    """Options of a user-defined image dataset."""

    path: str = setting(MISSING, "folder, absolute or below data_root: train/ and test/ (or val/), or class folders")
    image_size: Optional[int] = setting(
        None, "size in pixels to scale and crop images to; null: that of the first image", minimum=4, maximum=4096
    )
    channels: Optional[int] = setting(None, "1 (greyscale) or 3 (colour); null: as the first image", minimum=1)
    label_column: Optional[str] = setting(None, "null: label, labels, fine_label or the only integer column")
    random_crop: bool = setting(False, "random resized crops of training images: 8 to 100 % of the area (ImageNet)")
    resize: Optional[int] = setting(None, "shorter side before the crop (ImageNet: 256); null: image_size", minimum=4)
    test_fraction: float = setting(0.2, "test share of each class without a test split", minimum=0.001, maximum=0.9)

    def validate(self) -> None:
        if self.channels not in (None, 1, 3):
            raise SettingError("channels", self.channels, "images are greyscale or colour", "use 1, 3 or null")
        if self.resize is not None and self.image_size is not None and self.resize < self.image_size:
            problem = f"is smaller than the crop, image_size={self.image_size}"
            raise SettingError("resize", self.resize, problem, "use image_size or more, or null")

    def full_info(self, data_root: Path) -> DatasetInfo:
        train, test = self._encoded(data_root)
        first = open_image(train.encoded[0])
        size = self.image_size or first.size[0]
        if self.image_size is None and first.size[0] != first.size[1]:
            origin = train.encoded[0].origin
            problem = f"{origin} has {first.size[0]} x {first.size[1]} pixels, and images must be square"
            remedy = f"set the size to scale and crop all images to, for instance dataset.image_size={min(first.size)}"
            raise SettingError("image_size", None, problem, remedy)
        if len(train.class_names) < 2:
            raise DataError(f"dataset.path={self.path} has a single class ({train.class_names[0]}); add another")
        channels = self.channels or (1 if first.mode in GREY_MODES else 3)
        replace(self, image_size=size)  # refuses a smaller `resize`
        return DatasetInfo(ImageShape(channels, size, len(train.class_names)), len(train), len(test))

    def read(self, data_root: Path) -> Splits[Images]:
        """Training and test images, decoded in memory or batch by batch."""
        splits, shape = self._encoded(data_root), self.full_info(data_root).shape
        framing = Framing(shape.size, self.resize or shape.size, self.random_crop)
        size_gib = sum(map(len, splits)) * shape.size**2 * shape.channels / 2**30
        workers = None
        if self.random_crop or size_gib > self.memory_gib:
            logger.info("images of %s are decoded batch by batch, by %d processes", self.name, self.workers)
            workers = self.workers
        return Splits(*(replace(split, channels=shape.channels, framing=framing, workers=workers) for split in splits))

    def place(self, data_root: Path) -> Path | None:
        folder = self.located(data_root, self.path)
        return folder if folder.is_dir() else None

    def absent(self, data_root: Path) -> DataError:
        problem = f"dataset.path={self.path}: {self.located(data_root, self.path)} is not a folder"
        return DataError(f"{problem}. Give an absolute path or one below data_root.")

    def _encoded(self, data_root: Path) -> tuple[EncodedImages, EncodedImages]:
        """Training and test images as stored."""
        folder = self.place(data_root)
        if folder is None:
            raise self.absent(data_root)
        if self.name == "image_parquet":
            return read_hub_images(folder, label_column=self.label_column, test_fraction=self.test_fraction)
        return read_folders(folder, self.test_fraction)


@dataclass
class HubImages(CustomImages):
    """A dataset of the hub with a column of images and a column of labels: dataset=hub dataset.path=owner/name.

    A folder in the hub's layout, absolute or below data_root, is read without network access. Run names depend on path,
    subset and revision, not on the content.
    """

    path: str = setting(MISSING, "owner/name on the hub, or a folder in its layout")
    subset: Optional[str] = setting(
        None, "configuration of the dataset, in a folder its subfolder; null: its default, or all"
    )
    revision: Optional[str] = setting(None, "commit, branch or tag on the hub; null: the latest")
    train_split: str = setting("train", "name of the training split")
    test_split: Optional[str] = setting(None, "test split; null: test, validation, or test_fraction of train")

    def absent(self, data_root: Path) -> DataError:
        return DataError(f"{self.path} is not a folder below {data_root}; it is searched on the hub. {REMEDY}")

    def _encoded(self, data_root: Path) -> tuple[EncodedImages, EncodedImages]:
        where = self.place(data_root) or self.path
        splits = self.train_split, self.test_split
        return read_hub_images(
            where, REMEDY, self.subset, self.revision, *splits, self.label_column, self.test_fraction
        )


@dataclass
class ImageNet(CustomImages):
    """Options of ImageNet. Augmentation and normalisation: He et al. 2016 as in the released code of CPT, cpt_imagenet."""

    sizes: ClassVar[tuple[int, int, int]] = (1000, 1_281_167, 50_000)
    """Classes, training and validation images."""

    name: str = "imagenet"
    path: str = setting(
        "imagenet",
        f"folder of train/ and val/, or of the hub's parquet files; or {HUB}, a download of 150 GB that requires login",
    )
    image_size: Optional[int] = setting(
        224, "size in pixels to scale and crop images to; null: 224", minimum=4, maximum=4096
    )
    channels: Optional[int] = setting(None, "1 (greyscale) or 3 (colour); null: 3", minimum=1)
    resize: Optional[int] = 256
    random_crop: bool = True
    flip: bool = True
    mean: list[float] = setting(MEAN, "mean of each channel, pixels in [0, 1]")
    std: list[float] = setting(STD, "standard deviation of each channel", minimum=1e-6)

    def full_info(self, data_root: Path) -> DatasetInfo:
        return DatasetInfo(ImageShape(self.channels or 3, self.image_size or 224, self.sizes[0]), *self.sizes[1:])

    def read(self, data_root: Path) -> Splits[Images]:
        splits = super().read(data_root)
        found = len(splits.train), len(splits.test)
        check_whole(self.name, data_root / self.path, "training and validation images", found, self.sizes[1:])
        return splits

    def _encoded(self, data_root: Path) -> tuple[EncodedImages, EncodedImages]:
        folder = self.place(data_root)
        if self.path == HUB or (folder is not None and has_parquet(folder)):
            return read_hub_images(folder or HUB, test_split="validation", label_column=self.label_column)
        return super()._encoded(data_root)

    def absent(self, data_root: Path) -> DataError:
        put = "the class folders train/ and val/ of ILSVRC 2012 (image-net.org, registration needed)"
        more = f" Or set dataset.path={HUB} to download it from the hub. dataset=image_folder reads any folder."
        return missing("ImageNet", self.located(data_root, self.path), put, more)


@dataclass
class ImageNetMini(ImageNet):
    """Options of a proxy for ImageNet: 100 photographs of 100 classes in its layout, for trying the pipeline.

    Its validation images are its training images, so accuracies are meaningless.
    """

    sizes = (100, 100, 100)
    takes_all_if_fewer = True

    name: str = "imagenet_mini"
    path: str = setting("imagenet-mini", "folder of imagenet-mini.tar, or train/ and val/, absolute or below data_root")
    image_size: Optional[int] = 112
    resize: Optional[int] = 128

    def place(self, data_root: Path) -> Path | None:
        folder = self.located(data_root, self.path)
        places = folder, folder / "imagenet-mini", folder / "imagenet-mini.tar"
        return next((path for path in places if path.is_file() or (path / "train").is_dir()), None)

    def absent(self, data_root: Path) -> DataError:
        folder = self.located(data_root, self.path)
        return missing(self.name, folder, "imagenet-mini.tar, or its folders train/ and val/,")

    def _encoded(self, data_root: Path) -> tuple[EncodedImages, EncodedImages]:
        found = self.place(data_root)
        if found is not None and found.is_file():
            root = unpack_to_cache(found)
            found = next((path for path in (root, root / "imagenet-mini") if (path / "train").is_dir()), None)
        if found is None:
            raise self.absent(data_root)
        return read_folders(found, self.test_fraction)


TRAIN_SAMPLES, TEST_SAMPLES = 50_000, 10_000
JPEG = b"\xff\xd8"
"""The first bytes of a JPEG file."""
OFFICIAL = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}


@dataclass
class Cifar(ImageDatasetOptions):
    """Options of CIFAR-10 and CIFAR-100. Normalisation and augmentation: released code of CPT, modules/data.py."""

    mean: list[float] = setting([0.4914, 0.4822, 0.4465], "mean of each channel, pixels in [0, 1]")
    std: list[float] = setting(
        [0.2023, 0.1994, 0.2010], "standard deviation of each channel (the released code's)", minimum=1e-6
    )
    crop_padding: int = 4
    flip: bool = True

    equal_classes = True

    @property
    def classes(self) -> int:
        """Number of classes."""
        return 100 if self.name == "cifar100" else 10

    def full_info(self, data_root: Path) -> DatasetInfo:
        return DatasetInfo(ImageShape(3, 32, self.classes), TRAIN_SAMPLES, TEST_SAMPLES)

    @property
    def source(self) -> str:
        """The whole dataset, cifar10 or cifar100, which `name` may be a variant of."""
        return f"cifar{self.classes}"

    def place(self, data_root: Path) -> Path | None:
        places = data_root / self.source, data_root / "uoft-cs" / self.source
        official = filter(self._is_official, (*places, data_root))
        folders = (place for place in places[:1] if (place / "train").is_dir())
        return next(itertools.chain(official, filter(has_parquet, places), folders), None)

    def absent(self, data_root: Path) -> DataError:
        name = self.source
        put = f"{name}/train-*.parquet and test-*.parquet, {name}/train/CLASS/*.png and test/, or {name}/{OFFICIAL[name]},"
        return missing(name, data_root, put, " dataset=digits needs no download.")

    def read(self, data_root: Path) -> Splits[Images]:
        place = self.place(data_root)
        if place is None or (has_parquet(place) and not self._is_official(place)):
            where = place or self._hub
            logger.info("reading the images of %s from the cache of datasets or from the hub", where)
        return self._stored(place, data_root)

    @property
    def _hub(self) -> str:
        return f"uoft-cs/{self.source}"

    def _stored(self, place: Path | None, data_root: Path) -> Splits[Images]:
        if place is not None and self._is_official(place):
            return self._checked(self._read_official(place), place)
        if place is not None and not has_parquet(place):
            return self._checked(Splits(*read_folders(place, 0.2)), place)
        found = read_hub_images(place or self._hub, str(self.absent(data_root)), test_split="test")
        return self._checked(Splits(*found), place or self._hub)

    def remark(self, data_root: Path) -> str:
        """Whether the images are JPEG: the official ones are lossless."""
        place = self.place(data_root)
        if place is not None and self._is_official(place):
            return ""
        train = self._stored(place, data_root).train  # read before, and kept
        lossy = isinstance(train, EncodedImages) and train.encoded[0].read().startswith(JPEG)
        return "re-encoded as JPEG" if lossy else ""

    def _is_official(self, folder: Path) -> bool:
        return (folder / OFFICIAL[self.source]).is_dir()

    def _read_official(self, folder: Path) -> Splits[Images]:
        from torchvision.datasets import CIFAR10, CIFAR100

        official = CIFAR10 if self.classes == 10 else CIFAR100
        try:
            found = [official(str(folder), train) for train in (True, False)]
        except UNREADABLE as error:
            problem = f"cannot read the official files in {folder}: {type(error).__name__}: {str(error).split('. ')[0]}"
            raise DataError(f"{problem}. Delete it and unpack the official archive again.") from error
        return Splits(*(Images(torch.from_numpy(split.data), torch.tensor(split.targets)) for split in found))

    def _checked(self, splits: Splits[Images], origin: Path | str) -> Splits[Images]:
        """Reject an incomplete dataset."""
        labels = torch.cat([splits.train.labels, splits.test.labels])
        found = len(splits.train), len(splits.test), len(labels.unique()), int(labels.max())
        expected = TRAIN_SAMPLES, TEST_SAMPLES, self.classes, self.classes - 1
        what = "training images, test images, distinct labels and highest label"
        check_whole(self.name, origin, what, found, expected)
        return splits


@dataclass
class CifarSmall(Cifar):
    """Options of CIFAR-10 at 16x16 pixels, averaged over 2x2 pixels: a proxy with a quarter of the cost.

    Training to convergence is feasible on two CPU cores; no paper uses it.
    """

    crop_padding: int = 2

    def full_info(self, data_root: Path) -> DatasetInfo:
        return super().full_info(data_root)._replace(shape=ImageShape(3, 16, self.classes))

    def remark(self, data_root: Path) -> str:
        return ""  # no official data have these images

    def load(self, data_root: Path, seed: int) -> Splits[Images]:
        splits = super().load(data_root, seed)
        return Splits(*(split and Images(halve(split.pixels), split.labels) for split in splits))  # type: ignore[arg-type]


def halve(pixels: Tensor) -> Tensor:
    """Means over 2x2 pixels, rounded half up: uint8 [N, H, W, C] -> uint8 [N, H/2, W/2, C].

    >>> import torch
    >>> halve(torch.tensor([[0, 1], [2, 255]], dtype=torch.uint8).reshape(1, 2, 2, 1)).item()  # 64.5
    65
    """
    total = pixels[:, ::2].short() + pixels[:, 1::2]
    return ((total[:, :, ::2] + total[:, :, 1::2] + 2) // 4).byte()


@dataclass
class Digits(ImageDatasetOptions):
    """Options of the digits. Differs from CIFAR's recipe: no flips, since mirrored digits are not digits."""

    name: str = "digits"
    mean: list[float] = setting([0.3060], "mean of each channel, pixels in [0, 1]")
    std: list[float] = setting([0.3763], "standard deviation of each channel", minimum=1e-6)
    crop_padding: int = 1

    def place(self, data_root: Path) -> Path | None:
        package = find_spec("sklearn")
        return Path(package.origin).parent if package and package.origin else None

    def absent(self, data_root: Path) -> DataError:
        return DataError(f"the digits are part of scikit-learn. Install it: {install_command('images')}")

    def full_info(self, data_root: Path) -> DatasetInfo:
        return DatasetInfo(ImageShape(1, 8, 10), 1438, 359)

    def read(self, data_root: Path) -> Splits[Images]:
        whole = _read_digits()
        held_out = hold_out(whole.labels, 0.2)
        return Splits(whole.subset(~held_out), whole.subset(held_out))


@cache  # parsing the text file takes half a second
def _read_digits() -> Images:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    pixels = torch.from_numpy(images.reshape(-1, 8, 8, 1) * (255 / 16)).round().to(torch.uint8)
    return Images(pixels, torch.from_numpy(labels).long())
