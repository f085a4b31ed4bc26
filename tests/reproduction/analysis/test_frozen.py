"""Frozen families: training and judging refuse a test that was changed after it was frozen."""

from __future__ import annotations

import argparse
import re
import runpy
import shutil
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
from omegaconf import OmegaConf
from scipy import stats

from bitcycle.reproduction import campaign, freeze
from bitcycle.reproduction.analysis import frozen
from bitcycle.reproduction.analysis.cells import Cell, Results, Run
from bitcycle.reproduction.analysis.claims import read_claims
from bitcycle.reproduction.analysis.contrast import Pool
from bitcycle.reproduction.analysis.frozen import WORDING, Family, check_frozen, fingerprint, read_families
from bitcycle.reproduction.analysis.items import BOARDS
from bitcycle.reproduction.analysis.verdict import EXPLORATORY, NO_TEST, NOT_TESTED, SUPPORTED, ClaimResult, judge
from bitcycle.settings import SettingError
from tests.conftest import ROOT
from tests.reproduction.claims_cases import HIGHER, ONE, OTHER, PAIR, PUBLISHED, cell, verdict

decides = runpy.run_path(str(ROOT / "scripts" / "null_families.py"))["decides"]


def family(*claims, looks: int = 2) -> Family:
    tests = {claim.id: fingerprint(claim) for claim in claims}
    return Family("f", "2026-11-24", looks, tests, dict.fromkeys(tests, range(4)), dict.fromkeys(tests))


@pytest.mark.parametrize("folder", [PUBLISHED, *sorted((ROOT / BOARDS).iterdir())], ids=lambda folder: folder.name)
def test_the_repository_s_families_are_those_that_were_frozen(folder):
    check_frozen(read_claims(folder), read_families(folder))


def test_the_fingerprint_depends_on_the_test_alone():
    same = replace(HIGHER, sentence="other words", note="x", value=3.0, looks=9, amended="today", quote="y")
    assert fingerprint(same) == fingerprint(HIGHER)
    changes = {
        "predicate": "lower",
        "metric": "best",
        "a": {"schedule": "RR"},
        "margin": 1.0,
        "each": True,
        "moments": 3,
    }
    others = {fingerprint(replace(HIGHER, **{name: value})) for name, value in changes.items()}
    assert len(others | {fingerprint(HIGHER)}) == len(changes) + 1 and not set(changes) & set(WORDING)


def test_a_changed_test_is_not_decided_and_not_trained(tmp_path, monkeypatch):
    home = family(HIGHER)
    rows = judge([HIGHER], {"x/y": Results("mini", PAIR)}, Pool([]), [home])
    p = float(stats.ttest_rel(ONE, OTHER).pvalue)
    assert (rows[0].verdict, rows[0].family, rows[0].p_corrected) == (SUPPORTED, "f", pytest.approx(2 * p))
    changed = replace(HIGHER, reference=-1.0)
    (found,) = judge([changed], {"x/y": Results("mini", PAIR)}, Pool([]), [home])
    assert (found.verdict, found.decided) == (EXPLORATORY, False) and "frozen" in found.reason
    with pytest.raises(SettingError, match=r"x/y-c1: its test is another than the one frozen on 2026-11-24"):
        check_frozen([changed], [home])
    with pytest.raises(SettingError, match="missing"):
        check_frozen([], [home])
    amended = replace(
        changed, amended="25 November 2026: another reference"
    )  # a frozen test that turned out to be wrong
    with pytest.raises(SettingError, match="add `withdrawn`"):
        check_frozen([amended], [home])
    check_frozen([amended], [replace(home, withdrawn=["x/y-c1"])])
    (found,) = judge([amended], {"x/y": Results("mini", PAIR)}, Pool([]), [home])
    assert (found.verdict, found.decided) == (EXPLORATORY, False) and "another reference" in found.reason


def test_a_withdrawn_claim_can_be_frozen_anew(tmp_path):
    """hlhlp/table1-c1 stayed in the family that had measured the length of training, so that no new seeds could decide it."""
    amended = replace(HIGHER, amended="24 November 2026: another margin")
    old = replace(family(replace(amended, reference=-1.0)), name="old", withdrawn=["x/y-c1"])
    new = replace(family(amended), name="new")
    for families in ([old, new], [new, old]):
        check_frozen([amended], families)
        (found,) = judge([amended], {"x/y": Results("mini", PAIR)}, Pool([]), families)
        assert (found.verdict, found.family) == (SUPPORTED, "new")
    folder = tmp_path / "families"
    folder.mkdir()
    entry = "frozen: '2026-11-24'\nlooks: 2\nclaims:\n  x/y-c1: {test: a, seeds: 4"
    (folder / "new.yaml").write_text(entry + "}\n")
    (folder / "old.yaml").write_text(entry + ", withdrawn: 'it measured something else'}\n")
    assert [one.name for one in read_families(tmp_path)] == ["new", "old"]
    (folder / "old.yaml").write_text(entry + "}\n")
    with pytest.raises(SettingError, match="is frozen in the families new and old"):
        read_families(tmp_path)


