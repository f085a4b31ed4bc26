"""Evaluation of a converted model: right after any number of training steps, and at q_max on request."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from torch import nn

import bitcycle
from bitcycle.quantizer import Dorefa, Sbm, SbmActivation
from bitcycle.settings import SettingError
from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
from evaluation_error import STEPS, evaluation_errors

pytestmark = pytest.mark.usefixtures("codes_everywhere")


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_evaluation_is_right_after_any_number_of_steps(bits):
    """The error before any training is that of rounding alone; later ones add what a batch clips that is no training batch."""
    before, *later = evaluation_errors("debiased", bits)
    assert before < {3: 0.5, 4: 0.25, 8: 0.015}[bits]
    assert max(later) < before + 0.025


def test_the_released_codes_range_is_a_setting():
    errors = dict(zip(STEPS, evaluation_errors("code")))
    assert errors[1] > 0.3 and errors[20] < 0.2


@pytest.mark.parametrize("compile", [False, True])
def test_the_corrected_range_is_the_weighted_mean_of_the_batches(compile):
    observer, momentum = SbmActivation(0.9, compile, debias=True), 0.9
    batches = [torch.randn(8, 4) * scale for scale in (1, 3, 2)]
    for x in batches:
        observer(x, torch.tensor(8))
        observer(x, torch.tensor(0))  # full precision is not observed
    weights = [momentum**age for age in (2, 1, 0)]
    low = sum(w * float(x.min()) for w, x in zip(weights, batches)) / sum(weights)
    value_range = sum(w * float(x.max() - x.min()) for w, x in zip(weights, batches)) / sum(weights)
    observer.eval()
    assert [float(x) for x in observer.evaluation_range()] == pytest.approx([low, value_range], rel=1e-6)


def test_time_steps_count_one_by_one():
    one, other = (SbmActivation(0.9, debias=True) for _ in range(2))
    sequence = torch.randn(5, 3, 4)
    one.quantize_sequence(sequence, torch.tensor(8))
    for step in sequence:
        other(step, torch.tensor(8))
    torch.testing.assert_close(one.state_dict(), other.state_dict())
    assert float(one.running_weight) == pytest.approx(1 - 0.9**5)


@pytest.mark.parametrize("compute", ["simulate", "codes"])
def test_every_way_to_compute_has_the_same_range(compute):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
    model = bitcycle.quantize_model(net, float_layers=[], compute=compute)
    x = torch.randn(2, 3, 8, 8)
    model(x).sum().backward()
    zero_point, value_range = model[0].activation_quantizer.evaluation_range()
    torch.testing.assert_close(torch.stack([zero_point, value_range]), torch.stack([x.min(), x.max() - x.min()]))


def test_a_state_of_the_released_form_is_read_as_it_is():
    old, new = SbmActivation(), SbmActivation(debias=True)
    old(torch.randn(8, 4), torch.tensor(8))
    new.load_state_dict(old.state_dict())
    assert new.evaluation_range() == old.evaluation_range()


def test_runs_of_the_command_line_keep_the_released_range():
    assert Sbm().as_released().activation(False).running_weight is None
    assert Sbm(running_range="debiased").as_released().activation(False).running_weight is not None


def test_no_step_begins_during_an_evaluation_at_q_max():
    """Its bits were lost at the end of the evaluation, and the following pass was counted at them."""
    model = bitcycle.quantize_model(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), float_layers=[])
    control = bitcycle.PrecisionController(model, bitcycle.schedule("CR", total_steps=80))
    control.step(0)
    with control.at_q_max(), control.at_q_max():
        pass
    with control.at_q_max(), pytest.raises(SettingError, match="step=79: begins within at_q_max"):
        control.step(79)
    assert control.step(79) == control.states[0].precision


def test_an_evaluation_at_q_max_is_one_word():
    model = bitcycle.quantize_model(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), float_layers=[])
    schedule = bitcycle.schedule("CR", q_min=2, q_max=8, cycles=1, total_steps=8)
    control, x = bitcycle.PrecisionController(model, schedule), torch.randn(16, 4)
    assert control.step(0).weight == 2
    model(x)
    at_8 = copy.deepcopy(model).eval()
    bitcycle.PrecisionController(at_8, schedule).use((8, 8, 8))
    model.eval()
    before = model(x)
    with control.at_q_max():
        assert torch.equal(model(x), at_8(x))
    assert torch.equal(model(x), before) and not torch.equal(before, at_8(x))
    with pytest.raises(RuntimeError, match="stop"), control.at_q_max():
        raise RuntimeError("stop")
    assert model[0].precision.precision.weight == 2


def test_a_model_in_evaluation_mode_is_right_once_converted():
    """Its layers took an empty range, as they noticed no change of mode: every output was a constant."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    x = torch.randn(16, 8)
    expected = plain(x)
    model = bitcycle.quantize_model(plain, float_layers=[])
    assert not model.training and (model(x) - expected).norm() < 0.03 * expected.norm()


