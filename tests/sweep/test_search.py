"""Searching with a sweeper of Hydra that optimizes: runs return their metric, not an exit code."""

from __future__ import annotations

import sys

import pytest
import yaml

from bitcycle.settings import SettingError
from bitcycle.train_command import JobFailed, main
from bitcycle.training.outcome import objective
from tests.conftest import ROOT

SUMMARY = {
    "final": 91.0,
    "best": 92.0,
    "mean_of_last": {"mean": 90.5},
    "cost": {"total": {"gbitops": 12.0, "relative_to_static": 0.4}},
}


@pytest.mark.parametrize(
    ("name", "value"),
    [("final", 91), ("best", 92), ("mean_of_last", 90.5), ("gbitops", 12), ("relative_to_static", 0.4)],
)
def test_objective(name, value):
    assert objective(SUMMARY, name) == value


def test_objective_that_a_run_does_not_have():
    with pytest.raises(SettingError, match="no validation data"):
        objective(SUMMARY, "validation")
    assert objective({**SUMMARY, "validation": {"final": 89.0}}, "validation") == 89


SEARCH = (
    "hydra/sweeper=optuna",
    "hydra.sweeper.n_jobs=1",
    "hydra.sweeper.sampler.seed=0",
    "dataset=digits",
    "model=resnet8",
)
RUN = ("scale=smoke", "schedule=CR", "training.steps=8", "training.evaluation_steps=8", "logging.progress=false")


@pytest.fixture
def search(monkeypatch, tmp_path):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")

    def run(*arguments: str) -> tuple[int, dict]:
        monkeypatch.setattr(sys, "argv", ["train.py", "-m", *SEARCH, *RUN, *arguments, f"results_root={tmp_path}"])
        code = main(ROOT / "conf")
        found = tmp_path / ".multirun" / "optimization_results.yaml"
        return code, yaml.safe_load(found.read_text()) if found.is_file() else {}

    return run


def test_optuna_tunes_q_min_and_cycles(search, tmp_path):
    """Accuracy up and cost down: what is found is what the runs say, and nothing is worse in both than another run."""
    code, found = search(
        "hydra.sweeper.n_trials=3",
        "hydra.sweeper.direction=[maximize,minimize]",
        "logging.objective=[final,relative_to_static]",
        "schedule.q_min=range(3,6)",
        "schedule.cycles=choice(1,2)",
    )
    assert code == 0
    summaries = [yaml.safe_load(path.read_text()) for path in tmp_path.rglob("summary.json")]
    measured = {(s["final"], s["cost"]["total"]["relative_to_static"]) for s in summaries}
    front = {tuple(solution["values"]) for solution in found["solutions"]}
    assert front and front <= measured
    assert all({"schedule.q_min", "schedule.cycles"} == set(solution["params"]) for solution in found["solutions"])
    for accuracy, cost in front:
        assert not any(a > accuracy and c < cost for a, c in measured)


def test_a_failed_run_is_no_good_result(search):
    """Exit code 2 is no accuracy of 2 percent."""
    code, found = search("hydra.sweeper.n_trials=1", "hydra.sweeper.direction=maximize", "schedule.q_min=choice(9)")
    assert (code, found) == (2, {})
    assert JobFailed(2).code == 2
