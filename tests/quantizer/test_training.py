"""Quantizers in training: steps that belong to a stage, penalties, latent weights, decay, and combinations that are refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import bitcycle
from bitcycle.layer import QuantizedConv2d, QuantizedLinear, penalty
from bitcycle.model import CifarResNet
from bitcycle.precision import Precision
from bitcycle.quantizer import Dorefa, PactBinary, QuantizerOptions, Sbm, Ttq, UniformL2, Wageubn, pact_binary
from bitcycle.quantizer.l2_step import optimal_step
from bitcycle.recipe.options import OptimizerOptions
from bitcycle.settings import SettingError
from bitcycle.shapes import ImageShape
from bitcycle.training.loop import Trainer
from bitcycle.training.run import execute
from tests.conftest import plan
from tests.settings import QUANTIZER_SCHEDULES, RESUME

STATIC = ["schedule=static", "schedule.gradient=32"]
LOW_BITS = {
    "dorefa": ["schedule=static", "schedule.q_max=4", "schedule.gradient=8"],
    "wageubn": ["schedule=static", "schedule.q_max=6"],
    # 1 bit learns slowest: after 120 steps it is at 30 to 42 %, depending on the processor
    "pact_binary": [*STATIC, "schedule.q_max=1", "training.steps=240", "training.evaluation_steps=240"],
    "uniform_l2": [*STATIC, "schedule.q_max=2"],
    "ternary": [*STATIC, "schedule.q_max=2"],
    "multibit": [*STATIC, "schedule.q_max=2"],
    "ttq": [*STATIC, "schedule.q_max=2"],
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "multibit")) for name in LOW_BITS]
)
def test_networks_learn_at_few_bits(digits, name):
    options = [
        "training.compile=false",
        "training.steps=120",
        "training.batch_size=32",
        "training.evaluation_steps=120",
        "dataset.train_samples=null",
        "dataset.test_samples=200",
    ]
    summary = execute(digits(f"quantizer={name}", *options, *LOW_BITS[name]))
    assert summary["final"] > 30  # chance is 10 %


def test_every_quantizer_has_a_resume_case_within_its_bits(digits):
    for case, overrides in RESUME.items():
        if case.startswith("quantizer="):
            digits(*overrides)  # refused otherwise
    assert set(QUANTIZER_SCHEDULES) >= {"uniform_l2", "pact_binary", "ternary", "ttq", "multibit"}


# --- steps of uniform_l2 -------------------------------------------------------------------------------------------------


def uniform_model(**options) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))
    return bitcycle.quantize_model(model, UniformL2(**options))


def three_stages(steps_per_epoch: int | None = None):
    """4 steps at 32 bits, 4 at 2 bits, 4 at 32 bits."""
    window = {"start": 4, "end": 8, "unit": "step"}
    return bitcycle.schedule("deficit", q_min=2, q_max=32, total_steps=12, steps_per_epoch=steps_per_epoch, **window)


def train(model: nn.Module, control: bitcycle.PrecisionController, steps: range, observe=lambda step: None) -> None:
    for step in steps:
        control.step(step)
        x = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(step))
        model(x).square().sum().backward()
        observe(step)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 1e-3 * parameter.grad
                parameter.grad = None


def steps_of(layer: QuantizedConv2d | QuantizedLinear) -> tuple[Tensor, Tensor, int]:
    quantizer = layer.weight_quantizer
    expected = optimal_step(layer.weight.detach().reshape(1, -1), 1)
    return quantizer.step.clone(), expected, int(quantizer.step_bits)


def test_a_step_is_that_of_the_weights_at_the_beginning_of_a_stage():
    model = uniform_model()
    found = {}
    train(
        model,
        bitcycle.PrecisionController(model, three_stages()),
        range(12),
        lambda t: found.update({t: steps_of(model[3])}),
    )
    assert [found[step][2] for step in range(12)] == [0] * 4 + [2] * 4 + [0] * 4
    torch.testing.assert_close(found[4][0], found[4][1])
    for step in range(5, 8):
        assert torch.equal(found[step][0], found[4][0])
        assert not torch.equal(found[step][1], found[4][1])  # the optimum has moved on


def test_activations_keep_the_step_of_the_first_batch_of_a_stage():
    model = uniform_model()
    found = {}
    control = bitcycle.PrecisionController(model, three_stages())
    train(model, control, range(12), lambda t: found.update({t: model[3].activation_quantizer.step.clone()}))
    assert found[3] == 1
    assert found[4] != 1
    assert all(torch.equal(found[step], found[4]) for step in range(4, 12))


def test_evaluation_at_other_bits_leaves_training_as_it_was():
    results = []
    for evaluated in (False, True):
        model = uniform_model()
        control = bitcycle.PrecisionController(model, three_stages())

        def evaluate(step: int, model=model, control=control, evaluated=evaluated) -> None:
            if not evaluated:
                return
            model.eval()
            outputs = []
            for bits in (8, 3, 2, 32):
                control.use(Precision(bits, bits, 32))
                outputs.append(model(torch.randn(7, 1, 8, 8)))
            assert all(output.isfinite().all() for output in outputs)
            assert not torch.equal(outputs[0], outputs[1])
            control.use(control.precision)
            model.train()

        train(model, control, range(12), evaluate)
        results.append(model.state_dict())
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_evaluation_sees_the_step_of_its_own_bits():
    model = uniform_model().eval()
    control = bitcycle.PrecisionController(model, bitcycle.schedule("static", q_max=2, gradient=32, total_steps=1))
    x = torch.randn(7, 1, 8, 8)
    control.use(Precision(32, 32, 32))
    expected = model(x)
    errors = []
    for bits in (2, 4, 8):
        control.use(Precision(bits, bits, 32))
        errors.append((model(x) - expected).norm() / expected.norm())
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 0.02


def test_resuming_keeps_the_step_of_the_stage():
    undisturbed = uniform_model()
    control = bitcycle.PrecisionController(undisturbed, three_stages())
    train(undisturbed, control, range(6))
    saved = copy.deepcopy(undisturbed.state_dict())
    train(undisturbed, control, range(6, 12))
    resumed = uniform_model()
    resumed(torch.randn(2, 1, 8, 8))  # whatever was computed before loading does not matter
    resumed.load_state_dict(saved)
    train(resumed, bitcycle.PrecisionController(resumed, three_stages()), range(6, 12))
    torch.testing.assert_close(resumed.state_dict(), undisturbed.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("trains", [True, False])
def test_loaded_weights_of_a_float_network_have_steps_of_their_own(trains):
    """They kept those of the weights before: ten times as large, all of them were clipped."""
    plain, model = (
        nn.Sequential(nn.Linear(8, 8)),
        bitcycle.quantize_model(nn.Sequential(nn.Linear(8, 8)), "uniform_l2", float_layers=[]),
    )
    x = torch.randn(16, 8)
    model(x)
    with torch.no_grad():
        plain[0].weight.mul_(10)
    model.load_state_dict(plain.state_dict())
    expected = bitcycle.quantize_model(plain, "uniform_l2", float_layers=[])
    assert torch.equal(model.train(trains)(x), expected.train(trains)(x))


def test_calibration_sees_all_channels_of_a_large_batch():
    quantizer = UniformL2().activation(compile=False)
    batch = torch.zeros(16, 64, 32, 32)
    batch[:, 5] = torch.rand(16, 32, 32) + 3
    quantizer.prepare(batch, 2)
    assert 1 < quantizer.step.item() < 4  # three steps reach the one channel that is not zero


def test_shapes_alone_need_no_steps():
    model = uniform_model().to("meta")
    assert model(torch.zeros(2, 1, 8, 8, device="meta")).shape == (2, 3)


def test_planning_a_large_network_searches_no_steps():
    """With numbers the search would take minutes."""
    found = plan("model=resnet50", "dataset=imagenet", "quantizer=uniform_l2", *STATIC, "schedule.q_max=2")
    assert found.cost().relative_to_static == 1


# --- trainable parameters and latent weights ------------------------------------------------------------------------------


def pact_model(**options) -> nn.Module:
    torch.manual_seed(0)
    return bitcycle.quantize_model(CifarResNet((1, 1, 1), ImageShape(1, 8, 10)), PactBinary(**options))


def set_precision(model: nn.Module, precision: Precision) -> None:
    control = bitcycle.PrecisionController(model, bitcycle.schedule("static", q_max=1, gradient=32, total_steps=1))
    control.use(precision)


def alphas(model: nn.Module) -> list[Tensor]:
    return [parameter for name, parameter in model.named_parameters() if name.endswith("alpha")]


def test_the_penalty_is_a_loss_term_of_the_binary_phase():
    model = pact_model()
    set_precision(model, Precision(1, 1, 32))
    term = penalty(model)
    term.backward()
    assert len(alphas(model)) == 6  # two convolutions in each of three blocks
    assert term.item() == pytest.approx(6 * 2e-4 * 9)
    assert [alpha.grad.item() for alpha in alphas(model)] == pytest.approx([4e-4 * 3] * 6)
    set_precision(model, Precision(32, 32, 32))
    assert penalty(model) == 0
    assert penalty(uniform_model()) is None
    assert penalty(nn.Linear(2, 2)) is None


def test_alpha_rests_in_the_float_phase_and_moves_in_the_binary_one(digits):
    seen = []

    def training(self, batch):
        train_step(self, batch)
        seen.append(torch.stack([alpha.detach().clone() for alpha in alphas(self.model)]))

    train_step = Trainer.train_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train_step", training)
        window = ["schedule.q_min=1", "schedule.q_max=32", "schedule.start=0.5", "schedule.end=1"]
        execute(digits("quantizer=pact_binary", "schedule=deficit", *window))
    assert all((alpha == 3).all() for alpha in seen[:32])
    assert all((alpha != 3).all() for alpha in seen[32:])


def test_the_penalty_pulls_alpha_down(digits, tmp_path, monkeypatch):
    finals = []
    short = (*STATIC, "schedule.q_max=1", "training.steps=40", "training.evaluation_steps=40")
    for factor in (0.0, 0.1):
        monkeypatch.setattr(pact_binary, "PENALTY", factor)
        run = digits("quantizer=pact_binary", *short, f"results_root={tmp_path}/{factor}")
        execute(run)
        state = run.folder.checkpoint.load()["model"]
        finals.append(torch.stack([value for name, value in state.items() if name.endswith("alpha")]))
    assert (finals[1] < finals[0] - 0.1).all()


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_parameters_of_quantizers_are_trained_without_decay(name):
    for model, count in ((pact_model(), 6), (uniform_model(), 0)):
        optimizer = OptimizerOptions(name=name, weight_decay=0.1).build(model)
        assert len(optimizer.param_groups) == (2 if count else 1)
        assert optimizer.param_groups[0]["weight_decay"] == 0.1
        if count:
            undecayed = optimizer.param_groups[1]
            assert undecayed["weight_decay"] == 0
            assert [id(parameter) for parameter in undecayed["params"]] == [id(alpha) for alpha in alphas(model)]
        assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))


# --- combinations that are refused before any data is read ------------------------------------------------------------------

REFUSED = {
    "quantizer=pact_binary": ("quantizer.name=pact_binary", "weights to 1 bit, not to 8", "schedule.q_max=1"),
    "quantizer=pact_binary schedule=CR": ("quantizer.name=pact_binary", "weights to 1 bit,"),
    "quantizer=pact_binary schedule.q_max=1": ("no quantizer of gradients", "schedule.gradient=32"),
    "quantizer=ternary schedule.q_max=2": ("no quantizer of gradients, but 2-bit", "schedule.gradient_min=32"),
    "quantizer=ternary schedule.gradient=32": ("quantizer.name=ternary", "weights to 2 bits, not to 8"),
    "quantizer=uniform_l2 schedule.gradient=32 schedule.q_max=9": (
        "uniform_l2",
        "2 to 8 bits, not to 9",
        "2 to 8 bits (or 32",
    ),
    "quantizer=uniform_l2 schedule=CR schedule.gradient_min=32 schedule.q_min=1": ("uniform_l2", "not to 1"),
    "quantizer=multibit schedule.gradient=32": ("multibit", "1 to 4 bits, not to 8"),
    "quantizer=ttq schedule.q_max=2": ("ttq", "gradients"),
    "quantizer=wageubn schedule.q_max=1": ("wageubn", "2 to 16"),
    "quantizer=dorefa schedule.q_max=20": ("dorefa", "1 to 16"),
    "quantizer=ternary schedule.q_max=2 schedule.gradient=32 quantizer.depthwise_bits=[8,16]": ("ternary", "not to 8"),
    "quantizer=pact_binary schedule.q_max=1 schedule.gradient=32 model=mobilenet_v2": (
        "quantizer.float_layers",
        "negative inputs",
        "leave such layers float",
    ),
    "quantizer=pact_binary schedule.q_max=1 schedule.gradient=32 quantizer.float_layers=[last]": ("negative inputs",),
    "quantizer=pact_binary schedule=deficit schedule.q_min=1 schedule.q_max=8": ("pact_binary", "not to 8"),
    "quantizer=fp8 quantizer.scaling=full": ("quantizer.scaling=full", "current, delayed"),
}


@pytest.mark.parametrize("overrides", REFUSED)
def test_bad_combinations_are_refused_with_the_remedy(overrides, tmp_path):
    with pytest.raises(SettingError) as error:
        plan(*overrides.split(), f"data_root={tmp_path}/absent")
    for words in REFUSED[overrides]:
        assert words in str(error.value)


def test_what_is_float_is_refused_by_nobody(tmp_path):
    for name in QUANTIZER_SCHEDULES:
        options = (f"quantizer={name}", "schedule.q_max=32", "dataset=digits", "model=resnet8")
        assert plan(*options, f"data_root={tmp_path}/absent").parameters


def test_the_controller_and_single_tensors_refuse_the_same():
    model = uniform_model()
    with pytest.raises(SettingError, match="no quantizer of gradients"):
        bitcycle.PrecisionController(model, bitcycle.schedule("static", q_max=8, total_steps=3))
    control = bitcycle.PrecisionController(model, bitcycle.schedule("static", q_max=8, gradient=32, total_steps=3))
    with pytest.raises(SettingError, match="2 to 8 bits, not to 9"):
        control.use(Precision(9, 32, 8))
    with pytest.raises(SettingError, match="weights to 2 bits"):
        bitcycle.quantize(torch.ones(2, 2), 3, quantizer="ttq", role="weight")
    with pytest.raises(SettingError, match="no quantizer of gradients"):
        bitcycle.quantize(torch.ones(2, 2), 8, quantizer="pact_binary", role="gradient")


@pytest.mark.parametrize(
    ("options", "precision"),
    [
        (Sbm(), Precision(8, 8, 8)),
        (PactBinary(), Precision(1, 1, 32)),
        (Ttq(), Precision(2, 8, 32)),
        (UniformL2(), Precision(8, 8, 32)),
        (Dorefa(), Precision(8, 8, 8)),
        (Wageubn(), Precision(8, 8, 8)),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_converted_model_begins_within_the_bits_of_its_quantizer(options: QuantizerOptions, precision: Precision):
    model = bitcycle.quantize_model(CifarResNet((1, 1, 1), ImageShape(1, 8, 10)), options)
    assert model.group2[0].conv2.precision.precision == precision
    assert model(torch.randn(2, 1, 8, 8)).isfinite().all()
