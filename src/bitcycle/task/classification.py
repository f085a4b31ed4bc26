"""Image classification: cross-entropy, top-1 and top-5 accuracy on the test images."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from bitcycle.dataset import Batch, DatasetOptions, EvaluationBatches, Splits, TrainingBatches, batch_length
from bitcycle.settings import Settings, setting
from bitcycle.task.base import Outcome


@dataclass
class ClassificationOptions(Settings):
    """Options of image classification."""

    name: str = setting("classification", "the task's name, as in task=NAME")
    label_smoothing: float = setting(
        0.0, "share of the target spread over all classes (papers: 0)", minimum=0, maximum=1
    )
    evaluation_batch_size: int = setting(500, "images evaluated at once", minimum=1, affects_result=False)


class Classification:
    """A classification task on two splits of images.

    Args:
        options: of the task.
        dataset: normalisation and augmentation.
        splits: training and test images.
        classes: number of classes.
        batch_size: training samples a step.
        seed: of order and augmentation.
        device: where batches are made.
    """

    metric = "test_accuracy"
    higher_is_better = True

    def __init__(
        self,
        options: ClassificationOptions,
        dataset: DatasetOptions,
        splits: Splits,
        classes: int,
        batch_size: int,
        seed: int,
        device: torch.device,
    ) -> None:
        self.options, self.batch_size, self.classes = options, batch_size, classes
        self.training_batches = TrainingBatches(splits.train, dataset, batch_size, seed, device)
        self.chance = float(splits.train.labels.bincount().max()) / len(splits.train)
        self.test_batches = EvaluationBatches(splits.test, dataset, options.evaluation_batch_size, device)

    def batches(self, step: int) -> Iterator[Batch]:
        return self.training_batches.starting_at(step)

    def samples(self, step: int) -> int:
        return batch_length(step, len(self.training_batches.images), self.batch_size)

    def train(self, model: nn.Module, batch: Batch) -> Outcome:
        logits = model(batch.inputs)
        loss = F.cross_entropy(logits, batch.targets, label_smoothing=self.options.label_smoothing)
        return Outcome(loss, (logits.detach().argmax(1) == batch.targets).float().mean())

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """`test_accuracy` and `test_accuracy_top5` in percent, `test_loss` as mean cross-entropy."""
        from torchmetrics import MeanMetric, Metric
        from torchmetrics.classification import MulticlassAccuracy

        metrics: dict[str, Metric] = {
            "test_accuracy": MulticlassAccuracy(self.classes, average="micro"),
            "test_accuracy_top5": MulticlassAccuracy(self.classes, top_k=min(5, self.classes), average="micro"),
        }
        mean_loss = MeanMetric().to(self.test_batches.device)
        for metric in metrics.values():
            metric.to(self.test_batches.device)
        for batch in self.test_batches:
            logits = model(batch.inputs)
            mean_loss.update(F.cross_entropy(logits, batch.targets), weight=len(batch.targets))
            for metric in metrics.values():
                metric.update(logits, batch.targets)
        percent = {name: round(100 * float(metric.compute()), 4) for name, metric in metrics.items()}
        return {**percent, "test_loss": float(mean_loss.compute())}
