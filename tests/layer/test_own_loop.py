"""A network and a loop of one's own: conversion and controller among what people bring along."""

from __future__ import annotations

import copy
import json
import logging

import pytest
import torch
from torch import nn

import bitcycle
from bitcycle.hardware import trace
from bitcycle.precision import Precision
from bitcycle.quantizer import QUANTIZERS
from bitcycle.settings import SettingError


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


def test_transformer_layers_are_quantized_in_evaluation_too():
    model = bitcycle.quantize_model(encoder(), float_layers=[]).eval()
    control = bitcycle.PrecisionController(model, bitcycle.schedule("static", q_max=2, total_steps=1))
    x = torch.randn(3, 4, 8)
    with torch.no_grad():
        control.use(Precision(32, 32, 32))
        as_float = model(x)
        control.use(Precision(2, 2, 2))
        model.train()
        model(x)  # lets the activations' ranges be seen
        model.eval()
        at_two_bits = model(x)
    torch.testing.assert_close(as_float, encoder().eval()(x))
    with torch.enable_grad():  # which the fast path never took
        torch.testing.assert_close(at_two_bits, model(x))
    assert (at_two_bits - as_float).abs().max() > 0.05


def test_networks_train_in_bfloat16():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 2))
    model = bitcycle.quantize_model(model.bfloat16(), float_layers=[])
    control = bitcycle.PrecisionController(model, bitcycle.schedule("CR", total_steps=16))
    for step in range(2):
        control.step(step)
        model(torch.randn(5, 3, 6, 6, dtype=torch.bfloat16)).float().square().mean().backward()
    assert model[0].weight.grad.dtype == torch.bfloat16
    assert model[0].weight.grad.isfinite().all()


@pytest.mark.parametrize("samples", [-1, 2.5, "4"])
def test_a_number_of_samples_is_a_whole_number(samples):
    model = bitcycle.quantize_model(nn.Linear(2, 2), float_layers=[])
    control = bitcycle.PrecisionController(model, bitcycle.schedule("CR", total_steps=10))
    with pytest.raises((SettingError, TypeError), match=r"samples=-1|integer"):
        control.step(0, samples=samples)


def test_a_controller_needs_a_schedule():
    with pytest.raises(SettingError, match=r"schedule=CR.*bitcycle.schedule\('CR', total_steps"):
        bitcycle.PrecisionController(bitcycle.quantize_model(nn.Linear(2, 2), float_layers=[]), "CR")


def test_a_model_without_quantized_layers_is_noticed():
    with pytest.warns(UserWarning, match="call quantize_model first"):
        bitcycle.PrecisionController(nn.Linear(2, 2), bitcycle.schedule("CR", total_steps=10))


def test_layers_without_counterpart_are_named(caplog):
    with caplog.at_level(logging.WARNING):
        model = nn.Sequential(nn.LSTMCell(2, 2), nn.LSTMCell(2, 2), nn.Linear(8, 2))
        bitcycle.quantize_model(model, float_layers=[])
    assert "stay float: 2 LSTMCell" in caplog.text


def test_hooks_survive_the_conversion():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    seen = []
    handle = model[1].register_forward_hook(lambda module, inputs, output: seen.append(type(module).__name__))
    model = bitcycle.quantize_model(model, float_layers=[])
    model(torch.ones(2, 4))
    assert seen == ["QuantizedLinear"]
    handle.remove()
    model(torch.ones(2, 4))
    assert len(seen) == 1


def test_shortcuts_are_known_by_whole_words():
    names = ("skip", "conv_shortcut", "skipper", "out_projection")
    model = nn.ModuleDict({"a": nn.Linear(2, 2), **{name: nn.Linear(2, 2) for name in names}, "z": nn.Linear(2, 2)})
    roles = bitcycle.layer.conversion.plan.layer_roles(model)
    assert [name for name, found in roles.items() if "shortcut" in found] == ["skip", "conv_shortcut"]


