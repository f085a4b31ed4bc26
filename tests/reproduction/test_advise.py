"""Advice: what keeps within a budget, cheapest first, and what recorded runs say of it."""

from __future__ import annotations

import gzip
import json
import shutil
from dataclasses import asdict
from functools import cache

import pytest

from bitcycle.files import as_csv, write_bytes
from bitcycle.reproduction import advise, evidence
from bitcycle.reproduction.analysis.collect import COLUMNS as SUMMARY_COLUMNS
from bitcycle.reproduction.analysis.collect import curve_name
from bitcycle.reproduction.candidate import Candidate
from bitcycle.reproduction.manifest import read_manifest
from bitcycle.schedule import SUITE
from tests.conftest import ROOT, configure


def row(
    schedule: str, seed: int, final: float, hash: str = "a", steps: int = 2000, **options: object
) -> dict[str, object]:
    """A recorded run of SBM on the digits as `collect` writes it."""
    config = asdict(
        configure(f"schedule={schedule}", *START, *(f"{k.replace('__', '.')}={v}" for k, v in options.items()))
    )
    values = {
        "scale": "mini",
        "model": "resnet8",
        "dataset": "digits",
        "quantizer": config["quantizer"]["name"],
        "schedule": schedule,
        "seed": seed,
        "hash": hash,
        "total_steps": steps,
        "metric": "test_accuracy",
        "q_min": config["schedule"]["q_min"],
        "q_max": config["schedule"]["q_max"],
        "final": final,
        "train_samples": 1438,
        "settings": json.dumps(config),
    }
    return {name: values.get(name) for name in SUMMARY_COLUMNS}


START = ["dataset=digits", "model=resnet8"]


@cache
def advice(*overrides: str, budget: float = 0.6, measure: str | None = None, summary: str = "nothing.csv"):
    from pathlib import Path

    return advise.advise(advise._configured([*START, *overrides]), budget, measure, Path(summary))


def test_the_cheapest_comes_first_and_all_keep_within_the_budget():
    found = advice()
    costs = [each["cost"] for each in found["candidates"]]
    assert costs == sorted(costs)
    assert costs[-1] <= 0.6
    settings = [each["settings"] for each in found["candidates"]]
    assert "schedule=RTH schedule.q_min=3 schedule.q_max=8" in settings
    assert "schedule=ER schedule.q_min=3 schedule.q_max=8" not in settings
    assert any("training.steps=" in each for each in settings)
    everything = advice(budget=10.0)["candidates"]
    assert {each["settings"].split()[0] for each in everything} == {f"schedule={name}" for name in (*SUITE, "static")}
    assert len(everything) == 2 * 6 - 1 + 10 * 5 * 2 + 6


def test_formats_and_peak_rates():
    found = advice("quantizer=mx", "hardware=tensorcore", budget=0.99)
    assert (found["measure"], found["device"]) == ("latency", "b200")
    settings = {each["settings"]: each["cost"] for each in found["candidates"]}
    assert 0.5 <= settings["schedule=static schedule.q_max=4"] < 0.6
    # Gradients stay at 8 bits, so two of the three products run at the rate of 8 bits.
    cyclic = "schedule=RTH schedule.q_min=4 schedule.q_max=8"
    assert 5 / 6 < settings[cyclic] < 0.95
    assert 0.5 < settings[f"{cyclic} schedule.gradient_min=4"] < settings[cyclic]
    assert not any("q_min=5" in each or "q_min=3" in each for each in settings)
    assert advice("quantizer=nvfp4", budget=2.0)["baseline"] == "static 4 bits"


def test_costs_are_those_of_a_run():
    from tests.conftest import plan

    made = plan(
        *START, "quantizer=mx", "schedule=RTH", "schedule.q_min=4", "training.steps=4000", "training.epochs=null"
    )
    found = {each["settings"]: each["cost"] for each in advice("quantizer=mx", budget=1.0)["candidates"]}
    assert found["schedule=RTH schedule.q_min=4 schedule.q_max=8"] == pytest.approx(
        made.cost().relative_to_static, abs=0.005
    )


