"""Recommendation: interactions, negatives, ranks, the network of the paper, and runs."""

from __future__ import annotations

import gzip
import math
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import bitcycle.dataset.sources as fetch_module
from bitcycle.dataset.interactions import HeldOut, Interactions, MovieLens, Ratings, read_ratings, unchosen_items
from bitcycle.errors import DataError
from bitcycle.layer import conversion_plan, quantize_model
from bitcycle.model import MODELS
from bitcycle.quantizer import PactBinary, Sbm
from bitcycle.settings import SettingError
from bitcycle.shapes import InteractionShape
from bitcycle.task import TASKS, TaskSetup
from bitcycle.task.recommendation import NegativeSampler, discounted_gain, hit_rate, popularity_ranks, ranks_of_first
from bitcycle.training.run import execute
from tests.conftest import plan

CPU = torch.device("cpu")
HEADER = "userId,movieId,rating,timestamp\n"


def write_ratings(path: Path, users: int = 40, items: int = 60, each: int = 12) -> None:
    """Users who like either even or odd films."""
    generator = np.random.default_rng(0)
    rows = []
    for user in range(users):
        liked = generator.permutation(np.arange(user % 2, items, 2))[:each]
        rows += [f"{user + 1},{item + 1},4.0,{1000 + place}" for place, item in enumerate(liked)]
    path.write_text(HEADER + "\n".join(rows) + "\n")


@pytest.fixture
def ratings(tmp_path) -> Path:
    write_ratings(tmp_path / "ratings.csv")
    return tmp_path


def build_task(root: Path, **values):
    dataset = Ratings(path="ratings.csv", **values)
    options = TASKS["recommendation"]()
    return options.build(TaskSetup(dataset, root, dataset.info(root), 50, 0, CPU))


def network(users: int = 7, items: int = 9, **values) -> nn.Module:
    return MODELS["ncf"](**values).build(InteractionShape(users, items))


def test_the_network_has_the_sizes_of_the_paper():
    model = network()
    mlp = 256 * 256 + 256 + 256 * 128 + 128 + 128 * 64 + 64
    norms = 2 * (256 + 128 + 64)
    assert sum(parameter.numel() for parameter in model.parameters()) == (7 + 9) * (64 + 128) + mlp + norms + 128 + 1
    assert model(torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6])).shape == (3,)


def test_initial_weights():
    torch.manual_seed(0)
    model = network(500, 500).requires_grad_(False)
    assert model.user_embedding.weight.std() == pytest.approx(0.01, rel=0.02)
    first = model.mlp[0][0].weight
    assert first.abs().max() == pytest.approx(math.sqrt(6 / 512), rel=0.01)
    assert model.final.weight.abs().max() == pytest.approx(math.sqrt(3 / 128), rel=0.05)


def test_which_layers_stay_float():
    for options in (Sbm(), PactBinary()):
        treated = [rule.treatment for rule in conversion_plan(network(), options)]
        assert treated == ["float", "quantized", "quantized", "float"]
    with pytest.raises(SettingError, match="PACT would clip"):
        quantize_model(network(), PactBinary(float_layers=["last"]))


