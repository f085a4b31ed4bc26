"""Language modelling: data as published, streams and blocks, networks of the papers' sizes, perplexity, exact resume."""

from __future__ import annotations

import math

import pyarrow
import pyarrow.parquet as parquet
import pytest
import torch
from torch import nn

from bitcycle.dataset.corpora import SIZES, OwnText, PennTreebank, WikiText, WikiTextSmall
from bitcycle.dataset.text import Lines, TextSize, number_tokens
from bitcycle.dataset.token_stream import TokenBlocks, TokenStreams
from bitcycle.errors import DataError
from bitcycle.layer import QuantizedEmbedding, quantize_model
from bitcycle.model import MODELS, TokenShape
from bitcycle.model.adaptive_vocabulary import AdaptiveVocabulary
from bitcycle.model.recurrent_language_model import RecurrentLanguageModelOptions, hold_at_zero
from bitcycle.settings import SettingError
from bitcycle.task import TaskSetup
from bitcycle.task.language_modelling import BlockLanguageModellingOptions, LanguageModellingOptions
from bitcycle.training.run import build_trainer, execute
from bitcycle.training.run_folder import read_records
from tests.conftest import plan
from tests.text_data import write_text

CPU = torch.device("cpu")


@pytest.fixture
def text(tmp_path):
    """Plans of smoke runs on a small made-up text."""
    write_text(tmp_path / "text")

    def make(*overrides: str):
        transformer = any(override.startswith("model=transformer") for override in overrides)
        size = ("model.width=16", "model.heads=2", "model.feedforward=32") if transformer else ("model.hidden=12",)
        small = (*size, "task.sequence_length=5", "dataset.train_samples=40", "dataset.test_samples=20")
        folders = (f"dataset.path={tmp_path}/text", f"results_root={tmp_path}/runs")
        return plan("dataset=text", "scale=smoke", "training.batch_size=4", *small, *folders, *overrides)

    return make


def test_tokens_are_numbered_by_the_training_file():
    lines = Lines(["b a b", "", "c"], ["a d"], ["d"])
    by_occurrence, by_frequency = number_tokens(lines), number_tokens(lines, by_frequency=True)
    assert by_occurrence.vocabulary == ("b", "a", "<eos>", "c", "<unk>")
    assert by_occurrence.train.tolist() == [0, 1, 0, 2, 2, 3, 2]
    assert by_occurrence.validation.tolist() == [1, 4, 2]  # d, which the training file lacks, becomes <unk>
    assert by_frequency.vocabulary == ("<eos>", "b", "a", "c", "<unk>")
    for split in ("train", "validation", "test"):
        words = [
            [numbered.vocabulary[i] for i in getattr(numbered, split)] for numbered in (by_occurrence, by_frequency)
        ]
        assert words[0] == words[1]


LAYOUTS = {
    "ptb": ("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt"),
    "wiki": ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"),
    "plain": ("train.txt", "valid.txt", "test.txt"),
    "hub": ("train-00000-of-00001.parquet", "validation-00000-of-00001.parquet", "test-00000-of-00001.parquet"),
}
CONTENT = (["a b c", " ", "<unk> a"], ["b"], ["c a"])


def write_layout(folder, layout) -> None:
    folder.mkdir(parents=True)
    for name, lines in zip(LAYOUTS[layout], CONTENT):
        if layout == "hub":
            parquet.write_table(
                pyarrow.table({"text": [f"{line}\n" if line.strip() else "" for line in lines]}), folder / name
            )
        else:
            (folder / name).write_text("".join(f"{line}\n" for line in lines))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_published_layouts_hold_the_same_text(layout, tmp_path, monkeypatch):
    name, options = ("ptb", PennTreebank()) if layout == "ptb" else ("wikitext2", WikiText())
    write_layout(tmp_path / name, layout)
    size = TextSize(8, 2, 3, 5)
    monkeypatch.setattr(type(options), "size", size)
    found = options.load(tmp_path)
    assert found.vocabulary == ("a", "b", "c", "<eos>", "<unk>")
    assert (found.train.tolist(), found.test.tolist()) == ([0, 1, 2, 3, 3, 4, 0, 3], [2, 0, 3])


def test_the_small_text_is_made_of_the_official_small_files(tmp_path, monkeypatch):
    folder = tmp_path / "wikitext2"
    folder.mkdir()
    (folder / "wiki.valid.tokens").write_text("a b\n")
    (folder / "wiki.test.tokens").write_text("a\n" * 2226 + "b c\n")
    monkeypatch.setattr(WikiTextSmall, "size", TextSize(3, 2 * 2226, 3, 4))
    found = WikiTextSmall().load(tmp_path)
    assert [found.vocabulary[i] for i in found.test] == ["b", "<unk>", "<eos>"]


