"""Average precision as in the released code of Better Schedules (cpt_voc), reported besides that of torchmetrics.

    Detections are visited by decreasing score. A detection is correct if the object of maximum overlap (IoU) has an
    overlap of at least 0.5 and is not yet matched; other objects are not tried. AP = area under the precision envelope
    over recall.

torchmetrics (COCO) differs in two points: a detection may match its second-best object, and precision is sampled at 101
recalls.
"""

from typing import NamedTuple

import torch
from torch import Tensor


def area_under_envelope(recall: Tensor, precision: Tensor) -> float:
    """Area under the precision envelope, which at each recall is the maximum precision at this or any higher recall.

    >>> round(area_under_envelope(torch.tensor([0.5, 0.5, 1.0]), torch.tensor([1.0, 0.5, 2 / 3])), 4)
    0.8333
    """
    zero, one = recall.new_zeros(1), recall.new_ones(1)
    recall, precision = torch.cat([zero, recall, one]), torch.cat([zero, precision, zero])
    envelope = precision.flip(0).cummax(0).values.flip(0)
    return float(((recall[1:] - recall[:-1]) * envelope[1:]).sum())


OVERLAP = 0.5
"""Minimum IoU of a correct detection, and with a better one above which a detection is dropped."""


class Detections(NamedTuple):
    """The detections in an image: boxes [D, 4] in pixels, scores [D] and classes [D], best first."""

    boxes: Tensor
    scores: Tensor
    labels: Tensor


class Truth(NamedTuple):
    """The objects in an image: boxes [M, 4] and classes [M]; named as in torchmetrics."""

    boxes: Tensor
    labels: Tensor


class AveragePrecision:
    """Accumulates the detections and objects of images."""

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self.scores: list[list[Tensor]] = [[] for _ in range(classes)]
        self.right: list[list[Tensor]] = [[] for _ in range(classes)]
        self.objects = [0] * classes

    def update(self, found: Detections, truth: Truth) -> None:
        """Add the detections and the objects of an image."""
        boxes, scores, labels = found
        objects, classes = truth
        for label in range(self.classes):
            rows = (labels == label).nonzero().flatten()
            rows = rows[scores[rows].argsort(descending=True, stable=True)]
            there = classes == label
            self.objects[label] += int(there.sum())
            self.scores[label].append(scores[rows].cpu().double())
            self.right[label].append(self._judge(boxes[rows], objects[there]).cpu().double())

    def _judge(self, boxes: Tensor, objects: Tensor) -> Tensor:
        """Mask of the correct detections."""
        from torchvision.ops import box_iou

        right = torch.zeros(len(boxes), dtype=torch.bool, device=boxes.device)
        if not len(boxes) or not len(objects):
            return right
        overlaps, best = box_iou(boxes, objects).max(dim=1)
        claimed: set[int] = set()
        for row, (overlap, index) in enumerate(zip(overlaps.tolist(), best.tolist())):
            if overlap >= OVERLAP:
                right[row] = index not in claimed
                claimed.add(index)
        return right

    def of_class(self, label: int) -> float:
        """Average precision of a class that has objects, between 0 and 1."""
        scores, right = torch.cat(self.scores[label]), torch.cat(self.right[label])
        right = right[scores.argsort(descending=True, stable=True)].cumsum(0)
        ranks = torch.arange(1, len(right) + 1, dtype=right.dtype, device=right.device)
        return area_under_envelope(right / self.objects[label], right / ranks)

    def mean(self) -> float:
        """Mean over the classes that have objects; 0 if none has."""
        values = [self.of_class(label) for label in range(self.classes) if self.objects[label]]
        return sum(values) / max(1, len(values))
