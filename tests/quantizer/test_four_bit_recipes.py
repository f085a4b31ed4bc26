"""Ingredients of 4-bit training recipes, against a literal float64 reading of the papers' equations."""

import math

import pytest
import torch
from torch import Tensor, nn

import bitcycle
from bitcycle.layer import PrecisionState
from bitcycle.precision import Precision
from bitcycle.quantizer import QUANTIZERS, QuantizerOptions
from bitcycle.quantizer.block import from_squares, squares
from bitcycle.quantizer.hadamard import hadamard_matrix, random_signs, rotate
from bitcycle.randomness import int32_key
from bitcycle.settings import SettingError
from tests.quantizer.test_formats import random

KEY = torch.tensor(int32_key("test"), dtype=torch.int32)
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def step_of(
    options: QuantizerOptions, layer: nn.Module, x: Tensor, upstream: Tensor, bits: Precision
) -> tuple[Tensor, Tensor, Tensor]:
    """Output and gradients of input and weight of a layer converted with `options`."""
    model = bitcycle.quantize_model(layer, options, float_layers=[])
    for module in model.modules():
        if isinstance(module, PrecisionState):
            module.set(bits)
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(upstream)
    assert x.grad is not None
    return y.detach(), x.grad, next(model.parameters()).grad


def nearest_e2m1(x: Tensor) -> Tensor:
    """x (float64) rounded to the nearest E2M1 value, ties to the even code, saturated at 6."""
    distance = (x.abs()[..., None].clamp_max(6) - E2M1).abs()
    codes = torch.arange(8)
    best = torch.where(distance == distance.amin(-1, keepdim=True), codes, 99)
    even = torch.where((best != 99) & (codes % 2 == 0), codes, 99).amin(-1)
    return x.sign() * E2M1[torch.where(even != 99, even, best.amin(-1))]


def nvfp4_2d(w: Tensor) -> Tensor:
    """NVFP4 with one E4M3 scale for each 16x16 square: appendix B and section 4.3, literally."""
    of_tensor = w.abs().max() / (6 * 448)
    y = torch.zeros_like(w, dtype=torch.float64)
    for i in range(0, len(w), 16):
        for j in range(0, w.shape[1], 16):
            square = w[i : i + 16, j : j + 16]
            step = (square.abs().max() / 6 / of_tensor).to(torch.float8_e4m3fn).double() * of_tensor.double()
            y[i : i + 16, j : j + 16] = step * nearest_e2m1(square.double() / step)
    return y


@pytest.mark.parametrize("size", [16, 64])
def test_the_rotation_is_orthogonal(size):
    matrix = hadamard_matrix(size)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size))
    signs = random_signs(size, KEY)
    assert set(signs.tolist()) == {-1.0, 1.0}


@pytest.mark.parametrize(("shape", "dim", "groups"), [((5, 48), 1, 1), ((70, 8), 0, 1), ((2, 40, 3, 3), 1, 2)])
def test_a_rotated_product_equals_the_plain_one(shape, dim, groups):
    signs = random_signs(16, KEY)
    a, b = random(*shape).double(), random(*shape, seed=1).double()
    turned = [rotate(x, dim, 16, signs, groups) for x in (a, b)]
    expected = (a * b).unflatten(dim, (groups, -1)).sum(dim + 1)
    found = (turned[0] * turned[1]).unflatten(dim, (groups, -1)).sum(dim + 1)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5)
    assert not torch.equal(turned[0], a)
    assert turned[0].movedim(dim, -1)[..., 0].ne(a.movedim(dim, -1)[..., 0]).any()


@pytest.mark.parametrize(("shape", "groups"), [((40, 35), 1), ((48, 20, 3, 3), 3), ((16, 16), 1), ((5, 3), 1)])
def test_squares_are_undone_exactly(shape, groups):
    w = random(*shape)
    tiles = squares(w, (0, 1), 16, groups)
    assert tiles.shape[1] == 256
    assert torch.equal(from_squares(tiles, w, (0, 1), 16, groups), w)


