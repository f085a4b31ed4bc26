"""Bits of single layers apart from the schedule."""

import json

import pytest
import torch
from torch import nn

import bitcycle
from bitcycle.layer import QuantizedProduct
from bitcycle.precision import Precision
from bitcycle.quantizer.sbm import Sbm
from bitcycle.settings import SettingError
from bitcycle.training.naming import run_hash
from tests.conftest import configure
from tests.gate_cases import gated, images, resnet


def network():
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(6)]
    return nn.Sequential(layers[0], nn.Sequential(*layers[1:3]), nn.ModuleDict({"mlp": layers[3]})["mlp"], *layers[4:])


def bits_of(model):
    return {
        name: module.precision.precision
        for name, module in model.named_modules()
        if isinstance(module, QuantizedProduct)
    }


def all_at(bits):
    return Precision(bits, bits, bits)


@pytest.mark.parametrize(
    ("entry", "precision"), [(5, (5, 5, 5)), ([4, 8], (4, 4, 8)), ([2, 3, 4], (2, 3, 4)), ((6,), (6, 6, 6))]
)
def test_bits_apart_from_the_schedule(entry, precision):
    model = bitcycle.quantize_model(network(), layer_bits={"1.*": entry})
    control = bitcycle.PrecisionController(model, bitcycle.schedule("static", q_max=7, total_steps=2))
    control.step(0)
    assert bits_of(model) == {"1.0": precision, "1.1": precision, "2": all_at(7), "3": all_at(7)}
    control.use((3, 3, 8))
    assert bits_of(model)["1.0"] == precision and bits_of(model)["2"] == (3, 3, 8)


def test_the_numbers_are_those_of_a_network_at_these_bits():
    torch.manual_seed(1)
    x, (apart, plain) = torch.randn(4, 8), (network(), network())
    apart = bitcycle.quantize_model(apart, float_layers=[], layer_bits={"1": 3})
    plain = bitcycle.quantize_model(plain, float_layers=[])
    for name, bits in (("0", 8), ("1", 3), ("2", 8)):
        state = next(module for module in plain.modules() if isinstance(module, bitcycle.layer.PrecisionState))
        state.set(all_at(bits))
        assert torch.equal(apart.get_submodule(name)(x), plain.get_submodule(name)(x))


def test_the_most_specific_entry_applies_in_whatever_order():
    entries = {"*": 2, "1": 3, "1.*": 4, "1.1": 5, "first": 6, "last": 7}
    expected = {"0": 2, "1.0": 4, "1.1": 5, "2": 2, "3": 2, "4": 2}
    for order in (entries, dict(reversed(entries.items()))):
        assert bits_of(bitcycle.quantize_model(network(), layer_bits=order)) == {
            name: all_at(bits) for name, bits in expected.items()
        }


def test_layers_that_would_be_float_by_default_are_quantized():
    model = bitcycle.quantize_model(network(), layer_bits={"first": 8, "last": "schedule"})
    control = bitcycle.PrecisionController(model, bitcycle.schedule("static", q_max=4, total_steps=2))
    control.step(0)
    assert bits_of(model)["0"] == all_at(8) and bits_of(model)["4"] == all_at(4)


def test_a_layer_listed_as_float_stays_float():
    model = bitcycle.quantize_model(network(), float_layers=["first", "2"], layer_bits={"*": 5})
    assert bits_of(model) == dict.fromkeys(("1.0", "1.1", "3", "4"), all_at(5))
    model = bitcycle.quantize_model(network(), float_layers=[], layer_bits={"1": 32})
    assert set(bits_of(model)) == {"0", "2", "3", "4"}


@pytest.mark.parametrize("wrong", [0, 33, "8", [8, 8, 8, 8], [], True, None, 4.5, {"weight": 8}])
def test_what_is_no_precision_is_refused(wrong):
    with pytest.raises(SettingError, match=r"layer_bits=.*first: .* is not a precision"):
        bitcycle.quantize_model(network(), layer_bits={"first": wrong})


def test_entries_that_match_nothing_and_bits_that_a_quantizer_lacks_are_refused():
    with pytest.raises(SettingError, match="layer_bits=7: is neither a role nor matches a layer"):
        bitcycle.quantize_model(network(), layer_bits={"7": 8})
    with pytest.raises(SettingError, match="quantizes weights to 2 bits, not to 8"):
        bitcycle.quantize_model(network(), "ternary", layer_bits={"first": 8})


