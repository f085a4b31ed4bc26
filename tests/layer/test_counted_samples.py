"""The samples that a controller counts for its cost, in a loop of one's own."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn

import bitcycle
from bitcycle import distributed
from bitcycle.settings import SettingError

OMITTED = (
    "the cost omits layers that training calls and the traced forward pass, the first one in evaluation mode, does not"
)


def linear_control(model: nn.Module) -> bitcycle.PrecisionController:
    schedule = bitcycle.schedule("static", q_max=8, total_steps=3)
    return bitcycle.PrecisionController(bitcycle.quantize_model(model, float_layers=[]), schedule)


class OfDictionary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)

    def forward(self, batch):
        return self.inner(batch["features"])


def test_samples_are_counted_after_an_interrupted_forward_pass():
    """After Ctrl-C in a notebook, those of all later steps were once left out, with their cost."""

    class Interrupted(nn.Linear):
        interrupts = False

        def forward(self, input):
            if self.interrupts:
                raise KeyboardInterrupt
            return super().forward(input)

    model = nn.Sequential(nn.Linear(4, 4), Interrupted(4, 2))
    control = linear_control(model)
    for step in range(3):
        control.step(step)
        model[1].interrupts = step == 1
        with contextlib.suppress(KeyboardInterrupt):
            model(torch.randn(5, 4))
    assert sum(control.meter.histogram.values()) == 15


def test_samples_are_counted_in_nested_inputs():
    model = OfDictionary()
    control = linear_control(model)
    control.step(0)
    model({"names": ["a"], "features": torch.randn(7, 4)})
    assert sum(control.meter.histogram.values()) == 7


@pytest.mark.parametrize("told", [0, 4])
def test_a_first_batch_without_samples_is_named(told):
    """It was the error of an inner part, samples=0, whose remedy was to give an input."""
    model = OfDictionary()
    control = linear_control(model)
    control.step(0, samples=told)
    with pytest.raises(SettingError, match=r"batch=\[\[0, 4\]\]: has no samples.*Remedy: leave out empty batches"):
        model({"features": torch.randn(0, 4)})


def test_samples_that_are_told_win_over_those_that_are_seen():
    model = OfDictionary()
    control = linear_control(model)
    for step in range(3):
        control.step(step, samples=10)
        for _ in range(2):  # gradients of two halves
            model({"features": torch.randn(5, 4)})
    assert sum(control.meter.histogram.values()) == 30


def cost_of_a_step(model: nn.Module, *batches: torch.Tensor, told: int = 0, batch_dimension: int = 0) -> float:
    model = bitcycle.quantize_model(model, float_layers=[])
    schedule = bitcycle.schedule("static", q_max=8, total_steps=2)
    control = bitcycle.PrecisionController(model, schedule, batch_dimension=batch_dimension)
    for step in range(2):
        control.step(step, samples=told)
        for batch in batches:
            model(batch)
    return control.cost().gbitops


@pytest.mark.parametrize("told", [5, 10])
def test_told_samples_have_all_passes_of_a_step(told):
    """Two views of a batch of 5 were counted as one, unless told as 10; with time first, steps were taken for samples."""
    views = torch.randn(2, 5, 4)
    expected = cost_of_a_step(nn.Linear(4, 2), *views)
    assert cost_of_a_step(nn.Linear(4, 2), *views, told=told) == pytest.approx(expected)
    assert cost_of_a_step(nn.Linear(4, 2), *views.flatten(0, 1).split([7, 3]), told=told) == pytest.approx(expected)
    x = torch.randn(7, 5, 3)
    expected = cost_of_a_step(nn.LSTM(3, 4), x, batch_dimension=1)
    assert cost_of_a_step(nn.LSTM(3, 4), x, told=told) == pytest.approx(expected)


@pytest.mark.parametrize("told", [0, 6])
def test_told_samples_of_parts_are_those_of_all_processes(told, monkeypatch):
    """The products of this process were divided by the samples of all."""
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    model = bitcycle.quantize_model(nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 2)}), float_layers=[])
    control = bitcycle.PrecisionController(model, bitcycle.schedule("static", q_max=8, total_steps=1), rank=0)
    control.step(0, samples=told)
    model["b"](model["a"](torch.randn(3, 4)))
    assert sum(layer.forward for layer in control.cost().layers) == 6 * (16 + 8) * 64


@pytest.mark.parametrize("told", [False, True])
def test_the_cost_of_a_copied_controller_is_not_silently_too_small(caplog, told):
    model = bitcycle.quantize_model(nn.Sequential(nn.Linear(4, 4)), float_layers=[])
    control = bitcycle.PrecisionController(model, bitcycle.schedule("static", total_steps=9))
    for t in range(3):
        control.step(t)
        model(torch.randn(5, 4)).sum().backward()
    control.cost()
    assert not caplog.messages
    model, control = copy.deepcopy((model, control))
    for t in range(3, 6):
        control.step(t, samples=5 if told else 0)
        model(torch.randn(5, 4)).sum().backward()
    control.cost()
    assert [message[:21] for message in caplog.messages] == ([] if told else ["the cost omits 2 step"])


def test_samples_are_counted_where_they_are():
    model = bitcycle.quantize_model(nn.LSTM(3, 4), float_layers=[])
    schedule = bitcycle.schedule("static", q_max=8, total_steps=1)
    control = bitcycle.PrecisionController(model, schedule, batch_dimension=1)
    control.step(0)
    model(torch.randn(7, 5, 3))
    with torch.no_grad():
        model(torch.randn(7, 5, 3))  # trains nothing
    assert control.cost().samples == 5
    control = bitcycle.PrecisionController(model, schedule, batch_dimension=3)
    control.step(0)
    with pytest.raises(SettingError, match="batch_dimension=3: is no dimension"):  # once counted as one sample
        model(torch.randn(7, 5, 3))
    with pytest.raises(SettingError, match="batch_dimension=-1: is negative"):  # features were counted as samples
        bitcycle.PrecisionController(model, schedule, batch_dimension=-1)


@pytest.mark.parametrize(
    ("arguments", "samples"),
    [
        (([torch.zeros(3, 8, 8)] * 4,), 4),
        (((torch.zeros(3, 8, 8),) * 4, ({"boxes": torch.zeros(2, 4)},) * 4), 4),
        (((torch.zeros(6, 9, 2), torch.zeros(6, 7, 2)),), 6),
        (((torch.zeros(6, 9, 2), torch.zeros(6, 7, 2)), (torch.zeros(6), torch.zeros(6))), 6),
    ],
)
def test_a_tuple_of_sequences_is_no_list_of_images(arguments, samples):
    """A network of two sequences had two samples, whatever its batch."""
    assert bitcycle.layer.control.watch.samples_of(arguments, {}, 0) == samples


class Batch:
    """A batch of another library, which PyTorch does not look into."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


