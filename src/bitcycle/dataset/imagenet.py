"""ImageNet (ILSVRC 2012): 1,281,167 training and 50,000 validation images in class folders `train/` and `val/`.

Registration is needed to get it, so it is never downloaded. Images are decoded batch by batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from bitcycle.dataset.base import DatasetInfo
from bitcycle.dataset.custom import CustomImages
from bitcycle.dataset.image_dataset import Splits
from bitcycle.errors import DataError
from bitcycle.settings import setting
from bitcycle.shapes import ImageShape

TRAIN_SAMPLES, VALIDATION_SAMPLES, CLASSES = 1_281_167, 50_000, 1000


@dataclass
class ImageNet(CustomImages):
    """Options of ImageNet. Augmentation and normalisation: He et al. 2016 as in the released code of CPT, cpt_imagenet."""

    name: str = "imagenet"
    path: str = setting("imagenet", "the folder with train/ and val/, absolute or below data_root")
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
        return DatasetInfo(ImageShape(3, self.image_size, CLASSES), TRAIN_SAMPLES, VALIDATION_SAMPLES)

    def read(self, data_root: Path) -> Splits:
        folder = data_root / self.path
        if not folder.is_dir():
            raise DataError(
                f"ImageNet is not in {folder}. Get ILSVRC 2012 from image-net.org (registration needed), put its class folders "
                f"into {folder}/train and {folder}/val, or set dataset.path or data_root. dataset=image_folder takes any folder."
            )
        splits = super().read(data_root)
        sizes = len(splits.train), len(splits.test)
        if sizes != (TRAIN_SAMPLES, VALIDATION_SAMPLES):
            raise DataError(
                f"{folder} holds {sizes[0]} training and {sizes[1]} validation images; ImageNet has {TRAIN_SAMPLES} and "
                f"{VALIDATION_SAMPLES}. Complete it, or use dataset=image_folder for another set of images."
            )
        return splits