@pytest.fixture(scope="module")
def summary(tmp_path_factory):
    """Static 8 bits and RTH with five seeds, CR with two, LR with one; and a run of another length."""
    finals = [60.0, 61.0, 62.0, 63.0, 64.0]
    rows = [row("static", seed, final) for seed, final in enumerate(finals)]
    rows += [row("RTH", seed, final - 2 + 0.1 * seed, "b") for seed, final in enumerate(finals)]
    rows += [row("CR", seed, finals[seed] + (-1) ** seed, "c") for seed in range(2)] + [row("LR", 0, 59.0, "d")]
    rows += [row("static", seed, final - 1, "e", steps=1000) for seed, final in enumerate(finals)]
    rows += [row("ER", 0, 10.0, "f", schedule__end_at_q_max=False)]  # no candidate: another end
    path = tmp_path_factory.mktemp("results") / "summary" / "runs.csv"
    path.parent.mkdir()
    path.write_text(as_csv(SUMMARY_COLUMNS, rows))
    return path


@pytest.fixture(scope="module")
def gains(tmp_path_factory):
    """RTH, static 8 bits and static 8 bits with 40 % of the steps on ResNet-20, for 1,000 steps with two seeds and for 4,000 with
    three; RTH gains 3 points and 1 point."""
    root = tmp_path_factory.mktemp("results")
    manifest = root / "manifest" / "board" / "gain.csv"
    manifest.parent.mkdir(parents=True)
    shutil.copy(ROOT / "results/manifest/board/gain.csv", manifest)
    arms = {("RTH", 1000): 58, ("static", 1000): 60, ("static", 400): 55, ("RTH", 4000): 69, ("static", 4000): 70}
    arms |= {("static", 1600): 68}
    rows = []
    for place in read_manifest(manifest):
        arm = place.ours.get("schedule", ""), int(place.ours.get("training.steps", 0))
        if place.scale == "mini" and place.ours["model"] == "resnet20" and arm in arms:
            made = row(arm[0], 0, arms[arm], place.hash, arm[1], training__steps=arm[1])
            cost = (0.4 if arm[0] == "RTH" else 1.0) * arm[1]
            made |= {"model": "resnet20", "dataset": "cifar10_16", "gbitops": cost}
            seeds = range(2 if arm[1] <= 1000 else 3)
            rows += [{**made, "seed": seed, "final": arms[arm] + seed / 10} for seed in seeds]
    summary = root / "summary" / "runs.csv"
    for one in rows:
        fit = {"training": {"step": [one["total_steps"]], "accuracy": [one["final"] + 5.0]}}
        write_bytes(summary.parent / "curves" / curve_name(one), gzip.compress(json.dumps(fit).encode()))
    summary.write_text(as_csv(SUMMARY_COLUMNS, rows))
    return summary


def test_gains_over_fewer_steps_are_told_by_training_accuracy(gains, capsys):
    found = evidence.recorded_gains(gains)
    assert [(row.fit, row.steps, row.schedule, row.n) for row in found] == [
        (pytest.approx(65.05), 1000, "RTH", 2),
        (pytest.approx(75.1), 4000, "RTH", 3),
    ]
    assert [(row.gain, row.price) for row in found] == [pytest.approx((3, 5)), pytest.approx((1, 2))]
    assert [row.steps for row in evidence.recorded_gains(gains, fit=90)] == [4000]
    assert [row.steps for row in evidence.recorded_gains(gains, fit=30)] == [1000]
    advise._advise(["budget=50", "fit=90", f"summary={gains}", *START])
    shown = capsys.readouterr().out
    assert "when a schedule pays" in shown and "4,000" in shown and "1,000" not in shown
    advise._advise(["budget=50", "json=true", f"summary={gains}", *START])
    assert [row["steps"] for row in json.loads(capsys.readouterr().out)["gains"]] == [1000, 4000]


