"""Image classification: cross-entropy loss; top-1 and top-5 accuracy on the test images."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from bitcycle.dataset import DatasetInfo
from bitcycle.dataset.image_dataset import Batch, ImageBatches, ImageDatasetOptions
from bitcycle.settings import setting
from bitcycle.task.base import Sample, StepOutput, Task, TaskOptions, TaskSetup, evaluation_splits


@dataclass
class ClassificationOptions(TaskOptions):
    """Options of image classification."""

    takes = ImageDatasetOptions
    can_be_shared = True

    name: str = "classification"
    label_smoothing: float = setting(0.0, "label smoothing (papers: 0)", minimum=0, maximum=1)
    evaluation_batch_size: int = setting(500, "images evaluated at once", minimum=1, affects_result=False)

    def sample(self, info: DatasetInfo) -> Sample:
        channels, size, _ = info.shape
        return Sample((torch.zeros(1, channels, size, size, device="meta"),), samples=1)

    def build(self, setup: TaskSetup) -> Classification:
        return Classification(self, setup)


class Classification(Task):
    """A classification task on splits of images. Raises SettingError if there are more processes than images to evaluate."""

    metric = "test_accuracy"
    validation_metric = "validation_accuracy"
    higher_is_better = True

    def __init__(self, options: ClassificationOptions, setup: TaskSetup) -> None:
        dataset, size = setup.dataset, options.evaluation_batch_size
        data = dataset.load(setup.data_root, setup.seed)
        self.options, self.classes = options, setup.info.shape.classes
        self.majority_baseline = float(data.train.labels.bincount().max()) / len(data.train)
        self.training_batches = ImageBatches(data.train, dataset, setup.batch_size, setup.seed, setup.device)
        self.splits = evaluation_splits(ImageBatches, data, dataset, size, setup)

    def train(self, model: nn.Module, batch: Batch) -> StepOutput:
        logits = model(batch.inputs)
        loss = F.cross_entropy(logits, batch.targets, label_smoothing=self.options.label_smoothing)
        return StepOutput(loss, (logits.detach().argmax(1) == batch.targets).float().mean())

    def measure(self, model: nn.Module, split: str) -> dict[str, float]:
        """`test_accuracy` and `test_accuracy_top5` in percent, `test_loss` as mean cross-entropy; of all processes' shards."""
        from torchmetrics import MeanMetric
        from torchmetrics.classification import MulticlassAccuracy

        batches, ranks = self.splits[split], {"": 1, "_top5": min(5, self.classes)}
        mean_loss = MeanMetric().to(batches.device)
        metrics = {
            f"{split}_accuracy{name}": MulticlassAccuracy(self.classes, top_k, average="micro").to(batches.device)
            for name, top_k in ranks.items()
        }
        for batch in batches:
            logits = model(batch.inputs)
            mean_loss.update(F.cross_entropy(logits, batch.targets), weight=len(batch.targets))
            for metric in metrics.values():
                metric.update(logits, batch.targets)
        percent = {name: round(100 * float(metric.compute()), 4) for name, metric in metrics.items()}
        return {**percent, f"{split}_loss": float(mean_loss.compute())}
