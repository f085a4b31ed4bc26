"""The deviation between seeds, and the difference that it lets one see."""

from __future__ import annotations

import math
import statistics
import sys

import numpy as np
import pytest
from scipy.stats import t as student

from bitcycle.reproduction.analysis.cells import Run
from bitcycle.reproduction.analysis.statistics import detectable
from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

from deviations import spread_table, spreads


def row(
    hash_: str, seed: int, final: float, model: str = "resnet8", batch_size: int = 64, samples: int | None = None
) -> Run:
    settings = {"training": {"batch_size": batch_size}, "dataset": {"train_samples": samples}}
    fields = {
        "scale": "mini",
        "model": model,
        "dataset": "cifar10",
        "metric": "test_accuracy",
        "total_steps": "1000",
        "hash": hash_,
        "seed": str(seed),
        "final": str(final),
        "seconds": "36",
    }
    return Run(fields, settings)


ROWS = [
    *(row("a", seed, final) for seed, final in enumerate((50.0, 52.0, 54.0))),  # variance 4, 2 degrees of freedom
    *(row("b", seed, final) for seed, final in enumerate((60.0, 61.0))),  # variance 0.5, 1 degree
    row("c", 0, 70.0),
    row("d", 0, 10.0, model="resnet20"),
    row("e", 0, 10.0, batch_size=32),
    row("f", 0, 10.0, samples=1000),
]


def test_the_deviation_is_pooled_over_settings_of_the_same_length():
    found = spreads(ROWS)
    first, *others = found.itertuples()
    assert (first.runs, first.settings, first.freedom, first.hours) == (6, 3, 1, pytest.approx(0.06))
    assert first.deviation == pytest.approx(math.sqrt((2 * 4 + 0.5) / 3))
    assert [(other.model, other.data, other.batch) for other in others] == [
        ("resnet20", "cifar10", "64"),
        ("resnet8", "cifar10", "32"),
        ("resnet8", "cifar10 (1,000 samples)", "64"),
    ]
    assert found.deviation[1:].isna().all()


def test_what_all_settings_have_in_common_with_a_seed_is_taken_out():
    """By hand: b - a is 10 with seed 0 and 9 with seed 1, so that 0.25 remains in each of four places; the third seed
    of a has nothing to be compared with."""
    assert spreads(ROWS).remaining[0] == pytest.approx(math.sqrt(4 * 0.25**2))
    effects = {"a": 50.0, "b": 60.0, "c": 55.0}
    rows = [row(name, seed, effects[name] + 3.0 * seed) for name in effects for seed in range(4)]
    (spread,) = spreads(rows).itertuples()
    assert spread.deviation == pytest.approx(3 * statistics.stdev(range(4)))
    assert spread.remaining == pytest.approx(0, abs=1e-9)
    assert spread.freedom == 12 - 3 - 4 + 1


def test_a_detectable_difference_is_found_in_four_of_five_repetitions():
    """Simulated: two settings with the same 10 seeds, compared seed by seed; deviation from 190 degrees of freedom."""
    generator = np.random.default_rng(0)
    seeds = generator.normal(0, 5, 11)
    noise = generator.normal(0, 1, (20, 11))
    rows = [row(f"h{i}", seed, seeds[seed] + noise[i, seed]) for i in range(20) for seed in range(11)]
    (spread,) = spreads(rows).itertuples()
    assert (spread.freedom, spread.remaining) == (190, pytest.approx(1, rel=0.1))
    shape = (4000, 10)
    difference = detectable(math.sqrt(2) * spread.remaining, 10, spread.freedom)
    gains = generator.normal(difference, 1, shape) - generator.normal(0, 1, shape)
    found = np.abs(gains.mean(1)) / math.sqrt(2 / 10) > student.ppf(0.975, 190)
    assert 0.74 < found.mean() < 0.86


def test_the_table_has_repeated_settings_and_counts_the_others():
    table = spread_table(ROWS)
    assert (
        "| cifar10, resnet8 | mini | 1000 of 64 | 3 | 6 | 1.68 (test_accuracy) |  |  |  |" in table
    )  # one degree of freedom
    more = [row("b", seed, final) for seed, final in ((2, 63.0), (3, 65.0))] + [row("a", 3, 56.0), row("c", 1, 71.0)]
    (spread, *_) = spreads([*ROWS, *more]).itertuples()
    assert spread.freedom == 4
    assert f"| {spread.remaining:.2f} |" in spread_table([*ROWS, *more])
    assert "3 further runs have one seed each. All 9 recorded runs took 0.1 hours" in table
