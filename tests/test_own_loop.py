"""A network and a loop of one's own: conversion and controller among what people bring along."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import bitcycle
from bitcycle.hardware import trace
from bitcycle.schedule import Precision


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


def test_transformer_layers_are_quantized_in_evaluation_too():
    model = bitcycle.quantize_model(encoder(), float_layers=[]).eval()
    control = bitcycle.PrecisionController(model, bitcycle.schedule("static", q_max=2, total_steps=1))
    x = torch.randn(3, 4, 8)
    with torch.no_grad():
        control.use(Precision(32, 32, 32))
        as_float = model(x)
        control.use(Precision(2, 2, 2))
        model.train()
        model(x)  # lets the activations' ranges be seen
        model.eval()
        at_two_bits = model(x)
    torch.testing.assert_close(as_float, encoder().eval()(x))
    with torch.enable_grad():  # which the fast path never took
        torch.testing.assert_close(at_two_bits, model(x))
    assert (at_two_bits - as_float).abs().max() > 0.05


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_tensors_are_quantized_as_float32_ones(dtype):
    x = torch.randn(4, 3, 6, 6).to(dtype)
    for role in ("weight", "activation", "gradient"):
        y = bitcycle.quantize(x, 4, role=role)
        assert y.dtype == dtype
        assert torch.equal(y, bitcycle.quantize(x.float(), 4, role=role).to(dtype))


def test_networks_train_in_bfloat16():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 2))
    model = bitcycle.quantize_model(model.bfloat16(), float_layers=[])
    control = bitcycle.PrecisionController(model, bitcycle.schedule("CR", total_steps=16))
    for step in range(2):
        control.step(step)
        model(torch.randn(5, 3, 6, 6, dtype=torch.bfloat16)).float().square().mean().backward()
    assert model[0].weight.grad.dtype == torch.bfloat16
    assert model[0].weight.grad.isfinite().all()


def linear_control(model: nn.Module) -> bitcycle.PrecisionController:
    schedule = bitcycle.schedule("static", q_max=8, total_steps=3)
    return bitcycle.PrecisionController(bitcycle.quantize_model(model, float_layers=[]), schedule)


class OfDictionary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)

    def forward(self, batch):
        return self.inner(batch["features"])


def test_samples_are_counted_in_nested_inputs():
    model = OfDictionary()
    control = linear_control(model)
    control.step(0)
    model({"names": ["a"], "features": torch.randn(7, 4)})
    assert sum(control.meter.histogram.values()) == 7


def test_samples_that_are_told_win_over_those_that_are_seen():
    model = OfDictionary()
    control = linear_control(model)
    for step in range(3):
        control.step(step, samples=10)
        for _ in range(2):  # gradients of two halves
            model({"features": torch.randn(5, 4)})
    assert sum(control.meter.histogram.values()) == 30


def test_a_model_without_quantized_layers_is_noticed():
    with pytest.warns(UserWarning, match="call quantize_model first"):
        bitcycle.PrecisionController(nn.Linear(2, 2), bitcycle.schedule("CR", total_steps=10))


def test_layers_without_counterpart_are_named(caplog):
    with caplog.at_level(logging.WARNING):
        model = nn.Sequential(nn.Conv1d(2, 2, 1), nn.Conv1d(2, 2, 1), nn.Flatten(), nn.Linear(8, 2))
        bitcycle.quantize_model(model, float_layers=[])
    assert "stay float: 2 Conv1d" in caplog.text


def test_hooks_survive_the_conversion():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    seen = []
    handle = model[1].register_forward_hook(lambda module, inputs, output: seen.append(type(module).__name__))
    model = bitcycle.quantize_model(model, float_layers=[])
    model(torch.ones(2, 4))
    assert seen == ["QuantizedLinear"]
    handle.remove()
    model(torch.ones(2, 4))
    assert len(seen) == 1


def test_shortcuts_are_known_by_whole_words():
    names = ("skip", "conv_shortcut", "skipper", "out_projection")
    model = nn.ModuleDict({"a": nn.Linear(2, 2), **{name: nn.Linear(2, 2) for name in names}, "z": nn.Linear(2, 2)})
    roles = bitcycle.layer.conversion.layer_roles(model)
    assert [name for name, found in roles.items() if "shortcut" in found] == ["skip", "conv_shortcut"]


def test_tracing_draws_no_random_numbers():
    class Noisy(nn.Linear):
        def forward(self, x):
            return super().forward(x + torch.randn_like(x))

    model, before = Noisy(3, 3), torch.get_rng_state()
    trace(model, torch.ones(2, 3))
    assert torch.equal(before, torch.get_rng_state())


def test_gradients_of_a_float_forward_pass_are_float():
    schedule = bitcycle.schedule("static", q_max=32, gradient=8, total_steps=2)
    assert schedule(0) == schedule.reference == Precision(32, 32, 32)
