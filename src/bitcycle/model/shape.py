"""What a data set asks of a network; each kind of data has its own description, and a network says which kind it takes."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias, Union


class ImageShape(NamedTuple):
    """Images of one size, each of one class: channels, height = width in pixels, number of classes."""

    channels: int
    size: int
    classes: int


class DetectionShape(NamedTuple):
    """Images with objects in boxes: channels, height and width in pixels of a typical one (they differ), number of classes."""

    channels: int
    height: int
    width: int
    classes: int


Shape: TypeAlias = Union[
    ImageShape,
    DetectionShape,
]
"""Any of them."""