def test_known_sizes_need_no_data():
    large = MovieLens(name="movielens_20m").info(Path("nowhere"))
    assert (large.shape, large.train_samples, large.test_samples) == ((138_493, 26_744), 19_861_770, 138_493)
    epoch = TASKS["recommendation"]().epoch(large, 2048)
    assert (epoch.samples, 8 * epoch.samples // 2048) == (99_308_850, 387_925)  # the steps that the paper prints
    assert epoch.steps == 48_491
    run = plan("dataset=movielens_100k", "data_root=nowhere")
    assert run.total_steps == 8 * 242
    assert run.workload.macs == 256 * 256 + 256 * 128 + 128 * 64 + 128
    assert run.config.training.learning_rate.rate(300_000, run.total_steps) == 5e-4


def test_the_last_item_of_each_user_tests(tmp_path, monkeypatch):
    monkeypatch.setattr("bitcycle.dataset.interactions.EVALUATION_NEGATIVES", 5)
    rows = ["7,30,1,50", "7,10,1,20", "7,20,1,90", "3,10,2,5", "3,40,2,5", "3,20,2,1", "3,30,2,4"]
    (tmp_path / "r.csv").write_text(HEADER + "\n".join(rows) + "\n")
    splits = Ratings(path="r.csv").load(tmp_path, seed=0)
    assert splits.train.shape == (2, 4)  # films 10, 20, 30, 40 are 0, 1, 2, 3; users 3, 7 are 0, 1
    assert list(zip(splits.train.users.tolist(), splits.train.items.tolist())) == [
        (0, 1),
        (0, 2),
        (0, 0),
        (1, 0),
        (1, 2),
    ]
    assert (splits.test.users.tolist(), splits.test.items.tolist()) == ([0, 1], [3, 1])
    assert splits.test.negatives.tolist() == [[-1] * 5, [3, -1, -1, -1, -1]]
    assert splits.validation is None


def test_validation_holds_out_one_item_more_of_some_users(ratings):
    dataset = Ratings(path="ratings.csv", validation=0.25)
    info, splits = dataset.info(ratings), dataset.load(ratings, seed=3)
    assert info.train_samples == len(splits.train.users) == 40 * 11 - 10
    assert len(splits.validation.users.unique()) == 10
    whole, other = Ratings(path="ratings.csv").load(ratings, 3), dataset.load(ratings, 4)
    assert torch.equal(whole.test.items, splits.test.items) and torch.equal(whole.test.negatives, splits.test.negatives)
    assert not torch.equal(other.validation.users, splits.validation.users)
    pairs = set(zip(splits.train.users.tolist(), splits.train.items.tolist()))
    for held in (splits.test, splits.validation):
        assert pairs.isdisjoint(zip(held.users.tolist(), held.items.tolist()))


def test_validation_leaves_something_to_train_on(tmp_path):
    (tmp_path / "a.csv").write_text(f"{HEADER}1,2,5,10\n1,3,5,11\n")
    assert Ratings(path="a.csv").info(tmp_path).train_samples == 1
    with pytest.raises(SettingError, match=r"validation=0\.5: leaves none of 1 training interactions"):
        Ratings(path="a.csv", validation=0.5).info(tmp_path)


def test_parts_of_the_data(ratings):
    dataset = Ratings(path="ratings.csv", train_samples=100, test_samples=8)
    splits = dataset.load(ratings, 0)
    assert dataset.info(ratings)[1:] == (100, 8) == (len(splits.train.users), len(splits.test.users))
    assert (splits.train.users.diff() >= 0).all()
    with pytest.raises(SettingError, match="at most 40"):
        Ratings(path="ratings.csv", test_samples=41).info(ratings)


@given(st.integers(0, 10_000), st.integers(2, 9), st.integers(1, 6))
def test_ranks_enumerate_what_was_not_chosen(seed, items, users):
    generator = np.random.default_rng(seed)
    chosen = generator.random((users, items)) < 0.5
    found = np.argwhere(chosen)
    interactions = Interactions(*map(torch.from_numpy, found.T.copy()), InteractionShape(users, items))
    sampler = NegativeSampler(interactions, CPU)
    for user in range(users):
        expected = np.flatnonzero(~chosen[user])
        ranks = torch.arange(len(expected))
        assert sampler.item(torch.full_like(ranks, user), ranks).tolist() == expected.tolist()
        drawn = unchosen_items(interactions, torch.tensor([user]), 4, seed)[0].tolist()
        assert sorted(set(drawn) - {-1}) == sorted(item for item in drawn if item >= 0)
        assert set(drawn) - {-1} <= set(expected.tolist())
        assert drawn.count(-1) == max(0, 4 - len(expected))


def test_draws_are_uniform_and_follow_from_seed_epoch_and_number(ratings):
    train = Ratings(path="ratings.csv").load(ratings, 0).train
    sampler, numbers = NegativeSampler(train, CPU), torch.arange(49_000)
    users = torch.zeros_like(numbers)
    drawn = sampler.draw(users, numbers, 0, 0)
    counts = torch.bincount(drawn, minlength=60)
    chosen = train.items[train.users == 0]
    assert (counts[chosen] == 0).all() and (counts > 0).sum() == 49
    assert counts[counts > 0].min() > 850 and counts.max() < 1150  # 1000 expected, standard deviation 31
    assert torch.equal(sampler.draw(users[5:9], numbers[5:9], 0, 0), drawn[5:9])
    assert not torch.equal(sampler.draw(users, numbers, 0, 1), drawn)
    assert not torch.equal(sampler.draw(users, numbers, 1, 0), drawn)


def test_an_epoch_has_each_interaction_once_and_four_others(ratings):
    task = build_task(ratings)
    run = task.batches(0)
    batches = [next(run) for _ in range(task.epoch.steps + 2)]
    users, items, targets = (torch.cat(column) for column in zip(*batches[: task.epoch.steps]))
    assert len(users) == 5 * 440 and targets.sum() == 440
    chosen = set(zip(task.users.tolist(), task.items.tolist()))
    labelled = set(zip(users[targets == 1].tolist(), items[targets == 1].tolist()))
    assert labelled == chosen
    assert chosen.isdisjoint(zip(users[targets == 0].tolist(), items[targets == 0].tolist()))
    assert torch.equal(users.bincount(), 5 * task.users.bincount())
    for step in (1, task.epoch.steps + 1):
        again = next(task.batches(step))
        assert all(torch.equal(*both) for both in zip(again, batches[step]))


def test_hit_rate_and_gain_by_hand():
    assert hit_rate(torch.tensor([0, 9, 10, 500])) == 50
    assert discounted_gain(torch.tensor([0, 2, 10])) == pytest.approx(100 * (1 + 0.5) / 3, abs=1e-4)
    everything = torch.ones(2, 13, dtype=torch.bool)
    assert hit_rate(ranks_of_first(torch.zeros(2, 13), everything)) == 0  # a constant network hits nothing
    assert hit_rate(ranks_of_first(torch.full((2, 13), torch.nan), everything)) == 0
    few = torch.arange(13) < 4
    assert ranks_of_first(torch.zeros(1, 13), few[None]).tolist() == [3]


def test_popularity_by_hand():
    train = Interactions(torch.tensor([0, 0, 1, 1, 2]), torch.tensor([0, 1, 0, 2, 0]), InteractionShape(3, 14))
    negatives = torch.tensor([[1, 2, 3, -1], [3, 4, -1, -1]])
    test = HeldOut(torch.tensor([2, 0]), torch.tensor([0, 5]), negatives)
    assert popularity_ranks(train, test).tolist() == [0, 2]


def test_files_of_ratings(tmp_path):
    text = HEADER + "1,2,3.5,10\n1,3,4.0,5\n"
    (tmp_path / "a.csv").write_text(text)
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "u.data").write_text("1\t2\t3\t10\n1\t3\t4\t5\n")
    for name in ("a.csv", "a.csv.gz", "u.data"):
        assert read_ratings(tmp_path / name).items.tolist() == [1, 0]
    (tmp_path / "b.csv").write_text("user,item\n1,2\n")
    for name in ("b.csv", "missing.csv"):
        with pytest.raises(DataError, match="cannot read"):
            read_ratings(tmp_path / name)
    with pytest.raises(DataError, match=r"ratings is not in .*missing.csv. Put a file with the columns userId"):
        Ratings(path="missing.csv").info(tmp_path)
    for rows in ("", "1,2,3.5,10\n", "1,2,3.5,10\n1,3,3.5,10\n1,4,3.5,10\n2,3,4.0,5\n"):
        (tmp_path / "c.csv").write_text(HEADER + rows)
        with pytest.raises(DataError, match="too few ratings"):
            Ratings(path="c.csv").info(tmp_path)
    (tmp_path / "c.csv").write_text(HEADER + "1,2,3.5,10\n1,3,3.5,10\n1,2,5.0,11\n")
    with pytest.raises(DataError, match="several ratings of an item by the same user"):
        Ratings(path="c.csv").info(tmp_path)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("1,2,5,10\n1,3,5,11\n,2,5,10\n,3,5,11\n", "column userId of .* lacks 2 values"),
        ("1,a,5,10\n1,,5,11\n", "column movieId of .* lacks 1 values"),
        ("1,2,5,10\n1,3,5,\n", "column timestamp of .* lacks 1 values"),
        ("1,2,5,12/31/2023\n1,3,5,01/01/2024\n", "timestamp of .* has texts such as '12/31/2023'.*Give numbers"),
    ],
)
def test_ratings_without_user_item_or_time_are_refused(tmp_path, rows, words):
    (tmp_path / "a.csv").write_text(HEADER + rows)
    with pytest.raises(DataError, match=words):
        Ratings(path="a.csv").info(tmp_path)


