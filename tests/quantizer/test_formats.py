"""Number formats: bit-exact microscaling, FP8 as PyTorch casts, NVFP4 by its definition, and one copy for each product."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import bitcycle
from bitcycle.quantizer import QUANTIZERS, fp8, nvfp4, quantize_mx
from bitcycle.quantizer.format import ELEMENTS, elements_by_bits, round_to_element
from bitcycle.quantizer.mx import FORMATS
from bitcycle.schedule import SUITE
from bitcycle.settings import SettingError
from tests.conftest import ROOT, golden_arrays

ALL_GOLDEN = ROOT.parent / "shared" / "reference" / "golden-mx" / "mx.npz"


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def check_golden(arrays: dict[str, Tensor]) -> int:
    cases = [key.split("__") for key in arrays if not key.endswith("__x")]
    for case, element, rounding in cases:
        x, expected = arrays[f"{case}__x"], arrays[f"{case}__{element}__{rounding}"]
        y = quantize_mx(x, element=element, rounding=rounding, block=32, dim=1 if x.dim() == 4 else -1)
        assert torch.equal(y, expected), (case, element, rounding)
    return len(cases)


@pytest.mark.golden
def test_mx_equals_the_emulation_library_bit_for_bit():
    assert check_golden(golden_arrays("mx")) == 4 * 7 * 2


@pytest.mark.skipif(not ALL_GOLDEN.is_file(), reason="the full golden data of MX formats are not on this machine")
def test_mx_equals_the_emulation_library_in_all_cases():
    with np.load(ALL_GOLDEN) as arrays:
        assert check_golden({key: torch.from_numpy(arrays[key]) for key in arrays.files}) == 14 * 14


def grid(name: str) -> list[float]:
    """Every non-negative value of a format, from its definition: m + 1 bits in each binade, the lowest with denormals."""
    _, mantissa, lowest, highest, largest = ELEMENTS[name]
    steps = range(2 ** (mantissa + 1))
    values = {step * 2.0 ** (exponent - mantissa) for exponent in range(lowest, highest + 1) for step in steps}
    return sorted(value for value in values if value <= largest)


def row(name: str) -> Tensor:
    element = ELEMENTS[name]
    return elements_by_bits({element.bits: element})[element.bits]


@pytest.mark.parametrize("name", ELEMENTS)
def test_elements_are_the_nearest_values_of_their_grid(name):
    values = torch.tensor(grid(name), dtype=torch.float64)
    x = torch.cat([random(300) * values[-1] / 2, values.float(), (values[1:] + values[:-1]).float() / 2])
    found = round_to_element(x, row(name))
    distance = (values - x.abs().double()[:, None]).abs()
    assert torch.equal((found.double().abs() - x.abs().double()).abs(), distance.amin(1))
    is_tie = (distance == distance.amin(1, keepdim=True)).sum(1) > 1
    codes = torch.searchsorted(values, found.double().abs())
    assert is_tie.any()
    assert (codes[is_tie] % 2 == 0).all()  # to even
    assert len(values) == {4: 8, 6: 32, 8: 128}[ELEMENTS[name].bits] - {"e4m3": 1, "e5m2": 4}.get(name, 0)


@pytest.mark.parametrize(("name", "kind"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_fp8_elements_equal_the_casts_of_pytorch(name, kind):
    every = torch.arange(256, dtype=torch.uint8).view(kind).float()
    finite = every[every.isfinite()]
    x = torch.cat([finite, random(20_000) * 10.0 ** (5 * torch.rand(20_000, generator=torch.manual_seed(1)) - 4)])
    largest = ELEMENTS[name].largest
    inside = x[x.abs() <= largest]
    assert torch.equal(round_to_element(inside, row(name)), inside.to(kind).float())
    special = round_to_element(torch.tensor([math.inf, -math.inf, math.nan, 1e30, -0.0]), row(name))
    assert special[:2].tolist() == [largest, -largest]
    assert special[2].isnan()
    assert special[3:].tolist() == [largest, 0]


def test_blocks_with_nan_or_infinity_are_nan_and_others_are_not():
    x = random(1, 64)
    for value in (math.nan, math.inf):
        x[0, 3] = value
        for y in (quantize_mx(x, "mxfp6_e2m3"), bitcycle.quantize(x, 4, quantizer="nvfp4", role="weight")):
            assert y[0, :16].isnan().all()
            assert y[0, 32:].isfinite().all()
    y = bitcycle.quantize(torch.tensor([[math.inf, math.nan, 2.0, -1.0]]), 8, quantizer="fp8", role="weight")
    assert y[0, 0] == 2  # the largest finite value
    assert y[0, 1].isnan()
    assert y[0, 2:].tolist() == [2, -1]


@pytest.mark.parametrize("scale", [1e-40, 1e-38, 1e-20, 1.0, 1e30])
def test_nvfp4_is_what_its_definition_says(scale):
    x = random(3, 40).double() * 10.0 ** (3 * random(3, 1, seed=1).double())
    x[1] *= 1e-9  # its blocks have scales that round to zero
    x = (x * scale).clamp(-3e38, 3e38).float()
    y = bitcycle.quantize(x, 4, quantizer="nvfp4", role="weight")
    of_tensor = x.abs().max() / (6 * 448)
    expected = torch.zeros_like(x)
    for i in range(3):
        for first in range(0, 40, 16):
            block = x[i, first : first + 16]
            of_block = (block.abs().max() / 6 / of_tensor).to(torch.float8_e4m3fn).float()
            step = of_block * of_tensor
            if step > 0:
                lift = 2.0**64 if of_tensor < 2.0**-64 else 1.0
                inverse = 1 / (of_tensor * lift) / of_block
                expected[i, first : first + 16] = step * round_to_element(block * lift * inverse, row("e2m1"))
    if of_tensor == 0:
        assert not y.any()
    else:
        assert torch.equal(y, expected)


@pytest.mark.golden
def test_nvfp4_equals_torchao_bit_for_bit():
    """Elements were divided by the product of both scales, which decides ties in another way."""
    arrays = golden_arrays("nvfp4")
    for case in ("integers", "relu", "normal", "tiny"):
        x, expected = arrays[case], arrays[f"{case}_quantized"]
        assert torch.equal(bitcycle.quantize(x, 4, quantizer="nvfp4", role="weight"), expected), case
        blocks = nvfp4.quantize_blocks(x.view(-1, 16, 1), row("e2m1"), torch.tensor(4))
        assert torch.equal(blocks.view_as(x), expected), case


@pytest.mark.parametrize("case", ["integers", "relu", "wide"])
def test_nvfp4_equals_torchao_on_a_million_values(case):
    source = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    x = random(4096, 256)
    x = {
        "integers": (4 * x).round(),
        "relu": x.relu().bfloat16().float(),
        "wide": x * torch.linspace(0, 20, 4096)[:, None].exp2(),
    }[case]
    theirs = source.NVFP4Tensor.to_nvfp4(x, per_tensor_scale=source.per_tensor_amax_to_scale(x.abs().max()))
    ours = bitcycle.quantize(x, 4, quantizer="nvfp4", role="weight")
    alike = theirs.scale.float().view(4096, 16, 1).expand(-1, -1, 16).reshape(x.shape) > 2.0**-6  # theirs go no lower
    assert torch.equal(ours[alike], theirs.dequantize(torch.float32)[alike])
    assert alike.float().mean() > 0.5


@pytest.mark.parametrize("name", ["mxfp4_e2m1", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "mxfp8_e5m2"])
def test_mx_equals_torchao_bit_for_bit(name):
    source = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    elements = {
        "mxfp4_e2m1": torch.float4_e2m1fn_x2,
        "mxfp8_e4m3": torch.float8_e4m3fn,
        "mxfp8_e5m2": torch.float8_e5m2,
    }
    x = random(4096, 256) * torch.linspace(-30, 30, 4096)[:, None].exp2()
    theirs = source.MXTensor.to_mx(x, elements.get(name, name.removeprefix("mx")), 32).dequantize(torch.float32)
    assert torch.equal(quantize_mx(x, name), theirs)


def test_delayed_scaling_uses_the_last_calls_and_evaluation_changes_nothing(monkeypatch):
    monkeypatch.setattr(fp8, "HISTORY", 2)
    quantizer, bits = QUANTIZERS["fp8"]().activation(False), torch.tensor(8)
    for large, expected in ((4.0, 4.0), (8.0, 4.0), (1.0, 1.0), (1.0, 1.0), (9.0, 1.0)):
        assert quantizer(torch.tensor([large, 0.5]), bits)[0] == expected  # saturates at the largest of the last two
    quantizer.eval()
    before = quantizer.history.clone()
    assert quantizer(torch.tensor([100.0]), bits) == 9
    quantizer.train()
    quantizer(torch.tensor([50.0]), torch.tensor(0))
    assert torch.equal(quantizer.history, before)
    current = QUANTIZERS["fp8"](scaling="current").activation(False)
    assert current(torch.tensor([50.0]), bits) == 50


@pytest.mark.parametrize("scaling", ["current", "delayed"])
def test_the_input_sequence_of_a_recurrent_layer_is_one_fp8_tensor(scaling):
    x = random(5, 3, 4) * torch.tensor([1.0, 30, 0.1, 5, 2]).view(5, 1, 1)
    whole, sequence = (QUANTIZERS["fp8"](scaling=scaling).activation(False) for _ in range(2))
    bits = torch.tensor(8)
    assert torch.equal(sequence.quantize_sequence(x, bits), whole(x, bits))
    assert torch.equal(sequence.history, whole.history)


@settings(max_examples=10)
@given(seed=st.integers(0, 1000), element=st.sampled_from(["mxfp4_e2m1", "mxfp8_e5m2"]))
def test_stochastic_rounding_is_unbiased_where_nothing_saturates(seed, element):
    x = random(1, 32, seed=seed).clamp(-1.4, 1.4)
    x[0, 0] = 1.5  # the largest value of both formats in this binade: nothing saturates
    draws = torch.stack([quantize_mx(x.repeat(100, 1), element, "stochastic", seed=key) for key in range(30)])
    step = (quantize_mx(x, element) - x).abs().amax().item() * 2
    assert ((draws.double().mean((0, 1)) - x[0]).abs() < 0.06 * max(step, 0.25)).all()
    assert torch.equal(quantize_mx(x, element, "stochastic", seed=3), quantize_mx(x, element, "stochastic", seed=3))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"element": "mxfp4_e2"}, "did you mean 'mxfp4_e2m1'"),
        ({"rounding": "up"}, "even, nearest, stochastic"),
        ({"block": 0}, "use 32"),
    ],
)
def test_what_quantize_mx_refuses(arguments, words):
    with pytest.raises(SettingError, match=words):
        quantize_mx(torch.ones(4), **arguments)


def test_tensors_of_any_shape_and_type():
    for shape in ((0, 5), (5,), (), (2, 3, 40), (2, 5, 3, 3), (1, 2, 3, 4, 40)):
        x = random(*shape)
        for dim in range(-len(shape), len(shape)):
            y = quantize_mx(x, dim=dim)
            assert y.shape == x.shape
            if x.numel():
                expected = quantize_mx(x.movedim(dim, -1).contiguous().view(-1, x.shape[dim]))
                assert torch.equal(y.movedim(dim, -1).reshape(-1), expected.reshape(-1))
    assert quantize_mx(random(3, 4).bfloat16()).dtype == torch.bfloat16


def test_bits_without_a_format_are_refused_with_those_that_have_one():
    with pytest.raises(SettingError, match="to 4, 6 or 8 bits, not to 5"):
        bitcycle.quantize(random(2, 3), 5, quantizer="mx")
    with pytest.raises(SettingError, match="to 4 bits, not to 8"):
        bitcycle.quantize(random(2, 3), 8, quantizer="nvfp4")
    mx = QUANTIZERS["mx"]
    with pytest.raises(SettingError, match="two of the same width"):
        mx(forward_formats=["mxfp8_e4m3", "mxint8"])
    with pytest.raises(SettingError, match="mxfp4_e2m1"):
        mx(gradient_formats=["mxfp4"])


def linear(quantizer: object, features: int = 40) -> nn.Module:
    return bitcycle.quantize_model(nn.Linear(features, 20), quantizer, float_layers=[])  # type: ignore[arg-type]


def test_the_ends_of_a_schedule_must_be_formats_and_steps_between_take_the_next_wider_one():
    for ends in ({"q_min": 3, "q_max": 8}, {"q_min": 4, "q_max": 7}, {"q_min": 5, "q_max": 8}):
        with pytest.raises(SettingError, match="4, 6 or 8 bits"):
            bitcycle.PrecisionController(linear("mx"), bitcycle.schedule("RTH", total_steps=100, cycles=2, **ends))
    with pytest.raises(SettingError, match="4, 6 or 8 bits"):
        bitcycle.PrecisionController(linear("mx"), bitcycle.schedule("static", q_max=5, total_steps=100))
    model = linear("mx")
    control = bitcycle.PrecisionController(model, bitcycle.schedule("CR", total_steps=100, cycles=2, q_min=4, q_max=8))
    x, found = random(3, 40), {}
    for t in range(100):
        bits = control.step(t).weight
        if bits not in found:
            found[bits] = model(x)
    assert set(found) == {4, 5, 6, 7, 8}
    assert torch.equal(found[5], found[6])
    assert torch.equal(found[7], found[8])
    assert not torch.equal(found[4], found[6])
    strict, schedule = linear(QUANTIZERS["mx"](between="refuse")), bitcycle.schedule("CR", total_steps=100, q_min=4)
    with pytest.raises(SettingError, match="not to 5"):
        bitcycle.PrecisionController(strict, schedule)


def test_other_formats_can_be_chosen_for_the_same_bits():
    options = QUANTIZERS["mx"](forward_formats=["mxfp6_e3m2", "mxint8"], gradient_formats=["mxfp8_e4m3"])
    assert (options.bits("weight"), options.bits("gradient")) == ([6, 8], [8])
    x = random(2, 64)
    for bits, element in ((6, "mxfp6_e3m2"), (8, "mxint8")):
        assert torch.equal(bitcycle.quantize(x, bits, quantizer=options, role="weight"), quantize_mx(x, element))
    found = bitcycle.quantize(x, 8, quantizer=options, role="gradient", stochastic=False)
    assert torch.equal(found, quantize_mx(x, "mxfp8_e4m3"))


@pytest.mark.parametrize("name", SUITE)
def test_the_ten_schedules_run_between_mxfp4_and_mxfp8(name):
    model = linear("mx")
    control = bitcycle.PrecisionController(model, bitcycle.schedule(name, q_min=4, q_max=8, cycles=2, total_steps=20))
    for t in range(20):
        control.step(t)
        model(random(4, 40, seed=t)).square().sum().backward()
    assert model.weight.grad.isfinite().all()
    assert control.cost().relative_to_static < 1


def test_a_recurrent_layer_trains_in_formats():
    for name, bits in (("mx", 4), ("nvfp4", 4), ("fp8", 8)):
        model = bitcycle.quantize_model(nn.LSTM(12, 20, bidirectional=True), name, float_layers=[])
        control = bitcycle.PrecisionController(model, bitcycle.schedule("static", q_max=bits, total_steps=3))
        control.step(0)
        x = random(5, 6, 12).requires_grad_()
        model(x)[0].square().sum().backward()
        plain = nn.LSTM(12, 20, bidirectional=True)
        plain.load_state_dict(model.state_dict(), strict=False)
        other = x.detach().clone().requires_grad_()
        plain(other)[0].square().sum().backward()
        error = (x.grad - other.grad).norm() / other.grad.norm()
        assert 0 < error < 0.5
        cosine = F.cosine_similarity(model.weight_hh_l0.grad.flatten(), plain.weight_hh_l0.grad.flatten(), 0)
        assert cosine > 0.85


def test_costs_count_the_share_of_the_scale():
    for name, bits, expected in (("mx", 4, 4.25), ("mx", 6, 6.25), ("mx", 8, 8.25), ("nvfp4", 4, 4.5), ("fp8", 8, 8)):
        model = linear(name)
        control = bitcycle.PrecisionController(model, bitcycle.schedule("static", q_max=bits, total_steps=2))
        control.step(0)
        model(random(1, 40))  # forward and weight gradient; an input without a gradient has no error product
        assert control.cost().gbitops == pytest.approx(2 * 40 * 20 * expected**2 / 1e9)
    model = linear("mx")
    control = bitcycle.PrecisionController(model, bitcycle.schedule("LT", q_min=4, q_max=8, cycles=2, total_steps=8))
    counted = 0.0
    for t in range(8):
        bits = control.step(t).weight
        width = {4: 4.25, 5: 6.25, 6: 6.25, 7: 8.25, 8: 8.25}[bits]
        counted += 40 * 20 * (width * width + width * 8.25) / 1e9
        model(random(1, 40))
    assert control.cost().gbitops == pytest.approx(counted)


def test_every_format_has_its_name():
    assert list(FORMATS) == [
        "mxfp4_e2m1", "mxint4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "mxfp8_e5m2", "mxint8",
    ]  # fmt: skip
