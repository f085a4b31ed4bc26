"""Convolutions in networks that expect the memory format of PyTorch's layers, and samples without a batch dimension."""

import copy

import pytest
import torch
from torch import nn

import bitcycle


class Viewed(nn.Module):
    """A network that takes views of the outputs of its convolutions, as that of PyTorch's tutorial does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3), nn.ConvTranspose2d(6, 4, 1)
        self.last = nn.Linear(4 * 36, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x).relu())
        return self.last(x.view(-1, 4 * 36))


@pytest.mark.parametrize("quantizer", ["sbm", "mx"])
def test_outputs_can_be_viewed(quantizer):
    model = bitcycle.quantize_model(Viewed(), quantizer, float_layers=[])
    model(torch.rand(2, 3, 8, 8)).sum().backward()
    assert model.first.weight.grad is not None


@pytest.mark.parametrize("volume", [False, True])
@pytest.mark.parametrize("which", ["input", "weight", "neither"])
def test_memory_formats_are_those_of_pytorchs_layers(which, volume):
    kind, format = (nn.Conv3d, torch.channels_last_3d) if volume else (nn.Conv2d, torch.channels_last)
    layer, x = kind(4, 6, 1), torch.rand(2, 4, *[5] * (2 + volume))
    if which == "input":
        x = x.to(memory_format=format)
    if which == "weight":
        layer.to(memory_format=format)
    expected = layer(x)
    assert bitcycle.quantize_model(layer, float_layers=[])(x).stride() == expected.stride()


@pytest.mark.parametrize(
    ("quantizer", "compute"), [("sbm", "simulate"), ("sbm", "codes"), ("dorefa", "simulate"), ("mx", "simulate")]
)
@pytest.mark.parametrize(
    "layer",
    [nn.Conv1d(32, 6, 3), nn.Conv2d(32, 6, 3), nn.ConvTranspose2d(32, 6, 3), nn.Linear(32, 6)],
    ids=lambda layer: type(layer).__name__,
)
def test_a_sample_without_a_batch_dimension_is_a_batch_of_one(layer, quantizer, compute):
    generator = torch.Generator().manual_seed(0)
    spatial = () if isinstance(layer, nn.Linear) else (7,) * len(layer.kernel_size)
    x = torch.randn(32, *spatial, generator=generator)
    found = []
    for alone in (True, False):
        model = bitcycle.quantize_model(copy.deepcopy(layer), quantizer, float_layers=[], compute=compute)
        given = (x if alone else x[None]).clone().requires_grad_()
        y = model(given)
        weight = torch.randn(y.numel(), generator=torch.Generator().manual_seed(1))
        (y.flatten() * weight).sum().backward()
        assert y.dim() == given.dim()
        found.append((y.flatten(), given.grad.flatten(), model.weight.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
