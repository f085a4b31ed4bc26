"""Recommendation of items to users: cross-entropy on chosen and random items; hit rate of the held-out item.

    positives      interactions of the training split                              target 1
    negatives      `negatives` items that the user has not chosen in it, for each positive, others in each epoch    target 0
    hit rate       share of users whose held-out item is among the 10 best of it and `evaluation_negatives` others
    NDCG           mean of log 2 / log(rank + 1) with ranks from 1, 0 beyond 10

Source: He et al. 2017, section 4.1, as in MLPerf 0.5 (partial pre-training, table 1), where a negative may be the
held-out item, too. Ties count against the held-out item, so that a constant network has hit rate 0. Differs from MLPerf
in the order of an epoch and in the negatives, which are hashes of (seed, epoch, sample).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitcycle.dataset import DatasetInfo
from bitcycle.dataset.epoch import Epoch
from bitcycle.dataset.interactions import HeldOut, InteractionOptions, Interactions
from bitcycle.randomness import hash_bits, int32_key
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


class NegativeSampler:
    """Stateless uniform sampling of the items that a user has not chosen in `interactions`, so that training can resume.

    The r-th item that a user has not chosen is r plus the number of chosen items before it. As c_k - k unchosen items
    precede the k-th chosen item c_k, this is the number of k with c_k - k <= r, found by one binary search for all
    samples.
    """

    def __init__(self, interactions: Interactions, device: torch.device) -> None:
        users, items = interactions.shape
        self.items, self.stride = items, items + 1
        keys = (interactions.users * self.stride + interactions.items).sort().values
        owner = torch.div(keys, self.stride, rounding_mode="floor")
        counts = torch.bincount(owner, minlength=users)
        starts = counts.cumsum(0) - counts
        position = torch.arange(len(keys)) - starts[owner]
        self.keys = (keys - position).to(device)
        self.starts, self.free = starts.to(device), (items - counts).to(device)

    def item(self, users: Tensor, ranks: Tensor) -> Tensor:
        """Items with the given ranks (from 0) among those not chosen by each of `users`."""
        before = torch.searchsorted(self.keys, users * self.stride + ranks, right=True) - self.starts[users]
        return (ranks + before).clamp_max(self.items - 1)  # a user who has chosen everything gets the last item

    def draw(self, users: Tensor, numbers: Tensor, seed: int, epoch: int) -> Tensor:
        """Draw one item for each of `users`; the result depends only on the user and (seed, epoch, number)."""
        key = torch.tensor(int32_key(seed, "negatives", epoch), dtype=torch.int32, device=users.device)
        bits = hash_bits(numbers.to(torch.int32), key).long() & 0x7FFFFFFF
        return self.item(users, bits * self.free[users] >> 31)


@dataclass
class RecommendationOptions(TaskOptions):
    """Options of recommendation."""

    takes = InteractionOptions

    name: str = "recommendation"
    negatives: int = setting(4, "negatives per positive, resampled in each epoch (MLPerf 0.5)", minimum=1)
    evaluation_batch_size: int = setting(64, "users evaluated at once", minimum=1, affects_result=False)

    def epoch(self, info: DatasetInfo, batch_size: int) -> Epoch:
        return Epoch(info.train_samples * (1 + self.negatives), batch_size)

    def sample(self, info: DatasetInfo) -> Sample:
        number = torch.zeros(1, dtype=torch.int64, device="meta")
        return Sample((number, number), samples=1)

    def build(self, setup: TaskSetup) -> Recommendation:
        return Recommendation(self, setup)


class Recommendation(Task):
    """A recommendation task."""

    metric = "test_hr10"
    validation_metric = "validation_hr10"
    higher_is_better = True

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
            yield self.batch(numbers.to(self.device), epoch)

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
        held_out = self.splits[split]
        rows = torch.arange(len(held_out.users), device=self.device).split(self.options.evaluation_batch_size)
        ranks = torch.cat([self._ranks(model, HeldOut(*(part[chosen] for part in held_out))) for chosen in rows])
        return {f"{split}_hr{BEST}": hit_rate(ranks), f"{split}_ndcg{BEST}": discounted_gain(ranks)}

    def _ranks(self, model: nn.Module, held_out: HeldOut) -> Tensor:
        candidates = torch.cat((held_out.items[:, None], held_out.negatives), 1)
        users = held_out.users[:, None].expand_as(candidates)
        scores = model(users.flatten(), candidates.clamp_min(0).flatten()).view(candidates.shape)
        return ranks_of_first(scores, candidates >= 0)


def ranks_of_first(scores: Tensor, valid: Tensor) -> Tensor:
    """Number of valid others that score no worse than the first item of each row [U, 1 + K]; NaN counts as better.

    >>> ranks_of_first(torch.tensor([[2.0, 1.0, 3.0, 2.0]]), torch.tensor([[True, True, True, True]])).tolist()
    [2]
    """
    return (~(scores[:, 1:] < scores[:, :1]) & valid[:, 1:]).sum(1)


def hit_rate(ranks: Tensor) -> float:
    """Percentage of ranks (from 0) below 10."""
    return round(100 * float((ranks < BEST).double().mean()), 4)


def discounted_gain(ranks: Tensor) -> float:
    """100 times the mean of log 2 / log(rank + 2) for ranks (from 0) below 10, else of 0."""
    gains = math.log(2) / (ranks.double() + 2).log()
    return round(100 * float(torch.where(ranks < BEST, gains, 0).mean()), 4)


def popularity_ranks(train: Interactions, held_out: HeldOut) -> Tensor:
    """Ranks of the held-out items if items are scored by their number of training interactions: a baseline."""
    counts = torch.bincount(train.items, minlength=train.shape.items)
    ranks = []
    for rows in torch.arange(len(held_out.users)).split(4096):  # bounds memory
        candidates = torch.cat((held_out.items[rows, None], held_out.negatives[rows]), 1)
        ranks.append(ranks_of_first(counts[candidates.clamp_min(0)], candidates >= 0))
    return torch.cat(ranks)
