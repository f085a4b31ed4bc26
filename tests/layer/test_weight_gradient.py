"""Sums of integers for the gradient of a convolution's weight (compute=codes)."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import bitcycle
from bitcycle.layer.codes import gradients
from bitcycle.layer.codes import product as code_product
from bitcycle.layer.codes.gradients import input_gradient, sums_input, sums_integers
from bitcycle.layer.codes.support import library
from bitcycle.layer.products.block_product import product_gradients
from bitcycle.precision import Precision
from bitcycle.quantizer.codes import Codes, GradientCodes
from bitcycle.quantizer.sbm import Sbm

pytestmark = pytest.mark.usefixtures("codes_everywhere")

needs_library = pytest.mark.skipif(library() is None, reason="no compiler, or a CPU without 8-bit products")

CONVOLUTIONS = {
    "3x3": (16, 16, {"kernel_size": 3, "padding": 1}),
    "few channels": (3, 16, {"kernel_size": 3, "padding": 1}),
    "odd channels": (21, 16, {"kernel_size": 1}),
    "channels": (48, 32, {"kernel_size": 3, "padding": 1}),
    "stride": (16, 32, {"kernel_size": 3, "padding": 1, "stride": 2}),
    "long stride": (16, 16, {"kernel_size": 3, "stride": 3}),
    "no padding": (16, 16, {"kernel_size": 3, "bias": False}),
    "wide padding": (32, 16, {"kernel_size": 3, "padding": 2}),
    "1x1": (16, 16, {"kernel_size": 1, "bias": False}),
    "1x1 stride": (32, 64, {"kernel_size": 1, "stride": 2}),
}


def channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def exact(x: Codes, gradient: GradientCodes, layer: nn.Conv2d) -> torch.Tensor:
    """The gradient from decoded tensors in float64."""
    operands = [codes.integers.double() * codes.scale + codes.zero_point for codes in (gradient, x)]
    return product_gradients(*operands, layer.weight.double(), (False, True, False), layer)[1]


@needs_library
@pytest.mark.parametrize("size", [(1, 3, 3), (3, 9, 8), (5, 7, 13), (70, 33, 32)])
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_it_is_the_sum_in_double_precision(case, size):
    """At the last size and stride 1 the sums do not fit into 32 bits: codes are large, and of one sign."""
    channels, out, options = CONVOLUTIONS[case]
    layer = nn.Conv2d(channels, out, **options)
    images, *shape = size
    torch.manual_seed(0)
    low = 250 if images == 70 else 0
    integers = channels_last(torch.randint(low, 256, (images, channels, *shape), dtype=torch.uint8))
    x = Codes(integers, torch.tensor(0.013), torch.tensor(-0.3))
    places = layer(torch.zeros(1, channels, *shape)).shape[2:]
    codes = channels_last(torch.randint(-128, -124 if low else 128, (images, out, *places), dtype=torch.int8))
    gradient = GradientCodes(codes, 2e-3, 0.07)
    assert sums_integers(layer, integers)
    found, expected = gradients.weight_gradient(x, gradient, layer), exact(x, gradient, layer).detach()
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-7 * float(expected.abs().max()))


@needs_library
@pytest.mark.parametrize("case", ["3x3", "channels", "no padding", "wide padding", "1x1"])
def test_the_input_gradient_is_that_of_the_weight_in_16_bits(case):
    """Of a weight that has 16 bits it is exact; of another the error is that of rounding the weight."""
    channels, out, options = CONVOLUTIONS[case]
    layer = nn.Conv2d(channels, out, **options)
    torch.manual_seed(0)
    x = torch.zeros(3, channels, 17, 9)
    codes = channels_last(torch.randint(-128, 128, layer(x).shape, dtype=torch.int8))
    gradient = GradientCodes(codes, 2e-3, 0.07)
    whole = torch.randint(-32_639, 32_640, layer.weight.shape).float()
    whole[0, :, 0, 0] = 32_639
    for weight, error in ((whole, 2e-7), (torch.randn(layer.weight.shape), 6e-5)):
        decoded = codes.double() * gradient.scale + gradient.zero_point
        expected = product_gradients(decoded, x.double(), weight.double(), (True, False, False), layer)[0]
        found = input_gradient(gradient, weight, layer).double()
        torch.testing.assert_close(found, expected, rtol=0, atol=error * float(expected.abs().max()))
    weight[2, 5] = torch.nan
    assert input_gradient(gradient, weight, layer)[:, 5].isnan().all()


def test_layers_whose_input_gradient_it_cannot_do():
    for layer in (nn.Conv2d(16, 16, 3, stride=2), nn.Conv2d(21, 16, 1), nn.Conv2d(16, 16, 1, padding=1)):
        assert not sums_input(layer)


@needs_library
def test_threads_change_nothing():
    layer = nn.Conv2d(16, 16, 3, padding=1)
    x = Codes(torch.randint(0, 256, (7, 16, 9, 9), dtype=torch.uint8), torch.tensor(0.1), torch.tensor(0.2))
    gradient = GradientCodes(torch.randint(-128, 128, (7, 16, 9, 9), dtype=torch.int8), 0.3, 0.4)
    before, found, of_x = torch.get_num_threads(), [], []
    try:
        for threads in (1, 2, 3, 16):
            torch.set_num_threads(threads)
            found.append(gradients.weight_gradient(x, gradient, layer))
            of_x.append(input_gradient(gradient, layer.weight.detach(), layer))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(each[0], other) for each in (found, of_x) for other in each[1:])


def trained(layer: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)))
    return [y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]


@needs_library
@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize("number", range(1, 9))
@pytest.mark.parametrize("case", ["3x3", "stride", "1x1"])
def test_layers_train_as_with_decoded_tensors(case, number, stochastic, monkeypatch):
    channels, out, options = CONVOLUTIONS[case]
    quantizer = Sbm(stochastic=stochastic)
    torch.manual_seed(number)
    network = bitcycle.quantize_model(nn.Conv2d(channels, out, **options), quantizer, float_layers=[], compute="codes")
    network.precision.set(Precision(8, 8, number))
    x = torch.randn(4, channels, 9, 8)
    for given in (x, x.relu()):
        found = trained(copy.deepcopy(network), given)
        with monkeypatch.context() as patch:
            patch.setattr(code_product, "sums_integers", lambda layer, integers: False)
            expected = trained(copy.deepcopy(network), given)
        for new, old, tolerance in zip(found, expected, (0, 6e-5, 2e-6, 2e-6), strict=False):
            torch.testing.assert_close(new, old, rtol=0, atol=tolerance * float(old.abs().max()))
        if not sums_input(network):
            assert torch.equal(found[1], expected[1])


@needs_library
@pytest.mark.parametrize("number", [9, 16, 32])
def test_other_gradients_are_decoded(number, monkeypatch):
    network = bitcycle.quantize_model(nn.Conv2d(16, 16, 3), float_layers=[], compute="codes")
    network.precision.set(Precision(8, 8, number))
    monkeypatch.setattr(code_product, "weight_gradient", None)
    trained(network, torch.randn(2, 16, 5, 5))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(16, 10, 3),
        nn.Conv2d(16, 16, 5),
        nn.Conv2d(16, 16, (1, 3)),
        nn.Conv2d(16, 16, 3, dilation=2),
        nn.Conv2d(16, 16, 3, groups=16),
        nn.Conv2d(16, 16, 3, padding=(1, 2)),
        nn.Linear(16, 16),
    ],
)
def test_layers_that_it_cannot_do(layer):
    assert not sums_integers(layer, torch.zeros(2, 16, 8, 8, dtype=torch.uint8))


def without_operator(network: nn.Module) -> nn.Module:
    """A copy that computes in Python."""
    network = copy.deepcopy(network)
    network.computation._has_operator = lambda x: False
    return network


@needs_library
@pytest.mark.parametrize("case", CONVOLUTIONS)
@pytest.mark.parametrize("number", [1, 3, 8])
def test_the_operator_has_the_numbers_of_its_parts(case, number):
    channels, out, options = CONVOLUTIONS[case]
    torch.manual_seed(number)
    layer = nn.Conv2d(channels, out, **options)
    network = bitcycle.quantize_model(layer, float_layers=[], compute="codes", compile=True)
    network.precision.set(Precision(number, number, number))
    for x in (torch.randn(5, channels, 17, 19), torch.randn(3, channels, 9, 8).relu()):
        x = channels_last(x)
        assert network.computation._has_operator(x)
        pair = [copy.deepcopy(network), without_operator(network)]
        for found, expected in zip(*(trained(each, x) for each in pair), strict=True):
            assert torch.equal(found, expected)
        for found, expected in zip(*(each.buffers() for each in pair), strict=True):
            assert torch.equal(found, expected)
        for found, expected in zip(*(each.eval()(x) for each in pair), strict=True):
            assert torch.equal(found, expected)


@needs_library
def test_the_operator_has_no_second_derivative():
    network = bitcycle.quantize_model(nn.Conv2d(16, 16, 3), float_layers=[], compute="codes", compile=True)
    x = torch.randn(2, 16, 5, 5, requires_grad=True)
    with pytest.raises(RuntimeError, match="use compute=simulate"):
        torch.autograd.grad(network(x).sum(), x, create_graph=True)
