"""Finished runs that all tests of measurements share."""

from __future__ import annotations

import pytest
import torch

from bitcycle.reproduction.measurement.job import Job, TrainedNetwork
from bitcycle.training.run import execute
from tests.conftest import ROOT, plan

DOMAINS = ROOT / "tests" / "data" / "golden-domains"


CPU = torch.device("cpu")


SMALL = ("dataset=digits", "model=resnet8", "scale=smoke", "training.batch_size=16", "training.evaluation_steps=4")


@pytest.fixture(scope="package")
def trained(tmp_path_factory):
    """A finished run with few bits, and its settings."""
    root = tmp_path_factory.mktemp("trained")
    made = plan(*SMALL, "schedule=CR", "schedule.cycles=2", "training.steps=8", f"results_root={root}/runs")
    execute(made)
    return made


@pytest.fixture(scope="package")
def gated(tmp_path_factory):
    """A finished run whose gates choose the bits."""
    root = tmp_path_factory.mktemp("gated")
    made = plan(*SMALL, "schedule=dfq", "training.steps=8", f"results_root={root}/runs")
    execute(made)
    return made


@pytest.fixture(scope="package")
def phased(tmp_path_factory):
    """Finished runs of HLHLp and of fine-tuning."""
    root = tmp_path_factory.mktemp("phased")
    common = (*SMALL, "quantizer=uniform_l2", "training.steps=16", f"results_root={root}/runs")
    plans = [
        plan(*common, f"schedule={name}", "schedule.ratio=10", "schedule.later_length=1")
        for name in ("hlhlp", "fine_tuning")
    ]
    for made in plans:
        execute(made)
    return plans


def job(options, *plans, phase=None):
    return Job(options, tuple(TrainedNetwork(made.folder, phase) for made in plans))
