"""Conversion looks for the order of layers by running the model, which must not notice."""

import pytest
import torch
from torch import nn

import bitcycle


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
