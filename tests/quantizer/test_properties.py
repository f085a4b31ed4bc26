"""What every quantizer promises, whatever its formula: float bits, zeros, layouts, levels, gradients, compilation."""

from __future__ import annotations

import re
import sys
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import bitcycle
from bitcycle.precision import FLOAT
from bitcycle.quantizer import QUANTIZERS, QuantizerOptions, compiler_works, dorefa, encode_bits, wageubn
from bitcycle.quantizer.compile_utils import Kernel
from bitcycle.quantizer.l2_step import SortedMagnitudes, fixed_point, improved_step, optimal_step, uniform_codes
from bitcycle.quantizer.pact_binary import MINIMUM_ALPHA, PactActivation
from bitcycle.quantizer.ternary import trained_ternary
from bitcycle.randomness import int32_key

NAMES = [name for name in QUANTIZERS if name != "none"]
VARIANTS: dict[str, QuantizerOptions] = {
    **{name: QUANTIZERS[name]() for name in NAMES},
    "uniform_l2 unit": QUANTIZERS["uniform_l2"](activation_levels="unit"),
    "fp8 current": QUANTIZERS["fp8"](scaling="current", stochastic=True),
}
SHAPES = [(6, 4, 3, 3), (5, 12), (3, 4, 5)]


def tensor(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run(options: QuantizerOptions, role: str, x: Tensor, number: int, signed: bool = False, compile: bool = False):
    """Output, gradient of x and gradients of the quantizer's parameters, as in a layer; bits 0 or 32 are float32."""
    bits, leaf = (
        torch.tensor(encode_bits(number)),
        x.detach().clone(memory_format=torch.preserve_format).requires_grad_(),
    )
    key = torch.tensor(int32_key(number), dtype=torch.int32)
    upstream = tensor(tuple(x.shape), seed=1)
    if role == "gradient":
        modules = (options.gradient(compile), options.input_gradient(compile))
        y: Tensor = leaf
        for module in modules:
            y = y if module is None else module(y, bits, key, key + 1)
        y.backward(upstream)
        return y.detach(), leaf.grad, []
    module = options.weight(compile) if role == "weight" else options.activation(compile, signed)
    module.prepare(leaf.detach(), encode_bits(number))
    y = module(leaf, bits)
    y.backward(upstream)
    return y.detach(), leaf.grad, [parameter.grad for parameter in module.parameters()]


def offered(options: QuantizerOptions, role: str) -> list[int]:
    return [number for number in options.bits(role) if number in (1, 2, 3, 4, 8)]


def signs(name: str, role: str) -> tuple[bool, ...]:
    return (False, True) if role == "activation" and not name.startswith("pact") else (False,)


@pytest.mark.parametrize("role", ["weight", "activation", "gradient"])
@pytest.mark.parametrize("name", VARIANTS)
def test_float_bits_change_nothing_in_either_direction(name, role):
    for shape in SHAPES:
        for signed in signs(name, role):
            x = tensor(shape)
            y, gradient, of_parameters = run(VARIANTS[name], role, x, FLOAT, signed)
            assert torch.equal(y, x)
            assert torch.equal(bitcycle.quantize(x, FLOAT, quantizer=VARIANTS[name], role=role, signed=signed), x)
            assert torch.equal(gradient, tensor(shape, seed=1))
            assert not any(found.any() for found in of_parameters)


@pytest.mark.parametrize("role", ["weight", "activation", "gradient"])
@pytest.mark.parametrize("name", VARIANTS)
def test_zeros_and_constants_give_finite_numbers(name, role):
    for number in offered(VARIANTS[name], role):
        for signed in signs(name, role):
            for value in (0.0, 0.3, 1e-30):
                found = run(VARIANTS[name], role, torch.full((3, 4, 2, 2), value), number, signed)
                assert all(part.isfinite().all() for part in (*found[:2], *found[2]))


@pytest.mark.parametrize("role", ["weight", "activation", "gradient"])
@pytest.mark.parametrize("name", VARIANTS)
def test_nan_stays_nan(name, role):
    options = VARIANTS[name]
    for shape in [(3, 4), (64, 64)]:  # steps of large tensors are searched in another way
        x = tensor(shape).abs()
        x[0, 0] = torch.nan
        for number in offered(options, role):
            assert bitcycle.quantize(x, number, quantizer=options, role=role)[0, 0].isnan()


@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_of_zeros_stays_zero(name):
    options = QUANTIZERS[name]()
    for module in (options.gradient(False), options.input_gradient(False)):
        for number in options.bits("gradient")[:8] if module is not None else ():
            key = torch.tensor(3, dtype=torch.int32)
            assert not module.quantize(torch.zeros(4, 3, 2, 2), torch.tensor(number), key, key).any()


def test_a_layer_of_zeros_has_step_one():
    assert torch.equal(optimal_step(torch.zeros(2, 5), 7), torch.ones(2, 1))


@pytest.mark.parametrize("role", ["weight", "activation", "gradient"])
@pytest.mark.parametrize("name", VARIANTS)
def test_memory_layout_changes_neither_numbers_nor_itself(name, role):
    x = tensor((6, 4, 3, 3))
    for number in offered(VARIANTS[name], role):
        for signed in signs(name, role):
            plain = run(VARIANTS[name], role, x, number, signed)
            other = run(VARIANTS[name], role, x.contiguous(memory_format=torch.channels_last), number, signed)
            torch.testing.assert_close(other, plain, rtol=1e-6, atol=1e-7)  # sums add in another order
            assert other[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", NAMES)
def test_docstrings_say_what_is_computed_and_where_it_comes_from(name):
    text = sys.modules[QUANTIZERS[name].kind.__module__].__doc__
    assert f'quantizer="{name}"' in text or name == "sbm"
    assert ">>> quantize(torch.tensor(" in text
    text = text.replace("\n", " ")
    assert "Source: " in text
    assert re.search(r"Differs from the authors' code|[Nn]o (difference from the authors'|code was released)", text)


LEVELS = {"ternary": {2: 3}, "ttq": {2: 3}}
BLOCKS = {"mx": 32, "nvfp4": 16, "mxfp4_backward": 32, "nvfp4_pretraining": 16}
"""Elements that share a scale, where not all of a row do."""


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), scale=st.floats(1e-3, 1e3), name=st.sampled_from(NAMES))
def test_at_most_two_to_the_bits_levels(seed, scale, name):
    options = QUANTIZERS[name]()
    x = tensor((200,), seed).view(1, -1)[:, : BLOCKS.get(name, 200)] * scale
    for role in ("weight", "activation"):
        if name == "wageubn" and role == "activation":
            continue  # A has no upper limit
        for number in offered(options, role):
            y = bitcycle.quantize(x, number, quantizer=options, role=role)
            most = LEVELS.get(name, {}).get(number, 2**number) if role == "weight" else 2**number
            assert len(y.unique()) <= most


