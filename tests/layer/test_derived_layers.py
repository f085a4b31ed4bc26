"""Classes derived from PyTorch's layers, and the last layer of networks whose layers cannot all be converted."""

import copy
import logging
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitcycle
from bitcycle import distributed
from bitcycle.layer import QuantizedLayer, carry_quantized
from bitcycle.precision import Precision
from bitcycle.settings import SettingError


class Reordered(nn.Linear):
    """As Falcon's: the product first, then the bias."""

    def forward(self, input):
        hidden = input @ self.weight.T
        return hidden if self.bias is None else hidden + self.bias


class Named(nn.Conv2d):
    """Changes nothing."""


class Padded(nn.Conv2d):
    def forward(self, x):
        return super().forward(F.pad(x, (1, 1, 1, 1)))


class Scaled(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight / 2, self.bias)


class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(F.dropout(x, 0.5, self.training))


class Adapted(nn.Linear):
    """A low-rank adapter whose second factor is zero at first."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.down, self.up = nn.Parameter(torch.randn(1, sizes[0])), nn.Parameter(torch.zeros(sizes[1], 1))

    def forward(self, x):
        return super().forward(x) + x @ self.down.T @ self.up.T


class Constrained(nn.Linear):
    """Limits the norms of its weights, which its initial weights keep to."""

    def forward(self, x):
        self.weight.data = torch.renorm(self.weight.data, 2, 0, 10.0)
        return super().forward(x)


class ConstrainedLater(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        self.weight.data.clamp_(-2, 2)
        return y


class Clipped(nn.Linear):
    def forward(self, x):
        return F.linear(x.clamp(-6, 6), self.weight, self.bias)


class ClippedWeight(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.clamp(-2, 2), self.bias)


class ClippedBias(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight, self.bias.clamp(-9, 9))


class ClippedInTraining(nn.Linear):
    def forward(self, x):
        return super().forward(x.clamp(-6, 6) if self.training else x)


class Thresholded(nn.Linear):
    def forward(self, x):
        return super().forward(F.hardshrink(x, 0.01))


class TwoInputs(nn.Linear):
    def forward(self, x, scale):
        return super().forward(x) * scale


class OptionalInput(nn.Linear):
    """Linear without its second input, which a converted layer would take for a bias."""

    def forward(self, x, scale=None):
        return super().forward(x) if scale is None else super().forward(x) * scale


class Gathering(nn.Linear):
    """Its method would be missing in the converted layer."""

    def gather(self):
        return self.weight


@pytest.mark.parametrize("bias", [True, False])
def test_a_class_that_only_changes_the_order_is_converted(bias):
    torch.manual_seed(0)
    derived, plain = Reordered(6, 5, bias=bias), nn.Linear(6, 5, bias=bias)
    plain.load_state_dict(derived.state_dict())
    state = torch.get_rng_state()
    models = [bitcycle.quantize_model(nn.Sequential(layer), float_layers=[]) for layer in (derived, plain)]
    assert torch.equal(state, torch.get_rng_state())
    x = torch.randn(3, 6)
    assert isinstance(models[0][0], QuantizedLayer) and torch.equal(models[0](x), models[1](x))
    assert bitcycle.conversion_report(models[0], x).rows[0].kind == "Reordered"


def test_a_class_that_changes_nothing_is_converted():
    assert isinstance(bitcycle.quantize_model(nn.Sequential(Named(3, 4, 3)), float_layers=[])[0], QuantizedLayer)


class Masked(nn.Linear):
    """Its weights of zero would not stay zero when quantized."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("mask", torch.ones(sizes[::-1]).tril())

    def forward(self, x):
        self.weight.data *= self.mask
        return super().forward(x)


class Twice(nn.Linear):
    def forward(self, x):
        return super().forward(super().forward(x))


class Normalized(nn.Conv2d):
    """As detectron2's, with normalization and activation of its own."""

    def __init__(self, *sizes):
        super().__init__(*sizes, bias=False)
        self.norm = nn.BatchNorm2d(sizes[1])

    def forward(self, x):
        y = F.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)
        return F.relu(self.norm(y))


class PaddedWithModule(nn.Conv2d):
    """As efficientnet_pytorch's."""

    def __init__(self, *sizes):
        super().__init__(*sizes, stride=2)
        self.static_padding = nn.ZeroPad2d((0, 1, 0, 1))

    def forward(self, x):
        return self._conv_forward(self.static_padding(x), self.weight, self.bias)


