"""ImageNet (ILSVRC 2012), 1,281,167 training and 50,000 validation images of 1000 classes, and a tiny proxy of its layout.

Class folders `train/` and `val/` (torchvision lists them), or parquet files in the layout of the hub's `ILSVRC/imagenet-1k`.
Registration is needed to get it, so it is never downloaded unasked. Images are decoded batch by batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Optional

from bitcycle.dataset.base import DatasetInfo, check_whole, missing
from bitcycle.dataset.custom import CustomImages, read_folders, read_hub_images
from bitcycle.dataset.fetch import unpack_to_cache
from bitcycle.dataset.hub import has_parquet
from bitcycle.dataset.image_dataset import ImageDatasetOptions, Splits
from bitcycle.dataset.source import Encoded
from bitcycle.settings import setting
from bitcycle.shapes import ImageShape

HUB = "ILSVRC/imagenet-1k"


@dataclass
class ImageNet(CustomImages):
    """Options of ImageNet. Augmentation and normalisation: He et al. 2016 as in the released code of CPT, cpt_imagenet."""

    name: str = "imagenet"
    path: str = setting(
        "imagenet",
        f"the folder with train/ and val/, or with the hub's parquet files, absolute or below data_root; or {HUB}, of which the"
        " library datasets gets 150 GB where it is logged in",
    )
    image_size: Optional[int] = setting(224, "pixels of the network's input", minimum=4)
    resize: Optional[int] = setting(
        256, "pixels of the shorter side before the centre is cut out for evaluation", minimum=4
    )
    random_crop: bool = setting(True, "training images are cut out at random places, sizes and aspect ratios")
    flip: bool = setting(True, "training images are flipped horizontally at random")
    mean: list[float] = setting([0.485, 0.456, 0.406], "mean of each channel, pixels in [0, 1]")
    std: list[float] = setting([0.229, 0.224, 0.225], "standard deviation of each channel", minimum=1e-6)

    def full_info(self, data_root: Path) -> DatasetInfo:
        assert self.image_size is not None
        return DatasetInfo(ImageShape(3, self.image_size, 1000), 1_281_167, 50_000)

    def read(self, data_root: Path) -> Splits:
        splits = super().read(data_root)
        sizes = len(splits.train), len(splits.test)
        what = "training and validation images"
        check_whole(self.name, data_root / self.path, what, sizes, self.full_info(data_root)[1:])
        return splits

    def _encoded(self, data_root: Path) -> tuple[Encoded, Encoded]:
        folder = data_root / self.path
        if self.path == HUB or has_parquet(folder):
            where = folder if folder.is_dir() else HUB
            return read_hub_images(where, None, None, "train", "validation", self.label_column, self.test_fraction)
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

    name: str = "imagenet_mini"
    path: str = setting(
        "imagenet-mini", "the folder with imagenet-mini.tar, or with train/ and val/, absolute or below data_root"
    )
    image_size: Optional[int] = setting(112, "pixels of the network's input", minimum=4)
    resize: Optional[int] = setting(
        128, "pixels of the shorter side before the centre is cut out for evaluation", minimum=4
    )

    def full_info(self, data_root: Path) -> DatasetInfo:
        assert self.image_size is not None
        return DatasetInfo(ImageShape(3, self.image_size, 100), 100, 100)

    def info(self, data_root: Path) -> DatasetInfo:
        """The samples that are used; `scale=smoke` may ask for more than there are."""
        train, test = (count and min(count, 100) for count in (self.train_samples, self.test_samples))
        return ImageDatasetOptions.info(replace(self, train_samples=train, test_samples=test), data_root)

    def _encoded(self, data_root: Path) -> tuple[Encoded, Encoded]:
        folder = data_root / self.path
        archive = folder / "imagenet-mini.tar"
        root = unpack_to_cache(archive) if archive.is_file() and not (folder / "train").is_dir() else folder
        found = next((path for path in (root, root / "imagenet-mini") if (path / "train").is_dir()), None)
        if found is None:
            raise missing(self.name, folder, "imagenet-mini.tar, or the folders train/ and val/ that it holds,")
        return read_folders(found, self.test_fraction)
