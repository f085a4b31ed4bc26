"""The affine quantizers in C++ have the numbers of PyTorch's operators, bit for bit, with any number of threads."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from bitcycle.cpp.extension import operators
from bitcycle.cpp.operators import AFFINE, BLOCK, MULTIBIT, cpp_operators
from bitcycle.quantizer import Multibit, Mx, Nvfp4
from bitcycle.quantizer.hadamard import Rotation
from bitcycle.quantizer.sbm import SbmActivation, SbmRows, SbmWeight
from bitcycle.quantizer.sbm_gradient import SbmGradient

pytestmark = pytest.mark.skipif(operators(AFFINE) is None, reason="no compiler")

BITS = [0, 1, 3, 8, 16]
STEP_KEY, LAYER_KEY = torch.tensor(-123, dtype=torch.int32), torch.tensor(98765, dtype=torch.int32)


@pytest.fixture
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


ON_THREADS = pytest.mark.parametrize(("bits", "threads"), [*((bits, 1) for bits in BITS), (3, 2)], indirect=["threads"])
"""How the elements are divided among threads does not depend on the bits."""


def tensors() -> list[Tensor]:
    torch.manual_seed(0)
    large = torch.randn(5, 16, 33, 31).contiguous(memory_format=torch.channels_last)
    found = [large, large.relu(), torch.randn(2, 3, 5, 7), torch.randn(7, 9, 65), torch.randn(6, 130), torch.randn(3)]
    found += [torch.zeros(4, 4), torch.full((3, 70), 2.5), torch.randn(200, 400).t()]
    for value in (torch.nan, torch.inf, -torch.inf):
        found.append(torch.randn(3, 100))
        found[-1][1, 20] = value
    return found


def assert_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert found.dim() < 4 or found.stride() == expected.stride()  # how a convolution is computed depends on it


def trained(module: nn.Module, x: Tensor, *arguments: Tensor, method: str = "__call__") -> list[Tensor]:
    """Output, gradient, and what the module remembers."""
    x = x.detach().requires_grad_()
    y = getattr(module, method)(x, *arguments)
    given = torch.linspace(-1, 2, y.numel()).view(y.shape)
    layout = torch.channels_last if y.dim() == 4 else torch.contiguous_format
    (gradient,) = torch.autograd.grad(y, x, given.contiguous(memory_format=layout))
    return [y.detach(), gradient, *module.buffers()]


def assert_equal(kind: type[nn.Module], x: Tensor, *arguments: Tensor, training: bool = True, method: str = "__call__"):
    eager, native = (kind(compile=compile).train(training) for compile in (False, True))
    for _ in range(2):
        pairs = zip(*(trained(module, x, *arguments, method=method) for module in (native, eager)), strict=True)
        for found, expected in pairs:
            assert_same(found, expected)


@ON_THREADS
def test_activations_weights_and_rows(bits, threads):
    for x in tensors():
        for training in (True, False):
            assert_equal(SbmActivation, x, torch.tensor(bits), training=training)
        assert_equal(SbmRows, x, torch.tensor(bits))
        if x.dim() > 1:
            assert_equal(SbmWeight, x, torch.tensor(bits))
        if x.dim() == 3:
            assert_equal(SbmActivation, x, torch.tensor(bits), method="quantize_sequence")
            assert_equal(SbmActivation, x[:1], torch.tensor(bits), method="quantize_sequence")


@pytest.mark.parametrize("kind", [SbmGradient, partial(SbmGradient, by_position=True)])
@ON_THREADS
def test_gradients(bits, kind, threads):
    for x in tensors():
        assert_equal(kind, x, torch.tensor(bits), STEP_KEY, LAYER_KEY)
        eager, native = (kind(compile=compile) for compile in (False, True))
        for module in (eager, native):
            module.stochastic = False
        values = (x, torch.tensor(bits), STEP_KEY, LAYER_KEY)
        assert_same(native.quantize(*values), eager.quantize(*values))
        if x.dim() == 3:
            keys = torch.arange(len(x), dtype=torch.int32) * 77777
            assert_equal(kind, x, torch.tensor(bits), STEP_KEY, keys, method="quantize_sequence")


def test_a_layer_may_be_followed_by_an_operation_in_place():
    x = torch.randn(4, 8, requires_grad=True)
    y = SbmGradient(compile=True)(x * 2, torch.tensor(8), STEP_KEY, LAYER_KEY)
    y.relu_().sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("threads", [1, 2], indirect=True)
def test_products_of_rows_are_pytorchs(threads):
    for shape in [(7, 5000), (1, 300), (128, 17), (3, 70_001), (2, 1)]:
        x, *others = torch.randn(4, *shape)
        found = cpp_operators(x, True).products_of_rows(x, others)
        assert torch.equal(found, torch.stack([torch.linalg.vecdot(x, other) for other in others]))


# ---- blocks ----


def block_tensors() -> list[Tensor]:
    found = [x for x in tensors() if x.dim() > 1]
    extreme = torch.randn(5, 100) * 10.0 ** torch.randint(-44, 38, (5, 100))
    return [*found, extreme, -torch.zeros(3, 40), torch.randn(4, 32, 1), torch.randn(48, 8, 3, 3)]


def assert_same_with_signs(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found.signbit()[~found.isnan()], expected.signbit()[~found.isnan()])


KEYS = pytest.mark.parametrize("key", [None, STEP_KEY ^ LAYER_KEY], ids=["nearest", "stochastic"])
COMBINED = Mx(forward_formats=["nvfp4", "mxfp8_e4m3"], gradient_formats=["nvfp4", "mxfp8_e5m2"], headroom=True)
"""Formats with scales of both kinds, of which the bits choose one."""
NEEDS_BLOCKS = pytest.mark.skipif(operators(BLOCK) is None, reason="no compiler")


@NEEDS_BLOCKS
@KEYS
@pytest.mark.parametrize("threads", [1, 2], indirect=True)
@pytest.mark.parametrize(
    ("options", "bits"),
    [
        (Mx(), 0),
        (Mx(), 4),
        (Mx(), 6),
        (Mx(), 8),
        (Nvfp4(), 0),
        (Nvfp4(), 4),
        (COMBINED, 0),
        (COMBINED, 4),
        (COMBINED, 8),
    ],
)
def test_blocks_along_any_dimension(options, bits, threads, key):
    eager, native = (options.gradient(compile) for compile in (False, True))
    for x in block_tensors():
        for dim, groups in [(0, 1), (1, 1), (-1, 1), (1, 2)]:
            if x.shape[dim] % groups == 0:
                arguments = (torch.tensor(bits), dim, groups, key)
                assert_same_with_signs(native.quantized(x, *arguments), eager.quantized(x, *arguments))


def rotated_tensors() -> list[Tensor]:
    """Whole tiles, tails of a tile, one row, parts of vectors, and tensors that are not contiguous."""
    shapes = [
        (128, 80),
        (130, 67),
        (70, 1),
        (3, 1000),
        (2, 65, 130),
        (64, 32, 3, 3),
        (1, 64),
        (16, 5),
        (128, 7),
        (96, 11),
    ]
    found = [torch.randn(shape) for shape in shapes]
    return [*found, torch.randn(100, 200).t(), *(x for x in block_tensors() if x.dim() < 4)]


@NEEDS_BLOCKS
@KEYS
@pytest.mark.parametrize("size", [8, 16, 32, 64])
@pytest.mark.parametrize("threads", [1, 2], indirect=True)
@pytest.mark.parametrize(("options", "bits"), [(Mx(), 0), (Mx(), 4), (Mx(block=24), 4), (Nvfp4(), 4), (COMBINED, 4)])
def test_blocks_after_a_rotation(options, bits, size, threads, key):
    rotation = Rotation(size, LAYER_KEY)
    eager, native = (options.gradient(compile) for compile in (False, True))
    for x in rotated_tensors():
        for dim, groups in [(0, 1), (1, 1), (-1, 1), (1, 2)]:
            if x.shape[dim] % groups == 0:
                arguments = (torch.tensor(bits), dim, groups, key, rotation)
                assert_same_with_signs(native.quantized(x, *arguments), eager.quantized(x, *arguments))


@NEEDS_BLOCKS
@pytest.mark.parametrize("threads", [1, 2], indirect=True)
@pytest.mark.parametrize(
    ("options", "bits"), [(Nvfp4(), 0), (Nvfp4(), 4), (Mx(), 8), (Mx(block=24), 4), (Mx(block=80), 4)]
)
def test_squares_of_weights(options, bits, threads):
    eager, native = (options.weight(compile) for compile in (False, True))
    convolutions = [torch.randn(48, 40, 3, 3), torch.randn(34, 70, 2, 1).contiguous(memory_format=torch.channels_last)]
    for weight in [*convolutions, torch.randn(96, 33, 3), *(x for x in block_tensors() if x.dim() < 4)]:
        for groups in (1, 2):
            if len(weight) % groups == 0:
                arguments = (torch.tensor(bits), (0, 1), groups)
                found, expected = (quantizer.in_squares(weight, *arguments) for quantizer in (native, eager))
                assert_same_with_signs(found, expected)


@pytest.mark.skipif(operators(MULTIBIT) is None, reason="no compiler")
@pytest.mark.parametrize("threads", [1, 2], indirect=True)
@pytest.mark.parametrize("bits", [0, 1, 2, 3, 4])
def test_sums_of_sign_vectors(bits, threads):
    """But for the rounding of the least squares, which decides no sign here: signs of zero and of one element, constant vectors,
    whose sign vectors are all the same, and vectors shorter than there are bits."""
    few = [
        torch.randn(5, 1),
        torch.randn(4, 3),
        torch.randn(3000, 7),
        1e-30 * torch.randn(3, 40),
        torch.tensor([[0.0, -0.0, 1.0]]),
    ]
    eager, native = (Multibit().activation(compile) for compile in (False, True))
    for x in [*tensors(), *few]:
        for found, expected in zip(
            trained(native, x, torch.tensor(bits)), trained(eager, x, torch.tensor(bits)), strict=True
        ):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=0, equal_nan=True)
            assert found.shape == x.shape
