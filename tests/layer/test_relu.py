"""compute=simulate: the ReLU that notes its range for the next quantizer, and gradients quantized in place, change no number."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

import bitcycle
from bitcycle.cpp.extension import operators
from bitcycle.cpp.operators import AFFINE
from bitcycle.layer.relu import RecordingReLU
from bitcycle.module.layers import add_relu
from bitcycle.quantizer.sbm import SbmActivation

pytestmark = pytest.mark.skipif(operators(AFFINE) is None, reason="needs g++")


@pytest.mark.parametrize("inplace", [True, False])
def test_it_is_relu_bit_for_bit_and_keeps_a_byte(inplace):
    x, kept = torch.tensor([-1.0, 0.0, 2.0, -0.0, torch.inf, torch.nan]), []
    found = []
    for relu in (nn.ReLU(inplace), RecordingReLU(inplace)):
        leaf = x.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: kept.append(saved) or saved, lambda saved: saved):
            y = relu(leaf + 0)
        y.backward(torch.tensor([1.0, torch.inf, 3.0, 4.0, 5.0, 6.0]))
        found.append((y.detach(), leaf.grad))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0, equal_nan=True)
    assert kept[-1].element_size() == 1


def test_it_can_be_differentiated_twice():
    found = []
    for relu in (nn.ReLU(), RecordingReLU()):
        x = torch.randn(50, generator=torch.Generator().manual_seed(0)).requires_grad_()
        (first,) = torch.autograd.grad((relu(x) ** 3).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), x)[0])
    assert torch.equal(*found)


def summands() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 16, 33, 31), (3, 5, 7, 9), (130,), (1, 1, 1, 1), (0, 4), (5, 3, 40)]
    found = [tuple(torch.randn(2, *shape, generator=generator)) for shape in shapes]
    layouts = [tuple(x.contiguous(memory_format=torch.channels_last) for x in pair) for pair in found[:2]]
    found += [
        *layouts,
        (layouts[0][0], found[0][1]),
        (torch.randn(4, 6), torch.randn(6)),
        (torch.randn(9, 7).t(), torch.randn(7, 9)),
    ]
    special = torch.tensor([-1.0, 0.0, 2.0, -0.0, torch.inf, -torch.inf, torch.nan])
    return [
        *found,
        tuple(torch.cartesian_prod(special, special).T.contiguous()),
        (torch.randn(4).double(), torch.randn(4).double()),
    ]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("needed", [(True, True), (True, False), (False, True), (False, False)])
def test_the_relu_of_a_sum_is_pytorchs(threads, needed):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for a, b in summands():
            found = []
            for relu in (nn.ReLU(inplace=True), RecordingReLU(inplace=True)):
                leaves = [
                    x.clone(memory_format=torch.preserve_format).requires_grad_(need) for x, need in zip((a, b), needed)
                ]
                y = add_relu(relu, *leaves)
                if any(needed):
                    y.backward(
                        torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view(y.shape).as_strided(y.shape, y.stride())
                    )
                with torch.no_grad():
                    found.append([y, *(leaf.grad for leaf in leaves if leaf.requires_grad), add_relu(relu, *leaves)])
                assert all(torch.equal(leaf.nan_to_num(), x.nan_to_num()) for leaf, x in zip(leaves, (a, b)))
            torch.testing.assert_close(found[1], found[0], rtol=0, atol=0, equal_nan=True, check_stride=True)
    finally:
        torch.set_num_threads(before)


def test_the_relu_of_a_sum_twice_differentiated_and_under_autocast():
    found = []
    for relu in (nn.ReLU(), RecordingReLU()):
        x = torch.randn(50, generator=torch.Generator().manual_seed(0)).requires_grad_()
        (first,) = torch.autograd.grad((add_relu(relu, x, x**2 - 1) ** 3).sum(), x, create_graph=True)
        with torch.autocast("cpu"):
            product = x.view(5, 10) @ torch.ones(10, 3)
            rounded = add_relu(relu, product, product)
        assert rounded.dtype == torch.bfloat16
        found.append([torch.autograd.grad(first.square().sum(), x)[0], rounded])
    assert all(map(torch.equal, *found))


def test_without_a_graph_ranges_are_noted_and_tensors_changed_in_place():
    relu, quantizer, x = RecordingReLU(inplace=True), SbmActivation(compile=True), torch.randn(300) - 0.5
    expected = torch.relu(x)
    with torch.no_grad():
        assert relu(x) is x
        version = x._version
        assert version == 1
        assert torch.equal(x, expected)
        assert torch.equal(quantizer(x, torch.tensor(3)), SbmActivation()(expected, torch.tensor(3)))
        x.mul_(2)  # its note is out of date
        assert torch.equal(quantizer(x, torch.tensor(3)), SbmActivation()(2 * expected, torch.tensor(3)))


def test_a_range_is_not_noted_for_a_tensor_that_others_may_change():
    quantizer, numbers = SbmActivation(compile=True), np.linspace(0, 1, 50, dtype=np.float32)
    x = torch.from_numpy(numbers)
    for _ in range(2):
        assert torch.equal(quantizer(x, torch.tensor(3)), SbmActivation()(x.clone(), torch.tensor(3)))
        numbers *= 5


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
                assert any(type(module) is RecordingReLU for module in model) == compile
                if hook:
                    model[1].register_forward_hook(change)
                    model[2].register_forward_hook(lambda _, __, y, held=held: y.register_hook(held.append) and None)
                found.append(gradients(model, x))
            assert all(map(torch.equal, *found))
            assert not hook or torch.equal(*held)
    finally:
        torch.set_num_threads(before)