def test_tracing_draws_no_random_numbers():
    class Noisy(nn.Linear):
        def forward(self, x):
            return super().forward(x + torch.randn_like(x))

    model, before = Noisy(3, 3), torch.get_rng_state()
    trace(model, torch.ones(2, 3))
    assert torch.equal(before, torch.get_rng_state())


def test_gradients_of_a_float_forward_pass_are_float():
    schedule = bitcycle.schedule("static", q_max=32, gradient=8, total_steps=2)
    assert schedule(0) == schedule.reference == Precision(32, 32, 32)


def signed_network(activation: type[nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), activation(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("quantizer", ["dorefa", "uniform_l2", "ternary", "ttq"])
def test_signed_inputs_are_found_at_the_first_batch(quantizer):
    """Findings on networks of others, line 1."""
    x = torch.randn(64, 6)
    plain = signed_network(nn.Tanh)
    model = bitcycle.quantize_model(signed_network(nn.Tanh), quantizer, float_layers=[])
    for layer in (model[0], model[2], model[4]):
        layer.precision.weight_bits.fill_(0)
    model(x)
    hidden = plain[:2](x)
    found = model[2].activation_quantizer(hidden, torch.tensor(8))
    torch.testing.assert_close(found, hidden, atol=0.05, rtol=0)
    assert model[4].activation_quantizer.non_negative  # behind the ReLU
    other = bitcycle.quantize_model(signed_network(nn.Tanh), quantizer, float_layers=[])
    other.load_state_dict(model.state_dict())
    assert not other[2].activation_quantizer.non_negative


def test_a_quantizer_without_signed_form_refuses_by_name():
    model = bitcycle.quantize_model(signed_network(nn.Tanh), "pact_binary", float_layers=["0"])
    with pytest.raises(ValueError, match=r"negative.*'2'.*float_layers"):
        model(torch.randn(4, 6))
    bitcycle.quantize_model(signed_network(nn.ReLU), "pact_binary", float_layers=["0"])(torch.randn(4, 6))


def test_a_layer_that_cuts_its_input_says_so_once(caplog):
    model = bitcycle.quantize_model(signed_network(nn.ReLU), "dorefa", float_layers=[])
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            model(40 * torch.randn(64, 6))
    said = [record.getMessage() for record in caplog.records]
    assert [message.split(":")[0] for message in said] == ["layer '2'", "layer '4'"]
    assert "% of the input" in said[0] and "quantizer=sbm" in said[0]


def test_evaluation_before_training_calibrates_and_leaves_training_alone():
    x, states = torch.randn(32, 6), []
    for evaluates in (False, True):
        model = bitcycle.quantize_model(signed_network(nn.ReLU), float_layers=[])
        if evaluates:
            y = model.eval()(x)
            torch.testing.assert_close(y, signed_network(nn.ReLU)(x), atol=0.05, rtol=0.05)
            assert torch.equal(model(x / 2), model(x / 2))
        model.train()(x)
        states.append(model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(states[0].values(), states[1].values()))


def test_bits_travel_with_the_state_dict():
    model = bitcycle.quantize_model(signed_network(nn.ReLU), float_layers=[])
    bitcycle.PrecisionController(model, bitcycle.schedule("static", q_max=3, total_steps=1)).step(0)
    model(torch.randn(32, 6))
    other = bitcycle.quantize_model(signed_network(nn.ReLU), float_layers=[])
    other.load_state_dict(model.state_dict())
    assert other[0].precision.precision == Precision(3, 3, 3)
    x = torch.randn(5, 6)
    assert torch.equal(model.eval()(x), other.eval()(x))
    bitcycle.PrecisionController(model, bitcycle.schedule("static", q_max=5, total_steps=1)).step(0)
    model.load_state_dict(other.state_dict())
    assert model[0].precision.precision == Precision(5, 5, 5)  # a controller decides


@pytest.mark.parametrize("quantizer", sorted(QUANTIZERS.keys() - {"none", "pact_binary"}))
def test_float_state_dicts_fit_both_ways(quantizer):
    plain = signed_network(nn.ReLU)
    model = bitcycle.quantize_model(signed_network(nn.ReLU), quantizer, float_layers=[])
    model.load_state_dict(plain.state_dict(), strict=True)
    plain.load_state_dict(bitcycle.float_state_dict(model), strict=True)


def test_state_dicts_of_distributed_checkpoints_have_the_bits():
    """They ended in an AttributeError, as each key has to be the name of an attribute."""
    checkpoint = pytest.importorskip("torch.distributed.checkpoint.state_dict")
    model, other = (bitcycle.quantize_model(signed_network(nn.ReLU), float_layers=[]) for _ in range(2))
    bitcycle.PrecisionController(model, bitcycle.schedule("static", q_max=3, total_steps=1)).step(0)
    checkpoint.set_model_state_dict(other, checkpoint.get_model_state_dict(model))
    assert other[0].precision.precision == Precision(3, 3, 3)


def test_a_copy_of_a_model_under_a_controller_loads_bits():
    """It kept those of its model, whatever the loaded weights had been trained at: no controller sets its bits."""
    model = bitcycle.quantize_model(signed_network(nn.ReLU), float_layers=[])
    control = bitcycle.PrecisionController(model, bitcycle.schedule("LR", q_min=2, q_max=8, cycles=1, total_steps=4))
    control.step(0)
    at_two_bits = model.state_dict()
    control.step(3)
    best = copy.deepcopy(model)
    best.load_state_dict(at_two_bits)
    assert best[0].precision.precision == Precision(2, 2, 8)
    control.follow(best)
    best.load_state_dict(at_two_bits)
    assert best[0].precision.precision == model[0].precision.precision == Precision(8, 8, 8)


def test_a_copy_of_a_parametrized_layer_adapts_to_new_bits():
    """Its quantizer kept the steps of the bits at which it was copied: torch's copy did not make it a reader of its bits."""
    model = bitcycle.quantize_model(signed_network(nn.ReLU), "uniform_l2", float_layers=[])
    nn.utils.parametrizations.weight_norm(model[0])
    options = {"q_min": 2, "q_max": 8, "cycles": 1, "gradient_min": 32, "gradient_max": 32}
    control = bitcycle.PrecisionController(model, bitcycle.schedule("LR", **options, total_steps=4))
    x = torch.randn(8, 6)
    control.step(0)
    model(x)
    average = copy.deepcopy(model).eval()
    control.follow(average)
    average(x)
    control.step(3)
    torch.testing.assert_close(average(x), model.eval()(x))


def test_averages_of_weights_leave_bits_and_keys_alone():
    model = bitcycle.quantize_model(signed_network(nn.ReLU), float_layers=[])
    control = bitcycle.PrecisionController(model, bitcycle.schedule("LR", q_min=2, q_max=8, cycles=1, total_steps=4))
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    control.follow(average)
    key = average.module[0].layer_key.clone()
    for step in range(4):
        control.step(step)
        model(torch.randn(8, 6))
        average.update_parameters(model)
        assert average.module[0].precision.precision == model[0].precision.precision
        assert torch.equal(average.module[0].layer_key, key)
    assert control.meter.histogram.total() == 32  # the average was not called


def test_layers_outside_of_the_model_that_share_its_bits_are_named(caplog):
    """Of parts that were converted together, the controller of one set the bits of all without a word."""
    together = nn.ModuleDict({"body": signed_network(nn.ReLU), "head": nn.Linear(3, 2)})
    bitcycle.quantize_model(together, float_layers=[])
    schedule = bitcycle.schedule("CR", q_min=2, q_max=8, cycles=1, total_steps=4)
    bitcycle.PrecisionController(together, schedule)
    bitcycle.PrecisionController(bitcycle.quantize_model(signed_network(nn.ReLU), float_layers=[]), schedule)
    assert not caplog.messages
    bitcycle.PrecisionController(together["body"], schedule)
    assert [message.partition(";")[0][-6:] for message in caplog.messages] == [": head"]


def test_only_a_converted_model_can_follow():
    model = bitcycle.quantize_model(signed_network(nn.ReLU), float_layers=[])
    control = bitcycle.PrecisionController(model, bitcycle.schedule("CR", q_min=2, q_max=8, cycles=1, total_steps=4))
    with pytest.raises(SettingError, match=r"model=Sequential: has no quantized layers to set bits of"):
        control.follow(signed_network(nn.ReLU))
    with pytest.raises(SettingError, match=r"model=NoneType: is not a torch.nn.Module"):
        bitcycle.quantize_model(None)


@pytest.mark.parametrize("schedule", ["CR", "triangular", "cosine_anneal", "gradient_cycle"])
def test_a_controller_resumes_in_another_loop(schedule):
    def build(total: int = 6):
        model = bitcycle.quantize_model(signed_network(nn.ReLU), float_layers=[])
        return model, bitcycle.PrecisionController(model, bitcycle.schedule(schedule, cycles=2, total_steps=total))

    def train(model, control, steps):
        for step in steps:
            control.step(step)
            torch.manual_seed(step)
            model.zero_grad()
            model(torch.randn(8, 6)).square().mean().backward()
        return model[0].weight.grad

    model, control = build()
    whole = train(model, control, range(6))
    first, before = build()
    train(first, before, range(3))
    second, after = build()
    average = copy.deepcopy(second)
    second.load_state_dict(first.state_dict())
    after.load_state_dict(before.state_dict())
    after.follow(average)  # was evaluated at 8 bits until the next step
    precisions = {network[0].precision.precision for network in (first, second, average)}
    assert precisions == {before.precision}
    assert torch.equal(train(second, after, range(after.next_step, 6)), whole)
    assert after.cost() == control.cost()


def controller(name: str = "CR", **options) -> bitcycle.PrecisionController:
    model = bitcycle.quantize_model(signed_network(nn.ReLU), float_layers=[])
    return bitcycle.PrecisionController(model, bitcycle.schedule(name, **{"cycles": 2, "total_steps": 8} | options))


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [("RTH", {}, r"schedule=RTH: .* name=CR \(now RTH\)"), ("CR", {"q_max": 6}, r"q_max=8 \(now 6\)")],
)
def test_the_state_of_another_schedule_is_refused(name, options, problem):
    """It was once loaded, and training went on at other bits, without a word."""
    before = controller()
    before.step(2)
    after = controller(name, **options)
    with pytest.raises(ValueError, match=f"{problem}.*Remedy: make the controller with the schedule of that state"):
        after.load_state_dict(before.state_dict())
    assert after.next_step == 0


def test_another_length_of_a_resumed_run_is_named(caplog):
    before, longer, shorter = controller(), controller(total_steps=16), controller(total_steps=4)
    before.step(6)
    saved = json.loads(json.dumps(before.state_dict()))  # as transformers' callback keeps it
    longer.load_state_dict(saved)
    assert longer.next_step == 7
    assert "another length than the saved state was in, with total_steps=8 (now 16)" in caplog.text
    with pytest.raises(SettingError, match="step=6: is outside the run"):
        shorter.load_state_dict(saved)
    assert shorter.next_step == 0


def test_the_same_schedule_and_states_of_earlier_versions_are_loaded_without_a_word(caplog):
    options = {"stages": [3, 8], "gradient_stages": [8, 8]}
    for name, given in (("CR", {}), ("pfq_manual", options), ("static", {"q_max": 5})):
        given = {**given, "cycles": 2}
        before = controller(name, **given)
        before.step(2)
        saved = before.state_dict()
        controller(name, **given).load_state_dict(json.loads(json.dumps(saved)))
        if name == "static":  # its bits do not depend on the length
            controller(name, **given, total_steps=16).load_state_dict(saved)
        del saved["bound_schedule"]
        controller("RTH", q_min=5).load_state_dict(saved)
    assert not caplog.messages


def gradient_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    model(x).square().sum().backward()
    return model[0].weight.grad.clone()


def test_noise_is_fresh_for_each_call_of_a_step():
    model = bitcycle.quantize_model(signed_network(nn.ReLU), float_layers=[])
    control = bitcycle.PrecisionController(model, bitcycle.schedule("static", q_max=4, total_steps=2))
    x = torch.randn(64, 6)

    def gradients(calls: int) -> list[torch.Tensor]:
        control.step(0)
        return [gradient_of(model, x) for _ in range(calls)]

    found = gradients(32)
    assert len({tuple(g.flatten().tolist()) for g in found}) == 32
    assert all(torch.equal(a, b) for a, b in zip(found, gradients(32)))  # and derived
    control.use(Precision(4, 4, 32))
    exact = gradient_of(model, x)
    single = torch.stack([(g - exact).norm() for g in found]).mean()
    assert (sum(found) / 32 - exact).norm() < 1.3 * single / 32**0.5


def test_ranks_have_noise_of_their_own():
    x, found = torch.randn(64, 6), []
    for rank in (None, 0, 1):
        model = bitcycle.quantize_model(signed_network(nn.ReLU), float_layers=[])
        schedule = bitcycle.schedule("static", q_max=4, total_steps=2)
        bitcycle.PrecisionController(model, schedule, rank=rank).step(0)
        found.append(gradient_of(model, x))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize("quantizer", ["sbm", "dorefa", "wageubn"])
def test_a_step_between_forward_and_backward_is_refused(quantizer):
    model = bitcycle.quantize_model(signed_network(nn.ReLU), quantizer, float_layers=[])
    control = bitcycle.PrecisionController(model, bitcycle.schedule("static", q_max=4, total_steps=2))
    control.step(0)
    loss = model(torch.randn(4, 6)).sum()
    control.step(1)
    with pytest.raises(RuntimeError, match="before the forward pass"):
        loss.backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_activations_are_observed_once(reentrant):
    from torch.utils.checkpoint import checkpoint

    x, states = torch.randn(32, 6), []
    for checkpointed in (False, True):
        model = bitcycle.quantize_model(signed_network(nn.ReLU), float_layers=[])
        control = bitcycle.PrecisionController(model, bitcycle.schedule("static", q_max=4, total_steps=2))
        control.step(0)
        leaf = x.clone().requires_grad_()
        y = checkpoint(model, leaf, use_reentrant=reentrant) if checkpointed else model(leaf)
        y.sum().backward()
        states.append([*model.state_dict().values(), model[0].weight.grad])
        assert control.cost().samples == 32
    assert all(torch.equal(a, b) for a, b in zip(*states))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_micro_batches_count_once_each_and_passes_without_gradients_never(reentrant):
    """Reentrant checkpointing of a whole model counted the first micro-batch of a step only."""
    from torch.utils.checkpoint import checkpoint

    model = bitcycle.quantize_model(signed_network(nn.ReLU), float_layers=[])
    control = bitcycle.PrecisionController(model, bitcycle.schedule("static", q_max=4, total_steps=2))
    for step in range(2):
        control.step(step)
        for _ in range(3):
            with torch.no_grad():
                model(torch.randn(4, 6))
            checkpoint(model, torch.randn(4, 6, requires_grad=True), use_reentrant=reentrant).sum().backward()
    assert control.cost().samples == 2 * 3 * 4


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_inside_a_model_leaves_the_cost_alone(reentrant):
    """Reentrant checkpointing runs without gradients, which the trace once took for a part that is not trained."""
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Sequential):
        def forward(self, x):
            return self[4](checkpoint(lambda y: self[3](self[2](self[1](y))), self[0](x), use_reentrant=reentrant))

    parts = nn.Linear(6, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 2)
    costs = []
    for kind in (nn.Sequential, Checkpointed):
        model = bitcycle.quantize_model(kind(*copy.deepcopy(parts)), float_layers=[])
        control = bitcycle.PrecisionController(model, bitcycle.schedule("static", q_max=8, total_steps=1))
        control.step(0)
        model(torch.randn(4, 6)).sum().backward()
        costs.append(control.cost().gbitops)
    assert costs[0] == costs[1]


