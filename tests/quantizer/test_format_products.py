"""Number formats: each product of a layer has blocks along what it sums over."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bitcycle
from bitcycle.module.graph import GraphConvolution
from bitcycle.module.layers import MatrixProduct
from bitcycle.module.sparse import Edges
from bitcycle.precision import Precision
from bitcycle.quantizer import QUANTIZERS, quantize_mx
from tests.quantizer.test_formats import random

FORWARD, BACKWARD = "mxfp6_e2m3", "mxfp8_e5m2"
BITS = Precision(6, 6, 8)


def q(x: Tensor, dim: int, element: str = FORWARD) -> Tensor:
    return quantize_mx(x, element, dim=dim)


def trained_step(layer: nn.Module, *inputs: object) -> tuple[Tensor, list[Tensor], Tensor]:
    """Output, gradients of the inputs that are tensors and the gradient that came, of a converted layer at 6, 6 and 8 bits."""
    options = QUANTIZERS["mx"](stochastic=False)
    model = bitcycle.quantize_model(layer, options, float_layers=[])
    for module in model.modules():
        if isinstance(module, bitcycle.layer.PrecisionState):
            module.set(BITS)
    leaves = [x.clone().requires_grad_() if isinstance(x, Tensor) else x for x in inputs]
    y = model(*leaves)
    upstream = random(*y.shape, seed=9) * 1e-3
    y.backward(upstream)
    return y.detach(), [x.grad for x in leaves if isinstance(x, Tensor)], upstream


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6 * expected.abs().max().item())


@pytest.mark.parametrize("shape", [(70, 40), (3, 5, 40)])
def test_each_product_of_a_linear_layer_has_blocks_along_what_it_sums_over(shape):
    layer = nn.Linear(40, 35)
    weight, bias, x = layer.weight.detach().clone(), layer.bias.detach().clone(), random(*shape)
    y, (of_x,), g = trained_step(layer, x)
    close(y, q(x, -1) @ q(weight, 1).T + bias)
    close(of_x, q(g, -1, BACKWARD) @ q(weight, 0))
    rows = g.reshape(-1, 35)
    close(layer.weight.grad, q(rows, 0, BACKWARD).T @ q(x.reshape(-1, 40), 0))
    close(layer.bias.grad, rows.sum(0))


@pytest.mark.parametrize(
    "options",
    [
        {"stride": 2, "padding": 1},
        {"groups": 2, "dilation": 2},
        {"padding": "same"},
        {"padding_mode": "circular", "padding": 1},
    ],
    ids=str,
)
def test_each_product_of_a_convolution_has_blocks_along_what_it_sums_over(options):
    layer = nn.Conv2d(72, 80, 3, **options)
    groups = layer.groups
    weight, x = layer.weight.detach().clone(), random(36, 72, 6, 6)
    y, (of_x,), g = trained_step(layer, x)

    def grouped(tensor: Tensor, dim: int, element: str = FORWARD) -> Tensor:
        return torch.cat([q(part, dim, element) for part in tensor.chunk(groups, dim)], dim)

    def gradients(x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
        return torch.autograd.grad(layer._conv_forward(x, w, None), (x, w), g)

    close(y, layer._conv_forward(grouped(x, 1), q(weight, 1), layer.bias).detach())
    close(of_x, gradients(x, grouped(weight, 0), grouped(g, 1, BACKWARD))[0])
    close(layer.weight.grad, gradients(q(x, 0), weight, q(g, 0, BACKWARD))[1])
    close(layer.bias.grad, g.sum((0, 2, 3)))


@pytest.mark.parametrize("groups", [1, 2, 36])
def test_each_product_of_a_transposed_convolution_has_blocks_along_what_it_sums_over(groups):
    layer = nn.ConvTranspose2d(72, 36, 3, stride=2, bias=False, groups=groups)
    weight, x = layer.weight.detach().clone(), random(33, 72, 4, 4)
    y, (of_x,), g = trained_step(layer, x)

    def grouped(tensor: Tensor, dim: int, element: str = FORWARD) -> Tensor:
        return torch.cat([q(part, dim, element) for part in tensor.chunk(groups, dim)], dim)

    def gradients(x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
        return torch.autograd.grad(F.conv_transpose2d(x, w, stride=2, groups=groups), (x, w), g)

    close(y, F.conv_transpose2d(grouped(x, 1), grouped(weight, 0), stride=2, groups=groups))
    close(of_x, gradients(x, q(weight, 1), grouped(g, 1, BACKWARD))[0])
    close(layer.weight.grad, gradients(q(x, 0), weight, q(g, 0, BACKWARD))[1])


def test_depthwise_convolutions_have_blocks_along_the_channels():
    layer = nn.Conv2d(40, 40, 3, groups=40, bias=False)
    weight, x = layer.weight.detach().clone(), random(33, 40, 5, 5)
    y, (of_x,), g = trained_step(layer, x)
    close(y, F.conv2d(q(x, 1), q(weight, 0), groups=40))
    close(of_x, torch.nn.grad.conv2d_input(x.shape, q(weight, 0), q(g, 1, BACKWARD), groups=40))
    close(layer.weight.grad, torch.nn.grad.conv2d_weight(q(x, 0), weight.shape, q(g, 0, BACKWARD), groups=40))


def test_each_product_of_two_activations_has_blocks_along_what_it_sums_over():
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.product, self.unused = MatrixProduct(), nn.Linear(1, 1)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.product(a, b)

    a, b = random(2, 3, 34, 40), random(2, 3, 40, 36, seed=1)
    y, (of_a, of_b), g = trained_step(Attention(), a, b)
    close(y, q(a, -1) @ q(b, -2))
    close(of_a, q(g, -1, BACKWARD) @ q(b, -1).mT)
    close(of_b, q(a, -2).mT @ q(g, -2, BACKWARD))


def test_each_product_of_a_graph_convolution_has_blocks_along_what_it_sums_over():
    layer = GraphConvolution(40, 36)
    nodes = torch.arange(50)
    weight, x = layer.weight.detach().clone(), random(50, 40)
    y, (of_x,), g = trained_step(layer, x, Edges(torch.arange(51), nodes))  # every node its only neighbour
    close(y, q(x, -1) @ q(weight, 0))
    close(of_x, q(g, -1, BACKWARD) @ q(weight, 1).T)
    close(layer.weight.grad, q(x, 0).T @ q(g, 0, BACKWARD))