def test_told_samples_suffice_for_a_batch_of_another_library():
    """The remedy of the error once raised the same error."""

    class Network(nn.Sequential):
        def forward(self, batch):
            return super().forward(batch.x)

    model = Network(nn.Linear(4, 2))
    control = linear_control(model)
    control.step(0)
    with pytest.raises(RuntimeError, match=r"give step\(t, samples=...\)"):
        model(Batch(torch.randn(7, 4)))
    for step in (0, 1):
        control.step(step, samples=7)
        model(Batch(torch.randn(7, 4)))
    assert control.cost().samples == 14
    assert control.cost().gbitops == pytest.approx(14 * 8 * 64 * 2 * 1e-9)  # no error product: the input is data


def test_error_products_of_an_input_that_requires_a_gradient_are_counted():
    """As in adversarial training and for the discriminator of a GAN."""
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 2))
    control = linear_control(model)
    control.step(0)
    x = torch.randn(7, 4, requires_grad=True)
    model(x * 1).sum().backward()
    (layer,) = control.cost().layers
    assert layer.forward == layer.error == layer.weight_gradient == 7 * 8 * 64


def test_parts_that_training_calls_one_by_one_are_counted(caplog):
    """As in a GAN. The cost was unknown, which ended the training in Lightning."""
    model = nn.ModuleDict(
        {"g": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "d": nn.Linear(4, 1), "late": nn.Linear(4, 1)}
    )
    control = linear_control(model)
    for step in range(3):
        control.step(step)
        fake = model["g"](torch.randn(6, 4))
        (model["d"](torch.randn(6, 4)).sum() + model["d"](fake).sum()).backward()
        if step:
            model["late"](torch.randn(6, 4)).sum().backward()
    found = {layer.name: (layer.forward, layer.error, layer.weight_gradient) for layer in control.cost().layers}
    pass_of_g, pass_of_d = 18 * 16 * 64, 18 * 4 * 64
    assert control.cost().samples == 18
    assert found == {
        "g.0": (pass_of_g, 0, pass_of_g),
        "g.1": (pass_of_g, pass_of_g, pass_of_g),
        "d": (pass_of_d, 0, pass_of_d),
        "d#2": (pass_of_d, pass_of_d, pass_of_d),
    }
    assert [record.message.partition(";")[0] for record in caplog.records] == [
        "training calls 'late' after the first step only, and the cost omits its products"
    ]


