"""AWD-LSTM: what is dropped and for how long, what is added to the loss, batches of drawn length, averages by validation."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from bitcycle.dataset.token_stream import DrawnTokenStreams
from bitcycle.files import read_json
from bitcycle.layer import penalty, quantize_model
from bitcycle.model.recurrent_language_model import AwdLanguageModelOptions, locked_dropout
from bitcycle.recipe.weight_averaging import WeightAveragingOptions
from bitcycle.settings import SettingError
from bitcycle.shapes import TokenShape
from bitcycle.training.loop import Trainer
from bitcycle.training.run import execute
from tests.conftest import plan
from tests.text_data import write_text

NO_DROPOUT = dict.fromkeys(("dropout", "dropout_hidden", "dropout_input", "dropout_embedding", "dropout_weight"), 0.0)


def model(**options) -> nn.Module:
    return AwdLanguageModelOptions(**{"hidden": 6, "embedding": 4, **options}).build(TokenShape(9))


def test_three_layers_have_the_24_million_parameters_of_the_paper():
    """Merity et al. 2018, table 1: 24M on Penn Treebank (three layers, 1150 units, embedding of 400, one matrix for both)."""
    with torch.device("meta"):
        built = AwdLanguageModelOptions(layers=3).build(TokenShape(10_000))
    layers = [(400, 1150), (1150, 1150), (1150, 400)]
    recurrent = sum(4 * units * (size + units + 2) for size, units in layers)
    assert sum(p.numel() for p in built.parameters()) == 10_000 * 400 + 10_000 + recurrent == 24_221_600


def test_without_dropout_it_is_two_lstms_between_one_matrix():
    built = model(**NO_DROPOUT)
    tokens = torch.arange(8).view(4, 2)
    hidden, _ = built.layers[0](built.embedding.weight[tokens])
    hidden, _ = built.layers[1](hidden)
    logits, state = built(tokens)
    torch.testing.assert_close(logits, hidden @ built.embedding.weight.T + built.decoder.bias)
    first, middle = built(tokens[:2])
    torch.testing.assert_close(torch.cat([first, built(tokens[2:], middle)[0]]), logits)
    assert [tuple(part.shape) for part in state] == [(1, 2, 6)] * 2 + [(1, 2, 4)] * 2


def test_one_mask_serves_all_time_steps():
    torch.manual_seed(0)
    dropped = locked_dropout(torch.ones(5, 40, 30), 0.25, training=True)
    assert torch.equal(dropped, dropped[:1].expand_as(dropped))
    assert dropped.unique().tolist() == pytest.approx([0, 4 / 3])
    assert float((dropped[0] == 0).float().mean()) == pytest.approx(0.25, abs=0.05)
    assert torch.equal(locked_dropout(dropped, 0.25, training=False), dropped)


@pytest.mark.parametrize("quantizer", ["none", "sbm"])
def test_recurrent_weights_are_dropped_once_a_batch_and_come_back(quantizer):
    built = quantize_model(model(**{**NO_DROPOUT, "dropout_weight": 0.5}), quantizer).train()
    tokens, before = torch.arange(8).view(4, 2), copy.deepcopy(built.state_dict())
    outputs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outputs.append(built(tokens)[0])
    assert torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])
    assert all(
        torch.equal(value, before[name]) for name, value in built.state_dict().items() if name.partition("weight_")[1]
    )
    built.zero_grad()
    torch.manual_seed(0)
    built(tokens)[0].square().sum().backward()
    share = float((built.layers[0].weight_hh_l0.grad == 0).float().mean())
    assert 0.3 < share < 0.7  # what was dropped gets no gradient
    built.eval()
    assert torch.equal(built(tokens)[0], built(tokens)[0])


def test_dropped_words_are_zero_wherever_they_occur():
    built = model(**{**NO_DROPOUT, "dropout_embedding": 0.5}).train()
    torch.manual_seed(3)
    rows = built._embedded(torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0]]))
    assert torch.equal(rows[0], rows[1].flip(0))
    gone = (rows[0] == 0).all(1)
    assert 0 < int(gone.sum()) < 4
    torch.testing.assert_close(rows[0][~gone], 2 * built.embedding.weight[:4][~gone])


def test_what_is_added_to_the_loss():
    built = model(**NO_DROPOUT, activation_penalty=3.0, change_penalty=5.0).train()
    tokens = torch.arange(8).view(4, 2)
    assert penalty(built) is None
    built(tokens)
    h = built.layers[1](built.layers[0](built.embedding(tokens))[0])[0]
    expected = 3 * (h**2).mean() + 5 * ((h[1:] - h[:-1]) ** 2).mean()
    torch.testing.assert_close(penalty(built), expected)
    copy.deepcopy(built)  # although the last forward pass has a graph
    built.eval()(tokens)
    assert penalty(built) is None


def test_drawn_lengths():
    streams = DrawnTokenStreams(torch.arange(40_000), streams=2, length=70, seed=4)
    lengths = [streams.length_of(step) for step in range(4000)]
    assert sum(lengths) / len(lengths) == pytest.approx(0.975 * 70 - 0.5, abs=0.5)
    short = [length for length in lengths if length < 52]
    assert len(short) / len(lengths) == pytest.approx(0.05, abs=0.012)
    assert sum(short) / len(short) == pytest.approx(34.5, abs=1.2)
    assert lengths != [DrawnTokenStreams(torch.arange(400), 2, 70, seed=5).length_of(step) for step in range(4000)]
    assert min(DrawnTokenStreams(torch.arange(400), 2, 6).length_of(step) for step in range(200)) == 5


def test_batches_of_drawn_length_follow_each_other_through_the_whole_text():
    streams = DrawnTokenStreams(torch.arange(2001), streams=2, length=20, seed=1)
    batches = streams.starting_at(0)
    found = [next(batches)]
    while len(found) < 300:
        found.append(next(batches))
        before, after = found[-2:]
        begins = not after.continues
        assert int(after.inputs[0, 0]) == (0 if begins else int(before.targets[-1, 0]))
        assert not begins or int(before.targets[-1, 0]) == 999
        assert torch.equal(after.targets, after.inputs + 1)
    assert sum(not batch.continues for batch in found) > 3
    resumed = streams.starting_at(123)
    assert all(torch.equal(next(resumed).inputs, batch.inputs) for batch in found[123:130])


def test_averaging_begins_as_in_the_paper():
    """Merity et al. 2018, algorithm 1: t > n and v > min of v_l with l in {0, ..., t - n - 1}."""
    generator, options = torch.Generator().manual_seed(0), WeightAveragingOptions(patience=3)
    for _ in range(50):
        logs: list[float] = []
        for value in torch.rand(12, generator=generator).tolist():
            t = len(logs)
            expected = t > 3 and value > min(logs[: t - 3])
            logs.append(value)
            assert options.begins(logs, higher_is_better=False) == expected
            assert options.begins([-v for v in logs], higher_is_better=True) == expected
    with pytest.raises(SettingError, match="patience"):
        WeightAveragingOptions(patience=3, start=0.5).validate()


@pytest.fixture
def small(tmp_path):
    write_text(tmp_path / "text")

    def make(*overrides: str):
        sizes = ("model.hidden=8", "model.embedding=6", "task.sequence_length=8", "task.lengths=drawn")
        data = ("dataset=text", f"dataset.path={tmp_path}/text", "dataset.train_samples=60", "dataset.test_samples=20")
        recipe = ("training=awd", "scale=smoke", "training.batch_size=4", f"results_root={tmp_path}/runs")
        return plan(*data, "model=lstm_awd", *sizes, *recipe, *overrides)

    return make


def test_the_rate_is_in_proportion_to_the_length(small):
    trainer = Trainer(small("training.learning_rate.initial=2"), torch.device("cpu"))
    batches = trainer.task.batches(0)
    for batch in (next(batches) for _ in range(6)):
        trainer.train_step(batch)
        assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(2 * len(batch.inputs) / 8)


def test_the_recipe_learns_and_averages_once_validation_rises(small):
    """With one validation of patience, as the run is short; a rate too high makes validations rise."""
    planned = small(
        *("schedule=CR", "schedule.q_min=5", "schedule.cycles=2", "training.learning_rate.initial=8"),
        *("training.steps=40", "training.evaluation_steps=4", "training.weight_averaging.patience=1"),
    )
    summary = execute(planned)
    assert math.isfinite(summary["final"])
    averaged = read_json(planned.folder.summary)["averaged"]
    assert 1 < averaged["weights"] < 40  # every step since the trigger


def test_fixed_lengths_only_where_blocks_are_read(small):
    with pytest.raises(SettingError, match="lengths"):
        small("task=language_modelling_blocks")
