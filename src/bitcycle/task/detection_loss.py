"""Focal loss of the classes and smooth L1 loss of the boxes, for anchors that are matched with the objects of an image.

    an anchor is positive where its best overlap is >= 0.5, negative where it is < 0.4, else ignored; no object is forced on one
    focal(p, y = 1) = -a (1 - p)^g log p,   focal(p, y = 0) = -(1 - a) p^g log(1 - p),   p clamped to [1e-4, 1 - 1e-4]
    class loss of an image: sum over anchors and classes / max(1, positives)
    box loss of an image:   mean over positives and the four offsets of  d^2 / 2k if d <= k else d - k / 2,   k = 1/9

Source: released code of Better Schedules, cpt_voc; Lin et al. 2017, sections 3 and 4. The mean over a batch is taken by images.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from bitcycle import distributed
from bitcycle.task.anchors import encode, intersection_over_union

CLAMP = 1e-4
"""Minimum distance of scores from 0 and 1."""
KNEE = 1 / 9
"""Distance up to which the box loss is quadratic."""
NOTHING = -1
"""Class number of a row of `boxes` that holds no object."""


class Matches(NamedTuple):
    """The targets of the anchors of an image.

    Attributes:
        positive, ignored: bool [N, A].
        boxes: [N, A, 4], the object with the greatest overlap.
        labels: [N, A], its class; meaningless where there is no object.
    """

    positive: Tensor
    ignored: Tensor
    boxes: Tensor
    labels: Tensor


class DetectionLosses(NamedTuple):
    """Class loss, box loss and the share of positive anchors whose highest score is that of their class; scalars."""

    classes: Tensor
    boxes: Tensor
    right: Tensor


def match(places: Tensor, boxes: Tensor, labels: Tensor, positive: float = 0.5, negative: float = 0.4) -> Matches:
    """Match anchors [A, 4] with the objects of each image.

    Args:
        places: the anchors.
        boxes: [N, M, 4]; rows of no object count nothing.
        labels: [N, M], `NOTHING` for no object.
        positive, negative: overlaps from which and below which an anchor is positive and negative.
    """
    if not labels.shape[1]:
        boxes, labels = boxes.new_zeros(len(boxes), 1, 4), labels.new_full((len(labels), 1), NOTHING)
    overlaps = intersection_over_union(places, boxes).masked_fill((labels == NOTHING)[:, None], -1.0)
    best, index = overlaps.max(dim=2)
    matched = boxes.gather(1, index[..., None].expand(-1, -1, 4))
    is_positive = best >= positive
    return Matches(is_positive, ~is_positive & (best >= negative), matched, labels.gather(1, index))


def focal_terms(scores: Tensor, targets: Tensor, alpha: float = 0.25, gamma: float = 2.0) -> Tensor:
    """The focal loss of each score against its target, true or false; shapes alike."""
    scores = scores.clamp(CLAMP, 1 - CLAMP)
    of_target = torch.where(targets, scores, 1 - scores)
    weight = torch.where(targets, alpha, 1 - alpha) * (1 - of_target) ** gamma
    return -weight * of_target.log()


def smooth_l1(differences: Tensor) -> Tensor:
    """The box loss of each difference of offsets."""
    distance = differences.abs()
    return torch.where(distance <= KNEE, distance**2 / (2 * KNEE), distance - KNEE / 2)


def detection_losses(
    scores: Tensor, offsets: Tensor, places: Tensor, matches: Matches, alpha: float = 0.25, gamma: float = 2.0
) -> DetectionLosses:
    """Losses of a batch, means over its images.

    Args:
        scores: [N, A, K], between 0 and 1.
        offsets: [N, A, 4].
        places: the anchors [A, 4].
        matches: targets of the anchors.
        alpha, gamma: of the focal loss.
    """
    positives = matches.positive.sum(dim=1)
    classes = torch.arange(scores.shape[2], device=scores.device)
    targets = (matches.labels[..., None] == classes) & matches.positive[..., None]
    terms = focal_terms(scores, targets, alpha, gamma).masked_fill(matches.ignored[..., None], 0.0)
    class_loss = terms.sum(dim=(1, 2)) / positives.clamp_min(1)
    # unmatched anchors get a finite offset, as 0 times infinity would be nan
    wanted = encode(torch.where(matches.positive[..., None], matches.boxes, places), places)
    distances = smooth_l1(wanted - offsets).masked_fill(~matches.positive[..., None], 0.0)
    box_loss = distances.sum(dim=(1, 2)) / (4 * positives).clamp_min(1)
    right = (scores.detach().argmax(dim=2) == matches.labels) & matches.positive
    return DetectionLosses(class_loss.mean(), box_loss.mean(), distributed.ratio(right.sum(), positives.sum()))