class MaskedInForward(Masked):
    """As those of autoregressive networks."""

    def forward(self, x):
        return F.linear(x, self.weight * self.mask, self.bias)


class Binary(nn.Linear):
    """Quantizes its weight itself, straight-through."""

    def forward(self, x):
        return F.linear(x, self.weight + (self.weight.sign() - self.weight).detach(), self.bias)


class Shared(nn.Linear):
    """Multiplies by something else than its weight."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.other = nn.Parameter(torch.randn(sizes[::-1]))

    def forward(self, x):
        return F.linear(x, self.other, self.bias)


class Standardized(nn.Conv2d):
    """As BiT's."""

    def forward(self, x):
        variance, mean = torch.var_mean(self.weight, dim=(1, 2, 3), keepdim=True)
        return F.conv2d(x, (self.weight - mean) / (variance + 1e-6).sqrt(), self.bias, padding=1)


class StandardizedWithGain(nn.Conv2d):
    """As NF-ResNet's."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.gain = nn.Parameter(torch.zeros(sizes[1], 1, 1, 1))

    def forward(self, x):
        return F.conv2d(x, self.gain * F.normalize(self.weight.flatten(1)).view_as(self.weight), self.bias)


OTHERS = (
    *(Adapted(4, 4), TwoInputs(4, 4), Masked(4, 4), Twice(4, 4), ClippedWeight(4, 4)),
    *(MaskedInForward(4, 4), Binary(4, 4), Shared(4, 4)),
)


@pytest.mark.parametrize("layer", OTHERS, ids=type)
def test_a_class_that_may_compute_something_else_stays_float(layer, caplog):
    with caplog.at_level(logging.WARNING):
        model = bitcycle.quantize_model(nn.ModuleList([layer, nn.Linear(4, 4)]), float_layers=[])
    assert type(model[0]) is type(layer) and isinstance(model[1], QuantizedLayer)
    assert f"stay float: 1 {type(layer).__name__}; to quantize them" in caplog.text


def test_a_weight_that_is_zero_is_tried_with_others():
    layer = Twice(4, 4)
    nn.init.zeros_(layer.weight)
    model = bitcycle.quantize_model(nn.ModuleList([layer, nn.Linear(4, 4)]), float_layers=[])
    assert type(model[0]) is Twice


@pytest.mark.parametrize(
    "kind",
    [Constrained, ConstrainedLater, ClippedWeight],
)
def test_limits_that_show_only_in_large_or_small_numbers_stay(kind):
    """They vanished, as the layer was tried with usual numbers only."""
    layer = kind(4, 4)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    model = bitcycle.quantize_model(nn.ModuleList([layer, nn.Linear(4, 4)]), float_layers=[])
    assert model[0] is layer
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


OWN = (Noisy, OptionalInput, Gathering, Clipped, ClippedBias, ClippedInTraining, Thresholded, Scaled)
OWN_CONVOLUTIONS = (Padded, PaddedWithModule, Normalized)
COMPUTING = (Standardized, StandardizedWithGain)


def own_layers():
    torch.manual_seed(0)
    linear = [(kind(4, 6), 5 * torch.randn(3, 4)) for kind in OWN]
    return linear + [(kind(4, 6, 3), torch.randn(2, 4, 5, 5)) for kind in OWN_CONVOLUTIONS + COMPUTING]


@pytest.mark.parametrize(
    ("layer", "x"), own_layers(), ids=[kind.__name__ for kind in OWN + OWN_CONVOLUTIONS + COMPUTING]
)
@pytest.mark.parametrize("training", [True, False])
def test_a_layer_with_a_forward_of_its_own_keeps_it(layer, x, training):
    """All of these stayed float. With float bits they compute the same; with few, the same with quantized operands."""
    layer = copy.deepcopy(layer).train(training)
    quantized = bitcycle.quantize_model(nn.Sequential(copy.deepcopy(layer)), float_layers=[])[0]
    assert isinstance(quantized, QuantizedLayer) and isinstance(quantized, type(layer))
    outputs = []
    for module in (layer, quantized, pickle.loads(pickle.dumps(quantized)), copy.deepcopy(quantized)):
        if isinstance(module, QuantizedLayer):
            module.precision.set(Precision(32, 32, 32))
        torch.manual_seed(1)
        own = x.clone().requires_grad_()
        y = module(own)
        outputs.append((y, *torch.autograd.grad(y.square().mean(), (own, *module.parameters()))))
    for others in outputs[1:]:
        torch.testing.assert_close(others, outputs[0])


@pytest.mark.parametrize("kind", OWN_CONVOLUTIONS)
def test_a_convolution_with_a_forward_of_its_own_multiplies_quantized_operands(kind):
    """Zeros of its padding are exact, as those of PyTorch's convolutions."""
    torch.manual_seed(0)
    layer, x = kind(4, 6, 3), torch.randn(2, 4, 5, 5) + 2
    quantized = bitcycle.quantize_model(nn.Sequential(copy.deepcopy(layer)), float_layers=[])[0].eval()
    quantized.precision.set(Precision(3, 3, 3))
    y = quantized(x)
    layer.weight.data = quantized.quantized_weight().detach()
    torch.testing.assert_close(y, layer.eval()(quantized.quantized_operands(x, quantized.call_key())[0]))
    assert len(y.unique()) > 1


