"""Conversion looks for the order of layers by running the model, which must not notice."""

import random
from collections import deque

import numpy
import pytest
import torch
from torch import nn

import bitcycle
from bitcycle.hardware import trace


class Caching(nn.Sequential):
    """Keeps tensors from its first forward pass on: one is an attribute, one a buffer, others are in a list."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.mask: torch.Tensor | None = None
        self.register_buffer("largest", torch.zeros(4))
        self.outputs: list[torch.Tensor] = []

    def forward(self, x):
        if self.mask is None:
            self.mask = torch.ones_like(x[0])
        x = super().forward(x * self.mask)
        self.largest = torch.maximum(self.largest, x.amax(0).detach())
        self.outputs.append(x)
        return x


@pytest.mark.parametrize("sample", [None, torch.zeros(2, 4)])
def test_caches_are_empty_after_conversion(sample):
    """They held fake tensors with a sample, and proxies of torch.fx without."""
    model = bitcycle.quantize_model(Caching(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)), sample=sample)
    assert model.mask is None and model.outputs == []
    y = model(torch.randn(2, 4))
    assert all(type(x) is torch.Tensor for x in (y, model.mask, model.largest, *model.outputs))


def test_parts_in_evaluation_mode_stay_in_it():
    """A frozen batch norm was in training mode after conversion with a sample."""
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)
    model = nn.Sequential(*layers)
    model[1].eval()
    model = bitcycle.quantize_model(model, sample=torch.zeros(1, 3, 9, 9))
    assert [module.training for module in model] == [True, False, True, True]


class Counting(nn.Sequential):
    """Counts, queues, draws from every generator, and averages a weight at each forward pass. `needs_values`: decides by
    values, so that a pass without them is impossible."""

    def __init__(self, needs_values: bool) -> None:
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        self.needs_values, self.calls, self.generator = needs_values, 0, torch.Generator()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.plain, self.recent, self.history = (
            torch.zeros(2),
            deque([torch.zeros(3)], maxlen=2),
            {"of": [torch.zeros(1)]},
        )
        self.average = nn.Parameter(torch.zeros(4, 4), requires_grad=False)

    def forward(self, x):
        random.random()
        numpy.random.rand()
        torch.rand(1)
        torch.rand(1, generator=self.generator)
        self.calls += 1
        self.count += 1
        self.plain.add_(1)
        self.recent[0].add_(1)
        self.recent.append(self.plain)
        self.history["of"][0].add_(1)
        if self.needs_values and x.sum().item() > 100:
            return x
        if not isinstance(x, torch.fx.Proxy):
            self.average.data.lerp_(self[0].weight.data, 0.5)
        return super().forward(x)

    def state(self):
        tensors = [self.count, self.plain, *self.recent, *self.history["of"], self.average, self.generator.get_state()]
        return [self.calls, *(x.tolist() for x in tensors)]


def generators():
    return random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


@pytest.mark.parametrize("needs_values", [False, True])
@pytest.mark.parametrize("sample", [None, torch.zeros(2, 4)])
def test_counters_queues_and_random_numbers_are_those_of_before(sample, needs_values):
    """A counter was one step ahead after conversion, and Python's random numbers went on."""
    model = Counting(needs_values)
    before, drawn, weight = model.state(), generators(), model[1].weight
    converted = bitcycle.quantize_model(model, sample=sample)
    assert converted.state() == before and generators() == drawn
    assert converted[1].weight is weight
    trace(converted, torch.zeros(2, 4))
    assert converted.state() == before and generators() == drawn
