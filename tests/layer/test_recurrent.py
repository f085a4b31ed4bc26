"""Quantized LSTM and GRU: values against released code, PyTorch's layers as their float limit, time steps one by one."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import bitcycle
from bitcycle.layer import QuantizedGRU, QuantizedLSTM, carry_quantized, restart_quantizers
from bitcycle.layer.products.recurrent import step_keys
from bitcycle.precision import Precision
from bitcycle.quantizer import QUANTIZERS, Sbm, UniformL2
from bitcycle.settings import SettingError
from tests.conftest import ROOT

T, N, F, H = 4, 3, 5, 6
KINDS = {"LSTM": (nn.LSTM, QuantizedLSTM), "GRU": (nn.GRU, QuantizedGRU)}


with np.load(ROOT / "tests" / "data" / "golden-domains" / "ptb_qlstm.npz") as golden:
    GOLDEN = {name: torch.from_numpy(golden[name]) for name in golden.files}


def golden_layer(bits: int, gradient_bits: int) -> QuantizedLSTM:
    layer = QuantizedLSTM(F, H, quantizer=Sbm(stochastic=False, quantized_bias=True, running_range="code"))
    layer.precision.set(Precision(bits, bits, gradient_bits))
    with torch.no_grad():
        layer.weight_ih_l0.copy_(GOLDEN["W_weight"])
        layer.weight_hh_l0.copy_(GOLDEN["U_weight"])
        layer.bias_ih_l0.copy_(GOLDEN["W_bias"])
        layer.bias_hh_l0.zero_()
    return layer


@pytest.mark.parametrize(("bits", "gradient_bits"), [(0, 0), (4, 0), (4, 8), (5, 8), (8, 8)])
def test_lstm_equals_released_code(bits, gradient_bits):
    layer, case = golden_layer(bits, gradient_bits), f"b{bits}__g{gradient_bits}__"
    x, state = GOLDEN["x"].clone().requires_grad_(), (GOLDEN["h0"], GOLDEN["c0"])
    y, (h, c) = layer(x, state)
    (y * GOLDEN["gy"]).sum().backward()
    found = {"y": y, "h": h, "c": c, "gx": x.grad, "gW": layer.weight_ih_l0.grad}
    found |= {"gWbias": layer.bias_ih_l0.grad, "gU": layer.weight_hh_l0.grad}
    if bits:
        for name, product in (("W", layer.input_l0), ("U", layer.hidden_l0)):
            found[f"{name}_running_zero_point"] = product.activation_quantizer.running_zero_point.view(1, 1)
            found[f"{name}_running_range"] = product.activation_quantizer.running_range.view(1, 1)
        found["eval_y"] = layer.eval()(x, state)[0]
    for name, value in found.items():
        torch.testing.assert_close(value.detach(), GOLDEN[case + name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    "options",
    [{}, {"num_layers": 2, "batch_first": True}, {"bidirectional": True, "num_layers": 2}, {"bias": False}],
    ids=str,
)
def test_converted_layer_at_32_bits_is_pytorchs(name, options):
    plain = KINDS[name][0](F, H, **options)
    model = bitcycle.quantize_model(nn.Sequential(copy.deepcopy(plain)), float_layers=[])
    converted = model[0]
    assert type(converted) is KINDS[name][1]
    assert set(plain.state_dict()) <= set(converted.state_dict())
    assert [n for n, _ in converted.named_parameters()] == [n for n, _ in plain.named_parameters()]
    converted.precision.set(Precision(32, 32, 32))
    x, other = (torch.randn(T, N, F).requires_grad_() for _ in range(2))
    other.data.copy_(x.data)
    parts, batch = options.get("num_layers", 1) * (1 + options.get("bidirectional", False)), x.shape[1]
    batch = x.shape[0] if options.get("batch_first") else batch
    h = torch.randn(parts, batch, H)
    state = (h, h.flip(0)) if name == "LSTM" else h
    for given in (None, state):
        expected, found = plain(x, given), converted(other, given)
        torch.testing.assert_close(found, expected)
    expected[0].square().sum().backward()
    found[0].square().sum().backward()
    torch.testing.assert_close(other.grad, x.grad)
    for ours, theirs in zip(converted.parameters(), plain.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad)
    torch.testing.assert_close(converted(x[0]), plain(x[0]))  # one sequence without a batch dimension


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("quantizer", sorted(set(QUANTIZERS) - {"none", "pact_binary"}))
def test_every_quantizer_trains_and_remembers(name, quantizer):
    """A layer whose state was saved and loaded gives what the first one gives, in training and in evaluation."""
    torch.manual_seed(0)
    layers = [KINDS[name][1](F, H, num_layers=2, dropout=0.5, quantizer=quantizer) for _ in range(2)]
    options = layers[0].input_l0.quantizer_options
    bits = max((b for b in options.bits("weight") if b <= 4), default=8)
    gradient = max((b for b in options.bits("gradient") if b <= 8), default=32)
    x = torch.randn(T, N, F)
    for layer in layers:
        layer.precision.set(Precision(bits, max(2, bits), gradient))
    optimizer = torch.optim.SGD(layers[0].parameters(), lr=0.1)
    layers[0](x)[0].square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layers[0].parameters())
    optimizer.step()
    layers[1].load_state_dict(layers[0].state_dict())
    for training in (True, False):
        outputs = []
        for layer in layers:
            torch.manual_seed(1)
            outputs.append(layer.train(training)(x)[0])
        torch.testing.assert_close(*outputs, rtol=0, atol=0)


def test_the_whole_sequence_at_once_is_one_time_step_after_another():
    """Values and gradients, noise included, bit for bit; the running ranges up to rounding."""
    whole = QuantizedLSTM(F, H).input_l0
    single = copy.deepcopy(whole)
    for product in (whole, single):
        product.precision.set(Precision(4, 4, 6))
    x, upstream = torch.randn(T, N, F), torch.randn(T, N, 4 * H)
    x1, x2 = x.clone().requires_grad_(), x.clone().requires_grad_()
    y1 = whole(x1)
    keys, quantizer = step_keys(single.call_key(), T), single.activation_quantizer
    operands = (single.quantized_weight(), single.quantized_bias())
    steps = []
    for t in range(T):
        quantized = quantizer(x2[t], single.precision.activation_bits)
        steps.append(single.product_of(quantized.unsqueeze(0), *operands, keys[t : t + 1]))
    y2 = torch.cat(steps)
    for y in (y1, y2):
        y.backward(upstream)
    torch.testing.assert_close(y1, y2, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(x1.grad, x2.grad, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(whole.weight.grad, single.weight.grad, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(whole.activation_quantizer.state_dict(), single.activation_quantizer.state_dict())


def test_gradient_ranges_of_a_time_step():
    """Each sequence has its own range at each time step."""
    gradient = torch.randn(T, N, F)
    keys = torch.zeros(T, dtype=torch.int32)
    levels = (
        Sbm(stochastic=False).position_gradient(compile=False).quantize_steps(gradient, torch.tensor(1), keys[0], keys)
    )
    torch.testing.assert_close(levels.amax(2), gradient.amax(2))


def test_noise_differs_between_time_steps_and_layers():
    layer = QuantizedLSTM(F, H)
    keys = torch.cat([step_keys(product.call_key(), 50) for product in (layer.input_l0, layer.hidden_l0)])
    assert len(keys.unique()) == 100


def test_the_step_of_hidden_states_is_that_of_a_sequence_and_not_of_the_zeros_before_it():
    layer = QuantizedGRU(F, H, quantizer=UniformL2())
    layer.precision.set(Precision(8, 2, 32))
    layer(torch.randn(20, N, F))
    step = float(layer.hidden_l0.activation_quantizer.step)
    assert 0.05 < step < 0.9  # 1 is that of zeros


def test_weights_are_quantized_once_in_a_forward_pass():
    layer = QuantizedLSTM(F, H)
    calls = []
    layer.hidden_l0.weight_quantizer.register_forward_hook(lambda *_: calls.append(1))
    layer(torch.randn(T, N, F))
    assert len(calls) == 1


def test_controller_cost_and_phases():
    """The products of a converted model follow the schedule, and cost what the formula says."""
    model = bitcycle.quantize_model(nn.LSTM(F, H), quantizer="sbm", float_layers=[])
    schedule = bitcycle.schedule("static", q_max=4, total_steps=2)
    control = bitcycle.PrecisionController(model, schedule)
    control.step(0)
    model(torch.randn(T, N, F).requires_grad_())[0].sum().backward()
    assert model.hidden_l0.precision.precision == schedule(0)
    operations = control.meter.workload.operations
    assert {operation.module for operation in operations} == {"input_l0", "hidden_l0"}
    assert sum(operation.macs for operation in operations) == T * N * 4 * H * (F + H)
    assert all(operation.fixed_precision is None for operation in operations)
    carry_quantized(model)
    assert all(len(row.unique()) <= 16 for row in model.weight_hh_l0)
    restart_quantizers(model)
    assert model.hidden_l0.adapted  # SBM has nothing to adapt in training


def test_conversion_keeps_a_frozen_bias_and_the_optimizers_hold():
    layer = nn.LSTM(F, H)
    del layer.bias_hh_l0
    layer.register_buffer("bias_hh_l0", torch.zeros(4 * H), persistent=False)
    parameters = dict(layer.named_parameters())
    converted = bitcycle.quantize_model(nn.Sequential(layer), float_layers=[])[0]
    assert dict(converted.named_parameters()) == parameters
    assert not converted.bias_hh_l0.requires_grad
    converted(torch.randn(T, N, F))[0].sum().backward()
    copied = copy.deepcopy(converted)
    assert copied.input_l0.weight is copied.weight_ih_l0
    assert copied.input_l0.weight is not converted.input_l0.weight


def test_what_is_refused():
    layer = QuantizedLSTM(F, H)
    with pytest.raises(TypeError, match="pad_packed_sequence"):
        layer(pack_sequence([torch.randn(3, F), torch.randn(2, F)]))
    with pytest.raises(RuntimeError, match=r"must be equal to input_size"):
        layer(torch.randn(T, N, F + 1))
    with pytest.raises(RuntimeError, match="Expected hidden"):
        layer(torch.randn(T, N, F), (torch.zeros(1, N, H), torch.zeros(1, N + 1, H)))
    for make in (lambda: QuantizedLSTM(F, H, proj_size=2), lambda: bitcycle.quantize_model(nn.LSTM(F, H, proj_size=2))):
        with pytest.raises(SettingError):
            make()
    with pytest.raises(SettingError, match="PACT would clip"):
        QuantizedGRU(F, H, quantizer="pact_binary")


@pytest.mark.parametrize("quantizer", ["uniform_l2", "ternary"])
def test_a_step_size_is_not_taken_from_the_zeros_of_a_first_hidden_state(quantizer):
    """A sequence given one time step at a time kept the step 1 of its first hidden state for ever."""
    torch.manual_seed(0)
    plain = nn.LSTM(4, 8)
    at_once, in_turn = (bitcycle.quantize_model(copy.deepcopy(plain), quantizer, float_layers=[]) for _ in range(2))
    for model in (at_once, in_turn):
        model.precision.set(Precision(32, 8, 32))
    x, state, outputs = torch.randn(6, 3, 4), None, []
    for step in x.unbind(0):
        y, state = in_turn(step[None], state)
        outputs.append(y)
    expected = plain(x)[0]
    assert (at_once(x)[0] - expected).norm() < 0.01 * expected.norm()
    assert (torch.cat(outputs) - expected).norm() < 0.03 * expected.norm()


@pytest.mark.parametrize("quantizer", ["dorefa", "uniform_l2"])
def test_zeros_do_not_decide_whether_inputs_are_signed(quantizer):
    """A layer whose first input was zero clipped all negative inputs that followed."""
    model = bitcycle.quantize_model(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), quantizer, float_layers=[])
    layer, x = model[1], torch.randn(64, 4)
    layer(torch.zeros(2, 4))
    layer(x)
    y = layer.activation_quantizer(x, layer.precision.activation_bits)
    assert (y - x).norm() < 0.02 * x.norm()