def test_missing_and_other_data_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"ptb.train.txt.*licensed"):
        PennTreebank().load(tmp_path)
    write_layout(tmp_path / "ptb", "ptb")
    with pytest.raises(
        DataError, match=r"holds 8, 2, 3, 5 training, validation and test tokens .*; the whole ptb has 929589"
    ):
        PennTreebank().load(tmp_path)
    with pytest.raises(DataError, match=r"wiki.valid.tokens"):
        WikiTextSmall().load(tmp_path)

    with pytest.raises(DataError, match=r"Salesforce/wikitext cannot be loaded.* Put wiki.train.tokens"):
        WikiText(name="wikitext103").load(tmp_path)
    with pytest.raises(DataError, match=r"has no train.txt"):
        plan("dataset=text", f"dataset.path={tmp_path}")
    (tmp_path / "ptb" / "ptb.train.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="cannot read"):
        PennTreebank().load(tmp_path)


def test_settings_that_the_text_cannot_satisfy(tmp_path):
    path = str(write_text(tmp_path / "text"))
    recurrent, info = RecurrentLanguageModelOptions, OwnText(path=path).info(tmp_path)
    for make, words in (
        (lambda: OwnText(path=path, train_samples=100_000).info(tmp_path), "has only 114 pieces of 35 tokens"),
        (lambda: OwnText(path=path, validation=0.1).info(tmp_path), "comes with a validation split"),
        (lambda: LanguageModellingOptions().epoch(info, 4000), "too few for 4000 streams"),
        (lambda: BlockLanguageModellingOptions(sequence_length=9000).epoch(info, 1), "not one block"),
        (lambda: recurrent(name="gru", cell="gru"), "bias=both"),
        (lambda: recurrent(name="lstm", tied=True, embedding=5), "cannot be tied"),
        (
            lambda: plan("dataset=text", f"dataset.path={path}", "model=resnet8"),
            "not made for the data of dataset=text",
        ),
    ):
        with pytest.raises(SettingError, match=words):
            make()


def test_streams_go_through_the_text_side_by_side():
    tokens = torch.arange(23)
    streams = TokenStreams(tokens, streams=2, length=4)  # two of eleven tokens; the last one is left out
    batches = list(streams.of_epoch())
    assert [len(batch.inputs) for batch in batches] == [4, 4, 2]
    assert torch.cat([batch.inputs for batch in batches]).T.tolist() == [list(range(10)), list(range(11, 21))]
    assert all(torch.equal(batch.targets, batch.inputs + 1) for batch in batches)
    assert [batch.continues for batch in batches] == [False, True, True]
    assert (streams.epoch.steps, streams.epoch.samples, streams.epoch.samples_of(2)) == (3, 20, 4)
    from_4 = streams.starting_at(4)
    assert torch.equal(next(from_4).inputs, batches[1].inputs)
    assert [next(from_4).continues for _ in range(2)] == [True, False]


def test_blocks_are_read_in_an_order_of_each_epoch():
    blocks = TokenBlocks(torch.arange(12), count=2, length=3, seed=1)  # three blocks, and two tokens more
    batches = blocks.starting_at(0)
    epochs = [torch.cat([next(batches).inputs.T for _ in range(blocks.epoch.steps)]) for _ in range(3)]
    assert all(sorted(epoch.flatten().tolist()) == list(range(9)) for epoch in epochs)
    assert any(not torch.equal(epochs[0], epoch) for epoch in epochs[1:])
    again = blocks.starting_at(3)
    assert torch.equal(torch.cat([next(again).inputs.T for _ in range(3)]), torch.cat([epochs[1][2:], epochs[2]]))
    evaluated = torch.cat([batch.targets.T.flatten() for batch in blocks.of_epoch()])
    assert evaluated.tolist() == list(range(1, 12))


def parameters(name: str, vocabulary: int = 10_000) -> int:
    with torch.device("meta"):
        model = MODELS[name]().build(TokenShape(vocabulary))
    return sum(parameter.numel() for parameter in model.parameters())


def test_parameters_of_the_papers_networks():
    """Embedding V E, recurrent 4 H (E + H) and one bias of 4 H (HLHLp: two), softmax V H + V."""
    assert parameters("lstm") == 8_000_000 + 4 * 800 * 1600 + 3200 + 8_010_000
    assert parameters("lstm2") == 6_500_000 + 2 * (4 * 650 * 1300 + 2600) + 6_510_000
    assert parameters("lstm_hlhlp") == 3_000_000 + 4 * 300 * 600 + 2 * 1200 + 3_010_000
    assert parameters("gru_hlhlp") == 3_000_000 + 3 * 300 * 600 + 2 * 900 + 3_010_000


def test_parameters_of_the_transformers():
    """Layers as counted by hand; Baevski and Auli print 247M."""
    layer = 4 * (512 * 512 + 512) + 2 * 512 * 2048 + 2048 + 512 + 4 * 512
    assert parameters("transformer", 267_735) == 6 * layer + 2 * 512 + 267_735 * 512
    assert round(parameters("transformer_adaptive", 267_735) / 1e6) == 247


def test_cost_of_penn_treebank_is_that_of_the_released_code():
    """9.184e9 multiply-accumulates of the linear products of a batch of 20 x 35 (get_flops.py of cpt_ptb); all are quantized."""
    planned = plan("dataset=ptb", "schedule=static")
    workload = planned.workload
    assert planned.parameters == 21_133_200
    assert workload.macs / workload.samples * 20 * 35 == 9_184_000_000
    products = [operation for operation in workload.operations if operation.macs]
    assert all(operation.fixed_precision is None for operation in products)
    assert {operation.module for operation in products} == {"rnn.input_l0", "rnn.hidden_l0", "decoder"}
    without_gradient = [o.name for o in products if not o.needs_input_gradient]
    assert without_gradient == ["rnn.hidden_l0"]  # the state before the first step comes as values


def test_products_of_the_transformer():
    """18.87M multiply-accumulates a word in the linear layers, as FracTrain counts, and those of attention; all quantized."""
    workload = plan("dataset=wikitext103", "schedule=static").workload
    linear, attention = ([o for o in workload.operations if o.kind == kind] for kind in ("linear", "matmul"))
    layers = [o for o in linear if not o.is_float]
    assert sum(o.macs for o in layers) / workload.samples == 6 * (4 * 512**2 + 2 * 512 * 2048) == 18_874_368
    assert [o.name for o in linear if o.is_float] == ["head"]
    assert sum(o.macs for o in attention) / workload.samples == 6 * 2 * 256 * 512
    assert all(o.fixed_precision is None for o in attention)


@pytest.mark.parametrize(
    ("choice", "float_layers"), [("all", set()), ("products", {"embedding"}), ("recurrent", {"embedding", "decoder"})]
)
def test_what_is_quantized(choice, float_layers):
    for quantizer in ("sbm", "uniform_l2"):
        model = RecurrentLanguageModelOptions(name="lstm", hidden=4, quantize=choice).build(TokenShape(7))
        model = quantize_model(model, quantizer)
        layers = {"embedding": model.embedding, "decoder": model.decoder, "rnn": model.rnn}
        assert {name for name, layer in layers.items() if not hasattr(layer, "precision")} == float_layers
        if choice != "recurrent":
            assert (model.decoder.bias_quantizer is not None) == (quantizer == "sbm")


def test_the_embedding_has_as_many_values_as_its_bits_say():
    embedding = QuantizedEmbedding(10, 100)
    embedding.precision.set(embedding.precision.precision._replace(weight=2))
    rows = embedding(torch.arange(10))
    assert all(len(row.unique()) == 4 for row in rows)
    rows.sum().backward()
    assert torch.equal(embedding.weight.grad, torch.ones(10, 100))


def test_initial_weights():
    torch.manual_seed(0)
    model = RecurrentLanguageModelOptions(name="lstm", hidden=100).build(TokenShape(50))
    assert float(model.rnn.weight_hh_l0.detach().abs().max()) == pytest.approx(0.1, rel=0.01)
    assert float(model.embedding.weight.detach().abs().max()) == pytest.approx(0.1, rel=0.01)
    assert not model.decoder.bias.any() and not model.rnn.bias_hh_l0.any()
    wide = RecurrentLanguageModelOptions(name="lstm", hidden=400, recurrent_range=0.1, bias="both").build(
        TokenShape(50)
    )
    for parameter in wide.rnn.parameters():
        assert float(parameter.detach().abs().max()) == pytest.approx(0.1, rel=0.01)
    tied = RecurrentLanguageModelOptions(name="lstm", hidden=10, tied=True).build(TokenShape(50))
    assert tied.decoder.weight is tied.embedding.weight


def test_a_bias_held_at_zero_is_neither_trained_nor_saved():
    """The float layer computes what a layer with a second bias of zero computes."""
    torch.manual_seed(0)
    rnn, other = nn.LSTM(3, 4), nn.LSTM(3, 4)
    other.load_state_dict(rnn.state_dict())
    nn.init.zeros_(other.bias_hh_l0)
    hold_at_zero(rnn, "bias_hh_l0")
    x = torch.randn(5, 2, 3)
    torch.testing.assert_close(rnn(x), other(x))
    assert "bias_hh_l0" not in rnn.state_dict()
    rnn(x)[0].sum().backward()
    assert all(parameter.grad is not None for parameter in rnn.parameters())
    torch.testing.assert_close(rnn.double()(x.double())[0].float(), other(x)[0])


TINY_TRANSFORMER = {"width": 16, "heads": 2, "feedforward": 32, "layers": 2}


@pytest.mark.parametrize("cutoffs", [None, [5, 12]])
def test_a_transformer_sees_no_word_to_come(cutoffs):
    torch.manual_seed(0)
    model = MODELS["transformer"](cutoffs=cutoffs, **TINY_TRANSFORMER).build(TokenShape(20)).eval()
    tokens = torch.randint(20, (7, 2))
    changed = tokens.clone()
    changed[4] = (changed[4] + 1) % 20
    logits, other = model(tokens)[0], model(changed)[0]
    assert logits.shape == (7, 2, 20)
    torch.testing.assert_close(logits[:4], other[:4])
    assert (logits[4:] - other[4:]).abs().amax(dim=(1, 2)).min() > 1e-4


def test_adaptive_softmax_is_a_distribution_and_its_losses_those_of_all_words():
    torch.manual_seed(0)
    words = AdaptiveVocabulary(20, width=16, cutoffs=[5, 12], factor=4, dropout=0.0)
    assert [tuple(e.shape) for e in words.embeddings] == [(5, 16), (7, 4), (8, 1)]
    h, targets = torch.randn(30, 16), torch.randint(20, (30,))
    everything = words.log_probabilities(h)
    torch.testing.assert_close(everything.exp().sum(1), torch.ones(30))
    losses, right = words.losses(h, targets)
    torch.testing.assert_close(losses, nn.functional.cross_entropy(everything, targets, reduction="none"))
    assert right.dtype == torch.bool
    torch.testing.assert_close(words.losses(h[:0], targets[:0])[0], torch.zeros(0))
    vectors = words.embed(torch.arange(20))
    expected = torch.cat([e @ p.T for e, p in zip(words.embeddings, words.projections)])
    torch.testing.assert_close(vectors, expected)


def test_transformers_that_make_no_sense():
    for options, words in (
        ({"heads": 7}, "divided among 7 heads"),
        ({"cutoffs": [9, 3]}, "ascending"),
        ({"cutoffs": [9], "quantize_head": True}, "stays float"),
        ({"cutoffs": [3, 9, 20], "width": 16}, "leaves nothing"),
    ):
        with pytest.raises(SettingError, match=words):
            MODELS["transformer"](**options)
    with pytest.raises(SettingError, match="only 20 words"):
        MODELS["transformer"](cutoffs=[30]).check(TokenShape(20))


def task_of(planned, batch_size: int = 4):
    config = planned.config
    return config.task.build(TaskSetup(config.dataset, config.data_folder, planned.info, batch_size, config.seed, CPU))


def test_the_state_goes_on_as_values_and_begins_anew_with_each_epoch(text):
    planned = text("model.dropout=0", "quantizer=none")
    task, model = task_of(planned), planned.build_model()
    batches = task.batches(0)
    first, second = next(batches), next(batches)
    task.train(model, first)
    assert not any(part.requires_grad for part in task.state)
    carried = task.train(model, second).loss
    both, _ = model(torch.cat([first.inputs, second.inputs]))
    expected = nn.functional.cross_entropy(both[5:].flatten(0, 1), second.targets.flatten())
    torch.testing.assert_close(carried, expected)
    again = next(task.batches(planned.epoch.steps))
    torch.testing.assert_close(task.train(model, again).loss, task.train(model, first).loss, rtol=0, atol=0)


def test_evaluation_leaves_the_carried_state_alone(text):
    planned = text()
    task, model = task_of(planned), planned.build_model()
    task.train(model, next(task.batches(0)))
    before = [part.clone() for part in task.state]
    task.evaluate(model.eval())
    task.validate(model)
    assert all(torch.equal(*parts) for parts in zip(before, task.state))


@pytest.mark.parametrize("kind", ["language_modelling", "language_modelling_blocks"])
def test_perplexity_is_that_of_all_tokens(text, kind):
    """Against torchmetrics, which needs the logits of all tokens at once."""
    from torchmetrics.text import Perplexity

    planned = text(f"task={kind}", "task.sequence_length=5", "task.evaluation_batch_size=3", "quantizer=none")
    task, model = task_of(planned), planned.build_model().eval()
    metric, state = Perplexity(), None
    for batch in task.test.of_epoch():
        logits, state = model(batch.inputs, state if batch.continues else None)
        metric.update(logits.transpose(0, 1), batch.targets.T)
    values = task.evaluate(model)
    assert values["test_perplexity"] == pytest.approx(float(metric.compute()), rel=1e-5)
    assert values["test_perplexity"] == pytest.approx(math.exp(values["test_loss"]))


def test_time_sum_is_the_mean_times_the_tokens_of_a_stream(text):
    planned = [text("model.dropout=0", "quantizer=none", f"task.loss={loss}") for loss in ("token_mean", "time_sum")]
    losses = []
    for each in planned:
        task = task_of(each)
        losses.append(task.train(each.build_model(), next(task.batches(0))).loss)
    torch.testing.assert_close(losses[1], 5 * losses[0])


def test_chance_is_the_share_of_the_most_frequent_token(text):
    planned = text("dataset.train_samples=null")
    tokens = planned.config.dataset.load(planned.config.data_folder).train
    assert task_of(planned).majority_baseline == pytest.approx(float(tokens.bincount().max()) / len(tokens))


def test_it_learns_and_costs_what_was_foretold(text):
    """The made-up text is a chain of words, each followed by one of two: far below what single words tell."""
    recipe = (
        "training.steps=300",
        "training.learning_rate.initial=5",
        "training.evaluation_steps=100",
        "model.dropout=0",
    )
    planned = text("schedule=CR", "schedule.q_min=4", "model.hidden=32", "training.batch_size=8", *recipe)
    summary = execute(planned)
    split = planned.config.dataset.load(planned.config.data_folder)
    assert summary["metric"] == "test_perplexity" and summary["unit"] == ""
    shares = split.train.bincount(minlength=len(split.vocabulary)).double() / len(split.train)
    without_context = math.exp(-float(shares.log()[split.test].mean()))
    assert summary["best"] < 0.4 * without_context
    assert summary["cost"]["total"] == planned.cost().summary()
    evaluations = [r for r in read_records(planned.folder.metrics) if r["kind"] == "evaluation"]
    assert summary["best"] == min(r["test_perplexity"] for r in evaluations)
    assert summary["validation"]["best"] == min(r["validation_perplexity"] for r in evaluations)


MATRIX = [
    "quantizer=sbm schedule=RTH schedule.q_min=5 model=lstm2",
    "quantizer=wageubn schedule=CR schedule.q_min=4",
    "quantizer=dorefa schedule=LT schedule.q_min=4 task=language_modelling_blocks",
    "quantizer=multibit schedule=static schedule.q_max=2 schedule.gradient=32 model=gru_hlhlp",
    "quantizer=sbm schedule=CR schedule.q_min=4 model=transformer_adaptive model.layers=2 model.cutoffs=[5,20]"
    " task=language_modelling_blocks dataset.order=frequency",
    "quantizer=uniform_l2 schedule=static schedule.gradient=32 model=transformer model.layers=2 model.quantize_head=true",
    "quantizer=sbm schedule=pfq schedule.epoch_steps=2 schedule.epsilon=0.5 schedule.alpha=1",
]


@pytest.mark.parametrize("overrides", MATRIX)
def test_schedules_and_quantizers(text, overrides):
    summary = execute(text(*overrides.split(), "training.steps=24", "training.evaluation_steps=12"))
    assert math.isfinite(summary["final"])


@pytest.mark.parametrize("name", ["wikitext2", "wikitext2_small"])
def test_dry_runs_need_no_data(name, tmp_path):
    planned = plan(f"dataset={name}", f"data_root={tmp_path}", "model=lstm", "model.hidden=8")
    assert planned.info.shape.vocabulary == SIZES[name].vocabulary
    assert planned.cost().summary()


def test_what_the_command_line_says_wins_over_the_data_sets_recipe():
    planned = plan("dataset=ptb", "model=gru_hlhlp", "training=hlhlp_ptb", "task=language_modelling_blocks")
    config = planned.config
    assert (config.model.cell, config.training.clip_norm, config.task.sequence_length) == ("gru", 1.0, 256)


def test_the_trainer_clips_and_validates(text):
    trainer = build_trainer(text(), CPU)
    assert trainer.options.clip_norm == 0.25
    assert set(trainer.task.validate(trainer.model.eval())) == {"validation_perplexity", "validation_loss"}
