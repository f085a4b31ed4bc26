"""Who has chosen what: the items of each user in the order of time, without the last one, which tests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bitcycle.dataset.base import DatasetInfo, DatasetOptions, fixed_order, validation_size
from bitcycle.randomness import derive
from bitcycle.settings import setting
from bitcycle.shapes import InteractionShape


class Interactions(NamedTuple):
    """Pairs of user and item.

    Attributes:
        users, items: [P], sorted by user and within a user by time, each pair once.
        shape: how many users and items there are, numbered from 0.
    """

    users: Tensor
    items: Tensor
    shape: InteractionShape


class HeldOut(NamedTuple):
    """For each of U users one item to be found among the candidates.

    Attributes:
        users, items: [U].
        negatives: [U, K] int32, items that the user never chose; -1 where there are fewer than K.
    """

    users: Tensor
    items: Tensor
    negatives: Tensor


class InteractionSplits(NamedTuple):
    """What is trained on, what tests, and what validates if anything does."""

    train: Interactions
    test: HeldOut
    validation: HeldOut | None


@dataclass
class InteractionOptions(DatasetOptions):
    """Options that every data set of users and items has. Training samples are interactions, test samples users."""

    evaluation_negatives: int = setting(
        999, "items among which the held-out one is to be found (partial table 1: MLPerf 0.5)", minimum=1
    )

    def full_info(self, data_root: Path) -> DatasetInfo:
        """What the whole data set holds."""
        raise NotImplementedError

    def read(self, data_root: Path) -> Interactions:
        """All interactions.

        Raises:
            DataError: if the data are missing or cannot be read.
        """
        raise NotImplementedError

    def info(self, data_root: Path) -> DatasetInfo:
        full = self.full_info(data_root)
        held_out = validation_size(full.test_samples, self.validation)
        available = full._replace(train_samples=full.train_samples - held_out)
        return self.limited(available)

    def load(self, data_root: Path, seed: int) -> InteractionSplits:
        """The splits. `seed` says for which users validation holds out an item; negatives are the same for every run.

        Of each user the last interaction tests; with `validation` the one before validates for that share of the users.
        """
        everything = self.read(data_root)
        last = _last_of_users(everything.users)
        kept, chosen = ~last, torch.zeros_like(last)
        count = validation_size(everything.shape.users, self.validation)
        generator = torch.Generator().manual_seed(derive(seed, "validation"))
        held = torch.randperm(everything.shape.users, generator=generator)[:count]
        chosen[last.nonzero().flatten()[held] - 1] = True
        train = _subset(everything, kept & ~chosen)
        tested = last.nonzero().flatten()
        test = self._held_out(everything, tested[fixed_order(len(tested), self.test_samples)], "test")
        validation = self._held_out(everything, chosen.nonzero().flatten(), "validation") if count else None
        limited = fixed_order(len(train.users), self.train_samples).sort().values
        return InteractionSplits(_subset(train, limited), test, validation)

    def _held_out(self, everything: Interactions, positions: Tensor, split: str) -> HeldOut:
        users = everything.users[positions]
        negatives = unchosen_items(everything, users, self.evaluation_negatives, derive(0, "negatives", split))
        return HeldOut(users, everything.items[positions], negatives)


def _last_of_users(users: Tensor) -> Tensor:
    """A mask of the last interaction of each user; users are sorted."""
    return torch.cat((users[1:] != users[:-1], torch.ones(1, dtype=torch.bool)))


def _subset(interactions: Interactions, chosen: Tensor) -> Interactions:
    return interactions._replace(users=interactions.users[chosen], items=interactions.items[chosen])


def unchosen_items(interactions: Interactions, users: Tensor, count: int, seed: int) -> Tensor:
    """[U, count] different items that each of `users` never chose, at random; -1 where there are fewer."""
    starts = torch.searchsorted(interactions.users, torch.arange(interactions.shape.users + 1)).tolist()
    items, total = interactions.items.numpy(), interactions.shape.items
    found = np.full((len(users), count), -1, dtype=np.int32)
    for row, user in enumerate(users.tolist()):
        chosen = np.sort(items[starts[user] : starts[user + 1]])
        generator = np.random.default_rng([seed, user])
        free = total - len(chosen)
        ranks = generator.choice(free, min(count, free), replace=False, shuffle=False)
        # The r-th free item is r plus the chosen ones before it, of which the k-th (from 0) has chosen[k] - k free ones before.
        found[row, : len(ranks)] = ranks + np.searchsorted(chosen - np.arange(len(chosen)), ranks, side="right")
    return torch.from_numpy(found)