def test_a_withdrawn_test_decides_nothing_also_if_it_was_not_changed_yet():
    home = replace(family(HIGHER), withdrawn=["x/y-c1"])
    (found,) = judge([HIGHER], {"x/y": Results("mini", PAIR)}, Pool([]), [home])
    assert (found.verdict, found.leaning, found.decided) == (EXPLORATORY, SUPPORTED, False)
    assert "withdrawn" in found.reason and found.p_corrected is None


def test_new_seeds_in_a_family_of_its_own_decide_an_amended_claim():
    amended = replace(HIGHER, amended="24 November 2026: another margin")
    (found,) = judge([amended], {"x/y": Results("mini", PAIR)}, Pool([]), [])
    assert (found.verdict, found.decided) == (EXPLORATORY, False)
    (found,) = judge([amended], {"x/y": Results("mini", PAIR)}, Pool([]), [family(amended)])
    assert (found.verdict, found.family) == (SUPPORTED, "f") and "new seeds" in found.reason
    later = replace(family(amended), seeds={"x/y-c1": range(60, 64)})
    (found,) = judge([amended], {"x/y": Results("mini", PAIR)}, Pool([]), [later])
    assert (found.verdict, found.leaning, found.decided) == (EXPLORATORY, SUPPORTED, False)
    assert "0 of 4 planned seeds are trained" in found.reason


def test_a_campaign_refuses_a_test_that_was_changed(tmp_path, capsys):
    for name in ("results/published", "sweeps", "conf"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("families"))
    assert freeze.main(["f", "cpt/fig2-c1", "--seeds", "4", "--published", str(tmp_path / "results/published")]) == 0
    claims = tmp_path / "results/published/claims/cpt.yaml"
    given = argparse.Namespace(
        jobs=1, threads=1, plan=None, results_root="runs", summary=tmp_path / "s.csv", dry_run=True
    )
    before = claims.read_text()
    claims.write_text(before.replace("    metric: rise\n", "    metric: final\n", 1))
    assert claims.read_text() != before
    with pytest.raises(SettingError, match="cpt/fig2-c1: its test is another"):
        campaign.run(given, tmp_path)
    claims.write_text(before)
    board = tmp_path / BOARDS / "four_bit"
    shutil.copytree(ROOT / BOARDS / "four_bit/families", board / "families")
    claims = board / "claims/board.yaml"
    claims.write_text(claims.read_text().replace("predicate: lower", "predicate: higher", 1))
    with pytest.raises(SettingError, match="board/four_bit-c1: its test is another"):
        campaign.run(given, tmp_path)


def test_freezing(tmp_path, capsys):
    shutil.copytree(PUBLISHED / "claims", tmp_path / "published" / "claims")
    summary = tmp_path / "summary" / "claims.csv"
    summary.parent.mkdir()
    summary.write_text("claim_id,deviation,margin\ncpt/fig1-c2,0.5,\ncpt/fig1-c1,5.0,\n")
    common = ["--seeds", "6", "--published", str(tmp_path / "published")]
    assert freeze.main(["one", "cpt/fig1-c2", *common]) == 0
    (made,) = read_families(tmp_path / "published")
    assert (made.name, made.looks, made.seeds) == ("one", 2, {"cpt/fig1-c2": range(6)})
    assert abs(datetime.now(UTC) - datetime.fromisoformat(made.frozen)) < timedelta(minutes=5)
    assert made.power["cpt/fig1-c2"] == pytest.approx(0.93, abs=0.03)  # an effect of 0.91 at a deviation of 0.5
    for words, message in (
        (["one", "cpt/fig1-c1"], "frozen already"),
        (["two", "cpt/fig1-c1"], "power of 0.0"),
        (["two", "cpt/fig1-c2"], "is frozen in the families"),
        (["two", "cpt/table7-c2"], "does not quote"),
        (["two", "cpt/fig99-c1"], "there is no such claim"),
        (["cpt/two", "cpt/fig1-c1"], "cpt/two: is not the name of a family"),  # which no command would read
        (["two", "cpt/fig1-c1", "--first-seed", "-5"], "--first-seed=-5: is not a seed"),
    ):
        with pytest.raises(SettingError, match=message):
            freeze.main([*words, *common])
        assert not (tmp_path / "published/families/two.yaml").exists(), "a refused family leaves no file"
    own = ["--seeds", "cpt/fig1-c1=2000", "--first-seed", "60"]
    assert freeze.main(["three", "cpt/fig1-c1", "cpt/table5-c2", *common, *own]) == 0
    assert read_families(tmp_path / "published")[1].seeds == {
        "cpt/fig1-c1": range(60, 2060),
        "cpt/table5-c2": range(60, 66),
    }
    with pytest.raises(SettingError, match="there is no number for cpt/fig5-c1"):
        freeze.main(["four", "cpt/fig5-c1", *common[2:], *own])


