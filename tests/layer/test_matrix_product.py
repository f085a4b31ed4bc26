"""Products of two activations, ranges of gradients by position, and quantized biases."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bitcycle
from bitcycle.layer import MatrixProduct, PrecisionController, QuantizedLinear, QuantizedMatrixProduct, quantize_model
from bitcycle.precision import FLOAT, Precision
from bitcycle.quantizer import QUANTIZERS, Sbm, compiler_works
from tests.conftest import ROOT

with np.load(ROOT / "tests" / "data" / "golden-domains" / "bert_attention.npz") as arrays:
    GOLDEN = {key: torch.from_numpy(arrays[key]) for key in arrays.files}
KEY = torch.zeros((), dtype=torch.int32)


class SelfAttention(nn.Module):
    """The attention of BERT, whose two products are modules."""

    float_layers = ()
    quantized_bias = True

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.scores, self.context = MatrixProduct(), MatrixProduct()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        scores = self.scores(query, key.transpose(2, 3)) / query.shape[-1] ** 0.5 + mask
        return self.context(scores.softmax(-1), value).transpose(1, 2).flatten(2)


def attention(bits: int, gradient_bits: int) -> nn.Module:
    model = SelfAttention(16, int(GOLDEN["heads"]))
    parameters = {name.removeprefix("param__"): value for name, value in GOLDEN.items() if name.startswith("param__")}
    model.load_state_dict(parameters)
    if bits:
        quantize_model(model, Sbm(stochastic=False))
        model.query.precision.set(Precision(bits, bits, gradient_bits or FLOAT))
    return model


@pytest.mark.parametrize(("bits", "gradient_bits"), [(0, 0), (5, 0), (5, 8), (8, 8)])
def test_attention_equals_released_code(bits, gradient_bits):
    model, x = attention(bits, gradient_bits), GOLDEN["x"].clone().requires_grad_()
    y = model(x, GOLDEN["mask"])
    y.backward(GOLDEN["gy"])
    case = f"b{bits}__g{gradient_bits}__"
    torch.testing.assert_close(y, GOLDEN[f"{case}y"], rtol=0, atol=2e-6)
    torch.testing.assert_close(x.grad, GOLDEN[f"{case}gx"], rtol=1e-5, atol=2e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, GOLDEN[f"{case}grad__{name}"], rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("case", ["2d", "3d", "4d"])
def test_gradient_ranges_equal_released_code(case):
    gradient, expected = GOLDEN[f"gradq__{case}__g"], GOLDEN[f"gradq__{case}__q"]
    quantizer = Sbm(stochastic=False).position_gradient(compile=False)
    torch.testing.assert_close(quantizer.quantize(gradient, torch.tensor(8), KEY, KEY), expected, rtol=1e-6, atol=1e-7)
    for_tensor_only = Sbm(stochastic=False).gradient(compile=False)
    for_tensor = for_tensor_only.quantize(gradient, torch.tensor(8), KEY, KEY)
    assert len(for_tensor.unique()) <= 256
    assert torch.equal(for_tensor, expected) == (case == "2d")


def test_ranges_of_positions_and_of_the_tensor_are_one_where_there_are_no_positions():
    gradient = torch.randn(6, 9)
    both = (Sbm().position_gradient(False), Sbm().gradient(False))
    assert torch.equal(*(quantizer.quantize(gradient, torch.tensor(4), KEY, KEY) for quantizer in both))


def test_positions_are_rounded_without_bias():
    gradient = torch.randn(4, 3, 5)
    quantizer = Sbm().position_gradient(False)
    draws = [quantizer.quantize(gradient, torch.tensor(2), KEY + step, KEY) for step in range(2000)]
    assert (torch.stack(draws).mean(0) - gradient).abs().max() < 0.1


def test_compiled_ranges_are_the_same():
    if not compiler_works("cpu"):
        pytest.skip("no C++ compiler on this machine")
    gradient = torch.randn(4, 2, 5, 7)
    for stochastic in (True, False):
        options = Sbm(stochastic=stochastic)
        eager, fused = (
            options.position_gradient(compile).quantize(gradient, torch.tensor(4), KEY + 3, KEY)
            for compile in (False, True)
        )
        assert torch.equal(eager, fused)
    rows = [options.matmul_operand(compile)(gradient.transpose(2, 3), torch.tensor(3)) for compile in (False, True)]
    assert torch.equal(*rows)


def test_rows_have_ranges_of_their_own():
    product = QuantizedMatrixProduct()
    product.precision.set(Precision(8, 2, FLOAT))
    a, b = torch.tensor([[[0.0, 1, 2, 3], [0, 10, 20, 30]]]), torch.eye(4)[None]
    assert torch.equal(product(a, b), a)
    product.precision.set(Precision(8, 1, FLOAT))
    assert product(a, b).flatten().unique().tolist() == [0, 3, 30]
    product.precision.set(Precision(FLOAT, FLOAT, FLOAT))
    assert torch.equal(product(a, b), a)
    assert [*product.state_dict()] == ["precision.bits"]  # no range is remembered


def test_products_are_charged_at_the_bits_of_activations():
    model = quantize_model(SelfAttention(16, 2), Sbm())
    schedule = bitcycle.schedule("static", total_steps=10, q_max=4)
    controller = PrecisionController(model, schedule)
    controller.step(0)
    x, mask = torch.randn(3, 7, 16), torch.zeros(3, 1, 1, 7)
    model(x, mask).sum().backward()
    kinds = {operation.name: operation.kind for operation in controller.meter.workload.operations}
    assert [kinds[name] for name in ("query", "scores", "context")] == ["linear", "matmul", "matmul"]
    layers = {layer.name: layer for layer in controller.cost().layers}
    assert layers["scores"].forward == 3 * 7 * 7 * 16 * 4 * 4
    assert layers["context"].weight_gradient == 3 * 7 * 7 * 16 * 4 * 4
    assert not any(operation.is_float for operation in controller.meter.workload.operations)


def test_products_are_neither_first_nor_last():
    model = nn.Sequential(MatrixProduct(), nn.Linear(2, 2), nn.Linear(2, 2), MatrixProduct())
    roles = bitcycle.layer.conversion.plan.layer_roles(model)
    assert list(roles.values()) == [("matmul",), ("first",), ("last",), ("matmul",)]


@pytest.mark.parametrize("name", [name for name in QUANTIZERS if name not in ("none", "pact_binary")])
def test_every_quantizer_has_something_for_a_product(name):
    options = QUANTIZERS[name]()
    product = QuantizedMatrixProduct(quantizer=options)
    bits = max(number for number in options.bits("activation") if number <= 8)
    product.precision.set(Precision(FLOAT, bits, FLOAT))
    a, b = torch.randn(3, 2, 4, 5, requires_grad=True), torch.randn(3, 2, 5, 4)
    y = product(a, b)
    y.sum().backward()
    assert y.shape == (3, 2, 4, 4)
    assert torch.isfinite(y).all() and torch.isfinite(a.grad).all()
    assert product.penalties() == []
    product.restart()


def test_biases_are_quantized_where_network_or_setting_says_so():
    def bias_quantizer(options: Sbm, wanted: bool) -> object:
        model = nn.Sequential(nn.Linear(3, 4))
        model.quantized_bias = wanted
        return quantize_model(model, options, float_layers=[])[0].bias_quantizer

    assert bias_quantizer(Sbm(), False) is None
    assert bias_quantizer(Sbm(), True) is not None
    assert bias_quantizer(Sbm(quantized_bias=False), True) is None
    layer = QuantizedLinear(2, 4, quantizer=Sbm(quantized_bias=True))
    layer.precision.set(Precision(1, FLOAT, FLOAT))
    layer.bias.data = torch.tensor([0.0, 0.2, 0.9, 1.0])
    assert layer(torch.zeros(1, 2)).flatten().tolist() == [0, 0, 1, 1]


def test_the_product_of_learned_queries_costs_the_bits_of_activations():
    """It was charged at the bits of weights, as the queries do not depend on the input."""

    class Pooling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries, self.scores = nn.Parameter(torch.randn(3, 4)), MatrixProduct()

        def forward(self, x: Tensor) -> Tensor:
            return self.scores(self.queries.expand(len(x), 3, 4), x.transpose(1, 2))

    model = quantize_model(Pooling(), float_layers=[])
    control = PrecisionController(model, bitcycle.schedule("static", q_max=8, total_steps=1))
    control.step(0)
    control.use((2, 8, 8))
    model(torch.randn(5, 7, 4))
    assert [layer.forward for layer in control.cost().layers] == [5 * 3 * 7 * 4 * 8 * 8]
