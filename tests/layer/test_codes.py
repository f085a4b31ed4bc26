"""compute=codes: products of integer codes equal those of quantized float32 tensors up to the rounding of float32 sums."""

from __future__ import annotations

import copy
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import bitcycle
from bitcycle.layer.codes import product as code_product
from bitcycle.layer.codes.batch_norm import MaskSavingReLU
from bitcycle.layer.codes.product import MOST_TERMS, integer_products_work
from bitcycle.layer.codes.support import SWITCH
from bitcycle.layer.state import PrecisionState
from bitcycle.precision import Precision
from bitcycle.quantizer import compiler_works
from bitcycle.quantizer.codes import decode
from bitcycle.quantizer.compile_utils import Kernel
from bitcycle.quantizer.sbm import SbmActivation, SbmWeight
from bitcycle.recipe.options import TrainingOptions

pytestmark = pytest.mark.usefixtures("codes_everywhere")

CONVOLUTIONS = {
    "3x3": ({"kernel_size": 3, "padding": 1}, 4),
    "stride": ({"kernel_size": 3, "padding": 1, "stride": 2}, 4),
    "no padding": ({"kernel_size": 3}, 4),
    "wide padding": ({"kernel_size": 3, "padding": (3, 2), "bias": False}, 4),
    "dilation": ({"kernel_size": 3, "padding": 2, "dilation": 2}, 4),
    "1x1": ({"kernel_size": 1, "stride": 2, "bias": False}, 4),
    "oblong": ({"kernel_size": (1, 5), "padding": (0, 2)}, 4),
    "groups": ({"kernel_size": 3, "padding": 1, "groups": 2}, 4),
    "depthwise": ({"kernel_size": 3, "padding": 1, "groups": 4, "bias": False}, 4),
    "multiplier": ({"kernel_size": 3, "padding": 1, "groups": 4}, 8),
}


def pair(layer: nn.Module, precision: Precision, **options) -> tuple[nn.Module, nn.Module]:
    """The same layer with compute=simulate and compute=codes."""
    modes = [
        bitcycle.quantize_model(copy.deepcopy(layer), float_layers=[], compute=compute, **options)
        for compute in ("simulate", "codes")
    ]
    for mode in modes:
        mode.precision.set(precision)
    return modes[0], modes[1]


