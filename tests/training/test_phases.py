"""Phases: choosing starting weights, flatness, what a change of phase does."""

from __future__ import annotations

import copy
import math
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import bitcycle
from bitcycle.layer import carry_quantized, restart_quantizers, step_ratio
from bitcycle.model import MODELS
from bitcycle.quantizer import optimal_step
from bitcycle.shapes import GraphShape
from bitcycle.training.loop import Trainer
from bitcycle.training.phases import CandidateWeights, PhaseRunner, SecondMoment, best_candidates, choose
from tests.quantizer.test_golden import arrays

CPU = torch.device("cpu")


# Choosing


HISTORY = [
    CandidateWeights(10, 80.0, 1.0),
    CandidateWeights(20, 91.0, 9.0),
    CandidateWeights(30, 92.0, 6.0),
    CandidateWeights(40, 92.0, 5.0),
    CandidateWeights(50, 90.0, 7.0),
    CandidateWeights(60, math.nan, 0.0),
]


def test_starting_weights_of_a_constructed_history():
    """By hand: best is step 30, the earlier of two equal ones; of the best three (30, 40, 20) step 40 is the flattest; step 10,
    flatter still, is not among them."""
    best = best_candidates(HISTORY, 3, higher_is_better=True)
    assert [candidate.step for candidate in best] == [30, 40, 20]
    assert choose(best, "best")[0].step == 30
    assert choose(best, "flattest")[0].step == 40
    assert choose(best_candidates(HISTORY, 5, higher_is_better=True), "flattest")[0].step == 10
    assert choose(best_candidates(HISTORY, 1, higher_is_better=True), "flattest")[0].step == 30


def test_choosing_where_less_is_better_and_where_flatness_is_undefined():
    best = best_candidates(HISTORY, 6, higher_is_better=False)
    assert [candidate.step for candidate in best] == [10, 50, 20, 30, 40, 60]
    undefined = [CandidateWeights(1, 3.0, math.nan), CandidateWeights(2, 2.0, 8.0), CandidateWeights(3, 1.0, None)]
    assert choose(undefined, "flattest")[0].step == 2
    assert choose(undefined[:1], "flattest")[0].step == 1


def test_a_history_kept_one_by_one_is_that_of_all_at_once():
    kept: list[CandidateWeights] = []
    for candidate in HISTORY:
        kept = best_candidates([*kept, candidate], 3, higher_is_better=True)
    assert kept == best_candidates(HISTORY, 3, higher_is_better=True)


# Flatness


def test_trace_sqrt_v_equals_the_reference():
    golden = arrays("trace_sqrt_v")
    weight = nn.Parameter(torch.zeros(3, 8, dtype=torch.float64))
    moment = SecondMoment([weight])
    for gradient in golden["trace__grads"]:
        weight.grad = gradient.double()
        moment.update()
    torch.testing.assert_close(moment.moments[0], golden["trace__v"].double(), rtol=1e-12, atol=0)
    assert moment.trace_sqrt() == pytest.approx(float(golden["trace__s"]), rel=1e-12)


def test_trace_sqrt_v_by_hand():
    """One step: v / (1 - beta) = g^2, so s = |3| + |-4|, whatever beta; then v = 0.001 (0.999 g1^2 + g2^2)."""
    weight, unused = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(5))
    moment = SecondMoment([weight, unused])
    weight.grad = torch.tensor([3.0, -4.0])
    moment.update()
    assert moment.trace_sqrt() == pytest.approx(7)
    weight.grad = torch.tensor([0.0, 2.0])
    moment.update()
    correction = 1 - 0.999**2
    expected = math.sqrt(0.001 * 0.999 * 9 / correction) + math.sqrt(0.001 * (0.999 * 16 + 4) / correction)
    assert moment.trace_sqrt() == pytest.approx(expected)
    again = SecondMoment([weight, unused])
    again.load_state_dict(copy.deepcopy(moment.state_dict()))
    assert again.trace_sqrt() == moment.trace_sqrt()


def test_tracked_moments_are_those_of_the_gradients_whatever_the_optimizer_makes_of_them(digits):
    """PyTorch's SGD adds Nesterov's momentum to the gradients themselves where there is no weight decay."""
    plan = digits(
        *("schedule=fine_tuning", "schedule.start_from=[previous,flattest]"),
        *("training.optimizer.nesterov=true", "training.optimizer.weight_decay=0"),
    )
    trainer = Trainer(plan, CPU)
    trainer.phases.begin()
    weight, expected = trainer.model.conv1.weight, torch.zeros_like(trainer.model.conv1.weight)
    gradients: list[torch.Tensor] = []
    weight.register_post_accumulate_grad_hook(lambda p: gradients.append(p.grad.clone()))
    for _, batch in zip(range(3), trainer.task.batches(0)):
        trainer.train_step(batch)
        expected = 0.999 * expected + 0.001 * gradients[-1].square()
    index = next(i for i, p in enumerate(trainer.phases.moment.parameters) if p is weight)
    torch.testing.assert_close(trainer.phases.moment.moments[index], expected)


