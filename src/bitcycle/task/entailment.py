"""Textual entailment: cross-entropy and accuracy on sentence pairs; a sample is a pair."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitcycle import distributed
from bitcycle.dataset import DatasetInfo
from bitcycle.dataset.sentence_pairs import SentencePairOptions, TokenPairs
from bitcycle.device import to_device
from bitcycle.optional_imports import require
from bitcycle.settings import setting
from bitcycle.task.base import Sample, StepOutput, Task, TaskOptions, TaskSetup, accuracies_and_loss, check_shares


@dataclass
class EntailmentOptions(TaskOptions):
    """Options of entailment."""

    takes = SentencePairOptions
    can_be_shared = True

    name: str = "entailment"
    evaluation_batch_size: int = setting(64, "pairs evaluated at once", minimum=1, affects_result=False)

    def sample(self, info: DatasetInfo) -> Sample:
        tokens = torch.zeros(1, info.shape.length, dtype=torch.int64, device="meta")
        return Sample((tokens, tokens, torch.ones_like(tokens, dtype=torch.bool)), samples=1)

    def build(self, setup: TaskSetup) -> "Entailment":
        require("torchmetrics", "entailment")  # fail before training instead of at the first evaluation
        return Entailment(self, setup)


class Entailment(Task):
    """An entailment task on tokenized splits."""

    def __init__(self, options: EntailmentOptions, setup: TaskSetup) -> None:
        dataset = setup.dataset
        splits = dataset.load(setup.data_root, setup.seed)
        test, validation = splits["test"].labels, splits.get("validation", splits["test"]).labels
        check_shares(options.evaluation_batch_size, test_samples=test, validation=validation)
        self.options, self.classes, self.seed = options, setup.info.shape.classes, setup.seed
        self.device = setup.device
        self.splits = {name: TokenPairs(*(x.to(self.device) for x in split)) for name, split in splits.items()}
        self.epoch = options.epoch(setup.info, setup.batch_size)
        self.majority_baseline = float(splits["train"].labels.bincount().max()) / self.epoch.samples

    def batches(self, step: int) -> Iterator[TokenPairs]:
        train = self.splits["train"]
        for _, indices in self.epoch.shuffled(self.seed, step):
            yield train.batch(distributed.local_shard(to_device(indices, self.device)))

    def train(self, model: nn.Module, batch: TokenPairs) -> StepOutput:
        logits = model(batch.ids, batch.segments, batch.mask)
        loss = F.cross_entropy(logits, batch.labels)
        return StepOutput(loss, (logits.detach().argmax(1) == batch.labels).float().mean())

    def measure(self, model: nn.Module, split: str) -> dict[str, float]:
        """Accuracy in percent and mean cross-entropy: `test_accuracy`, `test_loss`."""
        return accuracies_and_loss(self._outputs(model, split), split, {"": 1}, self.classes, self.device)

    def _outputs(self, model: nn.Module, split: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits and labels of each batch of a split."""
        pairs = self.splits[split]
        for whole, mine in distributed.local_batches(len(pairs.labels), self.options.evaluation_batch_size):
            batch = pairs.batch(to_device(mine, self.device))
            with distributed.sharded(len(whole)):
                logits = model(batch.ids, batch.segments, batch.mask)
            yield logits, batch.labels