@given(seed=st.integers(0, 100), exponent=st.integers(-30, 30))
def test_ranges_of_wageubn_are_exact_powers_of_two(seed, exponent):
    x = tensor((50,), seed) * 2.0**exponent
    found = wageubn.power_of_two_range(x)
    largest = x.abs().max().double()
    assert found == 2.0 ** round(torch.log2(largest).item())
    assert wageubn.power_of_two_range(torch.zeros(3)) == 0


@settings(max_examples=25)
@given(seed=st.integers(0, 1000), power=st.integers(-8, 8))
def test_multibit_scales_with_the_vectors_and_more_bits_leave_less_error(seed, power):
    x = tensor((3, 40), seed)
    errors: dict[int, Tensor] = {}
    for number in (1, 2, 3, 4):
        y = bitcycle.quantize(x, number, quantizer="multibit", role="weight")
        scaled = bitcycle.quantize(x * 2.0**power, number, quantizer="multibit", role="weight")
        torch.testing.assert_close(scaled, y * 2.0**power, rtol=1e-5, atol=1e-6 * 2.0**power)
        errors[number] = (x - y).square().sum(1)
    for number in (2, 3, 4):
        assert (errors[number] <= errors[number - 1] + 1e-5).all()


@settings(max_examples=25)
@given(seed=st.integers(0, 1000))
def test_l2_steps_scale_with_the_weights(seed):
    x = tensor((2, 60), seed)
    torch.testing.assert_close(optimal_step(x * 8, 3), optimal_step(x, 3) * 8)


def averaged(quantize, gradient: Tensor, keys: int = 30, copies: int = 100) -> Tensor:
    """The mean of 3,000 draws; copies beside each other leave the ranges of rows and tensors as they are."""
    draws = [
        quantize(gradient.repeat(1, copies), torch.tensor(int32_key("draw", key), dtype=torch.int32))
        for key in range(keys)
    ]
    return torch.stack(draws).double().unflatten(2, (copies, -1)).mean((0, 2))


