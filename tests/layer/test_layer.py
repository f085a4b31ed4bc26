"""Quantized layers equal the released code; conversion follows a visible rule; the controller sets bits and counts cost."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
import torchvision
from torch import nn

import bitcycle
from bitcycle.layer import PrecisionState, QuantizedConv2d, QuantizedLinear, conversion_plan
from bitcycle.layer.conversion.plan import convertible_layers, has_signed_input, layer_roles
from bitcycle.model import MODELS, CifarMobileNetV2, CifarResNet
from bitcycle.precision import Precision
from bitcycle.quantizer import Dorefa, PactBinary, Sbm, SbmActivation, Ttq, UniformL2
from bitcycle.quantizer.dorefa import DorefaActivation
from bitcycle.settings import SettingError
from bitcycle.shapes import ImageShape
from tests.conftest import GOLDEN, golden_arrays

CONVOLUTIONS = json.loads((Path(GOLDEN) / "qconv.json").read_text())
DETERMINISTIC = Sbm(stochastic=False)


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("mode", ["gq", "ste"])
def test_convolution_equals_released_code(name, mode):
    case, golden = CONVOLUTIONS[name], golden_arrays("qconv")
    geometry = {key: case[key] for key in ("stride", "padding", "groups")}
    layer = QuantizedConv2d(
        case["in_channels"], case["out_channels"], case["kernel"], bias=False, quantizer=DETERMINISTIC, **geometry
    )
    layer.weight.data = golden[f"{name}__w"]
    layer.precision.set(Precision(case["num_bits"], case["num_bits"], case["num_grad_bits"] if mode == "gq" else 0))
    x = golden[f"{name}__x"].requires_grad_()
    y = layer(x)
    y.backward(golden[f"{name}__gy"])
    torch.testing.assert_close(y, golden[f"{name}__y"], rtol=0, atol=1e-6)
    torch.testing.assert_close(x.grad, golden[f"{name}__{mode}__gx"], rtol=0, atol=1e-6)
    torch.testing.assert_close(layer.weight.grad, golden[f"{name}__{mode}__gw"], rtol=0, atol=1e-6)


def released_name(key: str) -> str:
    """The released code's parameter name in ours."""
    key = key.replace("quantize_input", "activation_quantizer").replace("_layer0", ".0")
    for group in ("group2.0", "group3.0"):
        key = key.replace(f"{group}.downsample", f"{group}.shortcut.0").replace(f"{group}.bn3", f"{group}.shortcut.1")
    return key


@pytest.fixture(scope="module")
def tiny():
    golden = golden_arrays("tiny_resnet")
    model = bitcycle.quantize_model(CifarResNet((1, 1, 1), ImageShape(3, 32, 10), unused_bn=True), DETERMINISTIC)
    own = model.state_dict()
    state = {
        released_name(key.removeprefix("state__")): value for key, value in golden.items() if key.startswith("state__")
    }
    model.load_state_dict({key: value.view(own[key].shape) for key, value in state.items()})
    return golden, model


def set_bits(model: nn.Module, weight: int, activation: int, gradient: int) -> None:
    for module in model.modules():
        if isinstance(module, PrecisionState):
            module.set(Precision(weight, activation, gradient))


@pytest.mark.parametrize(("bits", "tolerance"), [(0, 1e-5), (3, 1e-5), (4, 1e-5), (8, 1e-3)])
def test_tiny_resnet_equals_released_code_in_evaluation(tiny, bits, tolerance):
    golden, model = tiny
    model = copy.deepcopy(model).eval()
    set_bits(model, bits, bits, 0)
    torch.testing.assert_close(model(golden["eval__x"]), golden[f"eval__b{bits}__logits"], rtol=0, atol=tolerance)
    torch.testing.assert_close(
        model.features(golden["eval__x"]), golden[f"eval__b{bits}__features"], rtol=0, atol=tolerance
    )