@pytest.mark.parametrize("compile", [False, True])
def test_square_weights_are_what_the_paper_says(compile):
    w = random(40, 35) * 10.0 ** random(40, 1, seed=2)
    quantizer = QUANTIZERS["nvfp4"](square_weights=True).weight(compile)
    found = quantizer.in_squares(w, torch.tensor(4), (0, 1))
    torch.testing.assert_close(found.double(), nvfp4_2d(w), rtol=1e-6, atol=0)


def test_square_weights_are_the_same_in_fprop_and_dgrad():
    layer = nn.Linear(35, 40, bias=False)
    w = layer.weight.detach().clone()
    x, g = torch.eye(35), torch.eye(35, 40)
    options = QUANTIZERS["nvfp4"](square_weights=True, stochastic=False)
    y, of_x, _ = step_of(options, layer, x, g, Precision(4, 4, 4))
    expected = nvfp4_2d(w).float()
    torch.testing.assert_close(y, expected.T)  # the identity is exact in NVFP4
    torch.testing.assert_close(of_x, expected[:35])


@pytest.mark.parametrize("name", ["nvfp4", "mx"])
def test_rotations_cancel_without_quantization(name):
    options = QUANTIZERS[name](hadamard=["dgrad", "wgrad"], backward_bits="gradient")
    x, g = random(48, 32), random(48, 64, seed=1)
    layer = nn.Linear(32, 64, bias=False)
    w = layer.weight.detach().clone()
    y, of_x, of_w = step_of(options, layer, x, g, Precision(32, 32, 32))
    torch.testing.assert_close(y, x @ w.T)
    torch.testing.assert_close(of_x, g @ w, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(of_w, g.T @ x, rtol=1e-5, atol=1e-5)


def test_wgrad_of_nvfp4_rotates_both_inputs_along_the_samples():
    """Figure 5: the weight's gradient is Q(H^T g)^T Q(H^T x), the other products are not rotated."""
    from bitcycle.layer.products.block_product import SIGNS

    x, g = random(48, 32), random(48, 64, seed=1)
    layer = nn.Linear(32, 64, bias=False)
    w = layer.weight.detach().clone()
    options = QUANTIZERS["nvfp4"](hadamard=["wgrad"], stochastic=False)
    _, of_x, of_w = step_of(options, layer, x, g, Precision(4, 4, 4))
    signs = random_signs(16, torch.tensor(SIGNS["all"], dtype=torch.int32))
    turn = torch.block_diag(*[(signs[:, None] * hadamard_matrix(16)).T] * 3)

    def q(t: Tensor) -> Tensor:  # blocks along the last dimension
        return bitcycle.quantize(t, 4, quantizer="nvfp4", role="weight").double()

    torch.testing.assert_close(of_w.double(), q((turn @ g).T) @ q((turn @ x).T).T, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(of_x.double(), q(g) @ q(w.T).T, rtol=1e-5, atol=1e-5)


def mxfp4_recipe(**changes: object) -> QuantizerOptions:
    options = {"stochastic_operands": True, "headroom": True, "backward_bits": "gradient", "hadamard_signs": "drawn"}
    return QUANTIZERS["mx"](**(options | {"hadamard": ["dgrad", "wgrad"], "hadamard_size": 64} | changes))


def mean_gradients(
    options: QuantizerOptions, x: Tensor, w: Tensor, g: Tensor, draws: int
) -> list[tuple[Tensor, Tensor]]:
    """Mean and standard error of the gradients of input and weight over steps, at MXFP8 forward and MXFP4 backward."""
    layer = nn.Linear(w.shape[1], w.shape[0], bias=False)
    layer.weight.data.copy_(w)
    model = bitcycle.quantize_model(layer, options, float_layers=[])
    control = bitcycle.PrecisionController(model, bitcycle.schedule("static", q_max=8, gradient=4, total_steps=draws))
    found: list[list[Tensor]] = [[], []]
    for step in range(draws):
        control.step(step)
        leaf = x.clone().requires_grad_()
        model.zero_grad()
        model(leaf).backward(g)
        found[0].append(leaf.grad.double())
        found[1].append(next(model.parameters()).grad.double())
    stacks = [torch.stack(values) for values in found]
    return [(values.mean(0), values.std(0) / math.sqrt(draws)) for values in stacks]


def test_the_mxfp4_recipe_has_unbiased_gradients():
    """Section 3: rounded stochastically without saturation, products of the backward pass have the right mean."""
    x, w, g = random(64, 64), random(64, 64, seed=1), random(64, 64, seed=2)
    draws = 300
    for (mean, error), exact in zip(
        mean_gradients(mxfp4_recipe(), x, w, g, draws), (g.double() @ w.double(), g.double().T @ x.double())
    ):
        z = (mean - exact) / error
        assert abs(z.mean()) < 4 / 64  # 64 * 64 independent normal numbers
        assert 0.9 < z.std() < 1.1


def test_without_headroom_the_mean_is_biased():
    x, w, g = random(64, 64), random(64, 64, seed=1), random(64, 64, seed=2)
    (mean, error), _ = mean_gradients(mxfp4_recipe(headroom=False), x, w, g, 300)
    z = (mean - g.double() @ w.double()) / error
    assert z.std() > 1.2


@pytest.mark.parametrize("compile", [False, True])
def test_nothing_saturates_with_headroom(compile):
    """A block whose largest element is between 6 and 8 in units of its scale keeps its mean."""
    x = torch.full((4000, 32), 7.9)
    options = QUANTIZERS["mx"](headroom=True)
    quantizer = options.gradient(compile)
    y = quantizer.along(x, torch.tensor(4), -1, KEY)
    assert set((y * 0.75).unique().tolist()) == {4.0, 6.0}
    assert y.mean().item() == pytest.approx(7.9, abs=4 * y.std().item() / math.sqrt(y.numel()))
    without = QUANTIZERS["mx"]().gradient(compile).along(x, torch.tensor(4), -1, KEY)
    assert without.unique().tolist() == [6.0]


def test_operators_and_functions_agree_with_headroom():
    x = random(37, 70) * 10.0 ** random(37, 1, seed=3)
    options = mxfp4_recipe()
    for maker, arguments in ((options.gradient, ()), (options.weight, (1,))):
        plain, native = (
            maker(compile).along(x, torch.tensor(4), -1, *(arguments and (1,)), key=KEY) for compile in (False, True)
        )
        assert torch.equal(plain, native)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mx", {"hadamard_size": 24}, "hadamard_size=24: is not a power of two. Remedy: use 16."),
        ("nvfp4", {"square_weights": True, "hadamard": ["dgrad"]}, "hadamard=.*use hadamard=\\[wgrad\\]"),
        ("nvfp4", {"headroom": True}, "headroom=True: is for scales that are powers of two"),
        ("mx", {"hadamard": ["fprop"]}, "hadamard"),
    ],
)
def test_options_that_do_not_go_together_are_refused(name, changes, message):
    with pytest.raises(SettingError, match=message):
        QUANTIZERS[name](**changes)


