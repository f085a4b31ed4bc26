"""Networks that are not ours: which layers are converted, what stays float and why, attention."""

import copy
import logging

import numpy
import pytest
import torch
from torch import nn

import bitcycle
from bitcycle.layer import QuantizedMultiheadAttention, QuantizedProduct, conversion_plan
from bitcycle.precision import Precision
from bitcycle.quantizer import Sbm
from bitcycle.settings import SettingError

FLOAT = Precision(32, 32, 32)


def roles(model: nn.Module, sample=None) -> dict[str, tuple[str, ...]]:
    return {rule.name: rule.roles for rule in conversion_plan(model, Sbm(), sample=sample) if rule.roles}


class HeadFirst(nn.Module):
    """Registered in another order than it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.body, self.stem = nn.Linear(4, 2), nn.Linear(4, 4), nn.Linear(3, 4)

    def forward(self, x):
        x = self.stem(x)
        return self.head(self.body(x) if x.sum() > -1e9 else x)


def test_first_and_last_are_those_of_execution():
    straight = HeadFirst()
    straight.forward = lambda x: straight.head(straight.body(straight.stem(x)))  # what fx can follow
    assert roles(straight, torch.zeros(1, 3)) == {"stem": ("first",), "head": ("last",)}
    sequential = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    assert roles(sequential) == {"0": ("first",), "2": ("last",)}


def test_layers_that_are_first_and_last_by_registration_only_are_named(caplog):
    """The head was silently taken for the first layer, and the stem for the last."""
    assert roles(HeadFirst()) == {"head": ("first",), "stem": ("last",)}
    assert "head (first), stem (last); pass sample to quantize_model" in caplog.text
    for options in ({"sample": torch.zeros(1, 3)}, {"float_layers": ["body"]}, {"float_layers": []}):
        caplog.clear()
        bitcycle.quantize_model(HeadFirst(), **options)
        assert not caplog.records
    bitcycle.quantize_model(HeadFirst(), float_layers=[], layer_bits={"last": 8})
    assert "by the order of registration: stem (last);" in caplog.text


def test_an_embedding_is_the_first_layer_and_q_k_v_stay_together():
    class Block(nn.Module):
        def __init__(self, embeds: bool) -> None:
            super().__init__()
            self.embedding = nn.Embedding(9, 4) if embeds else None
            self.query, self.key, self.value, self.out = (nn.Linear(4, 4) for _ in range(4))

        def forward(self, x):
            x = x if self.embedding is None else self.embedding(x)
            return self.out(self.query(x) * self.key(x) + self.value(x))

    assert roles(Block(True)) == {"out": ("last",)}
    assert roles(Block(False)) == dict.fromkeys(("query", "key", "value"), ("first",)) | {"out": ("last",)}


def test_downsampling_on_the_main_path_is_no_shortcut():
    model = nn.ModuleDict({"stem": nn.Linear(4, 4), "downsample": nn.ModuleDict({"reduction": nn.Linear(4, 4)})})
    model["layer"] = nn.ModuleDict({"downsample": nn.Sequential(nn.Conv2d(4, 4, 1))})
    model["head"] = nn.Linear(4, 4)
    assert [name for name, found in roles(model).items() if "shortcut" in found] == ["layer.downsample.0"]


def test_float_layers_takes_names_and_containers_and_refuses_what_matches_nothing():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    plan = conversion_plan(model, Sbm(float_layers=["1"]))
    assert [rule.name for rule in plan if rule.treatment == "float"] == ["1.0", "1.1"]
    assert plan[1].reason == "float_layers: 1"
    with pytest.raises(SettingError, match="matches a layer"):
        conversion_plan(model, Sbm(float_layers=["2.x"]))
    for name in ("", "last"):  # an empty string once left no layer float
        with pytest.raises(SettingError, match="is not a list"):
            bitcycle.quantize_model(model, float_layers=name)


@pytest.mark.parametrize(
    "spoil",
    [
        nn.utils.weight_norm,
        nn.utils.parametrizations.weight_norm,  # once left float with a line in the log
        lambda m: nn.utils.prune.l1_unstructured(m, "weight", 0.5),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_no_half_converted_model_is_left(spoil):
    import torch.nn.utils.prune

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    spoil(model[1])
    with pytest.raises(SettingError, match=r"layer '1'.*to the converted model instead"):
        bitcycle.quantize_model(model, float_layers=[])
    assert type(model[0]) is nn.Linear
    spoil(bitcycle.quantize_model(model, float_layers=["1"])[0])  # what the message recommends
    control = bitcycle.PrecisionController(model, bitcycle.schedule("CR", total_steps=8))
    control.step(0)
    y = model(torch.ones(3, 2))
    y.sum().backward()
    assert y.isfinite().all() and all(parameter.grad is not None for parameter in model.parameters())


def test_a_layer_without_a_weight_is_refused():
    """It became a float layer at its first input."""
    model = nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 2))
    with pytest.raises(SettingError, match=r"layer '0' has no weight before its first input"):
        bitcycle.quantize_model(model, float_layers=[])
    model(torch.zeros(1, 3))
    assert bitcycle.conversion_report(bitcycle.quantize_model(model, float_layers=[])).rows[0].bits == "8/8/8"


def compiled(layer: nn.Module) -> nn.Module:
    layer.compile(backend="eager")
    return layer


def hooked(layer: nn.Module) -> nn.Module:
    hooks = pytest.importorskip("accelerate.hooks")
    return hooks.add_hook_to_module(layer, hooks.ModelHook())


CALLED_BY_OTHER_MEANS = {"compiled": compiled, "wrapped": lambda m: torch.compile(m, backend="eager"), "hooked": hooked}


@pytest.mark.parametrize("call", CALLED_BY_OTHER_MEANS.values(), ids=CALLED_BY_OTHER_MEANS)
def test_a_layer_that_is_called_by_other_means_than_its_class_is_refused(call):
    """It stayed float, and the report and the cost called it quantized."""
    model = nn.Sequential(call(nn.Linear(2, 2)), nn.Linear(2, 2))
    with pytest.raises(SettingError, match=r"layer '0.*keep it float.*before adding hooks or compiling"):
        bitcycle.quantize_model(model, float_layers=[])
    with pytest.raises(SettingError, match=r"layer ''|layer '_orig_mod'"):
        bitcycle.quantize_model(call(nn.Linear(2, 2)), float_layers=[])
    assert type(model[1]) is nn.Linear
    model = bitcycle.quantize_model(model, float_layers=["0"])  # what the message recommends
    assert isinstance(model[1], QuantizedProduct)


@pytest.mark.parametrize("call", CALLED_BY_OTHER_MEANS.values(), ids=CALLED_BY_OTHER_MEANS)
def test_a_network_that_is_called_by_other_means_is_converted(call):
    torch.manual_seed(0)
    plain, x = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.randn(3, 2)
    expected = bitcycle.quantize_model(copy.deepcopy(plain), float_layers=[])(x)
    assert torch.equal(bitcycle.quantize_model(call(plain), float_layers=[])(x), expected)


def test_a_report_on_a_model_that_is_a_layer_or_multiplies_by_itself():
    """Products of the model itself once were in a row of their own, beside a quantized layer without any."""
    report = bitcycle.conversion_report(bitcycle.quantize_model(nn.Linear(2, 2), float_layers=[]), torch.zeros(1, 2))
    assert [(row.name, row.bits, row.share) for row in report.rows] == [("", "8/8/8", 1.0)]

    class Tied(nn.Sequential):
        def forward(self, x):
            return self[0](x) @ self[0].weight.T

    report = bitcycle.conversion_report(
        bitcycle.quantize_model(Tied(nn.Linear(2, 2)), float_layers=[]), torch.zeros(1, 2)
    )
    assert {row.name: (row.kind, row.bits, row.share) for row in report.rows} == {
        "0": ("Linear", "8/8/8", 0.5),
        "": ("Tied", "float", 0.5),
    }


@pytest.mark.parametrize("whole", [numpy.int64, torch.tensor])
def test_whole_numbers_of_other_libraries_are_steps(whole):
    model = bitcycle.quantize_model(nn.Linear(2, 2), float_layers=[])
    control = bitcycle.PrecisionController(model, bitcycle.schedule("CR", q_min=3, total_steps=8))
    keys = [(control.step(step), control.states[0].step_key.item(), control.next_step) for step in (1, whole(1))]
    assert keys[0] == keys[1] and type(control.next_step) is int
    with pytest.raises(TypeError, match="float"):
        control.step(1.5)


def test_parts_that_were_converted_separately_have_noise_of_their_own():
    """Layers of the same name were rounded alike. The first part has the noise of a network alone."""

    def build(own):
        torch.manual_seed(0)
        return bitcycle.quantize_model(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)), float_layers=[], layer_bits=own)

    def gradients(*parts):
        model = nn.ModuleList(parts)
        schedule = bitcycle.schedule("static", q_max=4, gradient=2, total_steps=1)
        bitcycle.PrecisionController(model, schedule).step(0)
        for part in parts:
            part(x).square().sum().backward()
        return [part[0].weight.grad for part in parts]

    x = torch.randn(5, 6)
    for own in ({}, {"1": [4, 2]}):
        [alone], pair = gradients(build(own)), gradients(build(own), build(own))
        assert torch.equal(pair[0], alone) and not torch.equal(pair[1], alone)
        assert all(map(torch.equal, gradients(build(own), build(own)), pair))


def test_a_second_conversion_says_so():
    model = bitcycle.quantize_model(nn.Sequential(nn.Linear(2, 2)), float_layers=[])
    with pytest.raises(SettingError, match="already converted"):
        bitcycle.quantize_model(model, float_layers=[])


@pytest.mark.parametrize("quantizer", ["sbm", "dorefa", "uniform_l2", "multibit", "wageubn"])
def test_an_empty_batch_passes(quantizer):
    layers = (
        nn.Linear(2, 4),
        nn.Conv1d(2, 4, 1),
        nn.LSTM(2, 4, num_layers=2),
        nn.MultiheadAttention(2, 1, batch_first=True),
    )
    inputs = torch.zeros(0, 2), torch.zeros(0, 2, 3), torch.zeros(3, 0, 2), torch.zeros(0, 3, 2)
    for layer, x in zip(layers, inputs):
        model = bitcycle.quantize_model(nn.ModuleList([copy.deepcopy(layer)]), quantizer, float_layers=[])[0]
        arguments = (x, x, x) if isinstance(layer, nn.MultiheadAttention) else (x,)
        found, expected = model(*arguments), layer(*arguments)
        found, expected = (y[0] if isinstance(y, tuple) else y for y in (found, expected))
        assert found.shape == expected.shape
        found.sum().backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize(
    ("quantizer", "compute"), [("sbm", "simulate"), ("sbm", "codes"), ("fp8", "simulate"), ("dorefa", "simulate")]
)
def test_checkpointing_changes_no_number(quantizer, compute, use_reentrant):
    """Observers and histories move once, and noise is that of one call. The recomputation of fp8 once had another scale, and
    counted as a call, so that the noise of a second batch of a step was that of a third."""
    from torch.utils.checkpoint import checkpoint

    found = []
    for recomputes in (False, True):
        torch.manual_seed(0)
        layers = nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)
        model = bitcycle.quantize_model(nn.Sequential(*layers), quantizer, float_layers=[], compute=compute)
        q_max = 8 if quantizer == "fp8" else 4
        control = bitcycle.PrecisionController(model, bitcycle.schedule("static", q_max=q_max, total_steps=2))
        for step in range(2):
            control.step(step)
            for _ in range(3):
                x = (1 + step) * torch.randn(5, 6, requires_grad=True)
                y = checkpoint(model[:3], x, use_reentrant=use_reentrant) if recomputes else model[:3](x)
                model[3:](y).square().sum().backward()
        found.append([*model.buffers(), *(parameter.grad for parameter in model.parameters())])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("quantizer", ["sbm", "fp8"])
def test_checkpointing_changes_no_number_of_a_layer_called_twice(quantizer, segments):
    """As in ALBERT. The recomputation of fp8 gave every call the scale of the last one."""
    from torch.utils.checkpoint import checkpoint

    found = []
    for recomputes in (False, True):
        torch.manual_seed(0)
        model = bitcycle.quantize_model(nn.Sequential(nn.Linear(8, 8)), quantizer, float_layers=[])
        q_max = 4 if quantizer == "sbm" else 8
        control = bitcycle.PrecisionController(model, bitcycle.schedule("static", q_max=q_max, total_steps=3))

        def block(x, model=model):
            return 3 * model(x).relu()

        calls = [block, block] if segments == 2 else [lambda x, block=block: block(block(x))]
        for step in range(3):
            control.step(step)
            y = (1 + step) * torch.randn(5, 8)
            for call in calls:
                y = checkpoint(call, y, use_reentrant=False) if recomputes else call(y)
            y.square().sum().backward()
        found.append([*model.buffers(), *(parameter.grad for parameter in model.parameters())])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize(("bits", "tolerance"), [(32, 1e-6), (12, 0.02)])
def test_second_derivatives_pass_straight_through_rounded_gradients(bits, tolerance, compile):
    """A penalty on gradients, as in WGAN-GP, trains a converted network as it does the float one."""
    torch.manual_seed(0)
    plain, x = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(16, 6, requires_grad=True)
    model = bitcycle.quantize_model(copy.deepcopy(plain), float_layers=[], compile=compile)
    bitcycle.PrecisionController(model, bitcycle.schedule("static", q_max=bits, total_steps=1)).step(0)
    for network in (plain, model):
        (gradient,) = torch.autograd.grad(network(x).sum(), x, create_graph=True)
        (gradient.norm(dim=1) - 1).square().mean().backward()
    for name in ("0.weight", "0.bias", "2.weight"):
        expected, found = (network.get_parameter(name).grad for network in (plain, model))
        assert (found - expected).norm() < tolerance * expected.norm()


@pytest.mark.parametrize("sample", [None, torch.zeros(1, 2)])
@pytest.mark.parametrize("model", [nn.ReLU(), nn.RNN(2, 2)])
def test_a_model_without_layers_to_quantize_is_refused_by_name(model, sample):
    """The remedy was to leave fewer layers float."""
    with pytest.raises(SettingError, match=r"model=Sequential: no layer .*\. Remedy: use modules such as nn.Linear"):
        bitcycle.quantize_model(nn.Sequential(model), sample=sample)


def test_layers_without_a_quantized_counterpart_are_named_if_nothing_else_is_left():
    class Own(nn.Linear):
        def forward(self, x):
            return nn.functional.linear(x, self.weight.sign(), self.bias)

    with pytest.raises(SettingError, match="all of them stay float, and 2 Own have no quantized counterpart"):
        bitcycle.quantize_model(nn.Sequential(nn.Linear(2, 2), Own(2, 2), Own(2, 2), nn.Linear(2, 2)))


def test_a_sum_of_embeddings_is_the_first_layer():
    model = nn.Sequential(nn.EmbeddingBag(10, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    words = torch.zeros(2, 3, dtype=torch.long)
    model = bitcycle.quantize_model(model, sample=words)
    report = bitcycle.conversion_report(model, words)
    assert [(row.name, row.bits) for row in report.rows] == [("1", "8/8/8"), ("3", "float")]


def test_execution_order_of_a_network_whose_shapes_depend_on_values():
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.hidden, self.first = nn.Linear(4, 2), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.last(self.hidden(self.first(x[x[:, 0] > 0])))

    model = bitcycle.quantize_model(Network(), sample=torch.ones(3, 4))
    assert not hasattr(model.first, "precision") and not hasattr(model.last, "precision")


LAYERS = {
    "conv1d": (nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), (2, 4, 9)),
    "conv3d": (nn.Conv3d(2, 3, 3, padding=1), (2, 2, 4, 4, 4)),
    "transposed": (nn.ConvTranspose2d(3, 4, 3, stride=2, output_padding=1), (2, 3, 5, 5)),
    "transposed in groups": (nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), (2, 4, 5, 5)),
    "transposed 1d": (nn.ConvTranspose1d(4, 6, 3, dilation=2), (2, 4, 5)),
    "transposed 3d": (nn.ConvTranspose3d(2, 3, 2, stride=2), (2, 2, 3, 3, 3)),
}


@pytest.mark.parametrize("kind", ["linear", *LAYERS])
def test_inputs_have_the_keyword_of_pytorch(kind):
    """Calls by keyword, which a float network may make, stopped with a TypeError after the conversion."""
    plain, shape = LAYERS[kind] if kind in LAYERS else (nn.Linear(4, 2), (3, 4))
    model = bitcycle.quantize_model(copy.deepcopy(plain), float_layers=[]).eval()
    x = torch.randn(shape)
    assert torch.equal(model(input=x), model(x))


@pytest.mark.parametrize("quantizer", ["sbm", "dorefa", "uniform_l2"])
@pytest.mark.parametrize("kind", LAYERS)
def test_more_convolutions(kind, quantizer):
    plain, shape = LAYERS[kind]
    model = bitcycle.quantize_model(nn.Sequential(copy.deepcopy(plain)), quantizer, float_layers=[])
    assert isinstance(model[0], QuantizedProduct)
    x = torch.randn(shape)
    y = model(x)
    if quantizer != "dorefa":  # which scales weights
        assert (y - plain(x)).norm() < 0.1 * plain(x).norm()
    y.sum().backward()
    assert model[0].weight.grad.isfinite().all()
    model[0].precision.set(FLOAT)
    torch.testing.assert_close(model(x), plain(x))


def test_transposed_weights_have_a_range_for_each_output_channel():
    model = bitcycle.quantize_model(nn.Sequential(nn.ConvTranspose2d(5, 3, 2)), float_layers=[])
    model[0].precision.set(Precision(1, 32, 32))
    weight = model[0].quantized_weight()
    assert all(len(weight[:, channel].unique()) == 2 for channel in range(3))


def test_transposed_weights_in_groups_have_a_range_for_each_output_channel():
    model = bitcycle.quantize_model(nn.ConvTranspose1d(6, 4, 3, groups=2), float_layers=[])
    model.precision.set(Precision(1, 32, 32))
    weight = model.quantized_weight()
    for group in range(2):
        for channel in range(2):
            whole, found = (each[3 * group : 3 * group + 3, channel] for each in (model.weight, weight))
            torch.testing.assert_close(found.unique(), torch.stack([whole.min(), whole.max()]))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_first": True, "bias": False},
        {"kdim": 6, "vdim": 4},
        {"add_bias_kv": True, "add_zero_attn": True},
    ],
)
def test_attention_in_float_equals_pytorchs(options):
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(8, 2, **options)
    model = bitcycle.quantize_model(copy.deepcopy(plain), float_layers=[])
    assert isinstance(model, QuantizedMultiheadAttention)
    model.precision.set(FLOAT)
    kdim, vdim = options.get("kdim", 8), options.get("vdim", 8)
    q, k, v = torch.randn(5, 5, 8), torch.randn(5, 5, kdim), torch.randn(5, 5, vdim)
    padding = torch.zeros(5, 5, dtype=torch.bool)
    padding[:, -1] = True
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    for keywords in ({}, {"attn_mask": causal}, {"key_padding_mask": padding, "average_attn_weights": False}):
        torch.testing.assert_close(model(q, k, v, **keywords), plain(q, k, v, **keywords), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(model(q[0], k[0], v[0]), plain(q[0], k[0], v[0]), atol=1e-5, rtol=1e-4)
    assert set(plain.state_dict()) == set(bitcycle.float_state_dict(model))


def test_a_report_says_what_became_of_each_layer(capsys):
    class Network(nn.Sequential):
        def forward(self, x):
            return self[4](self[3](self[1](self[0](x))[..., :2]))

    parts = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), nn.Bilinear(4, 4, 4), nn.Linear(2, 2), nn.Linear(2, 2)
    report = bitcycle.conversion_report(bitcycle.quantize_model(Network(*parts)), torch.zeros(1, 3, 6, 6))
    found = {row.name: (row.bits, row.reason) for row in report.rows}
    assert found["0"] == ("float", "float_layers: first")
    assert found["1"] == ("8/8/8", "")
    assert found["2"] == ("float", "no quantized counterpart")
    first, second, linear = 16 * 4 * 27, 16 * 4 * 4, 4 * 4 * 2 * 2
    assert report.quantized_share == pytest.approx((second + linear) / (first + second + 2 * linear))


def test_a_report_does_not_call_a_layer_quantized_whose_weights_a_function_reads():
    class Network(nn.Sequential):
        def forward(self, x):
            return self[0](x) @ self[1].weight.T

    model = bitcycle.quantize_model(Network(nn.Linear(3, 4), nn.Linear(4, 2)), float_layers=[])
    report = bitcycle.conversion_report(model, torch.zeros(5, 3))
    found = {row.name: (row.bits, row.reason) for row in report.rows}
    assert found["0"] == ("8/8/8", "")
    assert found["1"][0] == "float" and "reads its weights" in found["1"][1]
    assert report.quantized_share == pytest.approx(12 / 20)


def test_a_report_names_the_rules_of_parts_and_layers_that_came_later():
    """Float layers of a wrapped model had no quantized counterpart in its report, and a new one had no reason."""

    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module, self.head = module, nn.Linear(2, 2)

        def forward(self, x):
            return self.head(self.module(x))

    parts = [nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)]
    network = bitcycle.quantize_model(nn.Sequential(*parts))
    network[1] = nn.Linear(2, 2)
    rows = bitcycle.conversion_report(Wrapper(network), torch.zeros(1, 2)).rows
    assert {row.name: (row.bits, row.reason) for row in rows} == {
        "module.0": ("float", "float_layers: first"),
        "module.1": ("float", "not converted yet"),
        "module.2": ("8/8/8", ""),
        "module.3": ("float", "float_layers: last"),
        "head": ("float", "not converted yet"),
    }


def test_layers_with_complex_weights_stay_float(caplog):
    """They were converted, and the first batch ended in an error of PyTorch about the minimum of complex numbers."""
    layers = nn.Linear(4, 4, dtype=torch.cfloat), nn.Linear(4, 4)
    with caplog.at_level(logging.WARNING):
        model = bitcycle.quantize_model(nn.ModuleList(layers), float_layers=[])
    assert type(model[0]) is nn.Linear and isinstance(model[1], QuantizedProduct)
    assert "1 complex Linear" in caplog.text


def test_a_scripted_part_stays_float():
    """The conversion stopped with an AttributeError."""
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    model = bitcycle.quantize_model(nn.Sequential(scripted, nn.Linear(4, 2)), float_layers=[])
    assert model[0] is scripted and isinstance(model[1], QuantizedProduct)
    model(torch.randn(3, 4)).sum().backward()
    parts = [nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 4), nn.Linear(4, 2)]
    model = bitcycle.quantize_model(nn.Sequential(*parts), sample=torch.randn(3, 4))  # which hooks watch
    assert [isinstance(part, QuantizedProduct) for part in model] == [False, False, True, False]


def test_the_output_layer_of_float_attention_is_not_named_apart(caplog):
    """PyTorch's own attention, float by the rule, was said to need PyTorch's own classes."""
    x = torch.zeros(1, 3, 4)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 4, batch_first=True), 1)
    with caplog.at_level(logging.WARNING):
        model = bitcycle.quantize_model(model, sample=x)
    assert "no quantized counterpart" not in caplog.text
    assert "layers.0.self_attn.out_proj" not in {row.name for row in bitcycle.conversion_report(model, x).rows}


@pytest.mark.parametrize("wrong", [8, (8, 8), None])
def test_bits_are_three_numbers(wrong):
    model = bitcycle.quantize_model(nn.Linear(2, 2), float_layers=[])
    control = bitcycle.PrecisionController(model, bitcycle.schedule("static", q_max=8, total_steps=1))
    control.use((4, 4, 8))
    assert {state.precision for state in control.states} == {Precision(4, 4, 8)}
    with pytest.raises(SettingError, match="three numbers"):
        control.use(wrong)


def test_a_quantizer_that_is_nothing_is_refused_by_name():
    with pytest.raises(SettingError, match="quantizer=null: does not exist"):
        bitcycle.quantize_model(nn.Linear(2, 2), None)


@pytest.mark.parametrize("options", [{"padding_idx": 0}, {"max_norm": 0.5}, {"scale_grad_by_freq": True}])
def test_embeddings_keep_their_options(options):
    """Their vector of padding was once trained, and the others had no effect."""
    torch.manual_seed(0)
    plain = bitcycle.layer.QuantizableEmbedding(5, 3, **options)
    model = bitcycle.quantize_model(copy.deepcopy(plain), float_layers=[])
    bitcycle.PrecisionController(model, bitcycle.schedule("static", q_max=32, total_steps=1)).step(0)
    words = torch.tensor([[0, 1, 1], [4, 0, 2]])
    for network in (plain, model):
        network(words).square().sum().backward()
    assert torch.equal(model.weight, plain.weight)
    assert torch.equal(model.weight.grad, plain.weight.grad)


def test_whole_numbers_of_numpy_are_bits():
    """They had the wrong type, of which a whole number was said to be the right one."""
    three, eight = numpy.int64(3), numpy.int32(8)
    schedule = bitcycle.schedule("CR", q_min=three, q_max=eight, cycles=numpy.int64(2), total_steps=8)
    assert schedule(0) == Precision(3, 3, 8) and {type(bits) for bits in schedule(0)} == {int}
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = bitcycle.quantize_model(layers, float_layers=[], layer_bits={"0": three, "1": [three, eight]})
    assert [layer.precision.precision for layer in model] == [Precision(3, 3, 3), Precision(3, 3, 8)]
    x = torch.randn(4, 4)
    assert torch.equal(bitcycle.quantize(x, three), bitcycle.quantize(x, 3))
    model = bitcycle.quantize_model(nn.Linear(2, 2), float_layers=[])
    bitcycle.PrecisionController(model, schedule).use((three, three, eight))
    assert model.precision.precision == Precision(3, 3, 8) and type(model.precision.precision.weight) is int
    with pytest.raises(SettingError, match=r"q_min=3.0: has the wrong type"):
        bitcycle.schedule("CR", q_min=numpy.float64(3), total_steps=8)


def test_a_parametrization_is_no_layer_of_the_report():
    """It had a row of its own, float at 0 %, below that of its layer."""
    model = bitcycle.quantize_model(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), float_layers=[])
    nn.utils.parametrizations.weight_norm(model[0])
    assert [row.name for row in bitcycle.conversion_report(model, torch.zeros(2, 4)).rows] == ["0", "1"]
