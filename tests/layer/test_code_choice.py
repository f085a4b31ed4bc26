"""Which layers of compute=codes multiply codes on a CPU: those that by their shape take less time than on floats."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import bitcycle
from bitcycle.layer.batch_norm import TrainedBatchNorm2d
from bitcycle.layer.codes import batch_norm as code_norm
from bitcycle.layer.codes import product as code_product
from bitcycle.layer.codes.batch_norm import CodeBatchNorm2d, MaskSavingReLU
from bitcycle.layer.codes.support import integer_products_work, library
from bitcycle.layer.relu import RecordingReLU
from bitcycle.layer.state import PrecisionState
from bitcycle.precision import Precision

needs_integers = pytest.mark.skipif(not integer_products_work(), reason="no exact 8-bit products on this machine")


def converted(layer: nn.Module, compute: str = "codes") -> nn.Module:
    model = bitcycle.quantize_model(copy.deepcopy(layer), float_layers=[], compute=compute)
    for state in (module for module in model.modules() if isinstance(module, PrecisionState)):
        state.set(Precision(8, 8, 8))
    return model


def convolution(inputs: int, outputs: int, kernel: int, **options: int) -> nn.Module:
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, **options)


@needs_integers
@pytest.mark.parametrize(
    ("layer", "shape", "pays"),
    [
        (convolution(16, 16, 3), (32, 16, 32, 32), True),
        (convolution(16, 32, 1, stride=2), (32, 16, 32, 32), True),
        (convolution(512, 512, 3), (4, 512, 7, 7), False),  # 2.4 million weights for 196 positions
        (convolution(512, 512, 3), (32, 512, 7, 7), True),
        (convolution(96, 96, 3, groups=96), (32, 96, 32, 32), False),
        (convolution(96, 24, 1), (32, 96, 32, 32), False),
        (convolution(64, 64, 5), (32, 64, 16, 16), True),
        (nn.Linear(768, 3072), (4, 64, 768), False),
        (nn.Linear(768, 3072), (4096, 768), True),
        (nn.Linear(64, 64), (4096, 64), False),
    ],
)
def test_the_measured_layers(layer, shape, pays):
    """Those that took more than 1.05 times as long on codes multiply floats, and the others codes."""
    if layer.__class__ is nn.Conv2d and library() is None:
        pytest.skip("no operators")
    assert converted(layer).computation.accepts(torch.empty(shape)) is pays


@pytest.mark.parametrize(
    "layer",
    [
        convolution(6, 4, 3, stride=2, groups=2),
        nn.Conv2d(6, 5, (1, 4), dilation=(1, 2), padding=(2, 3), stride=(3, 1)),
        nn.Linear(6, 7),
    ],
)
def test_the_output_is_counted(layer):
    x = torch.randn(2, 6, 13, 9) if isinstance(layer, nn.Conv2d) else torch.randn(3, 2, 6)
    assert converted(layer).computation.output_elements(x) == layer(x).numel()
    if isinstance(layer, nn.Conv2d):
        assert converted(layer).computation.output_elements(x[0]) == layer(x[0]).numel(), "a single image"


def test_other_layers_train_as_simulated_bit_for_bit():
    """A convolution for each channel, and one whose numbers of channels no operator has."""
    torch.manual_seed(0)
    network = nn.Sequential(
        *(convolution(32, 32, 3, groups=32, bias=False), nn.ReLU(inplace=True)),
        *(convolution(32, 24, 1), nn.ReLU()),
    )
    x, found = torch.randn(4, 32, 8, 8), []
    for compute in ("simulate", "codes"):
        model = converted(network, compute)
        model(x).square().sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for expected, actual in zip(*found, strict=True):
        assert torch.equal(actual, expected)


@needs_integers
def test_it_is_decided_once_for_each_shape(monkeypatch):
    computation = converted(nn.Linear(768, 3072)).computation
    asked: list[int] = []
    monkeypatch.setattr(code_product.CodeLinear, "output_elements", lambda _, x: asked.append(len(x)) or len(x) * 3072)
    for rows in (4096, 4096, 8, 4096):
        computation.accepts(torch.empty(rows, 768))
    assert asked == [4096, 8]


def test_without_integer_products_batch_norm_and_relu_have_the_operators_of_simulate(monkeypatch):
    """With PyTorch's a step took 1.12 times as long as that of compute=simulate."""
    monkeypatch.setattr(code_norm, "library", lambda: None)
    x = torch.randn(4, 48, 8, 8).contiguous(memory_format=torch.channels_last)
    assert CodeBatchNorm2d(48).operator(x) == TrainedBatchNorm2d(48).operator(x)
    relu = MaskSavingReLU()
    relu.compile_kernel = True
    for added in (None, x + 1):
        assert relu.operator(x, added) == RecordingReLU().operator(x, added)
