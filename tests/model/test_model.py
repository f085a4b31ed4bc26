"""Networks: sizes equal the released code's, weights follow the seed."""

from __future__ import annotations

import pytest
import torch

from bitcycle.hardware import trace
from bitcycle.model import MODELS, build_seeded
from bitcycle.settings import SettingError
from bitcycle.shapes import ImageShape
from tests.conftest import golden_json, plan

STATISTICS = golden_json("model_stats")
NAMES = [key for key in STATISTICS if "gated" not in key]


def options_of(name: str, **more):
    return MODELS[name](**more)


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


def batch_norm(*channels: int) -> int:
    return sum(2 * width for width in channels)


def test_resnet20_with_extra_skips_by_hand():
    """18 units of 3x3 convolutions, two projections; the sizes of the reference for partial pre-training."""
    model = options_of("resnet20_extra_skip").build(ImageShape(3, 32, 10))
    binary = 9 * (6 * 16 * 16 + 16 * 32 + 5 * 32 * 32 + 32 * 64 + 5 * 64 * 64)
    projection = 16 * 32 + 32 * 64
    assert (binary, projection, 9 * 3 * 16) == (267_264, 2_560, 432)
    norms = batch_norm(16, *[16] * 6, *[32] * 6, *[64] * 6, 32, 64)
    assert sum(p.numel() for p in model.parameters()) == binary + projection + 432 + norms + 64 * 10 + 10
    operations = {o.name: o for o in trace(model, torch.zeros(1, 3, 32, 32)).operations}
    macs = {name: operation.macs for name, operation in operations.items()}
    assert macs["stem.0"] == 27 * 16 * 32**2
    units = [macs[f"units.{index}.conv"] for index in range(18)]
    assert units == [
        *[9 * 16 * 16 * 32**2] * 6,
        9 * 16 * 32 * 16**2,
        *[9 * 32 * 32 * 16**2] * 5,
        9 * 32 * 64 * 8**2,
        *[9 * 64 * 64 * 8**2] * 5,
    ]
    assert [macs["units.6.shortcut.0"], macs["units.12.shortcut.0"]] == [16 * 32 * 16**2, 32 * 64 * 8**2]
    assert sum(macs.values()) == 27 * 16 * 32**2 + sum(units) + 16 * 32 * 16**2 + 32 * 64 * 8**2 + 640


def test_resnet34_with_extra_skips_by_hand():
    widths, blocks, sizes = (64, 128, 256, 512), (3, 4, 6, 3), (56, 28, 14, 7)
    with torch.device("meta"):
        model = options_of("resnet34_extra_skip").build(ImageShape(3, 224, 1000))
    units = [(a, b) for a, b in zip((64, *widths), widths)]  # the first unit of each stage
    weights = [9 * a * b + 9 * b * b * (2 * n - 1) for (a, b), n in zip(units, blocks, strict=True)]
    projections = [a * b for a, b in units[1:]]
    norms = batch_norm(64, 64, *(w for w, n in zip(widths, blocks) for _ in range(2 * n)), *widths[1:])
    parameters = 49 * 3 * 64 + sum(weights) + sum(projections) + norms + 512 * 1000 + 1000
    assert sum(p.numel() for p in model.parameters()) == parameters == 21_797_800
    macs = sum(o.macs for o in trace(model, torch.zeros(1, 3, 224, 224, device="meta")).operations)
    expected = 49 * 3 * 64 * 112**2 + sum(w * s**2 for w, s in zip(weights, sizes)) + 512_000
    assert macs == expected + sum(w * s**2 for w, s in zip(projections, sizes[1:]))


def test_vgg16_by_hand():
    model = options_of("vgg16").build(ImageShape(3, 32, 10))
    widths = (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
    sizes = (32, 32, 16, 16, 8, 8, 8, 4, 4, 4, 2, 2, 2)
    weights = [9 * a * b for a, b in zip((3, *widths), widths)]
    parameters = sum(weights) + batch_norm(*widths) + 512 * 10 + 10
    assert sum(p.numel() for p in model.parameters()) == parameters == 14_724_042
    macs = sum(o.macs for o in trace(model, torch.zeros(1, 3, 32, 32)).operations)
    assert macs == sum(w * s**2 for w, s in zip(weights, sizes, strict=True)) + 5120


def test_a_skip_passes_every_quantized_convolution():
    """With convolutions that return nothing, what the stem says arrives at the classifier unchanged but for the stages."""
    model = options_of("resnet8_extra_skip").build(ImageShape(1, 8, 4)).eval()
    for unit in model.units:
        torch.nn.init.zeros_(unit.conv.weight)
    x = torch.randn(2, 1, 8, 8)
    passed = model.stem(x)
    for unit in model.units:
        pooled = passed if unit.stride == 1 else torch.nn.functional.avg_pool2d(passed, 2)
        passed = unit.shortcut(pooled)
    expected = model.fc(passed.relu().mean(dim=(2, 3)))
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize(
    ("name", "quantized"), [("resnet20_extra_skip", 18), ("resnet34_extra_skip", 32), ("vgg16", 12)]
)
def test_layers_that_partial_pretraining_binarizes(name, quantized):
    shape = ["dataset=imagenet"] if name.startswith("resnet34") else []
    static = ["schedule=static", "schedule.q_max=1", "schedule.gradient=32"]
    layers = plan(f"model={name}", "quantizer=pact_binary", *static, *shape).layers
    assert sum(rule.treatment == "quantized" for rule in layers) == quantized


@pytest.mark.parametrize(
    ("name", "size", "words"),
    [("vgg16", 28, "32 pixels"), ("resnet34_extra_skip", 28, "32 pixels"), ("resnet20_extra_skip", 3, "4 pixels")],
)
def test_images_that_vanish_are_refused(name, size, words):
    with pytest.raises(SettingError, match=words):
        options_of(name).check(ImageShape(3, size, 10))


def test_extra_skips_take_odd_sizes():
    model = options_of("resnet8_extra_skip").build(ImageShape(1, 9, 4)).eval()
    assert model(torch.zeros(2, 1, 9, 9)).shape == (2, 4)
    with pytest.raises(SettingError, match="use 18 or 34"):
        options_of("resnet34_extra_skip", depth=50)