def test_a_family_is_tested_at_half_of_its_seeds_and_at_the_end():
    arms = {name: cell(*values, schedule=name) for name, values in (("CR", ONE), ("static", OTHER))}
    home = family(HIGHER)  # four seeds

    def judged(trained: int, finished: str = "2026-11-25T00:00:00") -> ClaimResult:
        cells = []
        for one in arms.values():
            runs = [Run({**run.row, "finished": finished}, run.settings) for run in one.runs[:trained]]
            for run in runs:
                vars(run).update(curve={}, analyses=[])
            cells.append(replace(one, runs=tuple(runs)))
        return judge([HIGHER], {"x/y": Results("mini", tuple(cells))}, Pool([]), [home])[0]

    assert [judged(n).n for n in (1, 2, 3, 4)] == [None, 2, 2, 4]
    assert judged(1).verdict == NOT_TESTED and judged(1).reason.startswith("1 of 4 planned seeds are trained")
    assert "tested at 2 of 4 planned seeds" in judged(3).reason
    old = judged(4, finished="2026-11-23T23:59:59")
    assert (old.verdict, old.n) == (NOT_TESTED, None)  # seen before the family was frozen


def test_no_look_is_due_before_every_planned_setting_is_trained():
    """Of two networks, one had no runs: "tested at 6 of 6 planned seeds", and again with each seed of the other."""
    claim = replace(HIGHER, match=["model"])
    other = cell(*ONE, schedule="CR", model="resnet38"), cell(*OTHER, schedule="static", model="resnet38")
    home = replace(family(claim), cells={claim.id: 4})
    (found,) = judge([claim], {"x/y": Results("mini", PAIR)}, Pool([]), [home])
    assert (found.verdict, found.n) == (NOT_TESTED, None)
    assert found.reason.startswith("2 of 4 planned settings have runs")
    (found,) = judge([claim], {"x/y": Results("mini", (*PAIR, *other))}, Pool([]), [home])
    assert (found.n, found.reason) == (4, "tested at 4 of 4 planned seeds")


def test_a_freeze_counts_the_settings_that_a_claim_compares(tmp_path):
    """better/fig6-c5 compares ten schedules and static precision, at two highest precisions and with two aggregations."""
    shutil.copytree(PUBLISHED / "claims", tmp_path / "published" / "claims")
    common = ["--seeds", "40", "--published", str(tmp_path / "published"), "--deviation", "better/fig6-c5=0.56"]
    freeze.main(["all", "better/fig6-c5", *common])
    freeze.main(
        ["some", "better/fig6-c4", *common[:-2], "--power", "better/fig6-c4=0.9", "--cells", "better/fig6-c4=6"]
    )
    families = {one.name: one.cells for one in read_families(tmp_path / "published")}
    assert families == {"all": {"better/fig6-c5": 44}, "some": {"better/fig6-c4": 6}}
    with pytest.raises(SettingError, match="--cells=0: is not a number of settings"):
        freeze.main(["none", "cpt/fig2-c1", *common[:-2], "--cells", "cpt/fig2-c1=0"])


def test_no_look_is_due_before_every_arm_is_trained():
    """board/all_images-c6 was "tested at 4 of 4 planned seeds" with runs of its static arm alone, which another claim shares."""
    home = replace(family(HIGHER), frozen="2026-11-24T12:00:00+00:00")
    arms = cell(schedule="CR"), cell(*OTHER, schedule="static")
    (found,) = judge([HIGHER], {"x/y": Results("mini", arms)}, Pool([]), [home])
    assert (found.verdict, found.n) == (NOT_TESTED, None)
    assert found.reason.startswith("0 of 4 planned seeds are trained")
    every = replace(HIGHER, a={}, b=None)  # arm a is all cells
    assert frozen.due_look(every, [cell(schedule="CR")], home)[1].startswith("0 of 4 planned seeds are trained")