class Reparametrized(nn.Module):
    """The weight of `Standardized`, as a parametrization."""

    def forward(self, weight):
        variance, mean = torch.var_mean(weight, dim=(1, 2, 3), keepdim=True)
        return (weight - mean) / (variance + 1e-6).sqrt()


@pytest.mark.parametrize(
    ("quantizer", "compute"),
    [("sbm", "simulate"), ("dorefa", "simulate"), ("mx", "simulate"), ("uniform_l2", "simulate"), ("sbm", "codes")],
)
def test_a_weight_that_a_layer_computes_is_quantized_as_one_of_a_parametrization(quantizer, compute):
    """It stayed float, as in the networks of NF-ResNet and BiT."""
    torch.manual_seed(0)
    own, plain = Standardized(4, 6, 3), nn.Conv2d(4, 6, 3, padding=1)
    plain.load_state_dict(own.state_dict())
    x, found = torch.randn(2, 4, 5, 5).relu(), []
    for layer in (own, plain):
        model = bitcycle.quantize_model(nn.Sequential(layer), quantizer, float_layers=[], compute=compute)
        if layer is plain:
            nn.utils.parametrize.register_parametrization(model[0], "weight", Reparametrized())
        gradient = {"gradient_min": 32} if quantizer == "uniform_l2" else {}
        schedule = bitcycle.schedule("CR", q_min=4, q_max=8, total_steps=16, **gradient)
        control = bitcycle.PrecisionController(model, schedule)
        for step in range(3):
            control.step(step)
            y = model(x)
            y.square().mean().backward()
        found.append((y, *(parameter.grad for _, parameter in sorted(model.named_parameters()))))
        assert control.cost().relative_to_static < 1
    torch.testing.assert_close(found[0], found[1])


