"""The deviation between seeds, and the difference that it lets one see."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from scipy.stats import ttest_ind

from bitcycle.analysis.deviation import spread_table, spreads


def row(
    hash_: str, seed: int, final: float, model: str = "resnet8", batch_size: int = 64, samples: int | None = None
) -> dict[str, str]:
    return {
        "scale": "mini",
        "model": model,
        "dataset": "cifar10",
        "metric": "test_accuracy",
        "total_steps": "1000",
        "hash": hash_,
        "seed": str(seed),
        "final": str(final),
        "seconds": "36",
        "settings": json.dumps({"training": {"batch_size": batch_size}, "dataset": {"train_samples": samples}}),
    }


ROWS = [
    *(row("a", seed, final) for seed, final in enumerate((50.0, 52.0, 54.0))),  # variance 4, 2 degrees of freedom
    *(row("b", seed, final) for seed, final in enumerate((60.0, 61.0))),  # variance 0.5, 1 degree
    row("c", 0, 70.0),
    row("d", 0, 10.0, model="resnet20"),
    row("e", 0, 10.0, batch_size=32),
    row("f", 0, 10.0, samples=1000),
]


def test_the_deviation_is_pooled_over_settings_of_the_same_length():
    first, *others = spreads(ROWS)
    assert (first.runs, first.settings, first.freedom, first.seconds) == (6, 3, 3, 216)
    assert first.deviation == pytest.approx(math.sqrt((2 * 4 + 0.5) / 3))
    assert [(other.model, other.dataset, other.batch_size, other.deviation) for other in others] == [
        ("resnet20", "cifar10", "64", None),
        ("resnet8", "cifar10", "32", None),
        ("resnet8", "cifar10 (1,000 samples)", "64", None),
    ]
    assert others[0].detectable(3) is None
    with pytest.raises(ValueError, match="seeds=0 is not positive"):
        first.detectable(0)


def test_a_detectable_difference_is_found_in_four_of_five_repetitions():
    """Simulated: 10 seeds of each of two settings, deviation known from 200 degrees of freedom."""
    rows = [row(f"h{i}", seed, final) for i in range(20) for seed, final in enumerate(np.linspace(-1, 1, 11))]
    (spread,) = spreads(rows)
    generator = np.random.default_rng(0)
    shape = (4000, 10)
    a = generator.normal(0, spread.deviation, shape)
    b = generator.normal(spread.detectable(10), spread.deviation, shape)
    found = (ttest_ind(a, b, axis=1).pvalue < 0.05).mean()
    assert 0.74 < found < 0.84


def test_the_table_has_repeated_settings_and_counts_the_others():
    table = spread_table(ROWS)
    assert "| cifar10, resnet8 | mini | 1000 of 64 | 3 | 6 | 1.68 (test_accuracy) |" in table
    assert "3 further runs have one seed each. All 9 recorded runs took 0.1 hours" in table
