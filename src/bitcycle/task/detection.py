"""Object detection: focal and smooth L1 loss on anchors; mean average precision on the test images.

    boxes of an image = best 100 by score after non-maximum suppression, per class, of all anchors with score > 0.05

Source: released code of Better Schedules, cpt_voc. Differs from it in that boxes are clipped to the image instead of
the padded image, and in the main metric, that of torchmetrics (COCO's rule at an IoU of 0.5); theirs is reported too.
"""

from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor, nn

from bitcycle import distributed
from bitcycle.dataset import DatasetInfo
from bitcycle.dataset.detection import DetectionBatch, DetectionBatches, DetectionDatasetOptions
from bitcycle.optional_imports import require
from bitcycle.settings import SettingError, setting
from bitcycle.task.anchors import NOTHING, DetectionLosses, anchors, boxes_of, detection_losses, match
from bitcycle.task.average_precision import OVERLAP, AveragePrecision, Detections, Truth
from bitcycle.task.base import Sample, StepOutput, Task, TaskOptions, TaskSetup, evaluation_splits

CANDIDATES, DETECTIONS = 20_000, 100
"""Detections kept before non-maximum suppression (cpt_voc: all), and those of an image evaluated."""


@dataclass
class DetectionOptions(TaskOptions):
    """Options of object detection."""

    takes = DetectionDatasetOptions
    can_be_shared = True

    name: str = "detection"
    score_threshold: float = setting(0.05, "minimum score of detections", minimum=0, maximum=1)
    evaluation_batch_size: int = setting(4, "images evaluated at once", minimum=1)
    cost_size: Optional[list[int]] = setting(
        None,
        "height and width of the image whose cost is counted for all; null: the dataset's typical image, scaled and"
        " padded; Better Schedules: [224,224]",
        minimum=32,
        affects_result=False,
    )

    def validate(self) -> None:
        if self.cost_size is not None and len(self.cost_size) != 2:
            raise SettingError("cost_size", self.cost_size, "needs two numbers", "write [height, width], as [224,224]")

    def sample(self, info: DatasetInfo) -> Sample:
        shape = info.shape
        height, width = self.cost_size or (shape.height, shape.width)
        return Sample((torch.zeros(1, shape.channels, height, width, device="meta"),), samples=1)

    def build(self, setup: TaskSetup) -> "Detection":
        require("pycocotools", "detection")  # fail before training instead of at the first evaluation
        return Detection(self, setup)


class Detection(Task):
    """A detection task on splits of annotated images."""

    metric = "test_map50"
    validation_metric = "validation_map50"

    def __init__(self, options: DetectionOptions, setup: TaskSetup) -> None:
        dataset = setup.dataset
        data = dataset.load(setup.data_root, setup.seed)
        self.options, self.classes, self.device = options, len(dataset.class_names), setup.device
        counts = torch.cat([image.labels for image in data.train]).bincount()
        self.majority_baseline = float(counts.max() / counts.sum())
        self.training_batches = DetectionBatches(data.train, dataset, setup.batch_size, setup.seed, setup.device)
        self.splits = evaluation_splits(DetectionBatches, data, options.evaluation_batch_size, setup)

    def train(self, model: nn.Module, batch: DetectionBatch) -> StepOutput:
        """Sum of both losses, and the fraction of positive anchors whose highest score is that of their class."""
        losses = self._losses(batch, *_scores_and_offsets(model, batch))
        return StepOutput(losses.classes + losses.boxes, losses.right)

    def _losses(self, batch: DetectionBatch, scores: Tensor, offsets: Tensor) -> DetectionLosses:
        places = _anchors_of(batch)
        return detection_losses(scores, offsets, places, match(places, batch.boxes, batch.labels))

    def measure(self, model: nn.Module, split: str) -> dict[str, float]:
        """`test_map50`, `test_map` (mean over IoU thresholds from 0.5 to 0.95) and `test_map50_all_points` (as in the released
        code of Better Schedules) in percent, `test_loss` as mean loss per image."""
        from torchmetrics import MeanMetric
        from torchmetrics.detection import MeanAveragePrecision

        coco = MeanAveragePrecision(max_detection_thresholds=[1, 10, DETECTIONS], sync_on_compute=False)
        coco.warn_on_many_detections = False
        all_points, mean_loss = AveragePrecision(self.classes), MeanMetric().to(self.device)
        seen: list[tuple[int, Detections, Truth]] = []
        for number, batch in enumerate(self.splits[split]):
            with distributed.sharded(batch.samples):
                scores, offsets = _scores_and_offsets(model, batch)
                losses = self._losses(batch, scores, offsets)
            mean_loss.update(losses.classes + losses.boxes, weight=len(batch.sizes))
            boxes = boxes_of(offsets, _anchors_of(batch))
            for row, size in enumerate(batch.sizes):
                found = self.detect(boxes[row], scores[row], size)
                there = batch.labels[row] != NOTHING
                truth = Truth(batch.boxes[row][there].cpu(), batch.labels[row][there].cpu())
                seen.append((number, Detections(*(part.cpu() for part in found)), truth))
        # the order of a single process: by batch, then by process
        for _, found, truth in sorted(distributed.all_items(seen), key=lambda image: image[0]):
            coco.update([found._asdict()], [truth._asdict()])
            all_points.update(found, truth)
        values = coco.compute()
        percent = {"map50": values["map_50"], "map": values["map"], "map50_all_points": all_points.mean()}
        return {
            # torchmetrics returns -1 if no image has an object
            **{f"{split}_{name}": round(100 * max(0.0, float(value)), 4) for name, value in percent.items()},
            f"{split}_loss": float(mean_loss.compute()),
        }

    def detect(self, boxes: Tensor, scores: Tensor, size: tuple[int, int]) -> Detections:
        """The detections in an image of `size` without padding, from boxes [A, 4] and scores [A, K] of all anchors."""
        from torchvision.ops import batched_nms, clip_boxes_to_image

        places, labels = (scores > self.options.score_threshold).nonzero(as_tuple=True)
        values = scores[places, labels]
        if len(values) > CANDIDATES:
            values, best = values.topk(CANDIDATES)
            places, labels = places[best], labels[best]
        clipped = clip_boxes_to_image(boxes[places], size)
        kept = batched_nms(clipped, values, labels, OVERLAP)[:DETECTIONS]
        return Detections(clipped[kept], values[kept], labels[kept])


def _scores_and_offsets(model: nn.Module, batch: DetectionBatch) -> tuple[Tensor, Tensor]:
    """Scores between 0 and 1 [N, A, K] and offsets [N, A, 4] of all anchors, in float32 (or float64)."""
    logits, offsets = model(batch.images)
    logits, offsets = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (logits, offsets))
    return logits.sigmoid(), offsets


def _anchors_of(batch: DetectionBatch) -> Tensor:
    height, width = batch.images.shape[2:]
    return anchors(height, width, batch.images.device)
