"""Gains over static precision of equal cost, from made-up runs."""

from __future__ import annotations

import pytest

from bitcycle.reproduction.analysis.cells import Cell, Results
from bitcycle.reproduction.analysis.claims import read_claims
from bitcycle.reproduction.analysis.contrast import Pool
from bitcycle.reproduction.analysis.frozen import check_frozen, read_families
from bitcycle.reproduction.analysis.gain import comparisons, mean_gain, slope_of_gain
from bitcycle.reproduction.analysis.items import BOARDS
from bitcycle.reproduction.analysis.metrics import readings
from bitcycle.reproduction.analysis.verdict import SUPPORTED, judge
from tests.conftest import ROOT
from tests.reproduction.claims_cases import cell

LENGTHS = (1000, 4000, 16000)
FITS = {1000: 50.0, 4000: 70.0, 16000: 90.0}


def arm(schedule: str, steps: int, cost: float, *values: float, model: str = "resnet20") -> Cell:
    """A cell with these accuracies for the seeds 1, 2, ...; static arms fit their training data as FITS tell."""
    curve = {"training": {"step": [steps // 2, steps], "accuracy": [1.0, FITS.get(steps, 0.0)]}}
    actual = {"model": model, "dataset": "cifar10_16"}
    made = cell(
        *values,
        steps=steps,
        gbitops=cost,
        curve=curve,
        schedule=schedule,
        training__steps=steps,
        model=model,
        actual=actual,
    )
    for number, run in enumerate(made.runs, start=1):
        run.row.update(seed=str(number), finished="2026-11-26T00:00:00+00:00")
    return made


def arms(*, model: str = "resnet20", fall: float = 1.0, noise: float = 0.0) -> list[Cell]:
    """RTH gains 3, 2 and 1 points over static precision with 40 % of the steps, which is 5 points below that of full length."""
    found = []
    for place, steps in enumerate(LENGTHS):
        static = [60.0 + 10 * place + seed for seed in range(4)]
        drawn = [noise * ((7 * seed + 3 * place) % 5 - 2) for seed in range(4)]
        cyclic = [value - 2 - fall * place + more for value, more in zip(static, drawn)]
        found += [
            arm("static", steps, float(steps), *static, model=model),
            arm("static", steps * 4 // 10, 0.4 * steps, *(value - 5 for value in static), model=model),
            arm("RTH", steps, 0.399 * steps, *cyclic, model=model),
        ]
    return found


def split(cells: list[Cell]) -> tuple[list[Cell], list[Cell]]:
    return [c for c in cells if c.setting("schedule") != "static"], [
        c for c in cells if c.setting("schedule") == "static"
    ]


def test_gain_is_over_the_static_run_of_equal_cost():
    ours, static = split(arms())
    found = comparisons(ours, static)
    assert [int(one.full.runs[0].row["total_steps"]) for one in found] == list(LENGTHS)
    assert [int(one.equal.runs[0].row["total_steps"]) for one in found] == [400, 1600, 6400]
    assert [one.gain("1") for one in found] == pytest.approx([3, 2, 1])
    assert readings(found[1].full, "fit")["1"] == 70.0
    assert mean_gain(ours, static, "1") == pytest.approx(2)
    assert slope_of_gain(ours, static, "1") == pytest.approx(-0.5), "a point less for 20 points of training accuracy"


def test_nothing_is_compared_at_another_cost():
    static = split(arms())[1]
    dearer = [arm("RTH", 1000, 420.0, 60.0)]
    assert comparisons(dearer, static) == []
    assert mean_gain(dearer, static, "1") is None


def test_a_seed_without_all_lengths_does_not_count():
    cells = arms()
    short = arm("RTH", 16000, 6384.0, *(80.0,) * 2)
    ours, static = split([c for c in cells if (c.setting("schedule"), c.setting("training.steps")) != ("RTH", 16000)])
    assert mean_gain([*ours, short], static, "3") is None
    assert slope_of_gain(ours, static, "1") is None, "two lengths have no trend"


def test_the_frozen_claims_are_decided_by_their_sign():
    """Both networks gain, and gain less where they fit better: the claims of RTH hold; CR has no runs."""
    published = ROOT / BOARDS / "gain"
    claims, families = read_claims(published), read_families(published)
    check_frozen(claims, families)
    cells = (*arms(noise=0.05), *arms(model="resnet8", fall=0.9, noise=0.05))
    pool = Pool([run for one in cells for run in one.runs])
    found = {row.claim_id: row for row in judge(claims, {"board/gain": Results("mini", cells)}, pool, families)}
    assert {name: row.verdict for name, row in found.items() if row.estimate is not None} == {
        "board/gain-c1": SUPPORTED,
        "board/gain-c3": SUPPORTED,
    }
    assert found["board/gain-c1"].n == 4
    assert found["board/gain-c3"].estimate == pytest.approx(-0.475, abs=0.02)