@pytest.mark.parametrize("number", [1, 2, 4, 8])
def test_gradients_of_dorefa_are_unbiased(number):
    gradient = tensor((4, 30)) * torch.tensor([[1e-3], [1.0], [50.0], [0.0]])
    module, zero = QUANTIZERS["dorefa"]().gradient(False), torch.zeros((), dtype=torch.int32)
    mean = averaged(lambda g, key: module.quantize(g, torch.tensor(number), key, zero), gradient)
    step = 2 * gradient.abs().amax(1, keepdim=True) / (2**number - 1)
    assert ((mean - gradient).abs() <= 0.05 * step).all()  # five deviations of the mean


@pytest.mark.parametrize(
    "name",
    [name for name, options in VARIANTS.items() if options.bits("gradient") and options.gradient(False).stochastic],
)
def test_noise_of_gradients_depends_on_step_and_layer(name):
    module, number = VARIANTS[name].gradient(False), torch.tensor(max(offered(VARIANTS[name], "gradient")))
    keys = torch.tensor([[1, 20], [1, 30], [4, 20]], dtype=torch.int32)  # of step and layer
    draws = [module.quantize(tensor((4, 32)), number, step, layer) for step, layer in keys]
    assert not any(torch.equal(one, other) for one, other in combinations(draws, 2))


def numerical(function, x: Tensor, upstream: Tensor, epsilon: float = 1e-6) -> Tensor:
    """d sum(upstream function(x)) / dx by central differences, in float64."""
    found = torch.zeros_like(x)
    for index in range(x.numel()):
        offset = torch.zeros_like(x).view(-1)
        offset[index] = epsilon
        difference = function(x + offset.view_as(x)) - function(x - offset.view_as(x))
        found.view(-1)[index] = (upstream * difference).sum() / (2 * epsilon)
    return found


def test_dorefa_weights_are_differentiated_through_the_maximum():
    weight, upstream = tensor((4, 6)).double(), tensor((4, 6), 1).double()

    def without_rounding(w: Tensor) -> Tensor:
        return w.tanh() / w.tanh().abs().max()

    found = dorefa.weight_gradient(upstream, weight, torch.tensor(4))
    torch.testing.assert_close(found, numerical(without_rounding, weight, upstream), rtol=1e-6, atol=1e-8)
    ties = torch.tensor([0.5, -0.5, 0.1], dtype=torch.float64, requires_grad=True)
    without_rounding(ties).backward(upstream[0, :3])
    torch.testing.assert_close(dorefa.weight_gradient(upstream[0, :3], ties.detach(), torch.tensor(2)), ties.grad)


def test_derivatives_by_alpha():
    """Those of clip(x, 0, alpha), which many bits approach."""
    x, upstream = tensor((8, 20)).double() * 3, tensor((8, 20), 1).double()
    module = PactActivation().double()
    module.alpha.data.fill_(1.7)
    module(x, torch.tensor(20)).backward(upstream)
    alpha = module.alpha.detach()

    def function(a: Tensor) -> Tensor:
        return torch.minimum(x.clamp_min(0), a)

    torch.testing.assert_close(module.alpha.grad, numerical(function, alpha, upstream), rtol=1e-6, atol=1e-8)


def test_pact_after_a_relu_is_pact_in_its_place():
    before, upstream = tensor((50, 20)) * 3, tensor((50, 20), 1)
    found = []
    for chain in (nn.Identity(), nn.ReLU()):
        module, leaf = PactActivation(), before.clone().requires_grad_()
        y = module(chain(leaf), torch.tensor(1))
        y.backward(upstream)
        found.append((y.detach(), leaf.grad, module.alpha.grad))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_alpha_is_kept_from_vanishing_and_can_come_back():
    module = PactActivation()
    module.alpha.data.fill_(-5.0)
    y = module(torch.tensor([0.0, 1.0]), torch.tensor(1))
    y.sum().backward()
    assert y.tolist() == pytest.approx([0.0, MINIMUM_ALPHA])
    assert module.alpha.grad == 1


def test_derivatives_by_the_values_of_trained_ternary_weights():
    weight, upstream = tensor((5, 9)).double(), tensor((5, 9), 1).double()
    module = QUANTIZERS["ttq"]().weight(False).double()
    module(weight, torch.tensor(2)).backward(upstream)
    one = torch.ones((), dtype=torch.float64)
    for which, parameter in enumerate((module.positive, module.negative)):

        def function(value: Tensor, which: int = which) -> Tensor:
            values = (value, one) if which == 0 else (one, value)
            return trained_ternary(weight, *values, torch.tensor(2))

        torch.testing.assert_close(parameter.grad, numerical(function, one, upstream), rtol=1e-7, atol=1e-7)