def test_products_of_functions_are_named_at_the_first_step(caplog):
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.weight = nn.Linear(8, 8), nn.Parameter(torch.randn(3, 8))

        def forward(self, x):
            return nn.functional.linear(self.layer(x), self.weight)  # the weight of no layer

    model = bitcycle.quantize_model(Functional(), float_layers=[])
    control = bitcycle.PrecisionController(model, bitcycle.schedule("static", q_max=8, total_steps=2))
    for step in range(2):
        control.step(step)
        model(torch.randn(4, 8))
    assert [record.getMessage() for record in caplog.records if "functions" in record.getMessage()] == [
        "27 % of the multiply-accumulates are computed by functions and stay float, mostly in Functional; use modules such as"
        " nn.Linear, nn.MultiheadAttention and bitcycle.layer.MatrixProduct to quantize them"
    ]


def test_a_schedule_that_is_told_nothing_is_noticed(caplog):
    model = bitcycle.quantize_model(signed_network(nn.ReLU), float_layers=[])
    schedule = bitcycle.schedule("pfq", total_steps=100, steps_per_epoch=2)
    control = bitcycle.PrecisionController(model, schedule)
    with caplog.at_level(logging.WARNING):
        for step in range(100):
            control.step(step)
    assert caplog.text.count("schedule.observe") == 1


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("range_test", {}),
        ("pfq", {"stages": [4], "gradient_stages": [8]}),
    ],
)
def test_a_schedule_that_is_told_something_is_not_said_to_be_told_nothing(name, options, caplog):
    model = bitcycle.quantize_model(signed_network(nn.ReLU), float_layers=[])
    schedule = bitcycle.schedule(name, total_steps=9600, steps_per_epoch=2, **options)
    if name == "range_test":
        schedule.begin(0.1)
    control = bitcycle.PrecisionController(model, schedule)
    with caplog.at_level(logging.WARNING):
        for step in range(40):
            control.step(step)
            if (step + 1) % schedule.observation_steps == 0:
                schedule.observe(1.0, 0.1)
    assert "schedule.observe" not in caplog.text


