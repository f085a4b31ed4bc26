"""Cost models of three layers by hand, and every convention."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import pytest
import torch
from torch import nn

from bitcycle.hardware import (
    CONVENTIONS,
    HARDWARE,
    PUBLISHED_IMAGES,
    AllHardware,
    BitFusion,
    BitOps,
    Operation,
    ProductShape,
    TensorCore,
    Workload,
    Zc706,
    bitfusion,
    trace,
)
from bitcycle.hardware.bitfusion import ARRAY
from bitcycle.hardware.gemm import Energy
from bitcycle.layer import quantize_model
from bitcycle.precision import Precision
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


def test_the_trace_of_three_layers(network):
    conv, grouped, linear = network.operations
    assert [operation.macs for operation in network.operations] == [CONV, GROUPED, LINEAR]
    assert (conv.product, grouped.product, linear.product) == (
        ProductShape(64, 16, 3, 9),
        ProductShape(16, 8, 4, 9),
        ProductShape(1, 10, 32),
    )
    assert (grouped.groups, grouped.input_positions, grouped.output_positions) == (4, 64, 16)
    assert [operation.input_gradients for operation in network.operations] == [0, 1, 1]
    assert [operation.is_float for operation in network.operations] == [False, False, True]


def test_bit_operations_of_three_layers_by_hand(network):
    cost = BitOps().cost(network, {P8: 3, P4: 5}, P8)
    conv = [CONV * (3 * 64 + 5 * 16), 0, CONV * (3 * 64 + 5 * 32)]
    grouped = [GROUPED * (3 * 64 + 5 * 16), GROUPED * (3 * 64 + 5 * 32), GROUPED * (3 * 64 + 5 * 32)]
    linear = [LINEAR * 8 * 1024] * 3
    assert [[x.forward, x.error, x.weight_gradient] for x in cost.layers] == [conv, grouped, linear]
    total = sum(conv + grouped + linear)
    static = 8 * (CONV * 128 + GROUPED * 192 + LINEAR * 3072)
    assert cost.gbitops == total / 1e9
    assert cost.effective_macs == total / 1024
    assert cost.relative_to_static == total / static
    assert cost.compute_percentage == 100 * total / (8 * 1024 * (2 * CONV + 3 * GROUPED + 3 * LINEAR))
    assert cost.energy_j is None
    assert cost.latency_s is None


def test_zc706_of_three_layers_by_hand(network):
    cost = Zc706().cost(network, {P8: 3, P4: 5}, P8)
    mean_widths = {
        P8: CONV * (8 + 8) + GROUPED * (8 + 8 + 8) + LINEAR * 96,
        P4: CONV * (4 + 6) + GROUPED * (4 + 6 + 6) + LINEAR * 96,
    }
    seconds = {p: Fraction(work) / 8 / (128 * 200_000_000) for p, work in mean_widths.items()}
    assert cost.latency_s == float(3 * seconds[P8] + 5 * seconds[P4])
    assert cost.latency_relative_to_static == float((3 * seconds[P8] + 5 * seconds[P4]) / (8 * seconds[P8]))
    assert cost.gbitops == BitOps().cost(network, {P8: 3, P4: 5}, P8).gbitops
    assert cost.energy_j is None


@pytest.mark.parametrize(
    ("device", "at_4", "at_8", "at_16"), [("h100", 1978.9, 1978.9, 989.4), ("b200", 9000, 4500, 2250)]
)
def test_peak_rates_of_three_layers_by_hand(network, device, at_4, at_8, at_16):
    """Of two operands the wider one says the rate; gradients have 8 bits."""
    cost = TensorCore(device=device).cost(network, {P8: 3, P4: 5}, P8)
    linear = 3 * LINEAR / at_16
    of_8 = (2 * CONV + 3 * GROUPED) / at_8 + linear
    of_4 = (CONV + GROUPED) / at_4 + (CONV + 2 * GROUPED) / at_8 + linear
    assert cost.latency_s == pytest.approx(2 * (3 * of_8 + 5 * of_4) / 1e12)
    assert cost.latency_relative_to_static == pytest.approx((3 * of_8 + 5 * of_4) / (8 * of_8))
    assert cost.summary()["latency_peak_rates_s"] == cost.latency_s


def test_array_cycles_of_three_layers_by_hand(network, fast):
    """Per product m * ceil(n / 32) * ceil(k / (16 packed)) cycles, and one more to fill and one to drain."""
    at_8 = {
        # moving operand m, groups of output channels, rows of the reduction
        "0": [64 * 1 * 2, 0, 9 * 1 * 12],  # k = 27; no input gradient; kernel map 3 channels x 64 positions = 192
        "2": [4 * 16 * 1 * 3, 4 * 64 * 1 * 5, 4 * 9 * 1 * 4],  # k = 4 x 9; k = 8 x 9 over the input map; 4 x 16 = 64
        "5": [16 * 2, 16 * 1, 16 * 32],  # 32 bits are 4 x 4 digits: k = 32; k = 10; (32, 10, 1)
    }
    products = {"0": 2, "2": 4 * 3, "5": 3}
    cycles = sum(map(sum, at_8.values())) + 2 * sum(products.values())
    cost = fast.cost(network, {P8: 7}, P8)
    assert cost.latency_s == 7 * cycles / 5e8
    found = {layer.name: [round(5e8 / 7 * x) for x in dataclasses.astuple(layer)[1:]] for layer in cost.latency_layers}
    groups = {"0": 1, "2": 4, "5": 1}
    assert found == {name: [c + 2 * groups[name] * (c > 0) for c in passes] for name, passes in at_8.items()}
    assert cost.energy_j == pytest.approx(7 * sum(map(sum, at_8.values())) * 1000e-12, rel=1e-14)
    assert cost.energy_parts == {"array": cost.energy_j, "buffer": 0, "dram": 0}
    computing = sum(map(sum, at_8.values()))
    assert cost.latency_parts == {"compute": 7 * computing / 5e8, "memory": 7 * (cycles - computing) / 5e8}
    # 4 x 4 bits: forward packs four times as many numbers into a row, the backward products (8 x 4) twice as many
    at_4 = {"0": [64, 0, 9 * 6], "2": [4 * 16, 4 * 64 * 3, 4 * 9 * 2], "5": at_8["5"]}
    low = fast.cost(network, {P4: 7}, P8)
    assert low.latency_s == 7 * (sum(map(sum, at_4.values())) + 2 * sum(products.values())) / 5e8
    assert low.latency_relative_to_static == pytest.approx(low.latency_s / cost.latency_s, rel=1e-15)


def test_outer_product_weight_gradient_by_hand(network, fast):
    """(K^2 C_in, C_out, 1, positions): 27 rows of 64 positions, and in each group 36 rows of 16."""
    cost = dataclasses.replace(fast, preset="synthesised").cost(network, {P8: 1}, P8)
    gradients = [layer.weight_gradient * 5e8 for layer in cost.latency_layers]
    assert gradients == pytest.approx([27 * 4 + 2, 4 * (36 * 1 + 2), 16 * 32 + 2], abs=1e-6)


def test_memory_of_one_tiny_layer_by_hand():
    """1 x 1 convolution of a single pixel, 8 bits: each of the three products is one tile."""
    network = trace(quantize_model(nn.Conv2d(1, 1, 1, bias=False), "sbm", float_layers=[]), torch.zeros(1, 1, 1, 1))
    cost = BitFusion().cost(network, {P8: 10}, P8)
    bits = 8 + 16 * 8 + 2 * 1024  # input, one padded row of weights, partial sums in and out
    assert cost.dram_bits == 10 * 2 * bits  # forward and weight gradient
    picojoules = 1000 + 15 * bits
    picojoules += 8 * (0.059474375 + 0.1137040625) + 8 * 0.02136565625 + 128 * 0.02891615625
    picojoules += (32 + 1024) * (0.0331553125 + 0.0730840625)
    assert cost.energy_j == pytest.approx(20 * picojoules * 1e-12, rel=1e-13)
    cycles = 1 + -(-(8 + 128 + 1024) // 192) + -(-1024 // 192)
    assert cost.latency_s == pytest.approx(20 * cycles / 5e8, rel=1e-15)
    assert cost.average_power_w == pytest.approx(cost.energy_j / cost.latency_s)


FULL_RUNS = {  # cost-models, section 2.4: cycles, Mbit and mJ of an image, minutes and kJ of a run; three passes at 8 bits
    "resnet38": (1_277_262, 245.1, 4.5426, 348.78, 37.213),
    "resnet74": (2_503_866, 480.6, 8.9215, 683.72, 73.085),
}


@pytest.mark.parametrize("name", FULL_RUNS)
def test_full_runs_of_cifar_networks(name, monkeypatch):
    from bitcycle.model import MODELS
    from bitcycle.shapes import ImageShape

    model = MODELS[name]().build(ImageShape(3, 32, 10))
    network = trace(quantize_model(model, "sbm"), torch.zeros(1, 3, 32, 32))
    cycles, megabits, millijoules, minutes, kilojoules = FULL_RUNS[name]
    image = BitFusion(convention="fractrain", run_samples=PUBLISHED_IMAGES).cost(network, {P8: 1}, P8)
    assert image.latency_s * 5e8 == pytest.approx(cycles, abs=1e-3)
    assert image.dram_bits / 1e6 == pytest.approx(megabits, abs=0.05)
    assert image.energy_j * 1e3 == pytest.approx(millijoules, abs=5e-5)
    run = BitFusion(convention="fractrain").cost(network, {P8: 1}, P8)
    assert run.latency_s / 60 == pytest.approx(minutes, abs=5e-3)
    assert run.energy_j / 1e3 == pytest.approx(kilojoules, abs=5e-4)
    monkeypatch.setitem(bitfusion.ARRAY_PJ, "fractrain", 235.104)
    synthesised = BitFusion(convention="fractrain").cost(network, {P8: 1}, P8)
    assert synthesised.average_power_w == pytest.approx(1.57, abs=0.01)
    monkeypatch.setitem(bitfusion.ARRAY_PJ, "synthesised", 1000.0)
    outer = BitFusion(convention="fractrain", preset="synthesised").cost(network, {P8: 1}, P8)
    assert outer.latency_s / run.latency_s == pytest.approx(0.87, abs=0.01)
    assert outer.energy_j / run.energy_j == pytest.approx(0.88, abs=0.01)


# ------------------------------------------------------------------------------------------------ conventions and rules


def test_published_images_stand_for_the_whole_run(network):
    for kind in HARDWARE.values():
        whole = kind(convention="cpt").cost(network, {P8: 640}, P8)
        actual = kind(convention="cpt").cost(network, {P8: PUBLISHED_IMAGES}, P8)
        assert whole.gbitops == actual.gbitops
        assert (whole.energy_j, whole.latency_s) == (actual.energy_j, actual.latency_s)
        half = kind(convention="cpt", run_samples=640).cost(network, {P8: 320}, P8)
        assert half.gbitops == pytest.approx(whole.gbitops / 2, rel=1e-15)
        assert half.relative_to_static == 1


class _PooledByKeyword(nn.AvgPool2d):
    def __call__(self, x):
        return super().__call__(input=x)


@pytest.mark.parametrize("pooling", [nn.AvgPool2d, _PooledByKeyword])
def test_what_each_count_adds(pooling):
    model = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), pooling(4))
    network = trace(model, torch.zeros(2, 3, 4, 4))
    macs, batch_norm, relu, pool_in, pool_out = 16 * 12, 64, 64, 64, 4
    expected = {
        "conv_linear": macs,
        "weights_only": macs,
        "with_bn": macs + 2 * batch_norm + pool_in + pool_out,
        "with_bn_relu": macs + 2 * batch_norm + relu + pool_in,
    }
    for count, operations in expected.items():
        cost = BitOps(convention="better", count=count).cost(network, {P4: 5}, P8)
        assert cost.gbitops * 1e9 == pytest.approx(5 * operations * (16 + 32 + 32), rel=1e-15)
        assert sum(layer.total for layer in cost.layers) == 5 * operations * 80  # exact, also of two traced samples
        assert cost.compute_percentage == pytest.approx(100 * 80 / 3072)


def test_only_products_with_a_weight(network):
    attention = Operation("a", "matmul", 1000, ProductShape(10, 10, 10), 1, 10, 200, 100, True, None)
    both = dataclasses.replace(network, operations=(*network.operations, attention))
    better = BitOps(convention="better")
    assert better.cost(both, {P4: 1}, P8).gbitops == better.cost(network, {P4: 1}, P8).gbitops
    added = BitOps().cost(both, {P4: 1}, P8).gbitops - BitOps().cost(network, {P4: 1}, P8).gbitops
    assert added * 1e9 == pytest.approx(1000 * (16 + 32 + 32))


def test_float_layers_at_the_bits_of_the_schedule(network):
    float32, schedule = (BitOps(convention=name).cost(network, {P4: 1}, P8) for name in ("actual", "better"))
    assert float32.layers[2].forward == LINEAR * 1024
    assert schedule.layers[2].forward == LINEAR * 16
    assert Zc706(convention="better").cost(network, {P4: 1}, P8).latency_layers[2].forward == LINEAR / (2 * 25.6e9)


def test_layers_on_the_array(network):
    full = BitFusion().cost(network, {P8: 1}, P8)
    fractrain = BitFusion(convention="fractrain", run_samples=PUBLISHED_IMAGES).cost(network, {P8: 1}, P8)
    assert [layer.name for layer in full.energy_layers] == ["0", "2", "5"]
    assert [layer.name for layer in fractrain.energy_layers] == ["0", "2"]


def test_fixed_bits_do_not_follow_the_schedule():
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 8, 1))
    from bitcycle.quantizer import Sbm

    network = trace(quantize_model(model, Sbm(depthwise_bits=[8, 16], float_layers=[])), torch.zeros(1, 3, 4, 4))
    for kind in (BitOps, BitFusion, Zc706):
        low, high = (kind(convention="fractrain").cost(network, {p: 1}, P8) for p in (P4, P8))
        assert low.layers[1] == high.layers[1]
        assert low.layers[0].total < high.layers[0].total
    assert network.operations[1].fixed_precision == Precision(8, 8, 16)


def test_every_convention_decides_every_rule():
    for convention in CONVENTIONS:
        options = BitOps(convention=convention)
        for rule in ("count", "images", "float_layers", "input_gradient"):
            assert options.rule(rule) == CONVENTIONS[convention][rule]
        assert BitOps(convention=convention, count="with_bn").rule("count") == "with_bn"


def test_all_stands_side_by_side(network):
    histogram = {P8: 3, P4: 5}
    cost = AllHardware(convention="cpt").cost(network, histogram, P8)
    assert list(cost.by_hardware) == ["bitops", "bitfusion", "zc706", "tensorcore"]
    for name, part in cost.by_hardware.items():
        assert part == HARDWARE[name](convention="cpt").cost(network, histogram, P8)
        assert part.gbitops == cost.gbitops
    summary = cost.summary()
    assert summary["bitfusion"]["energy_j"] > 0
    assert summary["energy_j"] is None
