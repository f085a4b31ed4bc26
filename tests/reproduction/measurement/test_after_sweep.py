"""Analyses after a sweep: each that has its runs is made once."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from bitcycle.errors import DataError
from bitcycle.files import read_csv
from bitcycle.reproduction.analysis.collect import collect
from bitcycle.reproduction.measurement import after_sweep
from bitcycle.reproduction.measurement.after_sweep import analyse, groups_of, jobs_of, read_entry, sweeps_with_analyses
from bitcycle.reproduction.measurement.artifacts import read_result
from bitcycle.reproduction.measurement.surface import Surface
from bitcycle.settings import SettingError
from bitcycle.sweep.grid import as_text
from bitcycle.sweep.registry import Sweep, SweepRun
from tests.conftest import ROOT
from tests.reproduction.measurement.conftest import SMALL

# After a sweep


ENTRY = {"kind": "surface", "seeds": 2, "samples": 22, "at_scale": {"smoke": {"points": 3}}}


def test_after_a_sweep_what_has_its_runs_is_analysed_once(trained, tmp_path, capsys, monkeypatch):
    grid = {word.split("=")[0]: word.split("=")[1] for word in SMALL[:2] + SMALL[3:]}
    grid |= {"schedule": ["CR", "LR"], "schedule.cycles": 2, "training.steps": 8}
    sweep = Sweep(grids=[grid], trials={"smoke": 1}, analyses=[ENTRY])
    fixed = {"scale": "smoke", "results_root": str(trained.config.results_root)}
    with pytest.raises(SettingError, match="dry_run=json: is not a choice"):
        analyse({"x/y": sweep}, {**fixed, "dry_run": "json"}, ROOT / "conf")
    assert analyse({"x/y": sweep}, {**fixed, "dry_run": "true"}, ROOT / "conf") == 0
    assert capsys.readouterr().out == "x/y: 2 pending, 2 waiting for runs\n"
    assert analyse({"x/y": sweep}, fixed, ROOT / "conf") == 0
    assert capsys.readouterr().out == "x/y: 2 computed, 2 waiting for runs\n"
    assert analyse({"x/y": sweep}, fixed, ROOT / "conf") == 0
    assert capsys.readouterr().out == "x/y: 2 already done, 2 waiting for runs\n"
    broken = replace(sweep, analyses=[{**ENTRY, "samples": 23}, {"kind": "noise"}])
    assert analyse({"x/y": broken}, fixed, ROOT / "conf") == 1
    assert capsys.readouterr().out == "x/y: 2 computed, 1 failed, 3 waiting for runs\n"

    summary = tmp_path / "results" / "summary" / "runs.csv"
    assert collect(trained.folder.path.parent, summary) == read_csv(summary), "rows are sorted as those read again"
    copies = sorted((summary.parent / "analyses").glob("smoke-*-0-surface-*.csv"))
    assert len(copies) >= 4
    assert all(read_result(path).complete for path in copies)


def test_the_exit_code_is_the_worst_not_the_highest(tmp_path, capsys):
    """Missing data (3) hid a wrong configuration (2)."""

    class Fails:
        def __init__(self, error: Exception) -> None:
            self.error, self.path, self.analysis = error, tmp_path / "missing.csv", Surface()

        def run(self) -> None:
            raise self.error

    jobs = [Fails(DataError("no images")), Fails(SettingError("kind", "x", "is wrong", "change it"))]
    assert after_sweep.run_jobs("x/y", jobs) == 2
    assert "no images" in capsys.readouterr().err


def test_all_sweep_files_name_analyses_that_exist():
    every = sweeps_with_analyses(ROOT)
    assert {"cpt/fig2", "cpt/fig6", "hlhlp/fig1", "hlhlp/appD", "hlhlp/appF", "hlhlp/appH"} <= set(every)
    for name, sweep in every.items():
        for scale, entry in itertools.product(("paper", "mini", "smoke"), sweep.analyses):
            several, networks = read_entry(entry, scale)
            assert several, name
            runs = sweep.expand(scale)
            for network in networks:
                wanted = {key: as_text(value) for key, value in network.items() if key != "phase"}
                assert any(wanted.items() <= run.items() for run in runs), (name, network)


def test_entries_that_are_wrong():
    for entry, words in (
        ({"kind": "surfaces"}, "did you mean 'surface'"),
        ({"kind": "surface", "point": 3}, "did you mean 'points'"),
        ({"kind": "plane", "networks": [{}]}, "needs 3 networks"),
        ({"kind": "surface", "at_scale": {"smok": {"points": 3}}}, "analyses.at_scale=smok: .* did you mean 'smoke'"),
        ({"kind": "surface", "seeds": 0}, "analyses.seeds=0: is not a number of seeds"),
        ({"kind": "surface", "seeds": "two"}, "analyses.seeds=two: is not a number of seeds"),
    ):
        with pytest.raises(SettingError, match=words):
            read_entry(entry, "paper")
    with pytest.raises(SettingError, match="no such sweep"):
        sweeps_with_analyses(ROOT, ["cpt/fig22"])
    assert list(groups_of([], [], 1)) == []
    waiting = SweepRun({"schedule": "hlhlp", "seed": "0"}, None, waits_for="another run")
    sweep = Sweep(analyses=[{"kind": "corruption", "networks": [{"schedule": "hlhlp"}]}])
    assert jobs_of(sweep, "paper", [waiting]) == [None], "it was left out instead of waiting, too"
    assert after_sweep.main(["cpt/fig22"], ROOT) == 2


def test_a_misspelled_setting_is_not_a_run_that_is_waited_for(capsys):
    """`bitcycle analyse cpt/fig2 scal=smoke` waited for the runs of the paper, with exit code 0."""
    assert after_sweep.main(["cpt/fig2", "scal=smoke", "dry_run=true"], ROOT) == 2
    printed = capsys.readouterr()
    assert "cpt/fig2: 3 of 3 runs, wrong configuration: scal=...: unknown setting" in printed.err
    assert "did you mean 'scale'" in printed.err