def test_tracked_moments_are_those_of_adam():
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer, moment = torch.optim.Adam(model.parameters()), SecondMoment(model.parameters())
    assert moment.trace_sqrt() == 0.0
    for _ in range(7):
        optimizer.zero_grad()
        model(torch.randn(5, 6)).square().sum().backward()
        optimizer.step()
        moment.update()
    expected = sum((state["exp_avg_sq"] / (1 - 0.999**7)).sqrt().sum().item() for state in optimizer.state.values())
    assert moment.trace_sqrt() == pytest.approx(expected, rel=1e-6)


# What a change of phase does


def converted():
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(16, 3)
    )
    return bitcycle.quantize_model(model, quantizer="uniform_l2")


def test_ratio_of_steps_equals_the_reference():
    golden = arrays("l2_uniform")
    layers = nn.ModuleList(nn.Linear(900, 1, bias=False) for _ in range(3))
    for layer, weight in zip(layers, golden["ratio__layers_w"]):
        layer.weight.data = weight.view(1, -1).double()
    assert step_ratio(layers, 2, 8) == pytest.approx(float(golden["ratio__geometric_mean"]), rel=0.005)
    assert step_ratio(layers, 8, 2) == pytest.approx(1 / step_ratio(layers, 2, 8))


def test_ratio_of_steps_of_a_float_graph_network():
    """Whose layers are no linear ones of PyTorch: it once had no step to compare."""
    network = MODELS["gcn_small"]().build(GraphShape(features=64, classes=3, nodes=10, edges=20))
    assert 10 < step_ratio(network, 2, 8) < 130


def test_ratio_of_steps_counts_quantized_layers_only():
    model = converted()
    quantized = bitcycle.quantize_model(copy.deepcopy(nn.Sequential(nn.Linear(50, 50))), quantizer="uniform_l2")
    assert 20 < step_ratio(quantized, 2, 8) < 90
    assert 10 < step_ratio(model, 2, 8) < 130
    other = nn.Sequential(quantized, nn.Linear(7, 7))  # a float layer beside it
    assert step_ratio(other, 2, 8) == step_ratio(quantized, 2, 8)


def test_steps_are_computed_anew_at_equal_bits():
    model = converted().train()
    control = bitcycle.PrecisionController(model, bitcycle.schedule("static", q_max=2, gradient=32, total_steps=9))
    x = torch.randn(8, 2, 6, 6)
    control.step(0)
    model(x)
    step = model[3].weight_quantizer.step.clone()
    with torch.no_grad():
        model[3].weight.mul_(3)
    control.step(1)
    model(x)
    assert torch.equal(model[3].weight_quantizer.step, step)
    restart_quantizers(model)
    control.step(2)
    model(x)
    torch.testing.assert_close(model[3].weight_quantizer.step, 3 * step)


@pytest.mark.parametrize(
    ("schedule", "index", "said"),
    [
        ("static", 0, "the run ends at 5, worse than guessing (10)"),
        ("partial_pretrain", 0, "phase 1 (8 bits) ends at 5, worse than guessing (10): the phases after it start from"),
        ("partial_pretrain", 1, "phase 2 (8 bits) ends at 5, worse than guessing (10)"),
    ],
)
def test_a_run_that_ends_worse_than_guessing_is_named(schedule, index, said, caplog):
    """Also a run of one phase was said to have phases after it, and a cyclic one to have the bits of its first step."""
    controller = Mock(schedule=bitcycle.schedule(schedule, total_steps=10))
    record = {"phase": index + 1, "name": "8 bits", "metric": 5.0, "chance": 10.0}
    PhaseRunner(Mock(), Mock(), controller, Mock(), Mock(), True, index, records=[record]).warn_if_diverged()
    assert said in caplog.text
    assert ("useless weights" in caplog.text) == ("phases after" in said)


def test_carried_values_are_quantized_ones_and_float_phases_carry_all():
    model = converted().train()
    before = model[3].weight.detach().clone()
    control = bitcycle.PrecisionController(model, bitcycle.schedule("fine_tuning", total_steps=2))
    control.step(0)
    model(torch.randn(8, 2, 6, 6))
    carry_quantized(model)
    assert torch.equal(model[3].weight, before)
    control.step(1)
    model(torch.randn(8, 2, 6, 6))
    carry_quantized(model)
    unit = optimal_step(before.view(1, -1), 1).item()
    assert set(model[3].weight.detach().unique().tolist()) <= {-unit, 0.0, unit}
