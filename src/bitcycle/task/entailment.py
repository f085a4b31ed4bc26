"""Textual entailment: cross-entropy and accuracy on sentence pairs; a sample is a pair."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitcycle import distributed
from bitcycle.dataset import DatasetInfo
from bitcycle.dataset.epoch import Epoch
from bitcycle.dataset.sentence_pairs import SentencePairOptions, TokenPairs
from bitcycle.settings import SettingError, setting
from bitcycle.shapes import SentencePairShape
from bitcycle.task.base import Sample, StepOutput, Task, TaskOptions, TaskSetup, check_shares

METRICS = {"test": "test_accuracy", "validation": "accuracy_of_validation"}
"""Split -> main metric. Its name differs from that of the validation metric, as it must not be used for selection."""


class PairBatch(NamedTuple):
    """Token ids and segment ids [N, T], mask [N, T] (true for tokens, false for padding), labels [N]."""

    ids: Tensor
    segments: Tensor
    mask: Tensor
    labels: Tensor


@dataclass
class EntailmentOptions(TaskOptions):
    """Options of entailment."""

    takes = SentencePairOptions
    can_be_shared = True

    name: str = "entailment"
    evaluation_split: str = setting(
        "test",
        "split of the main metric (Better Schedules: test; its code: validation); validation is always evaluated",
        choices=("test", "validation"),
    )
    evaluation_batch_size: int = setting(64, "pairs evaluated at once", minimum=1, affects_result=False)

    def sample(self, info: DatasetInfo) -> Sample:
        shape = info.shape
        assert isinstance(shape, SentencePairShape)
        tokens = torch.zeros(1, shape.length, dtype=torch.int64, device="meta")
        return Sample((tokens, tokens, torch.ones(1, shape.length, dtype=torch.bool, device="meta")), samples=1)

    def build(self, setup: TaskSetup) -> Entailment:
        dataset, shape = setup.dataset, setup.info.shape
        assert isinstance(dataset, SentencePairOptions) and isinstance(shape, SentencePairShape)
        if self.evaluation_split == "validation" and dataset.validation == 0:
            remedy = "leave dataset.validation=null"
            raise SettingError("task.evaluation_split", "validation", "no validation data are used", remedy)
        splits = dataset.load(setup.data_root, setup.seed)
        return Entailment(self, splits, shape.classes, setup.batch_size, setup.seed, setup.device)


class Entailment(Task):
    """An entailment task on tokenized splits.

    Args:
        options: options of the task.
        splits: train, test, and validation if any.
        classes: number of classes.
        batch_size: training samples per step.
        seed: seed of the order.
        device: device of batches.
    """

    validation_metric = "validation_accuracy"
    higher_is_better = True

    def __init__(
        self,
        options: EntailmentOptions,
        splits: dict[str, TokenPairs],
        classes: int,
        batch_size: int,
        seed: int,
        device: torch.device,
    ) -> None:
        self.options, self.classes, self.seed = options, classes, seed
        self.splits = {name: split.to(device) for name, split in splits.items()}
        self.metric = METRICS[options.evaluation_split]
        test, validation = splits["test"].labels, splits.get("validation", splits["test"]).labels
        check_shares(options.evaluation_batch_size, test_samples=test, validation=validation)
        self.epoch = Epoch(len(splits["train"].labels), batch_size)
        self.majority_baseline = float(splits["train"].labels.bincount().max()) / self.epoch.samples

    def batches(self, step: int) -> Iterator[PairBatch]:
        train = self.splits["train"]
        for _, indices in self.epoch.shuffled(self.seed, step):
            yield batch_of(train, distributed.local_shard(indices.to(train.ids.device)))

    def train(self, model: nn.Module, batch: PairBatch) -> StepOutput:
        logits = model(batch.ids, batch.segments, batch.mask)
        loss = F.cross_entropy(logits, batch.labels)
        return StepOutput(loss, (logits.detach().argmax(1) == batch.labels).float().mean())

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Accuracy in percent and mean cross-entropy on the main metric's split: `test_accuracy`, `test_loss`."""
        accuracy, loss = self._measure(model, self.options.evaluation_split)
        return {self.metric: accuracy, self.metric.replace("accuracy", "loss"): loss}

    def validate(self, model: nn.Module) -> dict[str, float]:
        """The same on the validation split: `validation_accuracy`, `validation_loss`."""
        if "validation" not in self.splits:
            return {}
        accuracy, loss = self._measure(model, "validation")
        return {"validation_accuracy": accuracy, "validation_loss": loss}

    @torch.no_grad()
    def _measure(self, model: nn.Module, name: str) -> tuple[float, float]:
        from torchmetrics import MeanMetric
        from torchmetrics.classification import MulticlassAccuracy

        split = self.splits[name]
        accuracy = MulticlassAccuracy(self.classes, average="micro").to(split.ids.device)
        loss = MeanMetric().to(split.ids.device)
        for whole, mine in distributed.local_batches(len(split.labels), self.options.evaluation_batch_size):
            batch = batch_of(split, mine.to(split.ids.device))
            with distributed.sharded(len(whole)):
                logits = model(batch.ids, batch.segments, batch.mask)
            loss.update(F.cross_entropy(logits, batch.labels), weight=len(batch.labels))
            accuracy.update(logits, batch.labels)
        return round(100 * float(accuracy.compute()), 4), float(loss.compute())


def batch_of(split: TokenPairs, indices: Tensor) -> PairBatch:
    """Pairs of a split as inputs of the network."""
    places = torch.arange(split.ids.shape[1], device=indices.device)
    mask = places < split.lengths[indices][:, None]
    return PairBatch(split.ids[indices].long(), split.segments[indices].long(), mask, split.labels[indices])