@pytest.mark.parametrize("groups", [1, 2])
def test_rotations_cancel_in_convolutions(groups):
    layer = nn.Conv2d(32, 48, 3, padding=1, bias=False, groups=groups)
    x, g = random(20, 32, 6, 6).requires_grad_(), random(20, 48, 6, 6, seed=1)
    expected = torch.autograd.grad(layer(x), (x, layer.weight), g)
    found = step_of(mxfp4_recipe(hadamard_size=16), layer, x.detach(), g, Precision(32, 32, 32))[1:]
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_dgrad_of_a_convolution_with_square_weights():
    layer = nn.Conv2d(32, 48, 3, padding=1, bias=False)
    x, g = random(20, 32, 6, 6), random(20, 48, 6, 6, seed=1)
    w = layer.weight.detach().clone()
    options = QUANTIZERS["nvfp4"](square_weights=True, stochastic=False)
    _, of_x, _ = step_of(options, layer, x, g, Precision(4, 4, 4))
    kernel = options.weight(False).in_squares(w, torch.tensor(4), (0, 1))
    quantized = bitcycle.quantize(g, 4, quantizer="nvfp4", role="activation", signed=True)  # blocks along the channels
    torch.testing.assert_close(
        of_x, torch.nn.grad.conv2d_input(x.shape, kernel, quantized, padding=1), rtol=1e-4, atol=1e-4
    )