def test_tiny_resnet_equals_released_code_in_training(tiny):
    golden, model = tiny
    model = copy.deepcopy(model).train()
    set_bits(model, 4, 4, 0)
    logits = model(golden["train__x"])
    loss = nn.functional.cross_entropy(logits, golden["train__target"])
    loss.backward()
    torch.testing.assert_close(logits, golden["train__b4__logits"], rtol=0, atol=1e-5)
    torch.testing.assert_close(loss, golden["train__b4__loss"], rtol=0, atol=1e-6)
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    for key, value in golden.items():
        if key.startswith("train__b4__grad__"):
            gradient = parameters[released_name(key.removeprefix("train__b4__grad__"))].grad
            assert (gradient - value).norm() <= 1e-4 * value.norm(), key
        if key.startswith("train__b4__gradnorm__"):
            gradient = parameters[released_name(key.removeprefix("train__b4__gradnorm__"))].grad
            assert gradient.norm() == pytest.approx(value.item(), rel=1e-4), key
        if key.startswith("train__b4__after__"):
            buffer = buffers[released_name(key.removeprefix("train__b4__after__"))]
            torch.testing.assert_close(buffer, value.view(buffer.shape), rtol=1e-5, atol=1e-6)


def treatments(model: nn.Module, **options) -> dict[str, str]:
    return {rule.name: rule.treatment for rule in conversion_plan(model, Sbm(**options))}


def test_cifar_networks_leave_the_classifier_float():
    for model in (CifarResNet((1, 1, 1), ImageShape(3, 32, 10)), CifarMobileNetV2(ImageShape(3, 32, 10))):
        found = treatments(model)
        assert {name for name, treatment in found.items() if treatment == "float"} == {"fc"}


def test_other_networks_leave_first_last_and_shortcut_layers_float():
    found = treatments(torchvision.models.resnet18(weights=None))
    floats = {name for name, treatment in found.items() if treatment == "float"}
    assert floats == {"conv1", "fc", "layer2.0.downsample.0", "layer3.0.downsample.0", "layer4.0.downsample.0"}


def test_the_rule_is_a_setting():
    model = CifarResNet((1, 1, 1), ImageShape(3, 32, 10))
    floats = {
        name
        for name, treatment in treatments(model, float_layers=["first", "group3.*"]).items()
        if treatment == "float"
    }
    assert floats == {"conv1", "group3.0.conv1", "group3.0.conv2", "group3.0.shortcut.0"}
    with pytest.raises(SettingError, match=r"group1\.0\.conv1"):
        conversion_plan(model, Sbm(float_layers=["groop1.*"]))
    with pytest.raises(SettingError, match="would be quantized"):
        bitcycle.quantize_model(nn.Sequential(nn.ReLU()))


def test_depthwise_layers_can_have_fixed_bits():
    model = bitcycle.quantize_model(CifarMobileNetV2(ImageShape(3, 32, 10)), Sbm(depthwise_bits=[8, 16]))
    control = bitcycle.PrecisionController(model, bitcycle.schedule("CR", total_steps=10, cycles=1))
    control.step(0)
    depthwise, other = model.blocks[1].conv2.precision, model.blocks[1].conv1.precision
    assert depthwise.precision == Precision(8, 8, 16)
    assert other.precision == Precision(3, 3, 8)
    assert depthwise.gradient_bits == 16


def test_conversion_keeps_parameters_outputs_and_unknown_layers():
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=True), nn.Flatten(), nn.Linear(4 * 36, 5), nn.Linear(5, 2))
    x = torch.randn(2, 3, 8, 8)
    parameters, output = dict(model.named_parameters()), model(x)
    converted = bitcycle.quantize_model(model, float_layers=["last"])
    assert [type(layer) for layer in converted] == [QuantizedConv2d, nn.Flatten, QuantizedLinear, nn.Linear]
    assert all(parameter is parameters[name] for name, parameter in converted.named_parameters())
    set_bits(converted, 32, 32, 32)
    # quantizers put channels last, for which a CPU without AVX-512 adds a convolution's products in another order
    torch.testing.assert_close(converted(x), output, rtol=1e-6, atol=1e-6)
    set_bits(converted, 8, 8, 8)
    assert not torch.equal(converted(x), output)
    torch.testing.assert_close(converted(x), output, rtol=0.2, atol=0.05)


