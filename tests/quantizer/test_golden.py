"""Quantizers reproduce the golden values of the published formulas (tests/data/README.md says where they come from)."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from bitcycle.quantizer import PactBinary, Ttq, dorefa, ternary, wageubn
from bitcycle.quantizer.autograd import gradient_inside
from bitcycle.quantizer.l2_step import fixed_point, improved_step, optimal_step
from bitcycle.quantizer.multibit import decompose, reconstruct
from bitcycle.quantizer.pact_binary import PENALTY, PactActivation, binarize, pact
from bitcycle.quantizer.ternary import TrainedTernaryWeight, ternarize
from bitcycle.quantizer.uniform import quantize_symmetric
from tests.conftest import ROOT, golden_arrays

pytestmark = pytest.mark.golden
arrays = functools.partial(golden_arrays, folder=ROOT / "tests" / "data" / "golden-domains")


def cases(golden: dict[str, torch.Tensor], prefix: str = "") -> list[str]:
    return sorted({key.removeprefix(prefix).split("__")[0] for key in golden if key.startswith(prefix)})


def bits(number: int) -> torch.Tensor:
    return torch.tensor(number)


def same(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=tolerance, atol=tolerance)


PACT = arrays("pact_1bit")


@pytest.mark.parametrize("case", ["conv", "small_alpha", "flat", "edges"])
def test_pact(case):
    x, alpha, upstream = PACT[f"{case}__x"], PACT[f"{case}__alpha"], PACT[f"{case}__gy"]
    for number in (1, 2, 4):
        if f"{case}__k{number}__y" in PACT:
            same(pact(x, alpha, bits(number)), PACT[f"{case}__k{number}__y"])
    module = PactActivation().double()
    module.alpha.data.fill_(float(alpha))
    leaf = x.clone().requires_grad_()
    y = module(leaf, bits(1))
    y.backward(upstream)
    same(y, PACT[f"{case}__k1__y"])
    same(leaf.grad, PACT[f"{case}__gx"])
    same(module.alpha.grad, PACT[f"{case}__galpha_published"])


def test_pact_penalty():
    assert float(PACT["penalty__coefficient"]) == PENALTY
    modules = [PactActivation() for _ in PACT["penalty__alphas"]]
    for module, alpha in zip(modules, PACT["penalty__alphas"]):
        module.alpha.data.fill_(float(alpha))
    total = sum(module.penalty(bits(1)) for module in modules)
    total.backward()
    same(total, PACT["penalty__value"], 1e-6)
    same(torch.stack([module.alpha.grad for module in modules]), PACT["penalty__grad"], 1e-6)


SIGN = arrays("sign_ste")


@pytest.mark.parametrize("case", cases(SIGN))
def test_binary_weights(case):
    weight = SIGN[f"{case}__w"]
    assert torch.equal(binarize(weight, bits(1)), SIGN[f"{case}__q"])
    assert torch.equal(gradient_inside(SIGN[f"{case}__gq"], weight, -1, 1, bits(1)), SIGN[f"{case}__gw"])


DOREFA = arrays("dorefa")


@pytest.mark.parametrize("case", cases(DOREFA, "weight__"))
def test_dorefa_weights(case):
    weight = DOREFA[f"weight__{case}__w"]
    for number in (1, 2, 3, 4, 6, 8):
        same(dorefa.quantize_weight(weight, bits(number)), DOREFA[f"weight__{case}__b{number}__q"])
        if number > 1:
            gradient = dorefa.weight_gradient(DOREFA[f"weight__{case}__gq"], weight, bits(number))
            same(gradient, DOREFA[f"weight__{case}__gw"])
    assert torch.equal(DOREFA[f"weight__{case}__b32__q"], dorefa.quantize_weight(weight, bits(0)))


def test_the_sign_of_a_dorefa_weight_of_zero_is_positive():
    assert dorefa.quantize_weight(torch.tensor([0.0, -3.0, 1.5]), bits(1)).tolist() == [1.5, -1.5, 1.5]


@pytest.mark.parametrize("case", cases(DOREFA, "act__"))
def test_dorefa_activations(case):
    x = DOREFA[f"act__{case}__x"]
    for number in (1, 2, 3, 4, 6, 8):
        same(dorefa.quantize_activation(x, bits(number)), DOREFA[f"act__{case}__b{number}__y"])
        gradient = gradient_inside(DOREFA[f"act__{case}__gy"], x, 0, 1, bits(number))
        assert torch.equal(gradient, DOREFA[f"act__{case}__gx"])


@pytest.mark.parametrize("case", cases(DOREFA, "grad__"))
def test_dorefa_gradients(case, monkeypatch):
    monkeypatch.setattr(dorefa, "keyed_noise", lambda x, keys: keys[0] if keys else None)  # the noise is in the file
    gradient = DOREFA[f"grad__{case}__g"]
    samples = gradient.reshape(len(gradient), -1)
    for number in (1, 2, 4, 6, 8):
        for kind in ("deterministic", "with_noise"):
            key = f"grad__{case}__b{number}__{kind}"
            if key in DOREFA:
                noise = [DOREFA[f"grad__{case}__noise"].reshape(samples.shape)] if kind == "with_noise" else []
                same(dorefa.quantize_gradient(samples, bits(number), *noise).view_as(gradient), DOREFA[key])


WAGEUBN = arrays("wageubn")


@pytest.mark.parametrize("number", [4, 6, 8])
def test_wageubn_weights_and_activations(number):
    same(wageubn.quantize_weight(WAGEUBN["weight__w"], bits(number)), WAGEUBN[f"weight__b{number}__q"], 0)
    same(wageubn.quantize_activation(WAGEUBN["act__x"], bits(number)), WAGEUBN[f"act__b{number}__y"], 0)


@pytest.mark.parametrize("case", cases(WAGEUBN, "error__"))
def test_wageubn_errors(case):
    error = WAGEUBN[f"error__{case}__e"]
    value_range = wageubn.power_of_two_range(error)
    same(value_range, WAGEUBN[f"error__{case}__R"], 0)
    for number in (6, 8):
        key = f"error__{case}__b{number}"
        same(wageubn.quantize_error_of_input(error, value_range, bits(number)), WAGEUBN[f"{key}__E1"], 0)
        same(wageubn.quantize_error_of_layer(error, value_range, bits(number)), WAGEUBN[f"{key}__E2"], 0)


L2 = arrays("l2_uniform")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", ["gauss", "laplace", "uniform", "outlier", "sparse", "tiny"])
def test_l2_steps_leave_the_least_error(case, dtype):
    weight = L2[f"{case}__w"].double().reshape(1, -1)
    for number, tolerance in ((2, 1e-3), (3, 1e-3), (4, 1e-3), (8, 5e-3)):
        step = optimal_step(weight.to(dtype), 2 ** (number - 1) - 1).double()
        error = (weight - quantize_symmetric(weight, step, bits(number))).square().sum()
        assert error <= L2[f"{case}__b{number}__error"] * (1 + tolerance)
        improve = functools.partial(improved_step, weight.abs(), top=2 ** (number - 1) - 1)
        iterated = fixed_point(L2[f"{case}__b{number}__fp_start"].view(1, 1), improve)
        same(iterated.squeeze(), L2[f"{case}__b{number}__fp_step"])
        same(
            (weight - quantize_symmetric(weight, iterated, bits(number))).square().sum()
            / L2[f"{case}__b{number}__fp_error"],
            torch.ones(()),
            1e-9,
        )


def test_l2_steps_of_rows_ties_and_ratio():
    for number in (2, 4):
        steps = optimal_step(L2["rows__w"].double(), 2 ** (number - 1) - 1)
        same(steps.flatten(), L2[f"rows__b{number}__steps"], 1e-3)
    for number in (2, 3, 4):
        assert torch.equal(quantize_symmetric(L2["ties__w"], L2["ties__step"], bits(number)), L2[f"ties__b{number}__q"])
    layers = L2["ratio__layers_w"].double()
    ratios = optimal_step(layers, 1) / optimal_step(layers, 127)
    same(ratios.flatten(), L2["ratio__per_layer"], 1e-3)
    same(ratios.log().mean().exp(), L2["ratio__geometric_mean"], 1e-3)


TTQ = arrays("ttq")


@pytest.mark.parametrize("case", ["conv", "linear", "t02"])
def test_trained_ternary_weights(case, monkeypatch):
    monkeypatch.setattr(ternary, "MAXIMUM_SHARE", float(TTQ[f"{case}__t"]))
    module = Ttq().weight(compile=False).double()
    assert isinstance(module, TrainedTernaryWeight)
    module.positive.data.copy_(TTQ[f"{case}__Wp"])
    module.negative.data.copy_(TTQ[f"{case}__Wn"])
    weight = nn.Parameter(TTQ[f"{case}__w"])
    y = module(weight, bits(2))
    y.backward(TTQ[f"{case}__gq"])
    assert torch.equal(y, TTQ[f"{case}__q"])
    same(weight.grad, TTQ[f"{case}__gw"])
    same(module.positive.grad, TTQ[f"{case}__gWp"])
    same(module.negative.grad, TTQ[f"{case}__gWn"])


def test_ternary_weights():
    same(ternarize(TTQ["twn__w"], bits(2)), TTQ["twn__two_thirds__q"])


MULTIBIT = arrays("multibit")


@pytest.mark.parametrize("case", ["gauss", "tanh", "skewed"])
def test_sums_of_sign_vectors(case):
    vectors = MULTIBIT[f"{case}__w"]
    for number in (2, 3):
        key = f"{case}__k{number}__refined"
        coefficients, codes = decompose(vectors, bits(number))
        quantized = reconstruct(vectors, bits(number))
        same(coefficients[:, :number], MULTIBIT[f"{key}__alpha"], 1e-9)
        assert not coefficients[:, number:].any() and not codes[:, :, number:].any()
        same(quantized, MULTIBIT[f"{key}__q"], 1e-9)
        same((vectors - quantized).square().sum(1), MULTIBIT[f"{key}__error"], 1e-9)


def test_penalised_alpha_starts_where_the_paper_says():
    module = PactBinary().activation(compile=False)
    assert module.alpha == 3
    assert module.penalty(bits(1)).item() == pytest.approx(2e-4 * 9)
