"""Recommendation of items to users: cross-entropy on chosen and random items; hit rate of the held-out item.

    positives      interactions of the training split                              target 1
    negatives      `negatives` items that the user has not chosen in it, for each positive, new ones in each epoch    target 0
    hit rate       share of users whose held-out item is among the 10 best of it and 999 others
    NDCG           mean of log 2 / log(rank + 1) with ranks from 1, 0 beyond 10

Source: He et al. 2017, section 4.1, as in MLPerf 0.5 (partial pre-training, table 1), where a negative may be the
held-out item, too. Ties count against the held-out item, so that a constant network has hit rate 0. Differs from MLPerf
in the order of an epoch and in the negatives, which are hashes of (seed, epoch, sample).
"""

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitcycle.dataset import DatasetInfo
from bitcycle.dataset.epoch import Epoch
from bitcycle.dataset.interactions import HeldOut, InteractionOptions, Interactions, NegativeSampler
from bitcycle.device import to_device
from bitcycle.settings import setting
from bitcycle.task.base import Sample, StepOutput, Task, TaskOptions, TaskSetup

logger = logging.getLogger(__name__)

BEST = 10
"""Number of recommended items."""


class InteractionBatch(NamedTuple):
    """Users, items and targets (1 chosen, 0 not), [N] each."""

    users: Tensor
    items: Tensor
    targets: Tensor


@dataclass
class RecommendationOptions(TaskOptions):
    """Options of recommendation."""

    takes = InteractionOptions
    steps_are_alike = True

    name: str = "recommendation"
    negatives: int = setting(4, "negatives per positive, resampled in each epoch (MLPerf 0.5)", minimum=1)
    evaluation_batch_size: int = setting(64, "users evaluated at once", minimum=1, affects_result=False)

    def epoch(self, info: DatasetInfo, batch_size: int) -> Epoch:
        return Epoch(info.train_samples * (1 + self.negatives), batch_size)

    def sample(self, info: DatasetInfo) -> Sample:
        number = torch.zeros(1, dtype=torch.int64, device="meta")
        return Sample((number, number), samples=1)

    def build(self, setup: TaskSetup) -> "Recommendation":
        return Recommendation(self, setup)


class Recommendation(Task):
    """A recommendation task."""

    metric = "test_hr10"
    validation_metric = "validation_hr10"

    def __init__(self, options: RecommendationOptions, setup: TaskSetup) -> None:
        data = setup.dataset.load(setup.data_root, setup.seed)
        self.options, self.seed, self.device = options, setup.seed, setup.device
        self.epoch = options.epoch(setup.info, setup.batch_size)
        self.users, self.items = data.train.users.to(self.device), data.train.items.to(self.device)
        self.sampler = NegativeSampler(data.train, self.device)
        self.majority_baseline = options.negatives / (1 + options.negatives)
        self.splits = {name: HeldOut(*(x.to(self.device) for x in split)) for name, split in data.evaluated.items()}
        self.popularity = hit_rate(popularity_ranks(data.train, data.test))
        logger.info("recommending the most popular items has test_hr10 %.2f", self.popularity)

    def batches(self, step: int) -> Iterator[InteractionBatch]:
        for epoch, numbers in self.epoch.shuffled(self.seed, step):
            yield self.batch(to_device(numbers, self.device), epoch)

    def batch(self, numbers: Tensor, epoch: int) -> InteractionBatch:
        """The batch of samples with these numbers; each interaction has 1 + negatives samples, the positive first."""
        interactions = torch.div(numbers, 1 + self.options.negatives, rounding_mode="floor")
        chosen = numbers % (1 + self.options.negatives) == 0
        users = self.users[interactions]
        drawn = self.sampler.draw(users, numbers, self.seed, epoch)
        return InteractionBatch(users, torch.where(chosen, self.items[interactions], drawn), chosen.float())

    def train(self, model: nn.Module, batch: InteractionBatch) -> StepOutput:
        logits = model(batch.users, batch.items)
        loss = F.binary_cross_entropy_with_logits(logits, batch.targets)
        return StepOutput(loss, ((logits.detach() > 0) == (batch.targets > 0)).float().mean())

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """The metrics of `measure`, and the hit rate of the most popular items, `popularity_hr10`."""
        return {**super().evaluate(model), "popularity_hr10": self.popularity}

    def measure(self, model: nn.Module, split: str) -> dict[str, float]:
        """Hit rate and discounted gain in percent: `test_hr10` and `test_ndcg10`; of the users with an item in the split."""
        ranks = ranks_of(self.splits[split], model, self.options.evaluation_batch_size)
        return {f"{split}_hr{BEST}": hit_rate(ranks), f"{split}_ndcg{BEST}": discounted_gain(ranks)}


def ranks_of(held_out: HeldOut, score: Callable[[Tensor, Tensor], Tensor], batch_size: int) -> Tensor:
    """Ranks of the held-out items among their negatives, [U]; `score` takes users and items, [N] each."""
    ranks = []
    for users, items, negatives in zip(*(part.split(batch_size) for part in held_out), strict=True):
        candidates = torch.cat((items[:, None], negatives), 1)
        scores = score(users[:, None].expand_as(candidates).flatten(), candidates.clamp_min(0).flatten())
        ranks.append(ranks_of_first(scores.view(candidates.shape), candidates >= 0))
    return torch.cat(ranks)


def ranks_of_first(scores: Tensor, valid: Tensor) -> Tensor:
    """Number of valid others that score no worse than the first item of each row [U, 1 + K]; NaN counts as better.

    >>> ranks_of_first(torch.tensor([[2.0, 1.0, 3.0, 2.0]]), torch.tensor([[True, True, True, True]])).tolist()
    [2]
    """
    return (~(scores[:, 1:] < scores[:, :1]) & valid[:, 1:]).sum(1)


def hit_rate(ranks: Tensor) -> float:
    """Percentage of ranks (from 0) below 10. Ranks [N]."""
    return round(100 * float((ranks < BEST).cpu().double().mean()), 4)


def discounted_gain(ranks: Tensor) -> float:
    """100 times the mean of log 2 / log(rank + 2) for ranks (from 0) below 10, else of 0. Ranks [N]."""
    ranks = ranks.cpu()
    gains = math.log(2) / (ranks.double() + 2).log()
    return round(100 * float(torch.where(ranks < BEST, gains, 0).mean()), 4)


def popularity_ranks(train: Interactions, held_out: HeldOut) -> Tensor:
    """Ranks of the held-out items if items are scored by their number of training interactions: a baseline."""
    counts = torch.bincount(train.items, minlength=train.shape.items)
    return ranks_of(held_out, lambda _, items: counts[items], 4096)