@pytest.mark.filterwarnings("ignore:torchvision.roi_align")
def test_heads_of_detectors_are_counted_for_the_boxes_of_training():
    """The cost counted the boxes that evaluation detects, which an untrained network has none of."""
    detection = pytest.importorskip("torchvision.models.detection")
    backbone = nn.Sequential(nn.Conv2d(3, 4, 3, 8, 1), nn.ReLU(), nn.Conv2d(4, 4, 3, 1, 1))
    backbone.out_channels = 4
    anchors = detection.anchor_utils.AnchorGenerator(((16, 32),), ((0.5, 1.0, 2.0),))
    sizes = {"min_size": 32, "max_size": 32, "box_batch_size_per_image": 6, "rpn_anchor_generator": anchors}
    model = detection.FasterRCNN(backbone, num_classes=3, **sizes)
    control = linear_control(model)
    control.step(0)
    target = {"boxes": torch.tensor([[2.0, 2.0, 20.0, 20.0]]), "labels": torch.tensor([1])}
    sum(model([torch.rand(3, 32, 32)] * 2, [target] * 2).values()).backward()
    (head,) = (o for o in control.meter.workload.operations if o.name == "roi_heads.box_head.fc7")
    assert head.macs == 2 * 6 * 1024 * 1024


def test_layers_that_run_in_training_only_are_named(caplog):
    class Network(nn.Sequential):
        def forward(self, x):
            x = self[0](x)
            return self[1](x) + self[2](x) if self.training else self[1](x)

    model = Network(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    control = linear_control(model)
    for step in range(2):
        control.step(step)
        model(torch.randn(7, 4)).sum().backward()
    assert [record.message for record in caplog.records] == [f"{OMITTED}: 2"]


@pytest.mark.parametrize("is_part", [False, True])
def test_layers_that_are_called_outside_of_the_forward_pass_are_named(is_part, caplog):
    """Their cost was left out in silence. As a part of a ModuleDict they are counted."""

    class Network(nn.Sequential):
        def forward(self, x):
            return self[0](x)

    model = Network(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    control = linear_control(nn.ModuleDict({"net": model, "head": model[1]}) if is_part else model)
    for step in range(3):
        control.step(step)
        model[1](model(torch.randn(7, 4))).sum().backward()
    names = [layer.name for layer in control.cost().layers]
    assert names == (["net.0", "net.1"] if is_part else ["0"])
    assert [record.message for record in caplog.records] == ([] if is_part else [f"{OMITTED}: 1"])


def test_a_model_that_is_one_layer_is_not_taken_for_one_that_the_cost_omits(caplog):
    model = bitcycle.quantize_model(nn.Linear(4, 4), float_layers=[])
    control = bitcycle.PrecisionController(model, bitcycle.schedule("static", q_max=8, total_steps=3))
    control.step(0)
    model(torch.randn(7, 4)).sum().backward()
    assert not caplog.records


def test_unfreezing_is_noticed(caplog):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    control = linear_control(model)
    for step in range(3):
        assert len(caplog.records) == max(step - 1, 0)
        model[0].requires_grad_(step > 0)
        control.step(step)
        model(torch.randn(7, 4)).sum().backward()
    assert len(caplog.records) == 1 and "frozen or unfrozen" in caplog.text


def test_layers_in_plain_lists_are_converted():
    """They stayed float, and the trace ended in a KeyError."""

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
            self.steps, self.more = [(self.a, "x"), (self.b, "y")], {"c": self.c}

        def forward(self, x):
            for layer, _ in self.steps:
                x = layer(x)
            return self.more["c"](x)

    model = Network()
    control = linear_control(model)
    assert model.steps[0] == (model.a, "x") and model.more["c"] is model.c
    control.step(0)
    model(torch.randn(7, 4)).sum().backward()
    assert [layer.forward for layer in control.cost().layers] == [7 * 16 * 64] * 3


def test_a_float_layer_kept_in_a_closure_is_noticed(caplog):
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            old = self.a
            self.run = lambda x: old(x)

        def forward(self, x):
            return self.b(self.run(x))

    model = Network()
    control = linear_control(model)
    control.step(0)
    model(torch.randn(7, 4)).sum().backward()
    assert "50 % of the multiply-accumulates are computed by functions and stay float" in caplog.text
    assert control.cost().relative_to_static == 1 and control.cost().layers[0].forward == 7 * 16 * 1024


@pytest.mark.parametrize("calls", ["net", "its layers", "the compiled net"])
def test_lightning_style_modules_count_the_passes_of_their_core(calls):
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))

        def training_step(self, x):
            return (self.net[1](self.net[0](x)) if calls == "its layers" else self.net(x)).sum()

    module = bitcycle.quantize_model(Module(), float_layers=[])
    if calls == "the compiled net":
        module.net = torch.compile(module.net, backend="eager", fullgraph=True)
    control = bitcycle.PrecisionController(module, bitcycle.schedule("static", q_max=8, total_steps=1))
    control.step(0)
    module.training_step(torch.randn(7, 3)).backward()
    assert control.cost().samples == 7
    names = {operation.module.replace("_orig_mod.", "") for operation in control.meter.workload.operations}
    assert names == {"net.0", "net.1"}


