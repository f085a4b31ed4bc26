"""Images in class folders, in parquet files of the Hugging Face hub's layout, or at the hub: your own, and ImageNet.

ImageNet (ILSVRC 2012): 1,281,167 training and 50,000 validation images of 1000 classes, in class folders `train/` and `val/`,
or as the hub's `ILSVRC/imagenet-1k`. Registration is needed to get it, so it is never downloaded unasked.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Optional

from bitcycle.dataset.base import DatasetInfo, Splits, check_whole, logger, missing
from bitcycle.dataset.fetch import unpack_to_cache
from bitcycle.dataset.hub import has_parquet
from bitcycle.dataset.image_dataset import ImageDatasetOptions
from bitcycle.dataset.image_sources import REMEDY, Encoded, read_folders, read_hub_images
from bitcycle.dataset.images import GREY_MODES, DecodingOptions, EncodedImages, Framing, Images, open_image
from bitcycle.errors import DataError
from bitcycle.settings import MISSING, SettingError, setting
from bitcycle.shapes import ImageShape

HUB = "ILSVRC/imagenet-1k"


@dataclass
class CustomImages(ImageDatasetOptions, DecodingOptions):
    """Options of a data set of your own."""

    path: str = setting(
        MISSING, "the folder, absolute or below data_root: train/ and test/ (or val/), or class folders alone"
    )
    image_size: Optional[int] = setting(
        None,
        "pixels; other images are scaled by the shorter side and cropped; null: that of the first image",
        minimum=4,
        maximum=4096,
    )
    channels: Optional[int] = setting(
        None, "1 (grey) or 3 (colour) channels of the network's input; null: those of the first image", minimum=1
    )
    label_column: Optional[str] = setting(
        None, "parquet column of labels; null: label, labels, fine_label or the only integer one"
    )
    random_crop: bool = setting(
        False, "training images are cut out at random places, sizes (8 to 100 %) and aspect ratios, as for ImageNet"
    )
    resize: Optional[int] = setting(
        None, "pixels of the shorter side before the centre is cut out (ImageNet: 256); null: image_size", minimum=4
    )
    test_fraction: float = setting(
        0.2, "share of each class held out for testing where there is no test split", minimum=0.001, maximum=0.9
    )

    def validate(self) -> None:
        if self.channels not in (None, 1, 3):
            raise SettingError("channels", self.channels, "images are grey or coloured", "use 1, 3 or null")
        if self.resize is not None and self.image_size is not None and self.resize < self.image_size:
            problem = f"is smaller than the image_size={self.image_size} that is cut out of it"
            raise SettingError("resize", self.resize, problem, "use image_size or more, or null")

    def full_info(self, data_root: Path) -> DatasetInfo:
        train, test = self._encoded(data_root)
        first = open_image(train.images[0])
        size = self.image_size or first.size[0]
        if self.image_size is None and first.size[0] != first.size[1]:
            raise DataError(
                f"{train.images[0].origin} is {first.size[0]}x{first.size[1]} pixels; set dataset.image_size"
            )
        if len(train.class_names) < 2:
            raise DataError(f"dataset.path={self.path} holds a single class ({train.class_names[0]}); add another")
        channels = self.channels or (1 if first.mode in GREY_MODES else 3)
        shape = ImageShape(channels, size, len(train.class_names))
        return DatasetInfo(shape, len(train.images), len(test.images))

    def read(self, data_root: Path) -> Splits[Images]:
        """Training and test images, held in memory or decoded batch by batch."""
        splits, shape = self._encoded(data_root), self.full_info(data_root).shape
        assert isinstance(shape, ImageShape)
        resize = self.resize or shape.size
        framings = Framing(shape.size, resize, self.random_crop), Framing(shape.size, resize)
        size_gib = sum(len(split.images) for split in splits) * shape.size**2 * shape.channels / 2**30
        workers = None
        if self.random_crop or size_gib > self.memory_gib:
            logger.info("images of %s are decoded batch by batch, by %d processes", self.name, self.workers)
            workers = self.workers
        train, test = (
            EncodedImages(split.images, split.labels, shape.channels, framing, workers)
            for split, framing in zip(splits, framings, strict=True)
        )
        return Splits(train, test)

    def _encoded(self, data_root: Path) -> tuple[Encoded, Encoded]:
        """Training and test images as they are stored."""
        folder = data_root / Path(self.path).expanduser()  # an absolute path stands for itself
        if not folder.is_dir():
            problem = f"dataset.path={self.path}: {folder} is not a folder"
            raise DataError(f"{problem}. Give an absolute path or one below data_root.")
        if self.name == "image_parquet":
            return read_hub_images(folder, label_column=self.label_column, test_fraction=self.test_fraction)
        return read_folders(folder, self.test_fraction)


@dataclass
class HubImages(CustomImages):
    """A data set of the hub with a column of images and one of labels: dataset=hub dataset.path=owner/name.

    A folder in the hub's layout, absolute or below data_root, is read without network. Runs are named by path, subset and
    revision, not by what these hold.
    """

    path: str = setting(MISSING, "owner/name at the hub, or a folder in its layout")
    subset: Optional[str] = setting(None, "configuration of a data set that has several; null: its default")
    revision: Optional[str] = setting(None, "commit, branch or tag at the hub; null: the newest")
    train_split: str = setting("train", "name of the split to train on")
    test_split: Optional[str] = setting(
        None, "name of the split to test on; null: test, else validation, else test_fraction of the training split"
    )

    def _encoded(self, data_root: Path) -> tuple[Encoded, Encoded]:
        folder = data_root / Path(self.path).expanduser()
        where = folder if folder.is_dir() else self.path
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
        f"the folder with train/ and val/, or with the hub's parquet files, absolute or below data_root; or {HUB}, of which the"
        " library datasets gets 150 GB where it is logged in",
    )
    image_size: Optional[int] = 224
    resize: Optional[int] = 256
    random_crop: bool = True
    flip: bool = True
    mean: list[float] = setting([0.485, 0.456, 0.406], "mean of each channel, pixels in [0, 1]")
    std: list[float] = setting([0.229, 0.224, 0.225], "standard deviation of each channel", minimum=1e-6)

    def full_info(self, data_root: Path) -> DatasetInfo:
        assert self.image_size is not None
        classes, *samples = self.sizes
        return DatasetInfo(ImageShape(3, self.image_size, classes), *samples)

    def read(self, data_root: Path) -> Splits[Images]:
        splits = super().read(data_root)
        found = len(splits.train), len(splits.test)
        check_whole(
            self.name, data_root / self.path, "training and validation images", found, self.full_info(data_root)[1:]
        )
        return splits

    def _encoded(self, data_root: Path) -> tuple[Encoded, Encoded]:
        folder = data_root / self.path
        if self.path == HUB or has_parquet(folder):
            where = folder if folder.is_dir() else HUB
            return read_hub_images(where, test_split="validation", label_column=self.label_column)
        if not folder.is_dir():
            put = "the class folders train/ and val/ of ILSVRC 2012 (image-net.org, registration needed)"
            more = f" Or set dataset.path={HUB} to get it from the hub. dataset=image_folder takes any folder."
            raise missing("ImageNet", folder, put, more)
        return super()._encoded(data_root)


@dataclass
class ImageNetMini(ImageNet):
    """Options of a proxy for ImageNet: 100 photographs of 100 classes in its layout, to try reading and training.

    Its validation images are its training images again: accuracies mean nothing.
    """

    sizes = (100, 100, 100)
    takes_all_if_fewer = True

    name: str = "imagenet_mini"
    path: str = setting(
        "imagenet-mini", "the folder with imagenet-mini.tar, or with train/ and val/, absolute or below data_root"
    )
    image_size: Optional[int] = 112
    resize: Optional[int] = 128

    def _encoded(self, data_root: Path) -> tuple[Encoded, Encoded]:
        folder = data_root / self.path
        archive = folder / "imagenet-mini.tar"
        root = unpack_to_cache(archive) if archive.is_file() and not (folder / "train").is_dir() else folder
        found = next((path for path in (root, root / "imagenet-mini") if (path / "train").is_dir()), None)
        if found is None:
            raise missing(self.name, folder, "imagenet-mini.tar, or the folders train/ and val/ that it holds,")
        return read_folders(found, self.test_fraction)
