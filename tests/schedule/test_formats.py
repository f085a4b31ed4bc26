"""Schedules over formats, and the late switch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bitcycle
from bitcycle.precision import Precision
from bitcycle.quantizer import QUANTIZERS, with_formats
from bitcycle.schedule import FORMAT_BITS, SUITE
from bitcycle.settings import SettingError
from tests.conftest import plan

FORMATS = ["nvfp4", "mxfp6", "mxfp8"]


@pytest.mark.parametrize("name", SUITE)
def test_the_index_of_a_format_follows_the_formula_of_bits(name):
    """A schedule over three formats is the one over 2, 3 and 4 bits, whose halves are rounded to the same side."""
    by_bits = bitcycle.schedule(name, q_min=2, q_max=4, total_steps=184)
    by_format = bitcycle.schedule(name, formats=FORMATS, total_steps=184)
    widths = [FORMAT_BITS[format] for format in FORMATS]
    for step in range(184):
        assert by_format(step).weight == by_format(step).activation == widths[by_bits(step).weight - 2]
        assert by_format(step).gradient == 8
    assert [(p.weight, n) for p, n in by_format.run_lengths] == [
        (widths[p.weight - 2], n) for p, n in by_bits.run_lengths
    ]


def test_gradients_over_formats_of_their_own():
    schedule = bitcycle.schedule("CR", formats=FORMATS, gradient_formats=["mxfp4", "mxfp8"], total_steps=184)
    assert {p.gradient for p in schedule.precisions} == {4, 8}
    assert schedule.options.format_lists == (FORMATS, ["mxfp4", "mxfp8"])


def test_late_switch():
    schedule = bitcycle.schedule("late_switch", total_steps=1000)
    assert schedule.run_lengths == [(Precision(4, 4, 4), 820), (Precision(32, 32, 32), 180)]
    schedule = bitcycle.schedule("late_switch", formats=["nvfp4", "mxfp8"], share=0.4, total_steps=10)
    assert schedule.run_lengths == [(Precision(4, 4, 4), 6), (Precision(8, 8, 8), 4)]
    schedule = bitcycle.schedule("late_switch", formats=["nvfp4", "mxfp8"], gradient_formats=["mxfp8"], total_steps=100)
    assert schedule.run_lengths == [(Precision(4, 4, 8), 82), (Precision(8, 8, 8), 18)]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("RTH", {"formats": ["mxfp8", "nvfp4"]}, r"ascending order of cost.*write \[nvfp4,mxfp8\]"),
        ("RTH", {"formats": ["mxfp4", "nvfp4"]}, "one format of each width"),
        ("RTH", {"formats": FORMATS, "q_max": 6}, "q_max=6: contradicts formats, which have 8 bits"),
        ("RTH", {"formats": FORMATS, "q_min": "auto"}, "q_min=auto: contradicts"),
        ("RTH", {"gradient_formats": ["nvfp4"]}, "needs the formats of the forward pass"),
        ("CR", {"formats": FORMATS, "gradient_formats": FORMATS, "gradient_min": 6}, "gradient_min=6: contradicts"),
        ("CR", {"formats": FORMATS, "gradient_min": 4}, "gradient_min=4: is not the width of the last of formats"),
        ("RTH", {"formats": ["fp5"]}, "formats=fp5"),
        ("late_switch", {"formats": FORMATS}, "is not a pair"),
    ],
)
def test_refused(name, options, message):
    with pytest.raises(SettingError, match=message):
        bitcycle.schedule(name, total_steps=100, **options)


def test_formats_of_a_schedule_become_those_of_the_quantizer():
    schedule = bitcycle.schedule("RTH", formats=FORMATS, total_steps=100)
    options = with_formats(QUANTIZERS["nvfp4_pretraining"](), schedule)
    assert options.forward_formats == ["nvfp4", "mxfp6_e2m3", "mxfp8_e4m3"] and options.gradient_formats == [
        "mxfp8_e5m2"
    ]
    assert options.hadamard == ["wgrad"] and options.square_weights and options.float_share == 0.15
    assert with_formats(options, schedule) == options
    with pytest.raises(SettingError, match="quantizer=sbm does not have these formats"):
        with_formats(QUANTIZERS["sbm"](), schedule)


def linear_step(quantizer, schedule, step, square, compile):
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 48, bias=False), torch.randn(64, 64, requires_grad=True)
    options = QUANTIZERS[quantizer](square_weights=square)
    model = bitcycle.quantize_model(layer, options, float_layers=[], schedule=schedule, compile=compile)
    bitcycle.PrecisionController(model, schedule).step(step)
    y = model(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)))
    return y.detach(), x.grad, next(model.parameters()).grad


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("square", [False, True])
def test_each_step_computes_in_its_format(square, compile):
    """Bit for bit as with a quantizer of this format alone, by functions and by C++ operators."""
    formats = {"formats": FORMATS, "gradient_formats": FORMATS, "cycles": 2}
    mixed = bitcycle.schedule("CR", total_steps=20, **formats)
    steps = {mixed(step).weight: step for step in range(20)}
    assert set(steps) == {4, 6, 8}
    for bits, step in steps.items():
        alone = bitcycle.schedule("static", q_max=bits, total_steps=20)
        found = linear_step("mx", mixed, step, square, compile)
        expected = linear_step("nvfp4" if bits == 4 else "mx", alone, step, square, compile)
        for ours, theirs in zip(found, expected):
            assert torch.equal(ours, theirs), bits


def test_a_model_converted_for_other_formats_is_refused():
    model = bitcycle.quantize_model(nn.Linear(32, 32), "mx", float_layers=[])
    with pytest.raises(SettingError, match=r"converted without them.*quantize_model"):
        bitcycle.PrecisionController(model, bitcycle.schedule("RTH", formats=FORMATS, total_steps=100))


def test_plan_and_cost_of_formats():
    chosen = ("dataset=digits", "model=resnet8", "quantizer=mx", "hardware=tensorcore")
    planned = plan(*chosen, "schedule=late_switch", "schedule.formats=[nvfp4,mxfp8]", "training.steps=100")
    described = planned.describe()
    assert described["formats"] == {"forward": ["nvfp4", "mxfp8"], "gradient": ["nvfp4", "mxfp8"]}
    assert described["precision"] == [[4, 4, 4, 82], [8, 8, 8, 18]]
    quantized = [o for o in planned.workload.operations if not o.is_float]
    assert quantized[0].stored(Precision(4, 4, 4)) == (4.5, 4.5, 4.5)  # 8 bits of scale for 16 elements
    assert quantized[0].stored(Precision(8, 8, 8)) == (8.25, 8.25, 8.25)
    for layer, operation in zip(planned.cost().latency_layers, planned.workload.operations):
        if not operation.is_float:  # 82 % of the steps at twice the rate
            static = plan(*chosen, "schedule=static", "training.steps=100").cost()
            [same] = [other for other in static.latency_layers if other.name == layer.name]
            assert layer.total / same.total == pytest.approx(0.82 / 2 + 0.18, rel=0.01)
            break


def test_cost_of_a_backward_pass_at_the_bits_of_gradients():
    planned = plan("dataset=digits", "model=resnet8", "quantizer=mxfp4_backward", "schedule=mxfp4_backward")
    [operation, *_] = [o for o in planned.workload.operations if o.input_gradients and not o.is_float]
    [layer] = [layer for layer in planned.cost().layers if layer.name == operation.name]
    assert float(layer.error / layer.forward) == pytest.approx(4.25**2 / 8.25**2)
    assert float(layer.weight_gradient / layer.forward) == pytest.approx(4.25**2 / 8.25**2)


def test_float_share():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(10)), nn.Linear(8, 2))
    model = bitcycle.quantize_model(model, QUANTIZERS["nvfp4"](float_share=0.25, float_layers=["last"]))
    left = [rule.name for rule in model.conversion_rules if rule.treatment == "float"]
    assert left == ["8", "9", "10"]  # two of the ten others: round(2.5) is 2
