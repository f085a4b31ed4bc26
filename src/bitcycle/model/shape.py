"""What a data set asks of a network; each kind of data has its own description, and a network says which kind it takes."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias


class ImageShape(NamedTuple):
    """Images of one size, each of one class: channels, height = width in pixels, number of classes."""

    channels: int
    size: int
    classes: int


Shape: TypeAlias = ImageShape
"""Any of them."""