def measured(summary, settings: str):
    found = advise.advise(advise._configured(START), 1.0, None, summary)
    return next(
        each["measured"] for each in found["candidates"] if each["settings"] == f"{settings} schedule.q_max=8"
    ), found


def test_recorded_runs_are_compared_seed_by_seed(summary):
    found, everything = measured(summary, "schedule=RTH schedule.q_min=3")
    assert found["difference"] == pytest.approx(-1.8)
    assert found["low"] == pytest.approx(-1.8 - 2.776 * 0.1581 / 5**0.5, abs=1e-3)
    assert (found["n"], found["sureness"]) == (5, "worse")
    assert "resnet8, digits, 1438 training samples, 2000 steps" in everything["evidence_from"]
    assert measured(summary, "schedule=CR schedule.q_min=3")[0]["sureness"] == "undecided"
    assert measured(summary, "schedule=LR schedule.q_min=3")[0]["sureness"] == "one seed: no interval"
    assert measured(summary, "schedule=ER schedule.q_min=3")[0] is None
    shorter = next(each for each in everything["candidates"] if each["cost"] == 0.5 and "steps" in each["settings"])
    assert shorter["measured"]["difference"] == pytest.approx(-1)


def test_a_few_longer_runs_do_not_hide_the_evidence(summary):
    """Five static runs of twice the length hid the whole board: all else counted as shorter runs of other settings."""
    rows, wanted = evidence.recorded_runs(summary, "sbm")[0], {Candidate("RTH", 3, 8, 8)}
    longer = [row("static", seed, 70.0, "g", steps=4000) for seed in range(5)]
    name, found = evidence.choose_group([*rows, *longer], wanted, 8)
    assert "2000 steps" in name and found[Candidate("RTH", 3, 8, 8)]["n"] == 5


def test_runs_that_recorded_a_setting_removed_since_are_of_the_same_group(summary):
    """Runs of two versions were two groups, and the seeds of the newer one hid settings that only the older one had."""
    rows, wanted = evidence.recorded_runs(summary, "sbm")[0], {Candidate("RTH", 3, 8, 8), Candidate("LR", 3, 8, 8)}
    older = [of_older_version(one, removed="code") for one in rows if one["schedule"] != "LR"]
    found = evidence.choose_group([*rows, *older], wanted, 8)[1]
    assert found[Candidate("RTH", 3, 8, 8)]["n"] == 10 and found[Candidate("LR", 3, 8, 8)]["n"] == 1


def test_two_versions_that_share_runs_only_with_a_third_are_of_one_group(summary):
    rows, wanted = evidence.recorded_runs(summary, "sbm")[0], {Candidate("RTH", 3, 8, 8)}
    static = [of_older_version(one, 0, removed="code") for one in rows if one["schedule"] == "static"]
    cyclic = [one for one in rows if one["schedule"] == "RTH"]
    both = [of_older_version(one, removed="code", too="code") for one in rows if one["schedule"] in ("static", "RTH")]
    found = evidence.choose_group([*static, *cyclic, *both], wanted, 8)[1]
    assert found[Candidate("RTH", 3, 8, 8)]["n"] == 10


def of_older_version(recorded, later=50, **removed):
    """A run with another seed, recorded with settings of its quantizer that have been removed since."""
    settings = json.loads(recorded["settings"])
    settings["quantizer"] |= removed
    return recorded | {"seed": f"{int(recorded['seed']) + later}", "settings": json.dumps(settings)}


def test_the_board_of_this_repository_is_evidence():
    """A static run and all ten schedules of the board are measured; for a while none was shown."""
    found = advise.advise(advise._configured(["model=resnet74"]), 1.0, None, ROOT / "results/summary/runs.csv")
    measured = [each["settings"] for each in found["candidates"] if each["measured"]]
    assert {f"schedule={name} schedule.q_min=3 schedule.q_max=8" for name in SUITE} <= set(measured)
    assert "schedule=static schedule.q_max=4" in measured


