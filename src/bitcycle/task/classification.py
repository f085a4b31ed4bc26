"""Image classification: cross-entropy loss; top-1 and top-5 accuracy on the test images."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from bitcycle.dataset import DatasetInfo
from bitcycle.dataset.image_dataset import Batch, ImageBatches, ImageDatasetOptions
from bitcycle.settings import setting
from bitcycle.shapes import ImageShape
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
        assert isinstance(info.shape, ImageShape)
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
        dataset, shape = setup.dataset, setup.info.shape
        assert isinstance(dataset, ImageDatasetOptions) and isinstance(shape, ImageShape)
        data, size = dataset.load(setup.data_root, setup.seed), options.evaluation_batch_size
        self.options, self.classes = options, shape.classes
        self.majority_baseline = float(data.train.labels.bincount().max()) / len(data.train)
        self.training_batches = ImageBatches(data.train, dataset, setup.batch_size, setup.seed, setup.device)
        self.splits = evaluation_splits(ImageBatches, data, dataset, size, setup)

    def batches(self, step: int) -> Iterator[Batch]:
        return self.training_batches.starting_at(step)

    def train(self, model: nn.Module, batch: Batch) -> StepOutput:
        logits = model(batch.inputs)
        loss = F.cross_entropy(logits, batch.targets, label_smoothing=self.options.label_smoothing)
        return StepOutput(loss, (logits.detach().argmax(1) == batch.targets).float().mean())

    def measure(self, model: nn.Module, split: str) -> dict[str, float]:
        """Accuracy and top-5 accuracy in percent, as `test_accuracy` and `test_accuracy_top5`, and `test_loss`, the mean
        cross-entropy. Each process evaluates its shards; torchmetrics combines their results.
        """
        from torchmetrics import MeanMetric, Metric
        from torchmetrics.classification import MulticlassAccuracy

        metrics: dict[str, Metric] = {
            f"{split}_accuracy": MulticlassAccuracy(self.classes, average="micro"),
            f"{split}_accuracy_top5": MulticlassAccuracy(self.classes, top_k=min(5, self.classes), average="micro"),
        }
        batches = self.splits[split]
        mean_loss = MeanMetric().to(batches.device)
        for metric in metrics.values():
            metric.to(batches.device)
        for batch in batches:
            logits = model(batch.inputs)
            mean_loss.update(F.cross_entropy(logits, batch.targets), weight=len(batch.targets))
            for metric in metrics.values():
                metric.update(logits, batch.targets)
        percent = {name: round(100 * float(metric.compute()), 4) for name, metric in metrics.items()}
        return {**percent, f"{split}_loss": float(mean_loss.compute())}