def test_a_layer_used_twice_is_converted_once_and_subclasses_are_left_alone():
    shared = nn.Linear(4, 4)
    model = nn.Sequential(nn.Linear(4, 4), shared, shared, nn.modules.linear.NonDynamicallyQuantizableLinear(4, 4))
    converted = bitcycle.quantize_model(model, float_layers=[])
    assert converted[1] is converted[2]
    assert type(converted[3]) is not QuantizedLinear


def test_a_model_that_is_one_layer():
    converted = bitcycle.quantize_model(nn.Linear(3, 2), float_layers=[])
    assert isinstance(converted, QuantizedLinear)


def test_copies_and_moves_keep_one_precision_for_all_layers():
    model = bitcycle.quantize_model(CifarResNet((1, 1, 1), ImageShape(3, 32, 10)))
    moved = copy.deepcopy(model).to(torch.float64).to("cpu")
    states = [module for module in moved.modules() if isinstance(module, PrecisionState)]
    assert len(states) == 1
    bitcycle.PrecisionController(moved, bitcycle.schedule("static", q_max=5, total_steps=1)).step(0)
    assert moved.group3[0].conv2.precision.weight_bits == 5
    assert model.group3[0].conv2.precision.weight_bits == 8


def test_a_state_dict_has_ranges_and_once_the_bits():
    plain = CifarResNet((1, 1, 1), ImageShape(3, 32, 10))
    names = set(plain.state_dict())
    added = [name.rsplit(".", 1)[1] for name in bitcycle.quantize_model(plain).state_dict() if name not in names]
    assert set(added) == {"running_zero_point", "running_range", "running_weight", "bits"}
    assert added.count("bits") == 1


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(2 * 36, 3))


def test_controller_counts_a_hand_computed_cost():
    model = bitcycle.quantize_model(small_model(), float_layers=[])
    sched = bitcycle.schedule("LR", q_min=2, q_max=4, cycles=1, total_steps=3)
    control = bitcycle.PrecisionController(model, sched)
    with pytest.raises(RuntimeError, match="train one step first"):
        control.cost()
    for step in range(3):
        control.step(step)
        model(torch.randn(5, 1, 8, 8)).sum().backward()
        with torch.no_grad():
            model.eval()(torch.randn(7, 1, 8, 8))  # evaluation is not counted
        model.train()
    convolution, linear = 36 * 2 * 9, 72 * 3  # multiply-accumulates of one sample
    bits = [precision.weight for precision in (sched(0), sched(1), sched(2))]
    assert bits == [2, 3, 4]
    # The convolution reads the network's input: its error product is never computed.
    expected = sum(5 * (convolution * (q * q + 4 * q) + linear * (q * q + 2 * 4 * q)) for q in bits)
    static = 15 * (convolution * 32 + linear * 48)
    cost = control.cost()
    assert cost.samples == 15
    assert cost.gbitops == pytest.approx(expected * 1e-9, rel=1e-15)
    assert cost.effective_macs == pytest.approx(expected / 1024, rel=1e-15)
    assert cost.relative_to_static == pytest.approx(expected / static, rel=1e-15)


def test_controller_changes_bits_and_noise():
    model = bitcycle.quantize_model(small_model(), float_layers=[])
    x = torch.randn(5, 1, 8, 8)

    def gradient(seed: int, step: int) -> torch.Tensor:
        control = bitcycle.PrecisionController(model, bitcycle.schedule("static", q_max=3, total_steps=10), seed=seed)
        control.step(step)
        model.zero_grad()
        model(x).square().sum().backward()
        return model[0].weight.grad.clone()

    assert torch.equal(gradient(0, 0), gradient(0, 0))
    assert not torch.equal(gradient(0, 0), gradient(0, 1))
    assert not torch.equal(gradient(0, 0), gradient(1, 0))


