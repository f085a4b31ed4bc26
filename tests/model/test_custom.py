"""Networks of one's own and of timm on the command line."""

from __future__ import annotations

import re
import sys

import pytest
import torch

from bitcycle.settings import SettingError
from bitcycle.shapes import ImageShape
from bitcycle.train_command import main
from bitcycle.training.plan import make_plan
from bitcycle.training.run import execute
from tests.conftest import ROOT, configure

NETWORK = """
import functools
import torch
from torch import nn

def small(channels, classes, width=4):
    return nn.Sequential(
        nn.Conv2d(channels, width, 3), nn.ReLU(), nn.Conv2d(width, width, 3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes),
    )

def no_network():
    return 3

def of_width(width, classes):
    return small(1, classes, width)

def broad(channels, **options):
    return small(channels, 1000)

def of_colours(classes):
    return small(3, classes)

def lazy(classes):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(classes))

class Pair(nn.Module):
    def __init__(self, channels, classes):
        super().__init__()
        self.network = small(channels, classes)

    def forward(self, x):
        return self.network(x), x

instance = nn.Linear(3, 3)
wide = functools.partial(small, width=5)
cached = functools.cache(small)

@torch.no_grad()
def decorated(channels, classes):
    return small(channels, classes)
"""


@pytest.fixture
def network(tmp_path, monkeypatch):
    """A module in the folder in which the command is started."""
    name = f"mine_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(NETWORK)
    monkeypatch.chdir(tmp_path)
    yield name
    sys.modules.pop(name, None)
    if str(tmp_path) in sys.path:
        sys.path.remove(str(tmp_path))


def custom(network, *more):
    return ("dataset=digits", "model=custom", f"model.target={network}:small", "scale=smoke", *more)


def test_own_network_trains_with_a_schedule(network, tmp_path):
    more = (
        "model.arguments={width: 8}",
        "schedule=RTH",
        "schedule.cycles=2",
        "training.steps=8",
        "training.evaluation_steps=8",
    )
    plan = make_plan(configure(*custom(network, *more, f"results_root={tmp_path}/runs")))
    assert plan.parameters == (9 + 1) * 8 + (72 + 1) * 8 + (8 + 1) * 10
    summary = execute(plan)
    assert summary["total_steps"] == 8 and 0 < summary["cost"]["total"]["relative_to_static"] < 1


def test_a_network_that_was_not_told_the_number_of_classes_is_refused(network, tmp_path):
    """torchvision's networks take num_classes among others, and had 1,000 outputs, of which cross-entropy says nothing."""
    settings = (f"model.target={network}:broad", "training.steps=8", f"results_root={tmp_path}/runs")
    plan = make_plan(configure("dataset=digits", "model=custom", "scale=smoke", *settings))
    with pytest.raises(SettingError, match=r"returns \[\d+, 1000\], not logits .* model.arguments=\{num_classes: 10\}"):
        execute(plan)


def test_a_network_that_returns_more_than_logits_is_refused(network, tmp_path):
    """It was told to have as many outputs as it had."""
    settings = (f"model.target={network}:Pair", "training.steps=8", f"results_root={tmp_path}/runs")
    plan = make_plan(configure("dataset=digits", "model=custom", "scale=smoke", *settings))
    with pytest.raises(SettingError, match=r"returns a tuple, not logits .* let its forward return the logits alone"):
        execute(plan)


@pytest.mark.parametrize("name", ["small", "wide", "cached", "decorated"])
def test_a_changed_network_is_another_run(network, tmp_path, name):
    settings = ("dataset=digits", "model=custom", f"model.target={network}:{name}", "scale=smoke")
    before = make_plan(configure(*settings)).hash
    file = tmp_path / f"{network}.py"
    file.write_text(NETWORK.replace("width=4", "width=5"))
    assert make_plan(configure(*settings)).hash != before


WRONG = {
    "model.target=MINE": "write package.module:function",
    "model.target=MINE:smal": "did you mean 'small'",
    "model.target=MINE:insance": "use one of",
    "model.target=MINE:instance": "is a network itself. Remedy: name a function or class",
    "model.target=MINE:lazy": "returns a network with lazy layers",
    "model.target=./MINE.py:small": "write MINE:small, and run the command in the folder of the file",
    "model.target=nowhere_at_all:small": "run the command in the folder of the module",
    "model.target=MINE:no_network": "returns an object of type int",
    "model.target=MINE:small model.arguments={wdth: 2}": "did you mean 'width'",
    "model.target=MINE:small model.arguments=3": "model.arguments",
    "model.target=MINE:of_width": "MINE:of_width needs width. Remedy: set model.arguments={width: ...}",
}


@pytest.mark.parametrize("given", WRONG)
def test_wrong_targets_are_one_line_with_a_remedy(network, capsys, monkeypatch, given):
    arguments = given.replace("MINE", network).split(" ", 1)
    monkeypatch.setattr(sys, "argv", ["train.py", "dataset=digits", "model=custom", *arguments, "dry_run=json"])
    assert main(ROOT / "conf") == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and WRONG[given].replace("MINE", network) in error
    assert error.startswith("wrong configuration: model.")


def test_a_network_that_fails_on_the_data_is_told_their_shape(network):
    """Its own error comes through, as only the user can tell what it means: here, a network of colour images."""
    settings = ("dataset=digits", "model=custom", f"model.target={network}:of_colours", "scale=smoke")
    with pytest.raises(RuntimeError) as failed:
        make_plan(configure(*settings))
    assert failed.value.__notes__ == ["model=custom failed on a sample of the dataset, of shape [1, 1, 8, 8]"]


def test_timm_networks():
    pytest.importorskip("timm")
    options = configure("dataset=digits", "model=timm", "model.architecture=test_resnet").model
    options.check(ImageShape(3, 32, 10))
    assert options.build(ImageShape(3, 32, 10))(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    vit = configure("dataset=digits", "model=timm", "model.architecture=test_vit").model
    assert vit.build(ImageShape(1, 32, 5))(torch.zeros(2, 1, 32, 32)).shape == (2, 5)  # its input size is fixed
    for name, close in {"test_resnett": "did you mean 'test_resnet'?", "nonono": "timm has no such network"}.items():
        with pytest.raises(SettingError, match=re.escape(close)) as refused:
            configure("dataset=digits", "model=timm", f"model.architecture={name}").model.check(ImageShape(3, 32, 10))
        assert len(str(refused.value)) < 200  # timm has more than a thousand
