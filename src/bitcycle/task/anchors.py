"""Anchors of a detector, boxes as offsets from them, and the loss for anchors matched with the objects of an image.

    base of level l: 2^(l+2), l = 3..7;   scales 2^(0, 1/3, 2/3);   height / width 1/2, 1, 2;   stride 2^l, centred on each cell
    offsets of box g from anchor a, sizes of g at least one pixel:
        (cx_g - cx_a) / w_a / 0.1,   (cy_g - cy_a) / h_a / 0.1,   log(w_g / w_a) / 0.2,   log(h_g / h_a) / 0.2
    an anchor is positive if its maximum IoU is >= 0.5, negative if it is < 0.4, else ignored; objects may lack anchors
    focal(p, y = 1) = -a (1 - p)^g log p,   focal(p, y = 0) = -(1 - a) p^g log(1 - p),   p clamped to [1e-4, 1 - 1e-4]
    class loss of an image: sum over anchors and classes / max(1, positives)
    box loss of an image:   mean over positives and the four offsets of  d^2 / 2k if d <= k else d - k / 2,   k = 1/9

Boxes are x1, y1, x2, y2 in pixels; width is x2 - x1. The loss of a batch is the mean over images.

Source: Lin et al. 2017 (RetinaNet), sections 3 and 4; scale of the offsets and losses: released code of Better Schedules,
cpt_voc.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from bitcycle import distributed
from bitcycle.device import to_device

PYRAMID_LEVELS = (3, 4, 5, 6, 7)
OCTAVES = (2**0, 2 ** (1 / 3), 2 ** (2 / 3))
RATIOS = (0.5, 1.0, 2.0)
OFFSET_SCALE = (0.1, 0.1, 0.2, 0.2)


def cell_anchors(level: int) -> Tensor:
    """The nine anchors [9, 4] of a level, centred on the origin, ordered by ratio, then by scale."""
    base = 2 ** (level + 2)
    sizes = [(base * step / math.sqrt(ratio), base * step * math.sqrt(ratio)) for ratio in RATIOS for step in OCTAVES]
    return torch.tensor([[-w / 2, -h / 2, w / 2, h / 2] for w, h in sizes], dtype=torch.float64)


@lru_cache(maxsize=16)
def anchors(height: int, width: int, device: torch.device | None = None) -> Tensor:
    """All anchors [A, 4] of an image, level by level, row by row.

    >>> anchors(96, 128).shape
    torch.Size([2313, 4])
    """
    found = []
    for level in PYRAMID_LEVELS:
        stride = 2**level
        rows, columns = (torch.arange(-(-size // stride)) for size in (height, width))
        y, x = torch.meshgrid((rows + 0.5) * stride, (columns + 0.5) * stride, indexing="ij")
        centres = torch.stack([x, y, x, y], dim=-1).reshape(-1, 1, 4)
        found.append((centres + cell_anchors(level)).reshape(-1, 4))
    found_here = torch.cat(found).float()
    return found_here if device is None else to_device(found_here, device)


@lru_cache(maxsize=4)
def _offset_scale(dtype: torch.dtype, device: torch.device) -> Tensor:
    """OFFSET_SCALE on a device, copied once and not in every step."""
    return torch.tensor(OFFSET_SCALE, dtype=dtype, device=device)


def _centres_and_sizes(boxes: Tensor) -> tuple[Tensor, Tensor]:
    sizes = boxes[..., 2:] - boxes[..., :2]
    return boxes[..., :2] + sizes / 2, sizes


def offsets_of(boxes: Tensor, places: Tensor) -> Tensor:
    """Offsets [..., A, 4] of boxes [..., A, 4] from anchors [A, 4]."""
    (anchor_centres, anchor_sizes), (centres, sizes) = _centres_and_sizes(places), _centres_and_sizes(boxes)
    offsets = [(centres - anchor_centres) / anchor_sizes, (sizes.clamp_min(1) / anchor_sizes).log()]
    return torch.cat(offsets, dim=-1) / _offset_scale(boxes.dtype, boxes.device)


def boxes_of(offsets: Tensor, places: Tensor) -> Tensor:
    """Boxes [..., A, 4] from offsets [..., A, 4] of anchors [A, 4]; the inverse of `offsets_of`."""
    offsets = offsets * _offset_scale(offsets.dtype, offsets.device)
    anchor_centres, anchor_sizes = _centres_and_sizes(places)
    centres = anchor_centres + offsets[..., :2] * anchor_sizes
    half = offsets[..., 2:].exp() * anchor_sizes / 2
    return torch.cat([centres - half, centres + half], dim=-1)


POSITIVE, NEGATIVE = 0.5, 0.4
"""Minimum IoU of a positive anchor, and IoU below which one is negative."""
ALPHA, GAMMA = 0.25, 2.0
"""Weight of positive targets and focusing exponent of the focal loss."""
CLAMP = 1e-4
"""Minimum distance of scores from 0 and 1."""
KNEE = 1 / 9
"""Distance up to which the box loss is quadratic."""
NOTHING = -1
"""Class of a padding row of `boxes`."""


class Matches(NamedTuple):
    """Targets of the anchors of each image: positive and ignored ones, bool [N, A]; box [N, A, 4] and class [N, A] of the
    object with maximum IoU, undefined if the image has no objects."""

    positive: Tensor
    ignored: Tensor
    boxes: Tensor
    labels: Tensor


class DetectionLosses(NamedTuple):
    """Class loss, box loss and fraction of positive anchors whose highest score is that of their class; scalars."""

    classes: Tensor
    boxes: Tensor
    right: Tensor


def match(places: Tensor, boxes: Tensor, labels: Tensor) -> Matches:
    """Match the anchors `places` [A, 4] with the objects of each image: boxes [N, M, 4], labels [N, M], `NOTHING` for padding."""
    from torchvision.ops import box_iou

    if not labels.shape[1]:
        boxes, labels = boxes.new_zeros(len(boxes), 1, 4), labels.new_full((len(labels), 1), NOTHING)
    overlaps = box_iou(places, boxes.flatten(0, 1)).unflatten(1, labels.shape).transpose(0, 1)
    best, index = overlaps.masked_fill((labels == NOTHING)[:, None], -1.0).max(dim=2)
    matched = boxes.gather(1, index[..., None].expand(-1, -1, 4))
    is_positive = best >= POSITIVE
    return Matches(is_positive, ~is_positive & (best >= NEGATIVE), matched, labels.gather(1, index))


def focal_terms(scores: Tensor, targets: Tensor) -> Tensor:
    """Focal loss of each score for its boolean target; scores and targets have the same shape."""
    scores = scores.clamp(CLAMP, 1 - CLAMP)
    of_target = torch.where(targets, scores, 1 - scores)
    weight = torch.where(targets, ALPHA, 1 - ALPHA) * (1 - of_target) ** GAMMA
    return -weight * of_target.log()


def smooth_l1(differences: Tensor) -> Tensor:
    """Box loss of each difference of offsets. Any shape, kept."""
    distance = differences.abs()
    return torch.where(distance <= KNEE, distance**2 / (2 * KNEE), distance - KNEE / 2)


def detection_losses(scores: Tensor, offsets: Tensor, places: Tensor, matches: Matches) -> DetectionLosses:
    """Losses of a batch, means over its images, of scores [N, A, K] in (0, 1), offsets [N, A, 4] and anchors `places` [A, 4]."""
    positives = matches.positive.sum(dim=1)
    classes = torch.arange(scores.shape[2], device=scores.device)
    targets = (matches.labels[..., None] == classes) & matches.positive[..., None]
    terms = focal_terms(scores, targets).masked_fill(matches.ignored[..., None], 0.0)
    class_loss = terms.sum(dim=(1, 2)) / positives.clamp_min(1)
    # unmatched anchors get finite offsets, since 0 times infinity is nan
    wanted = offsets_of(torch.where(matches.positive[..., None], matches.boxes, places), places)
    distances = smooth_l1(wanted - offsets).masked_fill(~matches.positive[..., None], 0.0)
    box_loss = distances.sum(dim=(1, 2)) / (4 * positives).clamp_min(1)
    right = (scores.detach().argmax(dim=2) == matches.labels) & matches.positive
    return DetectionLosses(class_loss.mean(), box_loss.mean(), distributed.ratio(right.sum(), positives.sum()))
