"""The comparison with the published cost numbers: every expectation within its tolerance, and the committed table up to date."""

import csv
import sys

import pytest

from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

import published_costs
from published_formulas import MORE_THAN, Derived, bit_mix

with open(ROOT / "tests" / "data" / "hardware" / "cost_expectations.csv") as stream:
    EXPECTATIONS = list(csv.DictReader(stream))


@pytest.fixture(scope="module")
def comparisons():
    return published_costs.compare()


@pytest.fixture(scope="module")
def derived(comparisons):
    return [comparison for comparison in comparisons if isinstance(comparison.ours, Derived)]


@pytest.mark.parametrize(
    "row", EXPECTATIONS, ids=lambda r: "-".join((r["paper"], r["table"], r["model"], r["method"], r["metric"]))
)
def test_every_expectation_is_met(derived, row):
    published, formula = float(row["published"]), float(row["formula_value"])
    key = (row["paper"], row["table"], row["metric"])
    alike = [
        c
        for c in derived
        if (c.number.paper, c.number.table, c.number.metric) == key
        and c.number.published == pytest.approx(published, rel=1e-5)
        and c.ours.ours == pytest.approx(formula, rel=2e-5)  # printed with six digits
    ]
    assert alike, f"no number {key} with {published} published and {formula} by formula"
    assert all(abs(c.residual) <= float(row["tolerance_rel"]) for c in alike)
    assert all(c.ours.tolerance <= float(row["tolerance_rel"]) or c.ours.tolerance == MORE_THAN for c in alike)


def test_three_numbers_are_out_of_tolerance_as_the_papers_contradict_themselves(derived):
    outside = [(c.number.model, c.number.dataset, c.number.metric) for c in derived if not c.within]
    assert outside == [
        ("Transformer", "WikiText-103", "gbitops_saving_pct"),
        ("ResNet-38", "CIFAR-100", "energy_kJ"),
        ("ResNet-38", "CIFAR-100", "latency_min"),
    ]


def test_every_number_has_a_value_or_a_reason(comparisons):
    assert len(comparisons) > 400
    for comparison in comparisons:
        assert isinstance(comparison.ours, Derived) or len(comparison.ours) > 30
    papers = {(c.number.paper, c.number.table) for c in comparisons}
    for paper, tables in {"CPT": "2 3 5", "FracTrain": "1 2 3 4 5 6"}.items():
        assert {(paper, table) for table in tables.split()} <= papers


def test_the_committed_table_is_what_the_command_writes(comparisons, tmp_path, monkeypatch):
    monkeypatch.setattr(published_costs, "RESULT", tmp_path / "published_costs")
    published_costs.write(comparisons)
    for ending in ("csv", "md"):
        committed = (ROOT / "results" / f"published_costs.{ending}").read_text()
        assert (tmp_path / f"published_costs.{ending}").read_text() == committed, "run `make costs`"
    assert published_costs.summary(comparisons) in committed


def test_a_bit_mix_has_the_compute_percentage_that_it_is_for():
    for percentage in (1.9, 2.25, 2.5, 3.0, 3.3):
        mix = bit_mix(percentage)
        bits = sum(n * (w * a + w * g + a * g) for (w, a, g), n in mix.items()) / sum(mix.values())
        assert 100 * bits / 3072 == pytest.approx(percentage, rel=1e-6)
    assert {(p.activation, p.gradient) for p in bit_mix(3.0)} == {(4, 8), (6, 8)}