@pytest.mark.parametrize(
    "wrap", [lambda forward: torch.compile(forward, backend="eager"), torch.autocast("cpu", torch.bfloat16)]
)
def test_a_wrapped_forward_is_counted(wrap, caplog):
    """The trace ran the layers of the model itself, and charged them as functions in float32: sixteen times the cost."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    control = linear_control(model)
    model.forward = wrap(model.forward)
    control.step(0)
    model(torch.randn(7, 4)).sum().backward()
    assert [(layer.name, layer.forward) for layer in control.cost().layers] == [("0", 7 * 16 * 64), ("2", 7 * 16 * 64)]
    assert "the cost omits" not in caplog.text and "computed by functions" not in caplog.text


def test_a_training_pass_costs_the_bits_that_it_computes():
    """Those of `use` and `at_q_max` were charged at the schedule's 3 bits."""
    model = bitcycle.quantize_model(nn.Sequential(nn.Linear(4, 4)), float_layers=[])
    control = bitcycle.PrecisionController(model, bitcycle.schedule("CR", q_min=3, q_max=8, cycles=1, total_steps=100))
    control.step(0)
    model(torch.randn(1, 4))
    with control.at_q_max():
        model(torch.randn(2, 4))
    model(torch.randn(4, 4))
    control.use((6, 5, 8))
    with control.at_q_max():
        model(torch.randn(8, 4))
    model(torch.randn(16, 4))
    control.step(1)
    model(torch.randn(32, 4))
    assert control.meter.histogram == {(3, 3, 8): 1 + 4 + 32, (8, 8, 8): 2 + 8, (6, 5, 8): 16}


class ByForward(nn.Module):
    """Calls its layers, registered in another order, by `forward`, which runs no hook."""

    def __init__(self):
        super().__init__()
        self.third, self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.third.forward(self.second.forward(self.first.forward(x).relu()).relu())


def test_layers_that_are_called_by_forward_are_followed():
    """Their roles were those of their registration; they counted as float, and their report said so."""
    x = torch.randn(2, 8)
    model = bitcycle.quantize_model(ByForward(), sample=x)
    assert [type(layer) is nn.Linear for layer in (model.first, model.second, model.third)] == [True, False, True]
    control = bitcycle.PrecisionController(model, bitcycle.schedule("static", q_max=8, total_steps=1))
    control.step(0)
    model(x).sum().backward()
    report = bitcycle.conversion_report(model, x)
    assert [(row.name, round(row.share, 3)) for row in report.rows] == [
        ("third", 0.333),
        ("first", 0.333),
        ("second", 0.333),
    ]
    # of 64 multiply-accumulates per sample and layer: forward, to the weight and, but in the first layer, to the input
    operations = (32 * 32 * (2 + 3) + 8 * 8 * 3) * 64
    assert control.cost().gbitops == pytest.approx(2 * operations * 1e-9)


def test_batches_of_another_length_are_named_once(caplog):
    """A length curriculum had the cost of its first length, without a word."""
    model = bitcycle.quantize_model(nn.Sequential(nn.Linear(8, 8)), float_layers=[])
    control = bitcycle.PrecisionController(model, bitcycle.schedule("CR", total_steps=8))
    for step, length in enumerate((2, 2, 20, 20, 2, 30)):
        control.step(step)
        model(torch.randn(2 + step, length, 8)).sum().backward()
    named = [record.message for record in caplog.records if "shape" in record.message]
    assert len(named) == 1 and "first one's shape, [*, 2, 8], and this one has [*, 20, 8]" in named[0]