def test_bits_that_the_quantizer_lacks_are_refused_before_training():
    """Training failed at step 370, where the schedule left the 1 to 4 bits of multibit."""
    model = bitcycle.quantize_model(nn.Sequential(nn.Linear(4, 4)), "multibit")
    schedule = bitcycle.schedule("CR", q_min=3, q_max=8, gradient_min=32, cycles=1, total_steps=1000)
    with pytest.raises(SettingError, match="multibit: quantizes weights to 1 to 4 bits, not to 5"):
        bitcycle.PrecisionController(model, schedule)


def test_no_bits_are_refused_at_their_step():
    """The network trained in float, and the cost of the whole run was refused at its end."""
    model = bitcycle.quantize_model(nn.Sequential(nn.Linear(4, 4)), float_layers=[])
    control = bitcycle.PrecisionController(model, bitcycle.schedule("static", q_max=8, total_steps=10))
    with pytest.raises(SettingError, match="not to 0"):
        control.use((0, 0, 0))


@pytest.mark.parametrize(("bits", "zero"), [(3, True), (4, True), (5, False), (32, False)])
def test_layers_without_a_weight_at_the_lowest_bits_are_named(bits, zero, caplog):
    """PyTorch's initial weights of 512 inputs are below 0.045, half a step of 4 bits is 0.0625."""
    layers = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512), nn.Linear(512, 4))
    model = bitcycle.quantize_model(layers, "wageubn", float_layers=["last"], layer_bits={"1": 8})
    before = model[0].weight.clone()
    bitcycle.PrecisionController(
        model, bitcycle.schedule("CR", q_min=bits, q_max=max(bits, 8), cycles=1, total_steps=9)
    )
    found = [message for message in caplog.messages if "all weights of 1 layers are zero" in message]
    assert len(found) == zero and all("half a step: 0; raise q_min" in message for message in found)
    assert torch.equal(model[0].weight, before)


