"""Anchors of a detector, and boxes as offsets from them. Boxes are x1, y1, x2, y2 in pixels; width is x2 - x1.

    base of level l: 2^(l+2), l = 3..7;   scales 2^(0, 1/3, 2/3);   height / width 1/2, 1, 2;   stride 2^l, centred on each cell
    offsets of box g from anchor a, sizes of g at least one pixel:
        (cx_g - cx_a) / w_a / 0.1,   (cy_g - cy_a) / h_a / 0.1,   log(w_g / w_a) / 0.2,   log(h_g / h_a) / 0.2

Source: Lin et al. 2017 (RetinaNet), section 4; scale of the offsets: released code of Better Schedules, cpt_voc.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

LEVELS = (3, 4, 5, 6, 7)
SCALES = (2**0, 2 ** (1 / 3), 2 ** (2 / 3))
RATIOS = (0.5, 1.0, 2.0)
OFFSET_SCALE = (0.1, 0.1, 0.2, 0.2)


def cell_anchors(level: int) -> Tensor:
    """The nine anchors [9, 4] of a level, centred on the origin, ordered by ratio, then by scale."""
    base = 2 ** (level + 2)
    sizes = [(base * scale / math.sqrt(ratio), base * scale * math.sqrt(ratio)) for ratio in RATIOS for scale in SCALES]
    return torch.tensor([[-w / 2, -h / 2, w / 2, h / 2] for w, h in sizes], dtype=torch.float64)


@lru_cache(maxsize=16)
def anchors(height: int, width: int, device: torch.device | None = None) -> Tensor:
    """All anchors [A, 4] of an image, level by level, row by row.

    >>> anchors(96, 128).shape
    torch.Size([2313, 4])
    """
    found = []
    for level in LEVELS:
        stride = 2**level
        rows, columns = (torch.arange(-(-size // stride)) for size in (height, width))
        y, x = torch.meshgrid((rows + 0.5) * stride, (columns + 0.5) * stride, indexing="ij")
        centres = torch.stack([x, y, x, y], dim=-1).reshape(-1, 1, 4)
        found.append((centres + cell_anchors(level)).reshape(-1, 4))
    return torch.cat(found).float().to(device)


def _centres_and_sizes(boxes: Tensor) -> tuple[Tensor, Tensor]:
    sizes = boxes[..., 2:] - boxes[..., :2]
    return boxes[..., :2] + sizes / 2, sizes


def encode(boxes: Tensor, places: Tensor) -> Tensor:
    """Offsets [..., A, 4] of boxes [..., A, 4] from anchors [A, 4]."""
    (anchor_centres, anchor_sizes), (centres, sizes) = _centres_and_sizes(places), _centres_and_sizes(boxes)
    offsets = [(centres - anchor_centres) / anchor_sizes, (sizes.clamp_min(1) / anchor_sizes).log()]
    return torch.cat(offsets, dim=-1) / boxes.new_tensor(OFFSET_SCALE)


def decode(offsets: Tensor, places: Tensor) -> Tensor:
    """Boxes [..., A, 4] from offsets [..., A, 4] of anchors [A, 4]; the inverse of `encode`."""
    offsets = offsets * offsets.new_tensor(OFFSET_SCALE)
    anchor_centres, anchor_sizes = _centres_and_sizes(places)
    centres = anchor_centres + offsets[..., :2] * anchor_sizes
    half = offsets[..., 2:].exp() * anchor_sizes / 2
    return torch.cat([centres - half, centres + half], dim=-1)