@pytest.mark.parametrize(
    ("finished", "counts"), [("2026-11-24T11:59:59+00:00", False), ("2026-11-24T12:00:00+00:00", True)]
)
def test_a_run_of_the_same_day_does_not_count_if_it_finished_before_the_freeze(finished, counts):
    """A run of board/gain that ended 13 minutes before the family was frozen counted, as only the day was kept."""
    cells = [cell(*values, schedule=name, finished=finished) for name, values in (("CR", ONE), ("static", OTHER))]
    home = replace(family(HIGHER), frozen="2026-11-24T12:00:00+00:00")
    (found,) = judge([HIGHER], {"x/y": Results("mini", tuple(cells))}, Pool([]), [home])
    assert (found.n == 4) is counts


def test_a_sweep_that_was_changed_after_runs_of_a_family_has_no_test():
    """Freezing covered the test and the seeds only: after a look, one could change the sweep, train again and test once more."""
    arms = {name: cell(*values, schedule=name) for name, values in (("CR", ONE), ("static", OTHER))}
    home = family(HIGHER)

    def judged(finished: str, seed: str = "0", schedule: str = "CR") -> ClaimResult:
        row = {**arms["CR"].runs[0].row, "finished": finished, "seed": seed, "hash": "old"}
        before = replace(arms[schedule], runs=(Run(row, {}),))
        return judge([HIGHER], {"x/y": Results("mini", tuple(arms.values()), replaced=(before,))}, Pool([]), [home])[0]

    changed = judged("2026-11-25T00:00:00")
    assert changed.verdict == NOT_TESTED and changed.p_raw is None
    assert changed.reason.startswith("the sweep was changed when the family had runs (1)")
    for other in (judged("2026-11-23T00:00:00"), judged(""), judged("2026-11-25T00:00:00", seed="9")):
        assert (other.verdict, other.n) == (SUPPORTED, 4)


def test_later_runs_do_not_move_the_verdict_on_a_family():
    """The interval of fractrain/table1-c1, decided the day before, nearly doubled with trainings of another claim."""
    arms = [
        cell(*values[:2], schedule=name, finished="2026-11-25T00:00:00+00:00")
        for name, values in (("CR", ONE), ("static", OTHER))
    ]
    before = cell(70.0, 73.0, 71.0, 70.5, schedule="RTH", finished="2026-11-24T23:00:00+00:00")
    after = cell(40.0, 80.0, 20.0, 75.0, schedule="LR", finished="2026-11-25T00:00:01+00:00")

    def judged(*others: Cell) -> ClaimResult:
        pool = Pool([run for one in (*arms, *others) for run in one.runs])
        return judge([HIGHER], {"x/y": Results("mini", tuple(arms))}, pool, [family(HIGHER)])[0]

    found = judged(before)
    assert found.n == 2 and found.df is not None and judged().df != found.df  # its deviation is pooled
    assert judged(before, after) == found


def test_claims_of_a_family_that_wait_for_runs_count_in_the_correction():
    """hlhlp/table1-c1 was corrected for two claims, while the third of its family had no runs yet."""
    waiting = [replace(HIGHER, id=f"x/z{n}-c1") for n in range(2)]
    home = family(HIGHER, *waiting)
    rows = judge([HIGHER, *waiting], {"x/y": Results("mini", PAIR)}, Pool([]), [home])
    assert rows[0].p_corrected == pytest.approx(2 * 3 * stats.ttest_rel(ONE, OTHER).pvalue)


def test_a_family_does_not_wait_for_seeds_at_another_scale():
    """The first runs of a paper's setting made a closed family look untrained: 0 of 8 planned seeds, tested at none."""
    mini, paper = (
        Results(scale, tuple(cell(*values, schedule=name) for name, values in (("CR", ones), ("static", others))))
        for scale, ones, others in (("mini", ONE, OTHER), ("paper", ONE[:1], OTHER[:1]))
    )
    (found,) = judge([HIGHER], {"x/y": replace(mini, others=(paper,))}, Pool([]), [family(HIGHER)])
    assert (found.scale, found.n) == ("mini", 4)