class Cast(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


def test_a_weight_that_is_cast_to_the_type_of_the_input_is_quantized():
    """In float32 it is the layer's own; in other types the product was computed in float."""
    torch.manual_seed(0)
    layer, x = Cast(16, 16), torch.randn(8, 16)
    model = bitcycle.quantize_model(nn.Sequential(copy.deepcopy(layer)), float_layers=[]).eval()
    bitcycle.PrecisionController(model, bitcycle.schedule("static", q_max=3, total_steps=1)).step(0)
    errors = [(model(x.to(kind)) - layer(x)).norm() / layer(x).norm() for kind in (torch.float32, torch.bfloat16)]
    assert 0.1 < errors[0] < 0.5 and abs(errors[1] - errors[0]) < 0.02


class WithNorm(nn.Conv2d):
    """With a buffer, and with a module after the product, as detectron2's."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.norm = nn.BatchNorm2d(sizes[1])
        self.register_buffer("scale", torch.full((1,), 0.5))

    def forward(self, x):
        return self.norm(F.conv2d(x, self.scale * self.weight, self.bias))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("layer", [StandardizedWithGain, WithNorm])
def test_layers_with_computed_weights_are_converted_in_every_type(layer, kind):
    """They stayed float, as they were tried in float32 with other parameters and buffers of their own type."""
    layers = layer(3, 4, 3), nn.ReLU(), layer(4, 4, 3)
    for name, parameter in (found for one in layers for found in one.named_parameters()):
        if name == "gain":  # which is random if it is zero
            nn.init.ones_(parameter)
    model = bitcycle.quantize_model(nn.Sequential(*layers).to(kind), float_layers=[])
    assert isinstance(model[0], QuantizedLayer) and isinstance(model[2], QuantizedLayer)
    assert {parameter.dtype for parameter in model.parameters()} == {kind}
    model(torch.randn(2, 3, 8, 8, dtype=kind)).sum().backward()


def test_what_needs_the_weights_of_a_file_is_refused_for_computed_ones():
    model = bitcycle.quantize_model(nn.Sequential(Standardized(4, 6, 3)), float_layers=[])
    assert "weight" in dict(model[0].named_parameters())
    with pytest.raises(SettingError, match="layer '0' computes the weight that it quantizes from its own at each call"):
        bitcycle.finalize(model, 4)
    with pytest.raises(SettingError, match=r"layer '0' computes .* Remedy: list the layer in float_layers"):
        carry_quantized(model)


@pytest.mark.parametrize("kind", [Padded, WithNorm, Standardized])
def test_a_layer_with_a_forward_of_its_own_is_compiled(kind):
    """The compiler hides the padding from the layer, whose zeros were quantized."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = bitcycle.quantize_model(nn.Sequential(kind(4, 6, 3)), float_layers=[]).eval()
    bitcycle.PrecisionController(model, bitcycle.schedule("static", q_max=3, total_steps=1)).step(0)
    x = torch.randn(2, 4, 5, 5) + 2
    torch.testing.assert_close(torch.compile(model, backend="eager")(x), model(x))


def test_a_layer_with_a_forward_of_its_own_is_counted():
    costs = []
    for kind, options in ((Padded, {}), (nn.Conv2d, {"padding": 1})):
        model = bitcycle.quantize_model(nn.Sequential(kind(4, 6, 3, **options)), float_layers=[])
        control = bitcycle.PrecisionController(model, bitcycle.schedule("static", q_max=4, total_steps=1))
        control.step(0)
        model(torch.randn(2, 4, 5, 5)).sum().backward()
        costs.append(control.cost())
    assert costs[0] == costs[1]


def test_a_layer_with_a_forward_of_its_own_is_finalized(tmp_path):
    x, path = torch.randn(2, 4, 5, 5), tmp_path / "weights.safetensors"
    trained, loaded = (bitcycle.quantize_model(nn.Sequential(Normalized(4, 6, 3)), float_layers=[]) for _ in range(2))
    trained(x)
    bitcycle.finalize(trained.eval(), 4, path)
    bitcycle.load_finalized(loaded, path)
    bitcycle.PrecisionController(trained, bitcycle.schedule("static", q_max=4, total_steps=1)).step(0)
    torch.testing.assert_close(loaded(x), trained(x))


WIDTHS: list[int] = []


class Seeing(nn.Linear):
    def forward(self, x):
        WIDTHS.append(x.shape[-1])
        return super().forward(x)


class InHeads(nn.Linear):
    """Of a fixed number of features, which the layer itself does not tell."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.heads = 4, sizes[1] // 4

    def forward(self, x):
        return super().forward(x).view(*x.shape[:-1], *self.heads).flatten(-2)


@pytest.mark.parametrize(("kind", "width"), [(Seeing, 16), (InHeads, 0)])
def test_a_part_of_a_large_layer_is_tried(kind, width):
    """Falcon's layers were tried as a whole, which took half a minute for six of 2048 features."""
    WIDTHS.clear()
    model = bitcycle.quantize_model(nn.Sequential(kind(64, 64)), float_layers=[])
    assert isinstance(model[0], QuantizedLayer) and max(WIDTHS, default=0) == width


@pytest.mark.parametrize(("groups", "shape"), [(1, (16, 16)), (2, (16, 16)), (64, (16, 1)), (3, (15, 16))])
def test_a_part_of_each_group_is_tried(groups, shape):
    """Convolutions with groups were tried as a whole, which took a minute and a half for NFNet-F0."""
    shapes = set()

    class Grouped(nn.Conv2d):
        def forward(self, x):
            shapes.add(tuple(self.weight.shape[:2]))
            return super().forward(x.tanh())

    layer = Grouped(64 * groups if groups < 64 else 64, 32 * groups if groups < 64 else 64, 3, groups=groups)
    assert isinstance(bitcycle.quantize_model(nn.Sequential(layer), float_layers=[])[0], QuantizedLayer)
    assert shapes == {shape}


def test_trying_a_class_leaves_no_trace():
    class Counting(nn.Linear):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            self.calls, self.seen = torch.zeros(()), []

        def forward(self, x):
            self.calls.add_(1)
            self.seen.append(x)
            return super().forward(x)

    layer = Counting(4, 4)
    layer.weight.data.mul_(100)
    weight = layer.weight.clone()
    model = bitcycle.quantize_model(nn.Sequential(layer), float_layers=[])
    assert isinstance(model[0], QuantizedLayer) and torch.equal(model[0].weight, weight)
    assert layer.calls == 0 and layer.seen == []


def floats(model):
    return {rule.name for rule in model.conversion_rules if rule.treatment == "float"}


def test_the_last_layer_is_found_whatever_its_class():
    """Of Falcon only the head was quantized, as all layers before it were of its own class."""
    x = torch.randint(0, 9, (2, 5))
    layers = nn.Embedding(9, 4), Twice(4, 4), Twice(4, 4), nn.Linear(4, 4), nn.Linear(4, 9)
    assert floats(bitcycle.quantize_model(nn.Sequential(*layers), sample=x)) == {"4"}
    with pytest.raises(bitcycle.settings.SettingError, match="all of them stay float, and 2 Twice"):
        bitcycle.quantize_model(nn.Sequential(*layers[:3], layers[-1]), sample=x)


class Cosine(nn.Module):
    """A head with a weight of its own."""

    def __init__(self):
        super().__init__()
        self.prototypes = nn.Parameter(torch.randn(9, 4))

    def forward(self, x):
        return F.normalize(x, dim=-1) @ F.normalize(self.prototypes, dim=-1).T


@pytest.mark.parametrize("head", [Cosine(), Adapted(4, 9), nn.Bilinear(4, 4, 9)], ids=type)
@pytest.mark.parametrize("sample", [torch.zeros(2, 4), None])
def test_the_layer_before_a_head_that_stays_float_is_quantized(head, sample):
    class Network(nn.Sequential):
        def forward(self, x):
            h = self[2](self[1](self[0](x)))
            return head(h, h) if isinstance(head, nn.Bilinear) else self[3](h)

    model = Network(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), head)
    assert floats(bitcycle.quantize_model(model, sample=sample)) == {"0"}


