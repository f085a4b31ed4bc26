"""Counts of single operations, the meter, and wrong input."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bitcycle.hardware import (
    CONVENTIONS,
    HARDWARE,
    BitFusion,
    BitOps,
    CostMeter,
    Workload,
    Zc706,
    bitfusion,
    trace,
)
from bitcycle.hardware.bitfusion import ARRAY
from bitcycle.hardware.gemm import Energy
from bitcycle.layer import quantize_model
from bitcycle.precision import Precision
from bitcycle.quantizer import Mx
from bitcycle.settings import SettingError
from tests.hardware_models_cases import three_layers

P8, P4 = Precision(8, 8, 8), Precision(4, 4, 8)


@pytest.fixture
def fast(monkeypatch) -> BitFusion:
    """Bit Fusion without memory: cycles are those of the array, plus one to fill and one to drain for each product."""
    monkeypatch.setattr(bitfusion, "ARRAY", ARRAY._replace(bandwidth=2**40, energy=Energy(1000.0, *[0.0] * 7)))
    return BitFusion()


CONV, GROUPED, LINEAR = 64 * 16 * 27, 16 * 32 * 4 * 9, 320
"""Multiply-accumulates of the three layers, by hand: positions x output channels x reduction."""


@pytest.fixture(scope="module")
def network() -> Workload:
    return trace(quantize_model(three_layers(), "sbm", float_layers=["last"]), torch.zeros(1, 3, 8, 8))


# --------------------------------------------------------------------------------------------------- counts and meter


def test_counts_of_single_operations_by_hand(network):
    """DFQ: of eight samples, the second layer ran three at 4/2/6 bits and one at 8/8/8; four skipped it."""
    gate = {Precision(4, 2, 6): 3, P8: 1}
    cost = BitOps().cost(network, {P8: 8}, P8, {"2": gate})
    assert cost.layers[1].forward == GROUPED * (3 * 4 * 2 + 64)
    assert cost.layers[1].error == GROUPED * (3 * 4 * 6 + 64)
    assert cost.layers[1].weight_gradient == GROUPED * (3 * 2 * 6 + 64)
    assert cost.layers[0] == BitOps().cost(network, {P8: 8}, P8).layers[0]
    static = BitOps().cost(network, {P8: 8}, P8)
    assert cost.relative_to_static == pytest.approx(cost.gbitops / static.gbitops, rel=1e-15)
    board = Zc706().cost(network, {P8: 8}, P8, {"2": gate})
    work = GROUPED * (3 * ((4 + 2) + (4 + 6) + (2 + 6)) + 3 * 16)
    assert board.latency_layers[1].total == pytest.approx(work / 16 / (128 * 2e8), rel=1e-14)


def test_counts_of_single_operations_on_the_array_by_hand(network, fast):
    cost = fast.cost(network, {P8: 8}, P8, {"2": {Precision(4, 2, 6): 3, P8: 1}})
    # 2 x 4 bits pack 8, 6 x 4 and 2 x 6 bits pack 2 and 4: ceil(36/128), ceil(72/32) and ceil(64/64) rows
    mixed = [4 * 16 * 1 + 8, 4 * 64 * 3 + 8, 4 * 9 * 1 + 8]
    at_8 = [4 * 16 * 3 + 8, 4 * 64 * 5 + 8, 4 * 9 * 4 + 8]
    found = [round(x * 5e8) for x in dataclasses.astuple(cost.latency_layers[1])[1:]]
    assert found == [3 * low + high for low, high in zip(mixed, at_8)]


def test_a_backward_pass_at_the_bits_of_gradients_has_their_operands_throughout(fast):
    """Weights of 8 and activations of 6 bits, and 4 of both in the backward pass, each with a quarter of a bit of scale."""
    model = quantize_model(
        nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32)), Mx(backward_bits="gradient"), float_layers=[]
    )
    network, histogram = trace(model, torch.zeros(1, 64)), {Precision(8, 6, 4): 3}
    forward, *backward = dataclasses.astuple(BitOps().cost(network, histogram, P8).layers[1])[1:]
    assert forward == 3 * 2048 * 8.25 * 6.25
    assert backward == 2 * [3 * 2048 * 4.25**2]
    assert BitOps().cost(network, histogram, P8).layers[0].error == 0
    latencies = dataclasses.astuple(Zc706().cost(network, histogram, P8).latency_layers[1])[1:]
    assert latencies == pytest.approx([3 * 2048 * bits / 16 / (128 * 2e8) for bits in (8 + 6, 4 + 4, 4 + 4)])
    low, mixed = (
        fast.cost(network, {bits: 3}, P8).latency_layers[1] for bits in (Precision(4, 4, 4), Precision(8, 6, 4))
    )
    assert (mixed.error, mixed.weight_gradient) == (low.error, low.weight_gradient)
    assert mixed.forward > low.forward


def test_the_compute_percentage_is_relative_to_float32_also_where_bits_are_fixed(network):
    """The classifier is float32 in any case; the other layers have 64 of 1,024 bit operations per product."""
    cost = BitOps().cost(network, {P8: 1}, P8)
    quantized, whole = 64 * (2 * CONV + 3 * GROUPED), 1024 * (2 * CONV + 3 * GROUPED + 3 * LINEAR)
    assert cost.compute_percentage == pytest.approx(100 * (quantized + 1024 * 3 * LINEAR) / whole)
    fixed = Workload(tuple(dataclasses.replace(operation, fixed_precision=P4) for operation in network.operations))
    assert BitOps().cost(fixed, {P8: 1}, P8).compute_percentage == pytest.approx(
        100 * (32 * (2 * CONV + 3 * GROUPED + 3 * LINEAR) - 16 * (CONV + GROUPED + LINEAR)) / whole
    )


def test_elements_of_norms_cost_the_products_of_their_roles():
    network = Workload(
        (), batch_norm_elements=10, layer_norm_elements=7, relu_elements=5, pooled_inputs=3, pooled_outputs=1
    )
    for count, elements in (("weights_and_norm", 4 * 7), ("with_bn", 2 * 10 + 3 + 1), ("with_bn_relu", 2 * 10 + 3 + 5)):
        (layer,) = BitOps(count=count).cost(network, {Precision(4, 2, 6): 3}, P8).layers
        assert dataclasses.astuple(layer) == ("(elementwise)", *(3 * elements * bits for bits in (4 * 2, 2 * 6, 2 * 6)))


def test_counts_of_a_module_hold_for_all_within_and_the_longest_name_wins():
    block = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Sequential(nn.Conv2d(4, 4, 1)))
    network = trace(quantize_model(nn.Sequential(nn.Conv2d(3, 4, 1), block), float_layers=[]), torch.zeros(1, 3, 2, 2))
    assert [operation.name for operation in network.operations] == ["0", "1.0", "1.1.0"]
    low = Precision(2, 2, 6)
    cost = BitOps().cost(network, {P8: 4}, P8, {"1": {P4: 4}, "1.1": {low: 2}})
    assert [layer.forward for layer in cost.layers] == [48 * 4 * 64, 64 * 4 * 16, 64 * 2 * 4]


@pytest.mark.parametrize("name", HARDWARE)
def test_the_meter_costs_what_was_counted_to_the_last_digit(network, name):
    hardware, gate = HARDWARE[name](), {P4: 50, P8: 70}
    meter = CostMeter(network, hardware, P8)
    for step in range(60):
        meter.add(P4 if step % 3 else P8, 2)
        meter.add(P8 if step < 35 else P4, 2, operation="2")
    assert meter.cost() == hardware.cost(network, {P8: 40, P4: 80}, P8, {"2": gate})
    restored = CostMeter(network, hardware, P8)
    restored.add(P4, 7)  # which the state replaces
    restored.add(P4, 7, operation="0")
    restored.load_state_dict(meter.state_dict())
    assert restored.cost() == meter.cost()
    assert meter.state_dict() == {"8,8,8": 40, "4,4,8": 80, "2:8,8,8": 70, "2:4,4,8": 50}


histograms = st.dictionaries(
    st.builds(Precision, st.integers(1, 12), st.integers(1, 12), st.integers(1, 16)), st.integers(0, 10**7), max_size=4
)


@settings(max_examples=25, deadline=None)
@given(histograms, histograms)
def test_costs_add_up(first, second):
    network = trace(three_layers(), torch.zeros(2, 3, 8, 8))
    both = {p: first.get(p, 0) + second.get(p, 0) for p in {*first, *second}}
    for kind in (BitOps, BitFusion, Zc706):
        options = kind(convention="better")
        costs = [options.cost(network, histogram, P8) for histogram in (first, second, both)]
        exact = [sum(layer.total for layer in cost.layers) for cost in costs]
        assert exact[0] + exact[1] == exact[2]
        for quantity in ("energy_j", "latency_s"):
            parts = [getattr(cost, quantity) for cost in costs]
            if None not in parts:
                assert parts[0] + parts[1] == pytest.approx(parts[2], rel=1e-12)


@pytest.mark.parametrize("name", HARDWARE)
def test_cost_of_nothing_is_nothing(network, name):
    for convention in CONVENTIONS:
        cost = HARDWARE[name](convention=convention).cost(network, {}, P8)
        assert (cost.gbitops, cost.relative_to_static, cost.samples) == (0, 1, 0)


@pytest.mark.parametrize("name", HARDWARE)
def test_it_does_not_matter_how_many_samples_were_traced(name):
    model = three_layers()
    alone, together = (trace(model, torch.zeros(samples, 3, 8, 8)) for samples in (1, 6))
    cost = [HARDWARE[name]().cost(network, {P8: 12}, P8) for network in (alone, together)]
    assert cost[0] == cost[1]


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize("bits", [0, -1, 33, 8.0, None])
@pytest.mark.parametrize("name", HARDWARE)
def test_bits_outside_1_to_32_are_refused(network, name, bits):
    for precision in (Precision(bits, 8, 8), Precision(8, bits, 8), Precision(8, 8, bits)):
        with pytest.raises(SettingError, match="whole number of bits from 1 to 32"):
            HARDWARE[name]().cost(network, {precision: 1}, P8)
    with pytest.raises(SettingError, match="weight precision"):
        HARDWARE[name]().cost(network, {P8: 1}, Precision(bits, 8, 8))
    with pytest.raises(SettingError, match="leave skipped samples uncounted"):
        HARDWARE[name]().cost(network, {P8: 1}, P8, {"2": {Precision(bits, bits, bits): 1}})


def test_counts_that_contradict_each_other_are_refused(network):
    with pytest.raises(SettingError, match="per_operation=3: is not an operation of the model"):
        BitOps().cost(network, {P8: 1}, P8, {"3": {P8: 1}})
    with pytest.raises(SettingError, match="counts 3 samples of 2"):
        BitOps().cost(network, {P8: 2}, P8, {"2": {P8: 3}})
    with pytest.raises(SettingError, match="samples=-1"):
        BitOps().cost(network, {P8: -1}, P8)


def test_wrong_settings_are_refused():
    for wrong in ({"preset": "fractrian"}, {"count": "exact"}, {"convention": "papers"}, {"run_samples": 0}):
        with pytest.raises(SettingError, match=next(iter(wrong))):
            BitFusion(**wrong)