@pytest.mark.parametrize("name", ["resnet8", "mobilenet_v2", "resnet18", "resnet50"])
def test_models_say_which_layers_do_not_read_the_output_of_a_relu(name):
    """Quantizers that begin at 0 would cut these inputs off."""
    size = 64 if name in ("resnet18", "resnet50") else 16
    torch.manual_seed(0)
    model = MODELS[name]().build(ImageShape(3, size, 10)).train()
    roles, negative, handles = layer_roles(model), set(), []
    for layer_name, layer in convertible_layers(model).items():

        def look(_module, inputs, layer_name=layer_name):
            if inputs[0].min() < 0:
                negative.add(layer_name)

        handles.append(layer.register_forward_pre_hook(look))
    model(torch.randn(4, 3, size, size))
    for handle in handles:
        handle.remove()
    assert negative == {layer_name for layer_name in roles if has_signed_input(model, layer_name, roles[layer_name])}
    converted = bitcycle.quantize_model(model, "dorefa")
    for layer_name, layer in converted.named_modules():
        if isinstance(layer, QuantizedConv2d):
            expected = SbmActivation if layer_name in negative else DorefaActivation
            assert type(layer.activation_quantizer) is expected, layer_name


def test_quantizers_have_rules_of_their_own_for_float_layers():
    model = CifarResNet((1, 1, 1), ImageShape(3, 32, 10))

    def floats(options) -> set[str]:
        return {rule.name for rule in conversion_plan(model, options) if rule.treatment == "float"}

    shortcuts = {"group2.0.shortcut.0", "group3.0.shortcut.0"}
    assert floats(PactBinary()) == {"conv1", "fc", *shortcuts}
    assert floats(PactBinary(float_layers=["last", "first"])) == {"conv1", "fc"}
    assert floats(UniformL2()) == set()
    assert floats(Ttq()) == {"conv1", "fc"}
    assert floats(Dorefa()) == {"fc"}


@pytest.mark.parametrize("quantizer", ["sbm", "dorefa", "wageubn"])
def test_an_in_place_relu_may_follow_a_layer(quantizer):
    """As in torchvision's AlexNet and VGG, which have no batch norm in between: the same numbers as with a ReLU of its own."""
    gradients = []
    for inplace in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.ReLU(inplace), nn.Conv2d(4, 4, 3), nn.ReLU(inplace), nn.Flatten(), nn.Linear(64, 2)
        )
        model = bitcycle.quantize_model(model, quantizer, float_layers=[])
        model(torch.linspace(-1, 1, 2 * 3 * 64).reshape(2, 3, 8, 8)).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*gradients, strict=True))


def test_materializing_keeps_the_bits_or_is_refused():
    """`to_empty` left arbitrary numbers of bits and noise keys."""
    model = bitcycle.quantize_model(nn.Linear(2, 2), float_layers=[])
    key = model.layer_key.clone()
    model.to_empty(device="cpu")
    assert model.precision.weight_bits == 8 and torch.equal(model.layer_key, key)
    with torch.device("meta"):
        plain = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="materialize the float model"):
        bitcycle.quantize_model(plain, float_layers=[]).to_empty(device="cpu")
    with pytest.raises(RuntimeError, match="materialize the float model"):
        bitcycle.quantize_model(plain, float_layers=[]).load_state_dict(nn.Linear(2, 2).state_dict(), assign=True)


UNIT = pytest.param(UniformL2(activation_levels="unit"), id="uniform_l2, unit levels")


@pytest.mark.parametrize("quantizer", ["pact_binary", "uniform_l2", UNIT, "ternary", "multibit"])
def test_float_inputs_leave_out_a_quantizer_that_would_return_them(quantizer, monkeypatch):
    torch.manual_seed(0)
    layer = QuantizedConv2d(16, 16, 3, quantizer=quantizer).to(memory_format=torch.channels_last)
    x = torch.rand(2, 16, 6, 6).contiguous(memory_format=torch.channels_last).requires_grad_()
    layer.precision.set(Precision(32 if quantizer == "pact_binary" else 2, 32, 32))
    results = []
    for left_out in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(
                layer.activation_quantizer, *(("forward", None) if left_out else ("at_float", lambda x: None))
            )
            y = layer(x)
        operands = x, layer.weight, *layer.activation_quantizer.parameters()
        results.append((y, *torch.autograd.grad(y.square().sum(), operands)))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