def test_evidence_on_the_same_network_comes_first(summary):
    rows, wanted = evidence.recorded_runs(summary, "sbm")[0], {Candidate("RTH", 3, 8, 8)}
    other = [row(name, 0, final, name) for name, final in (("static", 70.0), ("RTH", 71.0))]
    own = [one | {"model": "resnet20", "settings": settings_of(one, "resnet20")} for one in other]
    for model, n in (("resnet20", 1), ("resnet74", 5)):
        found = evidence.choose_group([*rows, *own], wanted, 8, {"a"}, model)[1]
        assert found[Candidate("RTH", 3, 8, 8)]["n"] == n


def settings_of(one: dict[str, object], model: str) -> str:
    found = json.loads(one["settings"])
    found["model"]["name"] = model
    return json.dumps(found)


def test_runs_recorded_before_a_setting_existed_belong_to_the_same_group():
    new, old = row("static", 0, 60.0), row("static", 0, 60.0)
    settings = json.loads(old["settings"])
    del settings["quantizer"]["least_step"], settings["training"]["learning_rate"]["delay_epochs"]
    assert evidence.group_of(new) == evidence.group_of(old | {"settings": json.dumps(settings)})
    assert evidence.group_of(new) != evidence.group_of(row("static", 0, 60.0, training__learning_rate__initial=0.5))


def test_settings_without_effect_on_results_do_not_divide_groups():
    """Runs on a GPU and on a CPU were two groups."""
    here = row("static", 0, 60.0, training__device="cpu", training__log_steps=7)
    assert evidence.group_of(here) == evidence.group_of(row("static", 0, 60.0))


def test_superseded_runs_do_not_count_and_the_board_comes_first(summary):
    manifest = summary.parents[1] / "manifest" / "board"
    manifest.mkdir(parents=True)
    lines = [
        "scale,cell,hash,seeds,proxy,superseded,paper,ours",
        "mini,1,b,0 1,,2026-01-01,{},{}",
        "mini,2,a,0 1,,,{},{}",
    ]
    (manifest / "methods.csv").write_text("\n".join(lines) + "\n")
    try:
        rows, board = evidence.recorded_runs(summary, "sbm")
        assert board == {"a"}
        assert "b" not in {each["hash"] for each in rows}
        assert evidence.recorded_runs(summary, "mx")[0] == []
    finally:
        (manifest / "methods.csv").unlink()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["budget=cheap"], "write budget=60"),
        (["schedule=RTH"], "omit it"),
        (["measure=money"], "bitops, energy, latency"),
        ([*START, "measure=latency"], "hardware=tensorcore"),
        (["quantizer=none"], "quantizer=none: quantizes nothing"),
        (["top=all"], "top=all: has the wrong type. Remedy: give a whole number"),
        (["top=0"], "top=0: is too small. Remedy: use 1 or more"),
        (["summary=absent.csv"], "summary=absent.csv: no such file"),
        (["json=yes"], "json=yes: has the wrong type. Remedy: give true or false"),
    ],
)
def test_what_is_refused(arguments, words, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["advise", *arguments])
    assert advise.main() == 2
    assert words in capsys.readouterr().err


def test_it_prints_a_table_or_json(summary, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["advise", *START, f"summary={summary}", "budget=45%", "top=99"])
    assert advise.main() == 0
    out = capsys.readouterr().out
    assert "at most 45 % of the bit operations of static 8 bits" in out
    assert "schedule=RTH q_min=3 q_max=8" in out
    assert "-1.80" in out
    monkeypatch.setattr("sys.argv", ["advise", *START, "json=true", "budget=2"])
    assert advise.main() == 0
    assert json.loads(capsys.readouterr().out)["candidates"] == []


def test_quantizers_of_weights_are_weighed_with_float_gradients(capsys, monkeypatch):
    """8-bit gradients were asked for, and schedule.gradient=32 was refused."""
    monkeypatch.setattr("sys.argv", ["advise", "json=true", "budget=60", "quantizer=uniform_l2", *START])
    assert advise.main() == 0
    found = json.loads(capsys.readouterr().out)
    assert found["candidates"] and all("=32" in row["settings"] for row in found["candidates"])
