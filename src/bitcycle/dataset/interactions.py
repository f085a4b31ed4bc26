"""Interactions of users with items: each user's items in chronological order, the last one held out for testing.

MovieLens and user-defined ratings: an interaction is a rating of a film by a user, whatever its value. 20M: 20,000,263
ratings of 26,744 films by 138,493 users, the official ml-20m/ratings.csv (files.grouplens.org). 100K: 100,000 ratings
of 1,682 films by 943 users, a proxy whose results are not comparable. Harper and Konstan 2015. Both are for research
use and available from GroupLens only. Users and items are numbered in the order of their identifiers; ratings with
equal timestamps keep the order of the file.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bitcycle.dataset.base import (
    DatasetInfo,
    DatasetOptions,
    Splits,
    check_whole,
    fixed_order,
    missing,
    permutation,
    validation_size,
)
from bitcycle.dataset.sources import download
from bitcycle.device import scalar
from bitcycle.errors import UNREADABLE, DataError
from bitcycle.randomness import derive, hash_bits, int32_key
from bitcycle.settings import MISSING, SettingError, setting
from bitcycle.shapes import InteractionShape

EVALUATION_NEGATIVES = 999
"""Negatives ranked with the held-out item (partial pre-training, table 1: MLPerf 0.5)."""
COLUMNS = ("userId", "movieId", "rating", "timestamp")


class Release(NamedTuple):
    """An official dataset: sizes, MD5 checksum of the archive, and possible locations (first that of the archive)."""

    users: int
    items: int
    ratings: int
    md5: str
    places: tuple[str, ...]


MD5_20M, MD5_100K = "cd245b17a1ae2cc31bb14903e1204af3", "0e33842e24a9c977be4e0107933c0723"
RELEASES = {
    "movielens_20m": Release(138_493, 26_744, 20_000_263, MD5_20M, ("ml-20m/ratings.csv", "ml-20m/ratings.csv.gz")),
    "movielens_100k": Release(943, 1_682, 100_000, MD5_100K, ("ml-100k/u.data", "movielens/ratings.csv.gz")),
}
SOURCE = "https://files.grouplens.org/datasets/movielens"


class Interactions(NamedTuple):
    """Distinct pairs [P] of user and item, numbered from 0, sorted by user and then by time."""

    users: Tensor
    items: Tensor
    shape: InteractionShape


class HeldOut(NamedTuple):
    """A held-out item for each of U users, and negatives [U, K] int32, which the user never chose; -1 for padding."""

    users: Tensor
    items: Tensor
    negatives: Tensor


@dataclass
class InteractionOptions(DatasetOptions):
    """Options of all datasets of users and items. Training samples are interactions, test samples are users."""

    def info(self, data_root: Path) -> DatasetInfo:
        full = self.full_info(data_root)
        kept = full.train_samples - validation_size(full.test_samples, self.validation)
        if kept <= 0:
            problem = f"leaves none of {full.train_samples} training interactions"
            raise SettingError("validation", self.validation, problem, "hold out fewer, or 0 for none")
        return self.limited(full._replace(train_samples=kept))

    def load(self, data_root: Path, seed: int) -> Splits[Any]:
        """Training `Interactions` and `HeldOut` items; negatives are fixed for all runs.

        The last interaction of each user is for testing. With `validation`, the one before it is for validation, for
        that fraction of users, selected by `seed`.
        """
        everything = self.read(data_root)
        users = everything.shape.users
        last = everything.users.diff(append=torch.tensor([-1])) != 0  # last interaction of each user
        tested, count = last.nonzero().flatten(), validation_size(users, self.validation)
        validating = (tested[permutation(users, derive(seed, "validation"))[:count]] - 1).sort().values
        kept = ~last
        kept[validating] = False
        train = kept.nonzero().flatten()
        train = train[fixed_order(len(train), self.train_samples).sort().values]
        test = self._held_out(everything, tested[fixed_order(len(tested), self.test_samples)], "test")
        validation = self._held_out(everything, validating, "validation") if count else None
        trained = everything._replace(users=everything.users[train], items=everything.items[train])
        return Splits(trained, test, validation)

    def _held_out(self, everything: Interactions, positions: Tensor, split: str) -> HeldOut:
        users = everything.users[positions]
        negatives = unchosen_items(everything, users, EVALUATION_NEGATIVES, derive(0, "negatives", split))
        return HeldOut(users, everything.items[positions], negatives)


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
        key = scalar(int32_key(seed, "negatives", epoch), torch.int32, users.device)
        bits = hash_bits(numbers.to(torch.int32), key).long() & 0x7FFFFFFF
        return self.item(users, bits * self.free[users] >> 31)


def unchosen_items(interactions: Interactions, users: Tensor, count: int, seed: int) -> Tensor:
    """Draw [U, count] distinct items, int32, that each of `users` never chose; -1 if there are fewer."""
    sampler = NegativeSampler(interactions, users.device)
    ranks = np.full((len(users), count), -1, dtype=np.int32)
    for row, (user, free) in enumerate(zip(users.tolist(), sampler.free[users].tolist(), strict=True)):
        drawn = np.random.default_rng([seed, user]).choice(free, min(count, free), replace=False, shuffle=False)
        ranks[row, : len(drawn)] = drawn
    parts = zip(users[:, None].split(4096), torch.from_numpy(ranks).split(4096), strict=True)  # bounds memory
    return torch.cat([torch.where(drawn < 0, -1, sampler.item(owners, drawn)).int() for owners, drawn in parts])


@dataclass
class MovieLens(InteractionOptions):
    """Options of MovieLens."""

    def full_info(self, data_root: Path) -> DatasetInfo:
        users, items, ratings, *_ = RELEASES[self.name]
        return DatasetInfo(InteractionShape(users, items), ratings - users, users)

    def place(self, data_root: Path) -> Path | None:
        return next(filter(Path.is_file, (data_root / place for place in RELEASES[self.name].places)), None)

    def absent(self, data_root: Path) -> DataError:
        more = " dataset=movielens_100k is a small proxy of movielens_20m."
        return missing(self.name, data_root, RELEASES[self.name].places[0], more)

    def read(self, data_root: Path) -> Interactions:
        release, file = RELEASES[self.name], self.place(data_root)
        if file is None:
            archive, _, name = release.places[0].partition("/")
            absent = self.absent(data_root)
            file = download(f"{SOURCE}/{archive}.zip", data_root / archive, archive, absent, release.md5) / name
        interactions = read_ratings(file)
        found = *interactions.shape, len(interactions.users)
        check_whole(self.name, file, "users, films and ratings", found, release[:3])
        return interactions


@dataclass
class Ratings(InteractionOptions):
    """Options of user-defined ratings: a file with the header userId,movieId,rating,timestamp."""

    name: str = "ratings"
    path: str = setting(MISSING, "file, absolute or below data_root; may be compressed (.gz)")

    def place(self, data_root: Path) -> Path | None:
        file = self.located(data_root, self.path)
        return file if file.is_file() else None

    def absent(self, data_root: Path) -> DataError:
        return missing(self.name, self.located(data_root, self.path), f"a file with the columns {', '.join(COLUMNS)}")

    def full_info(self, data_root: Path) -> DatasetInfo:
        found = self.read(data_root)
        return DatasetInfo(found.shape, len(found.users) - found.shape.users, found.shape.users)

    def read(self, data_root: Path) -> Interactions:
        file = self.place(data_root)
        if file is None:
            raise self.absent(data_root)
        found = read_ratings(file)
        if len(found.users) == 0 or int(found.users.bincount().min()) < 2:
            raise DataError(f"{self.path} has too few ratings: give two or more of each user.")
        if len((found.users * found.shape.items + found.items).unique()) < len(found.users):
            raise DataError(f"{self.path} has several ratings of an item by the same user. Keep one of them.")
        return found


def read_ratings(file: Path) -> Interactions:
    """Ratings in a file: CSV with the header of ml-20m, or tab-separated without (u.data). Raises DataError if unreadable."""
    import pandas

    layout: dict[str, Any] = {"sep": "\t", "names": COLUMNS} if file.name == "u.data" else {}
    try:
        table = pandas.read_csv(file, engine="pyarrow", **layout)[[COLUMNS[0], COLUMNS[1], COLUMNS[3]]]
    except UNREADABLE as error:
        remedy = f"Download it again; it should have the columns {', '.join(COLUMNS)}."
        raise DataError(f"cannot read {file}: {error}. {remedy}") from error
    _check_columns(table, file)
    (user_ids, users), (item_ids, items) = (np.unique(table[name], return_inverse=True) for name in COLUMNS[:2])
    order = np.lexsort((table[COLUMNS[3]], users))  # stable: equal timestamps keep the order of the file
    shape = InteractionShape(len(user_ids), len(item_ids))
    return Interactions(torch.from_numpy(users[order]), torch.from_numpy(items[order]), shape)


def _check_columns(table: Any, file: Path) -> None:
    """Raise DataError if a value is missing, or if the timestamps are texts, which would be sorted by letters."""
    from pandas.api.types import is_string_dtype

    for name, column in table.items():
        if lacking := int(column.isna().sum()):
            raise DataError(f"column {name} of {file} lacks {lacking} values. Remove these rows.")
    times = table[COLUMNS[3]]
    if len(times) and is_string_dtype(times):
        problem = f"column {COLUMNS[3]} of {file} has texts such as {times.iloc[0]!r}, whose order is not that of time"
        raise DataError(f"{problem}. Give numbers, such as seconds, or dates as 2024-12-31 23:59:59, in all rows.")