def test_norms_and_single_numbers_after_the_last_layer_are_no_layers():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 1), nn.LayerNorm((4, 2, 2)))
    model = bitcycle.quantize_model(model, sample=torch.zeros(1, 3, 6, 6))
    assert floats(model) == {"0", "2"}


def test_the_cost_counts_the_samples_of_all_processes(monkeypatch):
    """With two processes it was that of one."""
    costs = {}
    for processes in (1, 2):
        monkeypatch.setattr(distributed, "world_size", lambda processes=processes: processes)
        model = bitcycle.quantize_model(nn.Sequential(nn.Linear(4, 4)), float_layers=[])
        control = bitcycle.PrecisionController(model, bitcycle.schedule("CR", cycles=1, total_steps=4), rank=0)
        control.step(0)
        model(torch.randn(3, 4))
        costs[processes] = control.cost()
    assert costs[2].gbitops == 2 * costs[1].gbitops > 0
    assert costs[2].relative_to_static == costs[1].relative_to_static


def test_a_report_on_a_float_model_says_so(capsys):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Bilinear(4, 4, 2))
    report = bitcycle.conversion_report(model)
    assert str(report).startswith("This model is not converted")
    assert [row.reason for row in report.rows] == ["not converted yet"] * 2 + ["no quantized counterpart"]
    assert capsys.readouterr().out == "" and repr(report) == str(report)


class ByKeyword(nn.Sequential):
    def forward(self, *, pixels):
        return super().forward(pixels)


def test_a_report_takes_the_samples_that_the_conversion_takes():
    """A dictionary raised a bare TypeError."""
    model = ByKeyword(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    sample = {"pixels": torch.zeros(2, 4)}
    model = bitcycle.quantize_model(model, sample=sample)
    reports = bitcycle.conversion_report(model, sample), bitcycle.conversion_report(model, **sample)
    assert reports[0] == reports[1] and reports[0].quantized_share == pytest.approx(16 / 40)
    plain = bitcycle.quantize_model(nn.Sequential(nn.Linear(4, 4)), float_layers=[])
    assert bitcycle.conversion_report(plain, (torch.zeros(2, 4),)).quantized_share == 1
