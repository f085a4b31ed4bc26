"""The samples that a controller counts for its cost, in a loop of one's own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import bitcycle


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


@pytest.mark.parametrize("told", [False, True])
def test_the_cost_of_a_copied_controller_is_not_silently_too_small(caplog, told):
    model = bitcycle.quantize_model(nn.Sequential(nn.Linear(4, 4)), float_layers=[])
    control = bitcycle.PrecisionController(model, bitcycle.schedule("static", total_steps=9))
    for t in range(3):
        control.step(t)
        model(torch.randn(5, 4)).sum().backward()
    control.cost()
    assert not caplog.messages
    model, control = copy.deepcopy((model, control))
    for t in range(3, 6):
        control.step(t, samples=5 if told else 0)
        model(torch.randn(5, 4)).sum().backward()
    control.cost()
    assert [message[:21] for message in caplog.messages] == ([] if told else ["the cost omits 2 step"])


def test_samples_are_counted_where_they_are():
    model = bitcycle.quantize_model(nn.LSTM(3, 4), float_layers=[])
    schedule = bitcycle.schedule("static", q_max=8, total_steps=1)
    control = bitcycle.PrecisionController(model, schedule, batch_dimension=1)
    control.step(0)
    model(torch.randn(7, 5, 3))
    with torch.no_grad():
        model(torch.randn(7, 5, 3))  # trains nothing
    assert control.cost().samples == 5
    images = bitcycle.layer.controller._samples(([torch.zeros(3, 8, 8)] * 4,), {}, 0)
    assert images == 4
