"""Focal loss of the classes and smooth L1 loss of the boxes, for anchors matched with the objects of an image.

    an anchor is positive if its maximum IoU is >= 0.5, negative if it is < 0.4, else ignored; objects may lack anchors
    focal(p, y = 1) = -a (1 - p)^g log p,   focal(p, y = 0) = -(1 - a) p^g log(1 - p),   p clamped to [1e-4, 1 - 1e-4]
    class loss of an image: sum over anchors and classes / max(1, positives)
    box loss of an image:   mean over positives and the four offsets of  d^2 / 2k if d <= k else d - k / 2,   k = 1/9

Source: released code of Better Schedules, cpt_voc; Lin et al. 2017, sections 3 and 4. The loss of a batch is the mean
over images.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from bitcycle import distributed
from bitcycle.task.anchors import encode

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


def match(places: Tensor, boxes: Tensor, labels: Tensor, positive: float = 0.5, negative: float = 0.4) -> Matches:
    """Match the anchors `places` [A, 4] with the objects of each image: boxes [N, M, 4], labels [N, M], `NOTHING` for padding.

    `positive` is the minimum IoU of positive anchors; anchors with an IoU below `negative` are negative.
    """
    from torchvision.ops import box_iou

    if not labels.shape[1]:
        boxes, labels = boxes.new_zeros(len(boxes), 1, 4), labels.new_full((len(labels), 1), NOTHING)
    overlaps = box_iou(places, boxes.flatten(0, 1)).unflatten(1, labels.shape).transpose(0, 1)
    best, index = overlaps.masked_fill((labels == NOTHING)[:, None], -1.0).max(dim=2)
    matched = boxes.gather(1, index[..., None].expand(-1, -1, 4))
    is_positive = best >= positive
    return Matches(is_positive, ~is_positive & (best >= negative), matched, labels.gather(1, index))


def focal_terms(scores: Tensor, targets: Tensor, alpha: float = 0.25, gamma: float = 2.0) -> Tensor:
    """Focal loss of each score for its boolean target; scores and targets have the same shape."""
    scores = scores.clamp(CLAMP, 1 - CLAMP)
    of_target = torch.where(targets, scores, 1 - scores)
    weight = torch.where(targets, alpha, 1 - alpha) * (1 - of_target) ** gamma
    return -weight * of_target.log()


def smooth_l1(differences: Tensor) -> Tensor:
    """Box loss of each difference of offsets."""
    distance = differences.abs()
    return torch.where(distance <= KNEE, distance**2 / (2 * KNEE), distance - KNEE / 2)


def detection_losses(
    scores: Tensor, offsets: Tensor, places: Tensor, matches: Matches, alpha: float = 0.25, gamma: float = 2.0
) -> DetectionLosses:
    """Losses of a batch, means over its images, of scores [N, A, K] in (0, 1), offsets [N, A, 4] and anchors `places` [A, 4]."""
    positives = matches.positive.sum(dim=1)
    classes = torch.arange(scores.shape[2], device=scores.device)
    targets = (matches.labels[..., None] == classes) & matches.positive[..., None]
    terms = focal_terms(scores, targets, alpha, gamma).masked_fill(matches.ignored[..., None], 0.0)
    class_loss = terms.sum(dim=(1, 2)) / positives.clamp_min(1)
    # unmatched anchors get finite offsets, since 0 times infinity is nan
    wanted = encode(torch.where(matches.positive[..., None], matches.boxes, places), places)
    distances = smooth_l1(wanted - offsets).masked_fill(~matches.positive[..., None], 0.0)
    box_loss = distances.sum(dim=(1, 2)) / (4 * positives).clamp_min(1)
    right = (scores.detach().argmax(dim=2) == matches.labels) & matches.positive
    return DetectionLosses(class_loss.mean(), box_loss.mean(), distributed.ratio(right.sum(), positives.sum()))
