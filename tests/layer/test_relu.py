"""compute=simulate: the ReLU that notes its range for the next quantizer, and gradients quantized in place, change no number."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import bitcycle
from bitcycle.layer.relu import NotingReLU
from bitcycle.quantizer.cpp_operators import AFFINE, are_available

pytestmark = pytest.mark.skipif(not are_available(AFFINE), reason="needs g++")


@pytest.mark.parametrize("inplace", [True, False])
def test_it_is_relu_bit_for_bit_and_keeps_a_byte(inplace):
    x, kept = torch.tensor([-1.0, 0.0, 2.0, -0.0, torch.inf, torch.nan]), []
    found = []
    for relu in (nn.ReLU(inplace), NotingReLU(inplace)):
        leaf = x.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: kept.append(saved) or saved, lambda saved: saved):
            y = relu(leaf + 0)
        y.backward(torch.tensor([1.0, torch.inf, 3.0, 4.0, 5.0, 6.0]))
        found.append((y.detach(), leaf.grad))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0, equal_nan=True)
    assert kept[-1].element_size() == 1


def test_it_can_be_differentiated_twice():
    found = []
    for relu in (nn.ReLU(), NotingReLU()):
        x = torch.randn(50, generator=torch.Generator().manual_seed(0)).requires_grad_()
        (first,) = torch.autograd.grad((relu(x) ** 3).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), x)[0])
    assert torch.equal(*found)


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
    layers.extend([nn.Conv2d(8, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(4 * 36, 3)])
    return layers


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters()), *model.buffers()]


@pytest.mark.parametrize("threads", [1, 2])
def test_networks_train_as_with_pytorchs(threads):
    """Also where a hook changes the output of a ReLU in place, or holds the gradient that is quantized."""

    def change(module: nn.Module, _inputs: object, y: torch.Tensor) -> torch.Tensor:
        if type(module) is nn.ReLU:  # whose output must not change
            return y + (2 * y).detach()
        with torch.no_grad():
            return y.mul_(3)

    x, before = torch.randn(3, 4, 12, 12), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for hook in (False, True):
            found, held = [], []
            for compile in (False, True):
                model = bitcycle.quantize_model(copy.deepcopy(network()), float_layers=[], compile=compile)
                assert any(type(module) is NotingReLU for module in model) == compile
                if hook:
                    model[1].register_forward_hook(change)
                    model[2].register_forward_hook(lambda _, __, y, held=held: y.register_hook(held.append) and None)
                found.append(gradients(model, x))
            assert all(map(torch.equal, *found))
            assert not hook or torch.equal(*held)
    finally:
        torch.set_num_threads(before)