def results(layer: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Output and all gradients of a training step, output of an evaluation, and what the observer remembers."""
    x = x.clone().requires_grad_()
    y = layer(x)
    torch.manual_seed(1)
    y.backward(torch.randn(y.shape))  # the same numbers in any memory format
    found = [y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]
    layer.eval()
    with torch.no_grad():
        found.append(layer(x.detach()))
    layer.train()
    return [*found, layer.activation_quantizer.running_zero_point, layer.activation_quantizer.running_range]


def assert_equal_but_for_rounding(layers: tuple[nn.Module, nn.Module], x: torch.Tensor) -> None:
    for expected, found in zip(*(results(layer, x) for layer in layers), strict=True):
        rounding = 4e-6 * float(expected.abs().max())
        torch.testing.assert_close(found, expected, rtol=0, atol=rounding)


@pytest.mark.parametrize("number", range(1, 9))
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolutions(case, number):
    options, out = CONVOLUTIONS[case]
    torch.manual_seed(number)
    x = torch.randn(3, 4, 9, 8).contiguous(memory_format=torch.channels_last)
    layers = pair(nn.Conv2d(4, out, **options), Precision(number, number, 8))
    assert layers[1].computation is not None
    assert_equal_but_for_rounding(layers, x)
    assert_equal_but_for_rounding(layers, x.relu())


@pytest.mark.parametrize("shape", [(6, 8), (3, 5, 8)])
@pytest.mark.parametrize("number", [1, 2, 3, 5, 8])
def test_linear_layers(number, shape):
    torch.manual_seed(number)
    for bias in (True, False):
        layers = pair(nn.Linear(8, 5, bias=bias), Precision(number, number + 1 if number < 8 else 8, 8))
        assert_equal_but_for_rounding(layers, torch.randn(shape))


def test_products_are_those_of_double_precision():
    """Codes are nearer to the exact product than float32 operands: each integer sum is exact."""
    torch.manual_seed(0)
    simulate, codes = pair(nn.Conv2d(64, 16, 3, padding=1, bias=False), Precision(8, 8, 8))
    x = torch.randn(2, 64, 8, 8).relu()
    operands = [operand.double() for operand in simulate.quantized_operands(x, simulate.layer_key)]
    exact = nn.functional.conv2d(*operands, padding=1)
    errors = [float((layer(x).detach() - exact.detach()).abs().max()) for layer in (simulate, codes)]
    assert errors[1] < 1.5 * errors[0]
    assert errors[1] < 1e-6 * float(exact.detach().abs().max())


@pytest.mark.parametrize(
    "precision", [Precision(32, 32, 32), Precision(9, 8, 8), Precision(8, 12, 8), Precision(32, 8, 8)]
)
def test_other_bits_are_computed_as_ever(precision):
    torch.manual_seed(0)
    x = torch.randn(3, 4, 9, 8)
    for expected, found in zip(*(results(layer, x) for layer in pair(nn.Conv2d(4, 4, 3), precision)), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("number", range(1, 9))
def test_codes_stand_for_the_quantized_tensor_bit_for_bit(number):
    torch.manual_seed(0)
    x, bits = torch.randn(5, 4, 3, 3), torch.tensor(number)
    observed, encoded = SbmActivation(), SbmActivation()
    assert torch.equal(decode(*encoded.encode(x, bits)), observed(x, bits))
    assert torch.equal(decode(*encoded.eval().encode(x, bits)), observed.eval()(x, bits))
    codes, quantized = SbmWeight().encode_weight(x, bits), SbmWeight()(x, bits)
    assert torch.equal(SbmWeight().decode_weight(codes, bits), quantized)
    assert codes.integers.dtype == torch.int8
    again = codes.integers * codes.scale.view(-1, 1, 1, 1) + codes.zero_point.view(-1, 1, 1, 1)
    torch.testing.assert_close(again, quantized)


needs_integers = pytest.mark.skipif(not integer_products_work(), reason="no exact 8-bit products on this machine")


@needs_integers
def test_without_integer_products_a_layer_computes_as_simulated(monkeypatch):
    """Bit for bit, as it takes the same products: codes that are decoded for each product would take longer."""
    layers = pair(nn.Conv2d(16, 16, 3, padding=1), Precision(8, 8, 8))
    x = torch.randn(3, 16, 9, 8)
    assert layers[1].computation.accepts(x)
    monkeypatch.setattr(code_product, "integer_products_work", lambda: False)
    assert not layers[1].computation.accepts(x)
    for found, expected in zip(*(results(layer, x) for layer in layers)):
        assert torch.equal(found, expected)


def test_products_of_codes_as_floats_are_exact(monkeypatch):
    """As on a GPU."""
    monkeypatch.setattr(code_product, "integer_products_work", lambda: False)
    layer = pair(nn.Conv2d(4, 4, 3, padding=1), Precision(8, 8, 8))[1]
    codes, weight = torch.randint(0, 256, (3, 4, 9, 8)), torch.randint(-128, 128, (4, 4, 3, 3))
    found = code_product.convolve_integers(codes.to(torch.uint8), weight.to(torch.int8), torch.ones(4), layer)
    assert torch.equal(found.double(), F.conv2d(codes.double(), weight.double(), padding=1))
    rows, square = codes.flatten(1).to(torch.uint8), torch.randint(-128, 128, (5, 288)).to(torch.int8)
    product = code_product.multiply_integers(rows, square, torch.ones(5))
    assert torch.equal(product.double(), rows.double() @ square.double().T)


REPORT = """
import logging, torch, bitcycle
logging.basicConfig(level=logging.INFO, format="%(message)s")
from bitcycle.layer.codes.support import integer_products_work, library
layer = bitcycle.quantize_model(torch.nn.Conv2d(16, 16, 3), float_layers=[], compute="codes")
print(library() is not None, integer_products_work(), layer.computation.accepts(torch.randn(2, 16, 8, 8)))
"""
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}


@needs_integers
@pytest.mark.parametrize(
    ("variables", "state", "words"),
    [
        ({}, "True True", "8-bit integer products"),
        ({SWITCH: "off"}, "False False False", f"float products, as compute=simulate, with its memory ({SWITCH}=off)"),
        (AVX2, "False False False", "float products, as compute=simulate, with its memory (its 8-bit sums saturate)"),
    ],
)
def test_the_log_says_what_multiplies(variables, state, words):
    command = [sys.executable, "-c", REPORT]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=True)
    assert f"compute=codes: 1 layers compute on codes; on this CPU: {words}" in done.stderr
    assert state in done.stdout


def test_a_wrong_value_of_the_switch_is_refused():
    command = [sys.executable, "-c", "from bitcycle.layer.codes.support import library; library()"]
    done = subprocess.run(command, env={**os.environ, SWITCH: "no"}, capture_output=True, text=True)
    assert f"{SWITCH}=no" in done.stderr.splitlines()[-1] and "auto" in done.stderr


def test_integer_products_are_exact_at_the_largest_codes():
    if not integer_products_work():
        pytest.skip("no exact 8-bit products on this machine")
    assert 255 * 128 * MOST_TERMS <= 2**31
    x, weight = torch.full((3, 700), 255, dtype=torch.uint8), torch.full((5, 700), -128, dtype=torch.int8)
    assert torch.equal(code_product.multiply_integers(x, weight, torch.ones(5)), x.float() @ weight.float().T)


@needs_integers
def test_one_byte_an_element_is_kept():
    """What a layer keeps for its backward pass, beside the weight: codes instead of a float32 copy of its input."""
    kept: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel() * tensor.element_size())
        return tensor

    sizes = []
    x = torch.randn(8, 16, 16, 16)
    for layer in pair(nn.Conv2d(16, 16, 3, padding=1, bias=False), Precision(8, 8, 8)):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            layer(x)
        sizes.append(sum(kept))
        kept.clear()
    assert sizes[0] >= 4 * x.numel()
    assert sizes[1] < 1.3 * x.numel()


@needs_integers
@pytest.mark.parametrize("inplace", [True, False])
def test_a_mask_saving_relu_has_the_same_numbers_and_keeps_a_byte(inplace):
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    x, found = torch.tensor([-1.0, 0.0, 2.0, -0.0, torch.inf, torch.nan]), []
    for relu in (nn.ReLU(inplace), MaskSavingReLU(inplace)):
        leaf = x.clone().requires_grad_()
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = relu(leaf + 0)
        y.backward(torch.arange(6.0))
        found.append((y.detach(), leaf.grad))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0, equal_nan=True)
    assert [tensor.dtype for tensor in kept] == [torch.bool]


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True)),
        *(nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)),
        *(nn.Conv2d(16, 32, 3, stride=2), nn.BatchNorm2d(32, affine=False), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Linear(32, 5),
    )


def test_inputs_of_batch_norm_that_are_computed_again_are_the_same():
    """Nothing but memory differs, whether all layers have codes or some are float; evaluation is as ever."""
    x, found = torch.randn(6, 3, 12, 12), []
    for recompute in (False, True):
        for float_layers in ([], ["first", "last"]):
            model = bitcycle.quantize_model(
                convolutional(), float_layers=float_layers, compute="codes", recompute=recompute
            )
            trained = []
            for number in (8, 32, 4):
                for state in (module for module in model.modules() if isinstance(module, PrecisionState)):
                    state.set(Precision(number, number, 8))
                y = model(x)
                y.square().sum().backward()
                trained += [y.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
            with torch.no_grad():
                found.append([*trained, model.eval()(x), *model.buffers()])
    for kept, again in zip(found[:2], found[2:], strict=True):
        assert all(torch.equal(one, other) for one, other in zip(kept, again, strict=True))


@needs_integers
def test_computing_again_takes_less_memory():
    kept: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel() * tensor.element_size())
        return tensor

    x, sizes = torch.randn(64, 3, 12, 12), []
    for options in ({}, {"compute": "codes"}, {"compute": "codes", "recompute": True}):
        model = bitcycle.quantize_model(convolutional(), float_layers=["last"], **options)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(x)
        sizes.append(sum(kept))
        kept.clear()
    assert sizes[2] < 0.5 * sizes[1]
    assert sizes[2] < 0.3 * sizes[0]


def test_there_is_nothing_to_compute_again_without_codes():
    with pytest.raises(ValueError, match="recompute"):
        bitcycle.quantize_model(convolutional(), recompute=True)
    with pytest.raises(ValueError, match="recompute"):
        TrainingOptions(recompute=True)


def test_layers_that_cannot_say_so(caplog):
    network = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"), nn.Conv2d(2, 2, 3, padding="same"))
    with caplog.at_level("INFO", "bitcycle"):
        bitcycle.quantize_model(network, float_layers=[], compute="codes")
    assert "2 of 2 quantized layers compute as compute=simulate" in caplog.text
    with pytest.raises(ValueError, match="compute"):
        bitcycle.quantize_model(nn.Sequential(nn.Linear(2, 2)), float_layers=[], compute="code")


def test_costs_are_those_of_simulate():
    costs = []
    for compute in ("simulate", "codes"):
        model = bitcycle.quantize_model(
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2)),
            float_layers=[],
            compute=compute,
        )
        control = bitcycle.PrecisionController(model, bitcycle.schedule("static", total_steps=2), hardware="all")
        control.step(0)
        model(torch.randn(2, 3, 8, 8)).sum().backward()
        costs.append(control.cost().summary())
    assert costs[0] == costs[1]


def test_other_bits_at_each_step_compile_nothing_anew():
    """Compiled and eager kernels give the same numbers, and precision enters them as data."""
    if not compiler_works("cpu"):
        pytest.skip("no C++ compiler on this machine")
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, bias=False),
        nn.Flatten(),
        nn.Linear(64, 5),
    )
    models = [
        bitcycle.quantize_model(copy.deepcopy(network), float_layers=[], compute="codes", compile=compile)
        for compile in (False, True)
    ]
    x, counts = torch.randn(6, 3, 8, 8), []
    for step, number in enumerate((8, 3, 5, 2, 7, 4, 6)):
        outputs = []
        for model in models:
            for state in (module for module in model.modules() if isinstance(module, PrecisionState)):
                state.set(Precision(number, number, 8))
                state.step_key.fill_(step)
            y = model(x)
            y.square().sum().backward()
            outputs.append([y, *(parameter.grad for parameter in model.parameters())])
        for eager, compiled in zip(*outputs, strict=True):
            assert torch.equal(eager, compiled)
        counts.append(counters["stats"]["unique_graphs"] + Kernel.compilations)
    assert counts[0] > 0
    assert counts[-1] == counts[0]


@pytest.mark.parametrize("kind", ["convolution", "linear"])
def test_nan_stays_visible_in_evaluation(kind):
    """It became the lowest code of the running range, so that a network with NaN inputs gave finite outputs."""
    plain, shape = (nn.Conv2d(4, 8, 3), (2, 4, 6, 6)) if kind == "convolution" else (nn.Linear(4, 8), (6, 4))
    model = bitcycle.quantize_model(nn.Sequential(plain), float_layers=[], compute="codes")
    x, layer = torch.randn(shape, generator=torch.Generator().manual_seed(0)), model[0]
    model(x)
    model.eval()
    bias = layer.quantized_bias()
    assert layer.computation(x, bias, layer.call_key()).isfinite().all()
    x.view(-1)[0] = torch.nan
    assert layer.computation(x, bias, layer.call_key())[0].isnan().any()