def test_costs_count_the_bits_of_each_layer():
    x = torch.randn(2, 8)
    model = bitcycle.quantize_model(network(), float_layers=[], layer_bits={"1.0": [4, 8], "last": [2, 6, 8]})
    control = bitcycle.PrecisionController(model, bitcycle.schedule("static", q_max=8, total_steps=1))
    control.step(0)
    model(x).sum().backward()
    macs, whole = 2 * 64 / 1e9, {}
    operations = {operation.name: operation for operation in control.meter.workload.operations}
    for name, precision in bits_of(model).items():
        whole[name] = operations[name].precision(all_at(8))
        assert whole[name] == precision
    # forward w a, error product w g (not of the first layer), weight gradient a g
    bit_operations = sum(
        p.weight * p.activation + p.activation * p.gradient + p.weight * p.gradient * (name != "0")
        for name, p in whole.items()
    )
    assert control.cost().gbitops == pytest.approx(macs * bit_operations / 1, rel=1e-6)


def test_a_report_names_the_rule():
    model = bitcycle.quantize_model(network(), layer_bits={"first": 8, "1": [4, 8]})
    report = bitcycle.conversion_report(model)
    assert "8/8/8, layer_bits: first" in str(report) and "4/4/8, layer_bits: 1" in str(report)


def test_gated_networks_keep_the_bits_of_single_layers():
    """Their choices do not change them, and cost follows."""
    x = images()
    found = {}
    for bits in (None, {"group1.0.conv1": 3}, {"group1.0.conv1": 8}):
        model, control = gated(resnet(), Sbm(layer_bits=bits, stochastic=False))
        control.step(1, samples=len(x))
        model(x).sum().backward()
        layer = model.get_submodule("group1.0.block.conv1")
        before = layer.precision.precision
        with control.at_q_max():
            assert (layer.precision.precision == before) == (bits is not None)
        found[str(bits)] = control.cost().gbitops
    assert len(set(found.values())) == 3


def test_state_dicts_and_files_of_integers_keep_the_bits(tmp_path):
    bits = {"1": 4, "last": 8}
    models = [bitcycle.quantize_model(network(), float_layers=[], layer_bits=bits) for _ in range(2)]
    x = torch.randn(4, 8)
    models[0](x)
    models[1].load_state_dict(models[0].state_dict())
    assert torch.equal(models[0].eval()(x), models[1].eval()(x))
    bitcycle.finalize(models[0], bits=6, path=tmp_path / "model.safetensors")
    loaded = bitcycle.load_finalized(models[1], tmp_path / "model.safetensors")
    assert len(loaded.get_submodule("1.0").weight[0].unique()) <= 16
    for state in {module for module in models[0].modules() if isinstance(module, bitcycle.layer.PrecisionState)}:
        if not state.fixed:
            state.set(Precision(6, 6, 32))
    torch.testing.assert_close(loaded(x), models[0](x))


def test_the_command_line_has_it_too():
    from bitcycle.training.plan import make_plan

    words = ("dataset=digits", "model=resnet8", "scale=smoke")
    layer_bits = "quantizer.layer_bits={first: 8, group3.*: [4,8]}"
    plain, apart = configure(*words), configure(*words, layer_bits)
    assert apart.quantizer.layer_bits == {"first": 8, "group3.*": [4, 8]}
    assert run_hash(plain) != run_hash(apart)
    assert run_hash(apart) == run_hash(configure(*words, "quantizer.layer_bits={group3.*: [4,8], first: 8}"))
    layers = {rule.name: rule for rule in make_plan(apart).layers}
    assert {rule.precision for name, rule in layers.items() if name.startswith("group3.")} == {Precision(4, 4, 8)}
    assert make_plan(apart).cost().gbitops < make_plan(plain).cost().gbitops


def test_transformers_models_remember_it(tmp_path):
    transformers = pytest.importorskip("transformers")
    import bitcycle.integrations.transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=50, **sizes))
    model = bitcycle.quantize_model(model, layer_bits={"*attention*": 8, "*.output.dense": [4, 8], "last": "schedule"})
    for state in {module for module in model.modules() if isinstance(module, bitcycle.layer.PrecisionState)}:
        if not state.fixed:
            state.set(Precision(5, 5, 8))
    model.save_pretrained(tmp_path)
    json.loads((tmp_path / "config.json").read_text())
    found = type(model).from_pretrained(tmp_path)
    assert bits_of(found) == bits_of(model) and len(set(bits_of(model).values())) == 3