def test_the_first_runs_at_a_scale_do_not_count_a_claim_twice():
    """partial/fig1-c2 was counted as "no test" besides, when one of 24 cells had a run at paper scale."""
    networks = {"resnet74": ONE[:1], "resnet38": (), "resnet110": ()}
    few = [cell(*values, schedule=name, model=model) for model, values in networks.items() for name in ("CR", "static")]
    mini = Results("mini", PAIR)
    assert [row.verdict for row in judge([HIGHER], {"x/y": Results("paper", tuple(few))}, Pool([]))] == [NO_TEST]
    rows = judge([HIGHER], {"x/y": replace(mini, others=(Results("paper", tuple(few)),))}, Pool([]))
    assert [(row.scale, row.verdict) for row in rows] == [("mini", SUPPORTED)]


def test_a_margin_that_the_paper_has_no_number_for_is_called_ours():
    close = [cell(*values, schedule=name) for name, values in (("CR", (70.0, 73.1, 73.0, 70.1)), ("static", OTHER))]
    ours, printed = replace(HIGHER, predicate="at_least"), replace(HIGHER, predicate="at_least", margin=0.5)
    assert (ours.assumed_margin, printed.assumed_margin, HIGHER.assumed_margin) == (True, False, False)
    assert "the margin is ours" in verdict(ours, *close).reason and "ours" not in verdict(printed, *close).reason


def test_a_margin_needs_a_quote(tmp_path):
    shutil.copytree(PUBLISHED / "claims", tmp_path / "claims")
    path = tmp_path / "claims" / "fractrain.yaml"
    lines = [line for line in path.read_text().splitlines() if "while achieving a comparable accuracy" not in line]
    path.write_text("\n".join(lines))
    with pytest.raises(SettingError, match=r"fractrain/table4-c1: margin has no quote|table4-c1.*has no quote"):
        read_claims(tmp_path)


def test_without_effects_at_most_one_family_in_twenty_decides_something_at_either_look(monkeypatch):
    monkeypatch.setattr("gc.collect", lambda: 0)  # which statsmodels calls each time
    false = sum(decides(seed) for seed in range(60))
    assert false <= stats.binom.ppf(0.999, 60, 0.05)


@pytest.mark.slow
def test_the_share_of_false_families_over_many_simulations(monkeypatch):
    monkeypatch.setattr("gc.collect", lambda: 0)
    false = sum(decides(seed) for seed in range(1000))
    assert false / 1000 <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / 1000)


def test_families_are_files_that_omegaconf_reads(tmp_path):
    shutil.copytree(PUBLISHED / "claims", tmp_path / "published" / "claims")
    freeze.main(["f", "cpt/fig2-c1", "--seeds", "4", "--published", str(tmp_path / "published")])
    content = OmegaConf.load(tmp_path / "published/families/f.yaml")
    assert content.looks == 2 and list(content.claims) == ["cpt/fig2-c1"]


def test_the_seed_that_a_look_waits_for_is_named():
    """With one failed run, "2 of 8 planned seeds are trained" stayed whatever else was trained, and named nothing."""
    home = family(HIGHER)
    pair = [cell(*values, schedule=name) for name, values in (("CR", ONE), ("static", OTHER))]
    gap = replace(pair[0], runs=(pair[0].runs[0], *pair[0].runs[2:]))
    words = frozen.due_look(HIGHER, [gap, pair[1]], home)[1]
    assert words.startswith("1 of 4 planned seeds are trained; the first test is at 2; it waits for seed 1")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seeds", "0"], "--seeds=0: is not a number of seeds"),
        (["--seeds", "-2", "--deviation", "cpt/fig5-c1=0.5"], "--seeds=-2: is not a number of seeds"),
        (["--seeds", "2.9"], "--seeds=2.9: is not a number of seeds"),
        (["--seeds", "inf"], "--seeds=inf: is not a number of seeds"),
        (["--seeds", "8", "--deviation", "cpt/fig5-c2=0.5"], "for a claim that is not to be frozen here"),
        (["--seeds", "8", "--deviation", "cpt/fig5-c1=nan"], "--deviation=nan: is not a deviation"),
        (["--seeds", "8", "--power", "cpt/fig5-c1=7"], "--power=7: is not a power"),
    ],
)
def test_a_plan_that_cannot_be_meant_is_not_frozen(words, said, tmp_path):
    with pytest.raises(SettingError, match=re.escape(said)):
        freeze.main(["made_up", "cpt/fig5-c1", *words])
    assert not (PUBLISHED / "families" / "made_up.yaml").exists()
