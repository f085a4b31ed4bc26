"""Help, options and scales on the command line."""

from __future__ import annotations

import logging
import re

import pytest
import torch

from bitcycle.configuration import GROUPS, PRESETS, all_keys, nearest_key, unused_settings
from bitcycle.device import choose_device
from bitcycle.errors import RunError
from bitcycle.help import LOGGING, TOP, groups, help_text
from bitcycle.settings import MISSING
from tests.conftest import ROOT, configure, run_train
from tests.made_data import with_made_data
from tests.settings import GRAPH


def test_help_is_one_screen_of_groups_options_and_common_settings(command):
    code, out, _ = command("--help", "")
    lines = out.splitlines()
    assert code == 0 and len(lines) <= 70 and max(map(len, lines)) < 170
    for group, options in GROUPS.items():
        assert f"\n{group}=" in out
        assert {name for name in options if re.search(rf"\b{name}\b", out)} or group == "model"
    assert sum(bool(re.match(r"  [\w.]+=", line)) for line in lines) == 10


def test_help_explains_every_option_and_setting_of_a_group():
    shown = {topic: help_text(topic) for topic in (*groups(), TOP, LOGGING)}
    for group, options in GROUPS.items():
        for name in options:
            assert re.search(rf"\b{name}\b", shown[group]), name
    everything = "\n".join(shown.values())
    for key in all_keys():
        if not key.endswith(".name") and key not in (*GROUPS, "training", "logging"):
            assert f"  {key}=" in everything or any(other.startswith(f"{key}.") for other in all_keys()), key
    assert MISSING not in everything
    assert max(len(line) for line in everything.splitlines()) < 260


def test_help_of_imagenet_says_what_null_means():
    settings = {line.split()[0]: line for line in help_text("dataset=imagenet").splitlines() if "=" in line}
    assert "null: 224" in settings["dataset.image_size=224"] and "null: 3" in settings["dataset.channels=null"]


def test_help_on_one_option_has_its_values_source_and_equation(command):
    code, out, _ = command("--help", "schedule=RTH")
    assert code == 0
    assert "Better Schedules, section 3.2" in out
    assert "schedule.profile=rex" in out and "schedule.form=horizontal" in out
    assert "epochs=40" in help_text("training=ptb")
    assert "steps: 2500" in help_text("scale=mini")
    quantizer = help_text("quantizer=sbm")
    assert "one range per output channel" in quantizer and "Differs from the authors' code" in quantizer
    assert "Source: \n" not in quantizer


@pytest.mark.parametrize(
    ("topic", "remedy"), [("shedule", "did you mean 'schedule'"), ("schedule=rth", "did you mean 'RTH'")]
)
def test_help_on_an_unknown_topic(command, topic, remedy):
    code, _, err = command("--help", topic)
    assert code == 2 and remedy in err


def test_a_setting_without_effect_is_said(command, caplog, monkeypatch):
    """Sweeps over schedules set q_min for static precision too; a person who does so is told."""
    monkeypatch.setattr(logging.getLogger("bitcycle"), "handlers", [caplog.handler])  # what is logged goes no further
    code = command("dataset=digits", "model=resnet8", "schedule=static", "schedule.q_min=9", "dry_run=json")[0]
    assert code == 0
    assert "schedule.q_min has no effect with schedule=static" in caplog.text


def test_a_batch_size_of_steps_on_a_whole_graph_is_said(command, caplog, monkeypatch, tmp_path):
    monkeypatch.setattr(logging.getLogger("bitcycle"), "handlers", [caplog.handler])
    run = with_made_data([*GRAPH, "model=gcn_small", "scale=smoke", "dry_run=json"], tmp_path, monkeypatch)
    assert command(*run)[0] == 0
    assert not caplog.text
    assert command(*run, "training.batch_size=10")[0] == 0
    assert "training.batch_size has no effect: each step trains on all" in caplog.text


@pytest.mark.parametrize(
    ("setting", "choice"),
    [
        ("training.learning_rate.milestones=[0.5]", "training.learning_rate.name=cosine"),
        ("training.learning_rate.delay=0.5", "training.learning_rate.name=constant"),
        ("training.optimizer.nesterov=true", "training.optimizer.name=adam"),
        ("training.optimizer.beta1=0.5", "training.optimizer.name=sgd"),
    ],
)
def test_a_setting_of_another_shape_or_optimizer_is_said(setting, choice):
    """It had no effect but another name of the run, which was trained again."""
    config = configure("dataset=digits", choice, setting)
    assert list(unused_settings(["seed=1", "schedule=CR", choice, setting], config)) == [
        (setting.split("=")[0], choice)
    ]
    assert not list(unused_settings([choice, "training.learning_rate.warmup=0.1", "+training.steps=8"], config))


