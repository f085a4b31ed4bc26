"""Quantizers at the ends of the number range: gradients that overflow, half precision, autocast, denormals."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bitcycle
from bitcycle.quantizer import QUANTIZERS, multibit, wageubn
from tests.quantizer.test_properties import NAMES, VARIANTS, offered, tensor

VARIANTS = {**VARIANTS, "sbm relative": QUANTIZERS["sbm"](least_step="relative")}
ROLES = ["weight", "activation", "gradient"]


def quantized_gradients(name, x, number):
    """x as each of the variant's quantizers of gradients returns it."""
    options, key = VARIANTS[name], torch.tensor(3, dtype=torch.int32)
    for kind in ("gradient", "position_gradient", "input_gradient"):
        if (module := getattr(options, kind)(False)) is not None:
            yield module.quantize(x, torch.tensor(number), key, key)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_gradient_that_is_not_finite_stays_so(name, value):
    """wageubn and fp8 once returned the largest finite value."""
    for number in offered(VARIANTS[name], "gradient"):
        for shape in ((3, 4), (64, 64), (2, 3, 4, 4), (2, 5, 6)):
            x = tensor(shape)
            x[(1, *(0 for _ in shape[1:]))] = value
            for y in quantized_gradients(name, x, number):
                assert not y[(1, *(0 for _ in shape[1:]))].isfinite()


@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
@pytest.mark.parametrize("name", [name for name in VARIANTS if not name.startswith("fp8")])  # which saturates
def test_a_weight_that_is_infinite_stays_visible(name, value):
    """DoReFa, ternary, TTQ and WAGEUBN returned finite weights."""
    for number in offered(VARIANTS[name], "weight"):
        for shape in ((3, 4), (64, 64)):
            x = tensor(shape)
            x[1, 0] = value
            assert not bitcycle.quantize(x, number, VARIANTS[name], "weight")[1, 0].isfinite(), number


@pytest.mark.parametrize("layer", ["convolution", "tokens", "lstm"])
@pytest.mark.parametrize("name", [name for name in VARIANTS if VARIANTS[name].bits("gradient")])
def test_a_gradient_scaler_notices_an_overflow(name, layer):
    """GradScaler skips a step with an infinite or NaN gradient, and lowers its scale."""
    torch.manual_seed(0)
    first = {"convolution": nn.Conv2d(3, 4, 3), "tokens": nn.Linear(6, 4), "lstm": nn.LSTM(6, 4)}[layer]
    x = torch.rand(2, 3, 6, 6) if layer == "convolution" else torch.rand(3, 2, 6)
    model = bitcycle.quantize_model(nn.Sequential(first), VARIANTS[name], float_layers=[])
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    y = model(x)
    y = y[0] if layer == "lstm" else y
    scaler.scale((y.flatten()[0] * 1e36).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**15
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", VARIANTS)
def test_half_precision_is_computed_in_float32(name, role):
    """Only the result is rounded; steps and sums in float16 were once wrong by whole levels, or infinite."""
    for number in offered(VARIANTS[name], role):
        for shape in ((3, 40), (64, 64), (6, 4, 3, 3), (3, 4, 5)):
            for scale in (1e-3, 1.0, 1e4):
                x = (tensor(shape).abs() * scale).clamp_max(6e4)
                x[0] *= 1 if role == "activation" else -1
                for kind in (torch.float16, torch.bfloat16):
                    half = x.to(kind)
                    y = bitcycle.quantize(half, number, VARIANTS[name], role)
                    assert y.dtype == kind
                    assert torch.equal(y, bitcycle.quantize(half.float(), number, VARIANTS[name], role).to(kind))


@pytest.mark.parametrize("name", VARIANTS)
def test_autocast_does_not_reach_into_quantizers(name):
    """The least squares of multibit were once solved from sums in bfloat16."""
    for role in ("weight", "activation"):
        for number in offered(VARIANTS[name], role):
            x = tensor((8, 700)).abs()
            expected = bitcycle.quantize(x, number, VARIANTS[name], role)
            with torch.autocast("cpu", torch.bfloat16):
                assert torch.equal(bitcycle.quantize(x, number, VARIANTS[name], role), expected)


def test_sign_vectors_of_a_constant_without_float64(monkeypatch):
    """Metal has none; the normal equations were singular there, and the result NaN."""
    monkeypatch.setattr(multibit, "widest_float", lambda device: torch.float32)
    x = torch.tensor([[0.7] * 6, [0.0] * 6, [0.3, -0.2, 0.1, 0.5, -0.9, 0.4]])
    for number in (1, 2, 3, 4):
        y = bitcycle.quantize(x, number, "multibit", "activation")
        assert y.isfinite().all()
        torch.testing.assert_close(y[:2], x[:2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", sorted({*NAMES} - {"dorefa"}))  # whose gradient has 1 / max |tanh w|
def test_denormal_numbers_give_finite_ones(name):
    for role in ROLES:
        for number in offered(VARIANTS[name], role):
            x = torch.tensor([[0.0, 1e-44, 0.0], [0.0, 0.0, 0.0]])
            assert bitcycle.quantize(x, number, VARIANTS[name], role).isfinite().all()
            if role == "gradient":
                assert all(y.isfinite().all() for y in quantized_gradients(name, x, number))


def test_ranges_of_wageubn_near_the_end_of_the_number_range():
    assert wageubn.power_of_two_range(torch.tensor([2e38])) == 2.0**127
    assert wageubn.power_of_two_range(torch.tensor([4e4]).half()) == 2.0**15
    assert wageubn.power_of_two_range(torch.tensor([1e-44])) == 2.0**-146


def test_the_step_after_a_relu_is_that_of_what_is_not_clipped():
    """Clipped negatives have the same error whatever the step; they once set it."""
    x = torch.tensor([[-100.0, 0.1, 0.2, 0.3]])
    y = bitcycle.quantize(x, 2, "uniform_l2", "activation")
    torch.testing.assert_close(y, x.clamp_min(0))
