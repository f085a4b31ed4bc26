"""Simulates families of claims without any effect: python scripts/null_families.py [COUNT].

Each family is judged at its planned half and at its end, by the code that judges the recorded runs. The share of families with
a false decision at either look is written to results/summary/null_families.csv, which docs/results.md shows.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy.stats import binomtest

from bitcycle.files import write_csv
from bitcycle.reproduction.analysis.cells import Cell, Results, Run
from bitcycle.reproduction.analysis.claims import Claim
from bitcycle.reproduction.analysis.contrast import Pool
from bitcycle.reproduction.analysis.frozen import LOOKS, Family, fingerprint
from bitcycle.reproduction.analysis.verdict import judge

RECORD = Path("results/summary/null_families.csv")
CLAIMS, SEEDS = 8, 8
ARMS = ("CR", "static")


def decides(seed: int) -> bool:
    """Whether a family of directional claims decides something at its half or its end, although both arms of each claim have
    independent accuracies from the same normal distribution."""
    generator = np.random.default_rng(seed)
    several = [
        Claim(f"x/y{n}-c1", predicate="higher", a={"schedule": ARMS[0]}, b={"schedule": ARMS[1]}) for n in range(CLAIMS)
    ]
    tests = {claim.id: fingerprint(claim) for claim in several}
    family = Family("null", "2026-11-24", LOOKS, tests, dict.fromkeys(tests, range(SEEDS)), dict.fromkeys(tests))
    arms = [[generator.normal(70, 1, SEEDS).tolist() for _ in ARMS] for _ in several]
    return any(
        row.decided
        for n in (SEEDS // 2, SEEDS)
        for row in judge(
            several,
            {
                claim.item: Results("mini", tuple(_cell(name, values, n) for name, values in zip(ARMS, arm)))
                for claim, arm in zip(several, arms)
            },
            Pool([]),
            [family],
        )
    )


def _cell(schedule: str, values: Sequence[float], count: int) -> Cell:
    """A cell with the runs of the first `count` seeds."""
    settings = {"model": "resnet8", "dataset": "cifar10", "schedule": schedule}
    common = {"scale": "mini", "hash": schedule, "metric": "test_accuracy", "total_steps": "1000", **settings}
    nested = {key: {"name": value} for key, value in settings.items()}
    rows = [{**common, "seed": str(seed), "final": str(value)} for seed, value in enumerate(values[:count])]
    return Cell({**settings, "quantizer": "sbm"}, settings, tuple(Run(row, nested) for row in rows))


def main() -> None:
    """Simulate the families and write the record."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    false = sum(decides(seed) for seed in range(count))
    interval = binomtest(false, count).proportion_ci()
    row = {
        "families": count,
        "claims": CLAIMS,
        "seeds": SEEDS,
        "looks": LOOKS,
        "deciding": false,
        "percent": f"{100 * false / count:.2f}",
        "low": f"{100 * interval.low:.2f}",
        "high": f"{100 * interval.high:.2f}",
    }
    write_csv(RECORD, tuple(row), [row])
    print(RECORD, row)


if __name__ == "__main__":
    main()