def test_a_launcher_of_others_that_fails_is_no_bug_of_ours(command, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))  # no SLURM, even where it is installed
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    run = ("dataset=digits", "model=resnet8", "scale=smoke", "training.steps=3")
    code, _, err = command("-m", "hydra/launcher=submitit_slurm", *run)
    assert code == 1
    assert "hydra_submitit_launcher" in err and "srun" in err and "bug" not in err


@pytest.mark.parametrize("device", ["cuda:1", "cuda", "mps", "xpu"])
def test_devices_that_are_not_there(device, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    with pytest.raises(RunError, match=f"training.device={device}, but PyTorch sees no"):
        choose_device(device)


def test_second_gpu(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    assert choose_device("cuda:1") == torch.device("cuda") == choose_device("auto") and chosen == [1]
    with pytest.raises(RunError, match="sees 2 devices of this kind, numbered from 0"):
        choose_device("cuda:2")


def test_each_option_of_a_group_is_stated_once():
    """In its file of conf/; what Hydra composes is what the Python interface reads."""
    for group, presets in PRESETS.items():
        assert {path.stem for path in (ROOT / "conf" / group).glob("*.yaml")} == set(presets)
        for name, preset in presets.items():
            assert len(preset.summary) > 10 and (preset.source or group in ("dataset", "training", "scale")), (
                preset.path
            )
            assert group in ("training", "scale") or preset.values["name"] == name, preset.path
            if group in ("schedule", "quantizer", "hardware"):  # others take longer to compose
                composed = configure(f"{group}={name}") if group != "hardware" else None
                assert composed is None or vars(getattr(composed, group)) == vars(preset()), name


def test_networks_that_differ_by_their_depth_alone_are_one_line_of_help():
    assert "model=resnet8, resnet14, resnet20" in help_text("model")
    assert configure("model=resnet56").model.depth == 56


def test_scales_change_what_they_are_combined_with():
    assert configure("scale=smoke").training.steps == 64
    assert configure("scale=mini", "dataset=digits").scale == "mini"
    assert configure("scale=mini", "training.steps=77").training.steps == 77
    assert configure("dataset=digits").training.batch_size == 64


def test_nearest_key_knows_abbreviations():
    assert "'training.optimizer.weight_decay'" in nearest_key("optim.wd")
    assert "'training.batch_size'" in nearest_key("train.bs")
    assert "did you mean" not in nearest_key("xyzzy")
    assert "hardware" not in nearest_key("training.amp")


def test_tab_completion_completes_groups(tmp_path):
    """What the README documents: Hydra's completion works with train.py."""
    done = run_train("-sc", "query=bash", env={"COMP_LINE": "train.py schedule=RT", "COMP_POINT": "20"})
    assert {"schedule=RTH", "schedule=RTV"} <= set(done.stdout.split()), done.stderr


@pytest.mark.parametrize(
    ("arguments", "problem", "remedy"),
    [
        (["-m", "+sweeps=cpt/table99"], "does not exist", "did you mean 'cpt/table"),
        (["+sweeps=cpt/table2"], "is a sweep of several runs", "write python train.py -m +sweeps=cpt/table2"),
        (["-m", "sweeps=cpt/table2"], "is not in the defaults list", "write a + before it: +sweeps=cpt/table2"),
        (["-m", "+sweeps=cpt/table2", "scale=huge"], "does not exist", "mini, paper, smoke"),
    ],
)
def test_a_sweep_that_cannot_be_run_is_one_line_with_a_remedy(arguments, problem, remedy):
    done = run_train(*arguments, launches=False)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert problem in line and remedy in line, line


@pytest.mark.parametrize("setting", ["workers=x", "workers=0", "runs_per_gpu=-1"])
def test_a_launcher_is_told_a_number_of_runs(setting, tmp_path):
    """`workers=x` once ended in a traceback that called it a bug."""
    words = (
        "-m",
        "dataset=digits",
        "model=resnet8",
        "scale=smoke",
        f"hydra.launcher.{setting}",
        f"results_root={tmp_path}",
    )
    done = run_train(*words, launches=False)
    assert done.returncode == 2
    assert f"hydra.launcher.{setting}: is not a number of runs. Remedy: use 1 or more" in done.stderr
