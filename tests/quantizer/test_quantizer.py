"""Quantizers: bit-exact against the released code, unbiased where stochastic, equal compiled or not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import bitcycle
from bitcycle.layer import PrecisionState
from bitcycle.quantizer import QUANTIZERS, Sbm, SbmActivation, SbmWeight, compiler_works, quantizer_options
from bitcycle.quantizer.affine import quantize_in_range, tensor_range
from bitcycle.randomness import derive, int32_key, uniform_noise
from bitcycle.settings import SettingError
from tests.conftest import golden_arrays

pytestmark = pytest.mark.usefixtures("codes_everywhere")

GOLDEN = golden_arrays("quantize")
ROLES = {"act": ("activation", "x"), "weight": ("weight", "x"), "grad": ("gradient", "g")}
CASES = sorted({tuple(key.split("__")[:2]) for key in GOLDEN if key.split("__")[0] in ROLES})


@pytest.mark.golden
@pytest.mark.parametrize(("kind", "name"), CASES, ids="-".join)
def test_equals_released_code_bit_for_bit(kind, name):
    role, source = ROLES[kind]
    x = GOLDEN[f"{kind}__{name}__{source}"]
    for bits in range(2, 9):
        if f"{kind}__{name}__b{bits}" in GOLDEN:
            y = bitcycle.quantize(x, bits, quantizer="sbm", role=role, stochastic=False)
            assert torch.equal(y, GOLDEN[f"{kind}__{name}__b{bits}"]), bits


@pytest.mark.golden
def test_observer_equals_released_code_bit_for_bit():
    golden = golden_arrays("quant_measure")
    for momentum, prefix in ((0.9, "step4"), (0.1, "momentum01")):
        observer = SbmActivation(momentum)
        for step in range(5):
            y = observer(golden[f"step{step}__x"], golden[f"step{step}__bits"].long())
            if momentum == 0.9:
                assert torch.equal(y, golden[f"step{step}__y"])
                assert observer.running_range == golden[f"step{step}__running_range"].squeeze()
        assert observer.running_zero_point == golden[f"{prefix}__running_zero_point"].squeeze()
        assert observer.running_range == golden[f"{prefix}__running_range"].squeeze()
        if momentum == 0.9:
            observer.eval()
            for bits in (3, 4, 8):
                assert torch.equal(observer(golden["eval__x"], torch.tensor(bits)), golden[f"eval__b{bits}__y"])
    untrained = SbmActivation().eval()
    assert torch.equal(untrained(golden["eval__x"], torch.tensor(8)), golden["untrained_eval__y"])


@pytest.mark.parametrize("method", ["forward", "encode", "quantize_sequence"])
def test_observer_rests_at_full_precision_and_in_evaluation(method):
    """After one batch of [-1, 3] and momentum 0.9 it is at 0.1 times that, whatever follows."""
    observer = SbmActivation(debias=True)
    observer(torch.tensor([[[-1.0, 3.0]]]), torch.tensor(8))
    seen = [buffer.clone() for buffer in observer.buffers()]
    torch.testing.assert_close(seen, [torch.tensor(value) for value in (-0.1, 0.4, 0.1)])
    x = torch.randn(2, 4, 3)
    y = getattr(observer, method)(x, torch.tensor(0))
    assert method == "encode" or torch.equal(y, x)
    observer.eval()
    getattr(observer, method)(x, torch.tensor(8))
    assert list(observer.buffers()) == seen


def test_stochastic_gradients_have_the_released_codes_mean_and_variance():
    names = sorted({key.split("__")[1] for key in GOLDEN if key.startswith("grad_stochastic__") and "__b" in key})
    for name in names:
        gradient = GOLDEN[f"grad__{name}__g"]
        for bits in (2, 4, 8):
            if f"grad_stochastic__{name}__b{bits}__mean" not in GOLDEN:
                continue
            step = (gradient.max() - gradient.min()) / (2**bits - 1)
            draws = bitcycle.quantize(
                gradient.expand(3000, *gradient.shape).contiguous(), bits, role="gradient", seed=0
            )
            fraction = ((gradient - gradient.min()) / step).double() % 1
            assert (draws.double().mean(0) - gradient).abs().max() < 0.05 * step  # five deviations of the mean
            variance = draws.double().var(0, unbiased=False) / step.double() ** 2
            assert (variance - fraction * (1 - fraction)).abs().max() < 0.05


@given(bits=st.integers(1, 16), scale=st.floats(1e-6, 1e6), seed=st.integers(0, 1000))
def test_at_most_two_to_the_bits_levels_within_the_range(bits, scale, seed):
    x = torch.randn(500, generator=torch.Generator().manual_seed(seed)) * scale
    for role, stochastic in (("activation", True), ("gradient", True), ("gradient", False)):
        y = bitcycle.quantize(x.view(5, 100), bits, role=role, stochastic=stochastic)
        step = max((x.max() - x.min()).item() / (2**bits - 1), 1e-8)  # 1e-8 is the released code's floor
        error = step * (1.0 if stochastic else 0.5)
        assert len(y.unique()) <= 2**bits
        assert y.min() >= x.min() - 1e-6 * scale
        assert y.max() <= x.max() + 1e-5 * scale + (error if step == 1e-8 else 0)  # there no level falls on the maximum
        assert (y.view(-1) - x).abs().max() <= error + 1e-5 * scale


@pytest.mark.parametrize("role", ["activation", "weight", "gradient"])
def test_float_bits_leave_the_tensor_alone(role):
    x = torch.randn(6, 5)
    assert torch.equal(bitcycle.quantize(x, 32, role=role), x)
    assert torch.equal(bitcycle.quantize(x, 4, quantizer="none", role=role), x)


def test_gradient_is_straight_through_without_a_mask():
    x = torch.randn(3, 4, requires_grad=True)
    upstream = torch.randn(3, 4)
    for module in (SbmWeight(), SbmActivation(), SbmActivation().eval()):
        x.grad = None
        module(x, torch.tensor(2)).backward(upstream)
        assert torch.equal(x.grad, upstream)


def test_memory_layout_does_not_change_the_numbers():
    x = torch.randn(4, 6, 5, 5)
    for role in ("activation", "weight", "gradient"):
        plain = bitcycle.quantize(x, 4, role=role, seed=3)
        assert torch.equal(
            plain, bitcycle.quantize(x.contiguous(memory_format=torch.channels_last), 4, role=role, seed=3)
        )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"bits": 33}, "use 1 to 32"),
        ({"bits": -1}, "use 1 to 32"),
        ({"bits": 0}, "use 1 to 32"),
        ({"bits": 8, "quantizer": "smb"}, "did you mean 'sbm'"),
        ({"bits": 8, "role": "gradients"}, "did you mean 'gradient'"),
    ],
)
def test_nonsense_is_refused_with_a_remedy(arguments, words):
    with pytest.raises(SettingError, match=words):
        bitcycle.quantize(torch.zeros(3), **arguments)


@pytest.mark.parametrize("x", [torch.arange(3), torch.tensor([True]), torch.ones(3, dtype=torch.complex64), [0.0, 1.0]])
def test_only_floating_point_tensors_are_quantized(x):
    """Whole numbers were once rounded down to whole numbers again."""
    with pytest.raises(SettingError, match=r"x=.*x\.float\(\)"):
        bitcycle.quantize(x, 3)


def noise(*parts, count=100_000):
    return uniform_noise((count,), torch.tensor(int32_key(*parts), dtype=torch.int32))


def test_noise_is_uniform():
    values = noise(0, 0).double()
    assert values.min() >= -0.5
    assert values.max() < 0.5
    assert abs(values.mean()) < 5 * (1 / 12 / len(values)) ** 0.5
    counts = torch.histc(values, 100, -0.5, 0.5)
    chi_squared = ((counts - 1000) ** 2 / 1000).sum()
    assert 50 < chi_squared < 170  # 99 degrees of freedom: 6 deviations of sqrt(198) around 99


def test_noise_of_other_seeds_steps_layers_and_elements_is_unrelated():
    base = noise(0, 0).double()
    others = {
        "seed": noise(1, 0),
        "step": noise(0, 1),
        "neighbour": base.roll(1),
        "far": base.roll(4096),
        "mirrored": base.flip(0),
    }
    for name, other in others.items():
        correlation = (base * other.double()).mean() * 12
        assert abs(correlation) < 5 / len(base) ** 0.5, name
        assert not torch.equal(base.sort().values, other.double().sort().values) or name in (
            "neighbour",
            "far",
            "mirrored",
        )
    x, step = torch.linspace(0, 1, 1000), torch.tensor(5, dtype=torch.int32)
    layers = [
        quantize_in_range(x, tensor_range, torch.tensor(2), step, layer) for layer in torch.arange(2, dtype=torch.int32)
    ]
    assert not torch.equal(*layers)


def test_noise_is_the_same_for_ever():
    """Resumed and repeated runs rely on these numbers: a change of them changes every result."""
    assert int32_key("noise", 0, 0) == 1112957469
    assert derive(7, "order", 3) == 7583819046357020684
    expected = [0.31282902, 0.34657109, -0.10651547]
    assert noise(0, 0, count=3).tolist() == pytest.approx(expected, abs=1e-7)


@pytest.mark.skipif(not compiler_works("cpu"), reason="no C++ compiler on this machine: there is only the eager mode")
def test_compiled_kernels_give_the_same_bits():
    torch.manual_seed(0)
    for shape in ((8, 16, 9, 9), (8, 1, 5, 5), (7, 30), (3, 4, 5)):
        x = torch.randn(shape)
        if len(shape) == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        for bits in (0, 2, 5, 8, 16):
            encoded = torch.tensor(bits)
            eager, compiled = SbmActivation(), SbmActivation(compile=True)
            assert torch.equal(eager(x, encoded), compiled(x, encoded))
            assert torch.equal(eager.eval()(x, encoded), compiled.eval()(x, encoded))
            assert torch.equal(SbmWeight()(x, encoded), SbmWeight(compile=True)(x, encoded))
            options = bitcycle.quantizer.Sbm()
            key = torch.tensor(int32_key(bits), dtype=torch.int32)
            gradients = []
            for compile in (False, True):
                y = x.clone().requires_grad_()
                options.gradient(compile)(y, encoded, key, key + 1).backward(x)
                gradients.append(y.grad)
            assert torch.equal(*gradients)


@pytest.mark.parametrize("layer", ["linear", "tokens", "lstm", "codes"])
@pytest.mark.parametrize("least_step", ["code", "relative"])
def test_tiny_gradients(layer, least_step, caplog):
    """Findings on networks of others, line 8: at a standard deviation of 1e-8, steps of at least 1e-8 leave 41 % of error."""
    torch.manual_seed(0)
    plain = nn.LSTM(8, 8) if layer == "lstm" else nn.Linear(8, 8)
    compute = "codes" if layer == "codes" else "simulate"
    options = Sbm(least_step=least_step)
    model = bitcycle.quantize_model(nn.Sequential(plain), options, float_layers=[], compute=compute)
    x = torch.randn(5, 6, 8) if layer in ("tokens", "lstm") else torch.randn(30, 8)
    found = []
    for scale in (2**-27, 1.0):
        model.zero_grad()
        next(module for module in model.modules() if isinstance(module, PrecisionState)).begin_step(1)
        y = model(x)[0] if layer == "lstm" else model(x)
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)) * scale)
        found.append(next(model.parameters()).grad / scale)
    error = (found[0] - found[1]).norm() / found[1].norm()
    assert error == 0 if least_step == "relative" else error > 0.05
    assert caplog.text.count("least_step=") == (
        2 if least_step == "code" else 0
    )  # one message, whatever the number of products


@pytest.mark.parametrize("quantizer", sorted(QUANTIZERS.keys() - {"pact_binary"}))
@pytest.mark.parametrize("role", ["activation", "weight", "gradient"])
@pytest.mark.parametrize("x", [torch.zeros(0, 4), torch.zeros(4, 0), torch.tensor(1.5), torch.ones(3, 4).half()])
def test_tensors_without_elements_or_dimensions_and_halves_keep_their_shape_and_type(quantizer, role, x):
    bits = max((bits for bits in quantizer_options(quantizer).bits(role) if bits <= 8), default=32)
    y = bitcycle.quantize(x, bits, quantizer, role)
    assert y.shape == x.shape and y.dtype == x.dtype and y.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "bits", "top"), [("dorefa", 4, 1), ("uniform_l2", 8, 9), ("pact_binary", 1, 3)])
def test_second_derivatives_reach_through_clipped_activations(name, bits, top, dtype):
    """A penalty on gradients got none from what precedes or follows a clipping quantizer, without an error."""
    quantizer, number = quantizer_options(name).activation(compile=False), torch.tensor(bits)
    x = torch.tensor([[0.4, -1.0, 0.9, 9.0]], dtype=dtype, requires_grad=True)
    factor = torch.tensor([[1.0, 2.0, -3.0, 4.0]], dtype=dtype, requires_grad=True)
    quantizer.prepare(x.detach().clamp_min(0), bits)
    (gradient,) = torch.autograd.grad((quantizer(x, number) * factor).sum(), x, create_graph=True)
    gradient.square().sum().backward()
    assert torch.equal(factor.grad, 2 * factor.detach() * ((x >= 0) & (x <= top)))


def test_second_derivatives_reach_through_the_weights_of_dorefa():
    """The gradient of a penalty is that of the published gradient, by finite differences."""
    quantizer, generator = quantizer_options("dorefa").weight(compile=False), torch.Generator().manual_seed(0)
    weight, factor = torch.randn(2, 3, 4, dtype=torch.float64, generator=generator).unbind()

    def gradient_at(w: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
        y = (quantizer(w, torch.tensor(4)) * f).sum()
        return torch.autograd.grad(y, w, create_graph=True)[0].square().sum()

    assert torch.autograd.gradcheck(gradient_at, (weight.requires_grad_(), factor.requires_grad_()))
