"""Run names: pinned, blind to what cannot change a result, and different for everything that can."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict

import pytest
from omegaconf import OmegaConf

from bitcycle.errors import RunError
from bitcycle.training.finished_run import read_run_config
from bitcycle.training.naming import run_hash, run_path
from bitcycle.training.run_folder import RunFolder
from tests.conftest import configure

# A changed name orphans finished runs: a new setting needs a neutral default, and a default must never change.
PINNED = {
    "": "8fb22129cb",
    "schedule=RTH model=resnet74": "c15b922d71",
    "schedule=CR schedule.cycles=32 quantizer.depthwise_bits=[8,16] model=mobilenet_v2 dataset=cifar100": "1835b35fd0",
    "dataset=digits model=resnet8 scale=smoke": "8100f8ce33",
    "schedule=dfq model=resnet38": "b15ca82824",
    "schedule=fractrain model=resnet38": "938f2f0b39",
}


@pytest.mark.parametrize("overrides", PINNED)
def test_names_are_for_ever(overrides):
    assert run_hash(configure(*overrides.split())) == PINNED[overrides]


@pytest.mark.parametrize(
    "override",
    [
        "seed=3",
        "training.compile=true",
        "training.checkpoint_seconds=1",
        "logging.wandb=offline",
        "data_root=elsewhere",
        "hardware.convention=cpt",
        "training.threads=1",
        "dry_run=true",
    ],
)
def test_what_cannot_change_a_result_is_not_in_the_name(override):
    assert run_hash(configure("schedule=RTH", override)) == run_hash(configure("schedule=RTH"))


@pytest.mark.parametrize(
    "override",
    [
        "schedule.q_min=4",
        "schedule=RR",
        "model=resnet38",
        "dataset=cifar100",
        "quantizer=none",
        "training.steps=100",
        "training.learning_rate.factor=0.2",
        "quantizer.momentum=0.1",
        "training.optimizer.nesterov=true",
        "schedule.q_min=auto",
        "training.learning_rate.rates=[0.01,0.001]",
        "training.weight_averaging.start=0.5",
        "training.compute=codes",
        "dataset.part=first_samples",
    ],
)
def test_what_can_change_a_result_is_in_the_name(override):
    assert run_hash(configure("schedule=RTH", override)) != run_hash(configure("schedule=RTH"))


def test_path_is_readable_and_keeps_scales_and_seeds_apart():
    path = run_path(configure("schedule=RTH", "model=resnet74", "seed=2"))
    assert str(path) == f"results/runs/paper/resnet74-cifar10-sbm-RTH-{PINNED['schedule=RTH model=resnet74']}/seed=2"


def test_unused_options_of_static_do_not_split_its_runs():
    assert run_hash(configure("schedule=static", "schedule.q_min=5", "schedule.cycles=2")) == run_hash(
        configure("schedule=static")
    )


def test_a_new_default_names_its_runs_anew_and_leaves_old_names_to_old_runs():
    """Later phases of HLHLp had the length of the first: a run of that length keeps the name that it had."""
    options = ("schedule=hlhlp", "quantizer=uniform_l2")
    assert run_hash(configure(*options, "schedule.later_length=1")) == "3cc3cd8c9e"
    assert run_hash(configure(*options)) != run_hash(configure(*options, "schedule.later_length=1"))


def test_recorded_settings_that_no_longer_exist_are_left_out(digits):
    run = digits("schedule=RTH")
    recorded = OmegaConf.create(asdict(run.config))
    recorded.quantizer.bifurcate = None
    recorded.schedule.range_test.start_bits = 2
    run.folder.path.mkdir(parents=True)
    run.folder.config.write_text(OmegaConf.to_yaml(recorded))
    assert asdict(read_run_config(run.folder)) == asdict(run.config)
    run.folder.summary.write_text(json.dumps({"hash": run_hash(run.config)}))
    assert asdict(read_run_config(run.folder)) == asdict(run.config)
    run.folder.summary.write_text(json.dumps({"hash": "0123456789"}))  # what a value other than the default leads to
    named = r"among quantizer\.bifurcate, schedule\.range_test\.start_bits\. Use the version"
    with pytest.raises(RunError, match=named):
        read_run_config(run.folder)


def test_a_copied_run_folder_is_not_the_run_of_its_new_name(copied_digits):
    """The copy counted as a run of another seed that nobody had trained."""
    run = copied_digits()
    assert run.folder.state() == "done"
    seed = RunFolder(run.folder.path.with_name("seed=9"))
    other = RunFolder(run.folder.path.parent.with_name("resnet8-digits-sbm-CR-0123456789") / "seed=0")
    archived = RunFolder(run.folder.path.parent.with_name("best") / "seed=0")
    for folder in (seed, other, archived):
        shutil.copytree(run.folder.path, folder.path)
    assert [seed.state(), other.state(), archived.state()] == ["resumable", "resumable", "done"]