def test_a_model_converted_in_inference_mode_is_trained():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with torch.inference_mode():
        model = bitcycle.quantize_model(model, float_layers=[])
        model(torch.randn(2, 4))
    control = bitcycle.PrecisionController(model, bitcycle.schedule("CR", total_steps=8))
    control.step(0)
    model(torch.randn(2, 4)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize("sizes", [(4, 8, 0), (4, 0, 8)], ids=str)
def test_layers_without_elements_stay_float(sizes, caplog):
    model = nn.Sequential(*(nn.Linear(*pair) for pair in ((4, 4), sizes[:2], sizes[1:])))
    model = bitcycle.quantize_model(model, float_layers=[])
    control = bitcycle.PrecisionController(model, bitcycle.schedule("CR", total_steps=8))
    control.step(0)
    y = model(torch.randn(2, 4))
    y.sum().backward()
    assert y.shape == (2, sizes[2]) and control.cost().gbitops > 0 and not caplog.text


class Adapted(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.adapter = base, nn.Linear(base.in_features, base.out_features)

    def forward(self, x):
        return self.base(x) + self.adapter(x)


def test_layers_that_are_added_after_the_conversion_are_named(caplog):
    model = nn.ModuleDict({"body": nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), "head": nn.Linear(4, 2)})
    model["body"] = bitcycle.quantize_model(model["body"], float_layers=["last"])
    schedule = bitcycle.schedule("CR", total_steps=8)
    bitcycle.PrecisionController(model, schedule)
    assert not caplog.text
    model["body"][1], model["body"][2] = Adapted(model["body"][1]), nn.Linear(4, 4)
    bitcycle.PrecisionController(model, schedule)
    assert "added after the conversion stay float: body.1.adapter, body.2;" in caplog.text


def test_mistaken_arguments_are_refused_by_name():
    """They ended in AttributeError, KeyError and TypeError."""
    model, schedule = bitcycle.quantize_model(nn.Linear(4, 4), float_layers=[]), bitcycle.schedule("CR", total_steps=8)
    with pytest.raises(SettingError, match=r"model=list: is not a torch.nn.Module.*ModuleList"):
        bitcycle.PrecisionController([model], schedule)
    with pytest.raises(SettingError, match=r"state=weight, bias, precision.bits.*has no cost, gates, next_step"):
        bitcycle.PrecisionController(model, schedule).load_state_dict(model.state_dict())
    with pytest.raises(SettingError, match=r"layer_bits=.*is not a mapping"):
        bitcycle.quantize_model(nn.Linear(4, 4), layer_bits=[8])


@pytest.mark.parametrize("steps", [40, 400])
def test_a_schedule_that_its_run_is_too_short_for_is_named(steps, caplog):
    """Only the command line did."""
    schedule = bitcycle.schedule("pfq", total_steps=steps, steps_per_epoch=10)
    bitcycle.PrecisionController(bitcycle.quantize_model(nn.Sequential(nn.Linear(2, 2)), float_layers=[]), schedule)
    assert ("reaches at most 1 of its 4 stages" in caplog.text) == (steps == 40)
