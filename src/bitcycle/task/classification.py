"""Image classification: cross-entropy loss; top-1 and top-5 accuracy on the test images."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from bitcycle.dataset import DatasetInfo
from bitcycle.dataset.base import Splits
from bitcycle.dataset.image_dataset import Batch, ImageBatches, ImageDatasetOptions
from bitcycle.dataset.images import Images
from bitcycle.settings import setting
from bitcycle.shapes import ImageShape
from bitcycle.task.base import Sample, StepOutput, Task, TaskOptions, TaskSetup, check_shares


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
        dataset, shape = setup.dataset, setup.info.shape
        assert isinstance(dataset, ImageDatasetOptions) and isinstance(shape, ImageShape)
        splits = dataset.load(setup.data_root, setup.seed)
        return Classification(self, dataset, splits, shape.classes, setup.batch_size, setup.seed, setup.device)


class Classification(Task):
    """A classification task on splits of images.

    Args:
        options: options of the task.
        dataset: options of the data set: normalisation and augmentation.
        splits: training and test images, and validation images if any.
        classes: number of classes.
        batch_size: training samples per step over all processes.
        seed: seed of order and augmentation.
        device: device of batches.

    Raises:
        SettingError (a ValueError): if there are more processes than images to evaluate.
    """

    metric = "test_accuracy"
    validation_metric = "validation_accuracy"
    higher_is_better = True

    def __init__(
        self,
        options: ClassificationOptions,
        dataset: ImageDatasetOptions,
        splits: Splits[Images],
        classes: int,
        batch_size: int,
        seed: int,
        device: torch.device,
    ) -> None:
        self.options, self.batch_size, self.classes = options, batch_size, classes
        check_shares(options.evaluation_batch_size, test_samples=splits.test, validation=splits.validation)
        self.training_batches = ImageBatches(splits.train, dataset, batch_size, seed, device)
        self.majority_baseline = float(splits.train.labels.bincount().max()) / len(splits.train)
        self.test_batches = ImageBatches(splits.test, dataset, options.evaluation_batch_size, seed, device)
        self.validation_batches = (
            ImageBatches(splits.validation, dataset, options.evaluation_batch_size, seed, device)
            if splits.validation is not None
            else None
        )

    def batches(self, step: int) -> Iterator[Batch]:
        return self.training_batches.starting_at(step)

    def train(self, model: nn.Module, batch: Batch) -> StepOutput:
        logits = model(batch.inputs)
        loss = F.cross_entropy(logits, batch.targets, label_smoothing=self.options.label_smoothing)
        return StepOutput(loss, (logits.detach().argmax(1) == batch.targets).float().mean())

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """`test_accuracy` and `test_accuracy_top5` in percent, `test_loss` as mean cross-entropy.

        Each process evaluates its shard of each batch; torchmetrics combines the results.
        """
        return self._measure(model, self.test_batches, "test")

    def validate(self, model: nn.Module) -> dict[str, float]:
        """The metrics of `evaluate` on the validation images, with the prefix `validation`."""
        return {} if self.validation_batches is None else self._measure(model, self.validation_batches, "validation")

    @torch.no_grad()
    def _measure(self, model: nn.Module, batches: ImageBatches, split: str) -> dict[str, float]:
        from torchmetrics import MeanMetric, Metric
        from torchmetrics.classification import MulticlassAccuracy

        metrics: dict[str, Metric] = {
            f"{split}_accuracy": MulticlassAccuracy(self.classes, average="micro"),
            f"{split}_accuracy_top5": MulticlassAccuracy(self.classes, top_k=min(5, self.classes), average="micro"),
        }
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
