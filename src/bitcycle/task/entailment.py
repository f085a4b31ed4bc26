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
        tokens = torch.zeros(1, info.shape.length, dtype=torch.int64, device="meta")
        return Sample((tokens, tokens, torch.ones_like(tokens, dtype=torch.bool)), samples=1)

    def build(self, setup: TaskSetup) -> Entailment:
        return Entailment(self, setup)


class Entailment(Task):
    """An entailment task on tokenized splits."""

    validation_metric = "validation_accuracy"
    higher_is_better = True

    def __init__(self, options: EntailmentOptions, setup: TaskSetup) -> None:
        dataset = setup.dataset
        if options.evaluation_split == "validation" and dataset.validation == 0:
            remedy = "leave dataset.validation=null"
            raise SettingError("task.evaluation_split", "validation", "no validation data are used", remedy)
        splits = dataset.load(setup.data_root, setup.seed)
        test, validation = splits["test"].labels, splits.get("validation", splits["test"]).labels
        check_shares(options.evaluation_batch_size, test_samples=test, validation=validation)
        self.options, self.classes, self.seed = options, setup.info.shape.classes, setup.seed
        self.splits = {name: split.to(setup.device) for name, split in splits.items()}
        self.metric = METRICS[options.evaluation_split]
        self.epoch = Epoch(len(splits["train"].labels), setup.batch_size)
        self.majority_baseline = float(splits["train"].labels.bincount().max()) / self.epoch.samples

    def batches(self, step: int) -> Iterator[PairBatch]:
        train = self.splits["train"]
        for _, indices in self.epoch.shuffled(self.seed, step):
            yield batch_of(train, distributed.local_shard(indices.to(train.ids.device)))

    def train(self, model: nn.Module, batch: PairBatch) -> StepOutput:
        logits = model(batch.ids, batch.segments, batch.mask)
        loss = F.cross_entropy(logits, batch.labels)
        return StepOutput(loss, (logits.detach().argmax(1) == batch.labels).float().mean())

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """The metrics of the split that the main metric is of, under its name."""
        accuracy, loss = self.measure(model, self.options.evaluation_split).values()
        return {self.metric: accuracy, self.metric.replace("accuracy", "loss"): loss}

    def measure(self, model: nn.Module, split: str) -> dict[str, float]:
        """Accuracy in percent and mean cross-entropy: `test_accuracy`, `test_loss`."""
        from torchmetrics import MeanMetric
        from torchmetrics.classification import MulticlassAccuracy

        pairs = self.splits[split]
        accuracy = MulticlassAccuracy(self.classes, average="micro").to(pairs.ids.device)
        loss = MeanMetric().to(pairs.ids.device)
        for whole, mine in distributed.local_batches(len(pairs.labels), self.options.evaluation_batch_size):
            batch = batch_of(pairs, mine.to(pairs.ids.device))
            with distributed.sharded(len(whole)):
                logits = model(batch.ids, batch.segments, batch.mask)
            loss.update(F.cross_entropy(logits, batch.labels), weight=len(batch.labels))
            accuracy.update(logits, batch.labels)
        return {f"{split}_accuracy": round(100 * float(accuracy.compute()), 4), f"{split}_loss": float(loss.compute())}


def batch_of(split: TokenPairs, indices: Tensor) -> PairBatch:
    """Pairs of a split as inputs of the network."""
    places = torch.arange(split.ids.shape[1], device=indices.device)
    mask = places < split.lengths[indices][:, None]
    return PairBatch(split.ids[indices].long(), split.segments[indices].long(), mask, split.labels[indices])