def test_gradients_of_activations_pass_inside_the_range_only():
    x = torch.tensor([-3.0, -0.5, 0.0, 0.5, 0.99, 1.01, 3.0])
    inside = {
        ("dorefa", False): [0, 0, 1, 1, 1, 0, 0],
        ("uniform_l2 unit", False): [0, 0, 1, 1, 1, 0, 0],
        ("uniform_l2 unit", True): [0, 1, 1, 1, 1, 0, 0],
        ("sbm", False): [1] * 7,
        ("wageubn", True): [1] * 7,
    }
    for (name, signed), mask in inside.items():
        module, leaf = VARIANTS[name].activation(False, signed), x.clone().requires_grad_()
        module(leaf, torch.tensor(4)).sum().backward()
        assert leaf.grad.tolist() == mask, name
    module, leaf = VARIANTS["uniform_l2"].activation(False, False), x.clone().requires_grad_()
    module.prepare(x, 2)
    module(leaf, torch.tensor(2)).sum().backward()
    assert leaf.grad.tolist() == [float(0 <= value <= 3 * module.step.item()) for value in x]


def test_four_levels_between_minus_one_and_one():
    h = torch.linspace(-1.2, 1.2, 41)
    y = bitcycle.quantize(h, 2, quantizer=VARIANTS["uniform_l2 unit"], role="activation", signed=True)
    expected = (2 * (1.5 * h.clamp(-1, 1) + 1.5).round() - 3) / 3
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-6)


def test_quantize_leaves_no_graph_behind_but_keeps_that_of_its_input():
    x = tensor((3, 4))
    for name in NAMES:
        number = QUANTIZERS[name]().bits("weight")[-1]
        assert not bitcycle.quantize(x, number, quantizer=name, role="weight").requires_grad
        assert bitcycle.quantize(x.clone().requires_grad_(), number, quantizer=name, role="weight").requires_grad


@pytest.mark.skipif(not compiler_works("cpu"), reason="no C++ compiler on this machine: there is only the eager mode")
@pytest.mark.parametrize("name", VARIANTS)
def test_compiled_and_eager_give_the_same_bits(name):
    options = VARIANTS[name]
    for shape in ((6, 8, 5, 5), (7, 30)):
        x = tensor(shape)
        if len(shape) == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        for role in ("weight", "activation", "gradient"):
            for signed in signs(name, role):
                for number in [FLOAT, *offered(options, role)]:
                    eager = run(options, role, x, number, signed)
                    compiled = run(options, role, x, number, signed, compile=True)
                    torch.testing.assert_close(compiled, eager, rtol=0, atol=0)


@pytest.mark.skipif(not compiler_works("cpu"), reason="no C++ compiler on this machine: there is only the eager mode")
@pytest.mark.parametrize("name", NAMES)
def test_other_bits_compile_nothing_new(name):
    from torch._dynamo.utils import counters

    options, x = VARIANTS[name], tensor((6, 8, 5, 5))
    for role in ("weight", "activation", "gradient"):
        numbers = [FLOAT, *offered(options, role)]
        run(options, role, x, numbers[-1], compile=True)
        before = counters["stats"]["unique_graphs"] + Kernel.compilations
        for number in numbers:
            run(options, role, x, number, compile=True)
        assert counters["stats"]["unique_graphs"] + Kernel.compilations == before


def test_the_search_for_a_step_ends_on_many_elements():
    """In float32 the sums over a million elements can go back and forth between two neighbours for ever."""
    x = torch.randn(1, 1_000_000, generator=torch.Generator().manual_seed(0))
    step = optimal_step(x, 127)
    iterated = fixed_point(step * 1.01, lambda step: improved_step(x.abs(), step, 127))
    codes = uniform_codes(x.abs(), step, 127)
    assert (codes * x.abs()).sum() / codes.square().sum() == pytest.approx(step.item(), rel=1e-5)
    assert iterated.item() == pytest.approx(step.item(), rel=1e-2)


@pytest.mark.parametrize("top", [1, 3, 127])
def test_sorted_magnitudes_have_the_moments_of_the_codes(top):
    """The sums that a step is judged by, and the same chosen step as a search through all elements."""
    x = torch.randn(3, 400, generator=torch.Generator().manual_seed(top)).double().abs()
    steps = torch.tensor([0.5, 0.03]).double().view(2, 1, 1).expand(2, 3, 1)
    codes = uniform_codes(x, steps, top)
    products, squares = SortedMagnitudes(x, top).moments(steps)
    torch.testing.assert_close(products, (x * codes).sum(-1, keepdim=True))
    assert torch.equal(squares, codes.square().sum(-1, keepdim=True))
    error = (x - steps * codes).square().sum(-1, keepdim=True)
    torch.testing.assert_close(SortedMagnitudes(x, top).squared_error(steps), error)
