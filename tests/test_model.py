"""Networks: sizes equal the released code's, weights follow the seed."""

from __future__ import annotations

import pytest
import torch

from bitcycle.hardware import trace
from bitcycle.model import MODELS, ImageShape, build_seeded
from bitcycle.settings import SettingError
from tests.conftest import golden_json, plan

STATISTICS = golden_json("model_stats")
NAMES = [key for key in STATISTICS if "gated" not in key]


def options_of(name: str, **more):
    kind, preset = MODELS[name]
    return kind(**{"name": name, **preset, **more})


@pytest.mark.parametrize("key", NAMES)
def test_parameters_and_macs_equal_released_code(key):
    name, classes = key.rsplit("_", 1)
    name = name.replace("_as_6n+2", "")
    expected, shape = STATISTICS[key], ImageShape(3, 32, int(classes))
    model = options_of(name).build(shape)
    assert sum(p.numel() for p in model.parameters()) == expected["parameters_without_unused"]
    operations = trace(model, torch.zeros(1, 3, 32, 32)).operations
    macs = {
        "macs_total": sum(o.macs for o in operations),
        "macs_conv": sum(o.macs for o in operations if o.kind == "conv"),
        "macs_first_conv": operations[0].macs,
        "macs_classifier": operations[-1].macs,
        "macs_shortcut_1x1": sum(o.macs for o in operations if "shortcut" in o.name),
        "macs_depthwise": sum(o.macs for o in operations if o.groups > 1),
    }
    assert macs == {part: expected[part] for part in macs}
    if name.startswith("resnet"):
        with_unused = options_of(name, unused_bn=True).build(shape)
        assert sum(p.numel() for p in with_unused.parameters()) == expected["parameters"]


@pytest.mark.parametrize(("name", "parameters"), [("resnet14", 175_258), ("resnet20", 272_474), ("resnet32", 466_906)])
def test_parameters_printed_by_hlhlp(name, parameters):
    assert plan(f"model={name}", "dry_run=true").parameters == parameters


def test_initial_weights_follow_the_released_rule_and_the_seed():
    model = build_seeded(options_of("resnet74"), ImageShape(3, 32, 100), seed=1)
    assert model.group3[5].conv1.weight.std().item() == pytest.approx((2 / (9 * 64)) ** 0.5, rel=0.02)
    assert model.fc.weight.std().item() == pytest.approx((2 / (64 * 100)) ** 0.5, rel=0.03)
    before = torch.random.get_rng_state()
    again, other = (build_seeded(options_of("resnet74"), ImageShape(3, 32, 100), seed=seed) for seed in (1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert not torch.equal(model.conv1.weight, other.conv1.weight)


@pytest.mark.parametrize(("depth", "words"), [(21, "use 20 or 26"), (2, "use 8 or 14"), (-4, "use 8 or 14")])
def test_depth_that_is_not_6n_plus_2(depth, words):
    with pytest.raises(SettingError, match=words):
        options_of("resnet20", depth=depth)


def test_networks_take_other_sizes_and_channels():
    for name in ("resnet8", "mobilenet_v2"):
        model = options_of(name).build(ImageShape(1, 8, 4)).eval()
        assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 4)
    with pytest.raises(SettingError, match="8 pixels or more"):
        options_of("mobilenet_v2").check(ImageShape(3, 4, 10))