@pytest.mark.parametrize(
    "times", [("9", "10"), ("2023-12-31", "2024-01-01"), ("2023-12-31 09:00:00", "2024-01-01 00:00:00")]
)
def test_times_are_numbers_or_dates(tmp_path, times):
    (tmp_path / "a.csv").write_text(f"{HEADER}1,2,5,{times[1]}\n1,3,5,{times[0]}\n")
    assert read_ratings(tmp_path / "a.csv").items.tolist() == [1, 0]


def test_movielens_is_whole_or_refused(tmp_path, monkeypatch):
    def offline(*_, **__):
        raise URLError("no network")

    monkeypatch.setattr(fetch_module, "urlopen", offline)
    with pytest.raises(DataError, match=r"ml-20m.zip.*no network.*ml-20m/ratings.csv.*movielens_100k"):
        MovieLens(name="movielens_20m").read(tmp_path)
    (tmp_path / "ml-20m").mkdir()
    write_ratings(tmp_path / "ml-20m" / "ratings.csv")
    with pytest.raises(DataError, match="the complete movielens_20m has 138493, 26744, 20000263"):
        MovieLens(name="movielens_20m").read(tmp_path)


@pytest.mark.parametrize(
    "overrides",
    [
        ["schedule=RTH"],
        ["schedule=partial_pretrain", "quantizer=pact_binary"],
        ["schedule=CR", "dataset.validation=0.5"],
    ],
)
def test_smoke_runs(ratings, overrides):
    run = plan(
        *("dataset=ratings", "dataset.path=ratings.csv", "scale=smoke", "dataset.test_samples=20", *overrides),
        *(f"data_root={ratings}", f"results_root={ratings}/runs", "training.steps=24"),
    )
    summary = execute(run)
    assert (summary["metric"], 0 <= summary["final"] <= 100) == ("test_hr10", True)
    assert ("validation" in summary) == ("dataset.validation=0.5" in overrides)


def test_it_learns_who_likes_what(ratings):
    run = plan(
        *("dataset=ratings", "dataset.path=ratings.csv", "quantizer=none", "training.epochs=40"),
        *("training.batch_size=256", "training.learning_rate.initial=0.003", "training.evaluation_steps=90"),
        *(f"data_root={ratings}", f"results_root={ratings}/runs"),
    )
    # 49 candidates, of which 30 are of the wrong kind: about 10 of 18 right, by chance 10 of 48. The best evaluation, as one of
    # 40 users is 2.5 points and the last digits of sums decide on several of them.
    assert execute(run)["best"] > 35
