"""CIFAR-10 at 16x16 pixels: the real images, averaged over 2x2 pixels, which two CPU cores can train on to convergence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from bitcycle.dataset.base import DatasetInfo
from bitcycle.dataset.cifar import Cifar
from bitcycle.dataset.image_dataset import Splits
from bitcycle.dataset.images import Images
from bitcycle.settings import setting
from bitcycle.shapes import ImageShape


@dataclass
class CifarSmall(Cifar):
    """Options of CIFAR-10 at 16x16 pixels, a proxy of CIFAR-10 with a quarter of its cost; no paper uses it."""

    crop_padding: int = setting(
        2, "training images are padded with this many zeros and cropped at random; 0: no crop", minimum=0
    )

    def full_info(self, data_root: Path) -> DatasetInfo:
        return super().full_info(data_root)._replace(shape=ImageShape(3, 16, self.classes))

    def read(self, data_root: Path) -> Splits:
        full = Cifar.read(replace(self, name="cifar10"), data_root)
        return Splits(_HalvedImages(full.train), _HalvedImages(full.test))


class _HalvedImages(Images):
    """Images at half their size, computed when they are decoded, so that only the chosen ones are."""

    def __init__(self, images: Images) -> None:
        self.images, self.labels = images, images.labels

    def subset(self, indices: Tensor) -> _HalvedImages:
        return _HalvedImages(self.images.subset(indices))

    def decoded(self) -> Images:
        return Images(halve(self.images.decoded().pixels), self.labels)


def halve(pixels: Tensor) -> Tensor:
    """Means over 2x2 pixels, rounded half up: uint8 [N, H, W, C] -> uint8 [N, H/2, W/2, C].

    >>> import torch
    >>> halve(torch.tensor([[0, 1], [2, 255]], dtype=torch.uint8).reshape(1, 2, 2, 1)).item()  # 64.5
    65
    """
    total = sum(pixels[:, i::2, j::2].short() for i in (0, 1) for j in (0, 1))
    assert isinstance(total, Tensor)
    return ((total + 2) // 4).byte()