def test_an_average_that_was_evaluated_before_training_follows_the_range_of_training():
    """It kept the range of that first batch, as it never leaves evaluation mode: half of its output was clipped."""
    model = bitcycle.quantize_model(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), float_layers=[])
    control = bitcycle.PrecisionController(model, bitcycle.schedule("static", q_max=8, total_steps=1))
    average, x = torch.optim.swa_utils.AveragedModel(model).eval(), torch.randn(16, 4)
    average(x / 100)
    control.step(0)
    model(x)
    average.update_parameters(model)
    torch.testing.assert_close(average(x), model.eval()(x), rtol=0, atol=0)


@pytest.mark.parametrize("quantizer", ["dorefa", "uniform_l2", "ternary"])
def test_an_average_from_before_the_first_batch_has_the_buffers_of_training(quantizer):
    """Quantizers that met signed inputs had more buffers than its own: an error, or batch norm with the values of others."""
    layers = (nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    model = bitcycle.quantize_model(nn.Sequential(*layers), quantizer, float_layers=[])
    average, x = torch.optim.swa_utils.AveragedModel(model), torch.randn(16, 4)
    model(x)
    average.update_parameters(model)
    torch.testing.assert_close(average.eval()(x), model.eval()(x), rtol=0, atol=0)
    assert list(average.module.state_dict()) == list(model.state_dict())


def test_signed_activations_of_dorefa_have_their_range_after_one_step():
    """It was a tenth of that, as the running range began at zero."""
    layers = nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)
    model, x = bitcycle.quantize_model(nn.Sequential(*layers), "dorefa", float_layers=[]), torch.randn(16, 4)
    torch.testing.assert_close(model(x), model.eval()(x), rtol=0, atol=0.05)
    for signed in (False, True):
        released = Dorefa().as_released().activation(compile=False, signed=signed)
        assert not any("running_weight" in name for name in released.state_dict())


@pytest.mark.parametrize("quantizer", ["dorefa", "uniform_l2"])
def test_training_goes_on_after_an_evaluation_without_gradients_found_signed_inputs(quantizer):
    """As Lightning's sanity check does: buffers from torch.inference_mode can neither be updated nor loaded outside of it."""
    model = bitcycle.quantize_model(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), quantizer, float_layers=[])
    x = torch.randn(16, 4)
    with torch.inference_mode():
        model.eval()(x)
    model.train()(x).sum().backward()
    model.load_state_dict(copy.deepcopy(model.state_dict()))


def test_a_mode_that_is_assigned_is_noticed():
    """Lightning does so after a validation: training went on with the steps of the first batch of the sanity check."""
    model = bitcycle.quantize_model(nn.Sequential(nn.Linear(4, 8)), "uniform_l2", float_layers=[])
    x, other = torch.randn(16, 4), copy.deepcopy(model)
    model.eval()
    model(10 * x)
    for module in model.modules():
        module.training = True
    assert torch.equal(model(x), other(x))
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=0, atol=0)
