"""Entailment: pairs as tokens, BERT with quantized attention, and runs of both."""

from __future__ import annotations

from pathlib import Path

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
import torch
from torch import nn

from bitcycle.dataset.sentence_pairs import SPECIAL, SentencePairFolder, Sick, Xnli, find_tokenizer, train_word_piece
from bitcycle.errors import DataError, RunError
from bitcycle.hardware import trace
from bitcycle.layer import MatrixProduct, QuantizedLinear, QuantizedMatrixProduct, quantize_model
from bitcycle.model import MODELS
from bitcycle.optional_imports import require
from bitcycle.precision import FLOAT, Precision
from bitcycle.quantizer import Sbm
from bitcycle.settings import SettingError
from bitcycle.shapes import SentencePairShape
from bitcycle.task import TASKS, TaskSetup
from bitcycle.training.run import execute
from tests.conftest import plan

CPU = torch.device("cpu")
TINY = ["model=bert_tiny", "model.hidden=16", "model.intermediate=32", "dataset.length=12", "dataset.vocabulary=120"]
ANIMALS, ACTS = ("dog", "cat", "bird", "horse"), ("runs", "sleeps", "eats", "sings")
SAID = ("does", "might", "never")


def write_pairs(folder: Path, sizes: dict[str, int]) -> None:
    """Pairs whose hypothesis says the same, leaves it open, or denies it, in its last word."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    for split, count in sizes.items():
        animals, acts = (torch.randint(0, 4, (count,), generator=generator).tolist() for _ in range(2))
        columns = {
            "premise": [f"A {ANIMALS[animal]} {ACTS[act]}" for animal, act in zip(animals, acts)],
            "hypothesis": [f"The {ANIMALS[animal]} {SAID[number % 3]}" for number, animal in enumerate(animals)],
            "label": [number % 3 for number in range(count)],
        }
        parquet.write_table(arrow.table(columns), folder / f"{split}-00000-of-00001.parquet")


@pytest.fixture
def pairs(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_pairs(tmp_path / "pairs", {"train": 260, "validation": 24, "test": 130})
    return tmp_path


def build(name: str, shape: SentencePairShape, **values):
    return MODELS[name](**values).build(shape)


def test_multilingual_bert_has_the_published_size_and_cost():
    transformers = require("transformers", "entailment")
    shape = SentencePairShape(119_547, 128, 3)
    with torch.device("meta"):
        model = build("mbert", shape)
        theirs = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=119_547, num_labels=3))
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == 177_853_440 + 768 * 3 + 3 == sum(parameter.numel() for parameter in theirs.parameters())
    names = {name for name, _ in theirs.named_parameters()}
    assert names == {name for name, _ in model.named_parameters()}
    quantize_model(model, Sbm())
    sample = TASKS["entailment"]().sample(Xnli(name="xnli").info(Path()))
    operations = trace(model, *sample.arguments, samples=1).operations
    macs = {
        kind: 64 * sum(operation.macs for operation in operations if operation.kind == kind)
        for kind in ("linear", "matmul")
    }
    # the released code's count for a batch of 64 leaves the classifier out
    assert macs["linear"] - 64 * 768 * 3 == 695_822_450_688
    assert macs["matmul"] == 64 * 12 * 2 * 128 * 128 * 768
    assert all(operation.is_float == (operation.kind == "embedding") for operation in operations)


def test_everything_is_quantized():
    shape = SentencePairShape(120, 12, 3)
    model = quantize_model(build("bert_tiny", shape), Sbm())
    kinds = [type(module) for module in model.modules()]
    assert kinds.count(QuantizedLinear) == 2 * 6 + 2
    assert kinds.count(QuantizedMatrixProduct) == 2 * 2
    assert nn.Linear not in kinds and MatrixProduct not in kinds
    assert all(module.bias_quantizer is not None for module in model.modules() if isinstance(module, QuantizedLinear))


def test_outputs_equal_those_of_transformers():
    transformers = require("transformers", "entailment")
    model = build("bert_tiny", SentencePairShape(120, 12, 3)).eval()
    config = transformers.BertConfig(
        vocab_size=120,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=512,
        num_labels=3,
    )
    theirs = transformers.BertForSequenceClassification(config).eval()
    theirs.load_state_dict(model.state_dict(), strict=False)
    ids, segments = torch.randint(0, 120, (4, 12)), torch.randint(0, 2, (4, 12))
    mask = torch.arange(12) < torch.tensor([12, 5, 9, 1])[:, None]
    expected = theirs(input_ids=ids, token_type_ids=segments, attention_mask=mask.long()).logits
    torch.testing.assert_close(model(ids, segments, mask), expected, rtol=1e-5, atol=1e-6)
    float_bits = quantize_model(model, Sbm())
    float_bits.classifier.precision.set(Precision(FLOAT, FLOAT, FLOAT))
    torch.testing.assert_close(float_bits(ids, segments, mask), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", ["safetensors", "first checkpoints"])
def test_published_weights_are_loaded(tmp_path, form):
    shape = SentencePairShape(120, 12, 3)
    source = build("bert_tiny", shape).bert.state_dict()
    if form == "safetensors":
        require("safetensors.torch", "entailment").save_file(
            {f"bert.{name}": value for name, value in source.items()}, str(tmp_path / "model.safetensors")
        )
    else:
        renamed = {
            name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
            for name, value in source.items()
        }
        torch.save({**renamed, "cls.predictions.bias": torch.zeros(3)}, tmp_path / "pytorch_model.bin")
    loaded = build("bert_tiny", shape, weights=str(tmp_path)).bert.state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in source.items())
    with pytest.raises(SettingError, match=r"word_embeddings.weight is \[120, 128\] instead of \[130, 128\]"):
        build("bert_tiny", SentencePairShape(130, 12, 3), weights=str(tmp_path))


def test_weights_that_are_missing_and_weights_that_are_random(tmp_path, caplog):
    shape = SentencePairShape(120, 12, 3)
    with pytest.raises(SettingError, match="contains no weights"):
        build("bert_tiny", shape, weights=str(tmp_path))
    for name in ("pytorch_model.bin", "model.safetensors"):
        (tmp_path / name).write_bytes(b"torn")
        with pytest.raises(SettingError, match=f"{name}: cannot be read"):
            build("bert_tiny", shape, weights=str(tmp_path))
    MODELS["bert_tiny"](name="said loudly").build(shape)
    assert "said loudly starts from RANDOM weights" in caplog.text


def test_networks_that_cannot_be():
    with pytest.raises(SettingError, match="does not divide"):
        MODELS["bert_tiny"](heads=3)
    with pytest.raises(SettingError, match="less than the 600 tokens"):
        MODELS["bert_tiny"]().check(SentencePairShape(120, 600, 3))


def test_pairs_become_padded_tokens(pairs):
    options = SentencePairFolder(path="pairs", length=12, vocabulary=120)
    assert options.info(pairs)[1:] == (260, 130)
    splits = options.load(pairs, seed=0)
    train = splits["train"]
    assert train.ids.shape == (260, 12)
    assert train.mask.sum(1).tolist() == [9] * 260  # [CLS] 3 words [SEP] 3 words [SEP]
    assert (train.ids[:, 0] == SPECIAL.index("[CLS]")).all()
    assert (train.ids == SPECIAL.index("[SEP]")).sum(1).eq(2).all()
    assert (train.ids[:, 9:] == 0).all() and (train.ids != SPECIAL.index("[UNK]")).all()
    assert train.segments[0].tolist() == [0] * 5 + [1] * 4 + [0] * 3
    assert {name: len(split.labels) for name, split in splits.items()} == {"train": 260, "validation": 24, "test": 130}
    cut = SentencePairFolder(path="pairs", length=8, vocabulary=120, train_samples=10, validation=0.0).load(
        pairs, seed=0
    )
    assert cut["train"].mask.sum(1).tolist() == [8] * 10
    assert "validation" not in cut


def test_a_trained_tokenizer_is_the_same_every_time_and_kept(pairs):
    tokenizers = require("tokenizers", "entailment")
    sentences = [f"{a} {b}{c} {n}" for a in ANIMALS for b in ACTS for c in ("", "ing") for n in range(40)]
    texts = {
        train_word_piece(tokenizers, 200, True, order).to_str() for order in (sentences, sentences[::-1], sentences)
    }
    assert len(texts) == 1
    first = find_tokenizer(None, 200, True, sentences)
    kept = list((pairs / "cache" / "bitcycle").iterdir())
    assert len(kept) == 1
    assert find_tokenizer(None, 200, True, sentences).to_str() == first.to_str() == kept[0].read_text()


def test_a_published_tokenizer_is_read_from_its_folder(pairs, monkeypatch):
    words = [*SPECIAL, "a", "the", "dog", "cat", "##s", *(f"[unused{number}]" for number in range(90))]
    (pairs / "published").mkdir()
    (pairs / "published" / "vocab.txt").write_text("\n".join(words))
    options = {"path": "pairs", "tokenizer": "published", "length": 12}
    splits = SentencePairFolder(**options, vocabulary=100, lowercase=True).load(pairs, seed=0)
    assert set(splits["train"].ids.unique().tolist()) <= {0, 1, 2, 3, 5, 6, 7, 8}
    home = SentencePairFolder(**{**options, "tokenizer": "~/published"}, vocabulary=100, lowercase=True)
    monkeypatch.setenv("HOME", str(pairs))
    assert torch.equal(home.load(pairs, seed=0)["train"].ids, splits["train"].ids)
    with pytest.raises(DataError, match=r"has 100 tokens, .*dataset\.vocabulary=100"):
        find_tokenizer(pairs / "published", 99, True, [])
    for words, problem in (("[UNK]\ndog", "sep_token not found"), ("[CLS]\n[SEP]\n[PAD]", "unk_token not found")):
        (pairs / "published" / "vocab.txt").write_text(words)
        with pytest.raises(DataError, match=f"cannot read the tokenizer .*{problem}"):
            SentencePairFolder(**options).load(pairs, seed=0)
    (pairs / "published" / "tokenizer.json").write_text("torn")
    with pytest.raises(DataError, match=r"cannot read the tokenizer .*Download its files again"):
        SentencePairFolder(**options).load(pairs, seed=0)
    with pytest.raises(DataError, match="there is no tokenizer in"):
        SentencePairFolder(**{**options, "tokenizer": "elsewhere"}).load(pairs, seed=0)


def test_xnli_is_read_by_language_and_refused_in_part(tmp_path):
    write_pairs(tmp_path / "xnli" / "de", {"train": 9})
    write_pairs(tmp_path / "nli" / "xnli" / "en", {"validation": 6, "test": 6})
    options = Xnli(language="en", tokenizer=None)
    assert len(options.read_split(tmp_path, "train")) == 9
    assert len(options.read_split(tmp_path, "test")) == 6
    assert options.info(tmp_path)[1:] == (392_702, 5_010)
    with pytest.raises(DataError, match=r"has 9, 6 training and test pairs; the complete xnli has 392702, 5010"):
        options.load(tmp_path, seed=0)

    with pytest.raises(DataError, match=r"facebook/xnli cannot be loaded.*xnli in de .*dataset=sick"):
        Xnli().read_split(tmp_path / "elsewhere", "validation")
    with pytest.raises(DataError, match="has the splits train, but not validation"):
        Xnli().read_split(tmp_path, "validation")


def test_data_that_are_missing_or_wrong(pairs):
    with pytest.raises(DataError, match=r"sick is not in .*train-\*.parquet.*zenodo.org/records/2787612"):
        Sick().load(pairs, seed=0)
    write_pairs(pairs / "nli" / "sick", {"train": 3, "validation": 3, "test": 3})
    with pytest.raises(DataError, match="has 3, 3 training and test pairs; the complete sick has 4439, 4906"):
        Sick().load(pairs, seed=0)
    columns = {"premise": ["a"], "hypothesis": ["b"], "label": [3]}
    parquet.write_table(arrow.table(columns), pairs / "pairs" / "validation-00000-of-00001.parquet")
    with pytest.raises(DataError, match="labels other than 0 to 2"):
        SentencePairFolder(path="pairs").load(pairs, seed=0)
    parquet.write_table(arrow.table({"premise": ["a"]}), pairs / "pairs" / "test-00000-of-00001.parquet")
    with pytest.raises(DataError, match="pairs that lack a sentence or a label"):
        SentencePairFolder(path="pairs").load(pairs, seed=0)
    (pairs / "pairs" / "train-00000-of-00001.parquet").write_bytes(b"torn")
    with pytest.raises(DataError, match="cannot be loaded"):
        SentencePairFolder(path="pairs").info(pairs)
    with pytest.raises(SettingError, match="at most 392702"):
        Xnli(train_samples=400_000).info(pairs)
    with pytest.raises(SettingError, match="has a validation split"):
        Xnli(validation=0.1).info(pairs)


@pytest.mark.parametrize(
    ("column", "values", "shown"),
    [
        ("label", ["neutral", "entailment"], "'neutral'"),
        ("label", [1.0, 0.0], "1.0"),
        ("label", [True, False], "True"),
        ("premise", [7, 8], "7"),
    ],
)
def test_columns_of_another_type_are_refused(tmp_path, column, values, shown):
    columns = {"premise": ["a", "b"], "hypothesis": ["c", "d"], "label": [0, 2], column: values}
    for split in ("train", "validation", "test"):
        parquet.write_table(arrow.table(columns), tmp_path / f"{split}-00000-of-00001.parquet")
    words = rf"column {column} of the train split of .* has the value {shown}\..*integers \(0 entailment, 1 neutral"
    with pytest.raises(DataError, match=words):
        SentencePairFolder(path=str(tmp_path)).load(tmp_path, seed=0)


def test_batches_can_begin_at_any_step_and_go_through_everything(pairs):
    dataset = SentencePairFolder(path="pairs", length=12, vocabulary=120)
    task = TASKS["entailment"]().build(TaskSetup(dataset, pairs, dataset.info(pairs), 50, 0, CPU))
    run = task.batches(0)
    first = [next(run) for _ in range(9)]
    assert [len(batch.labels) for batch in first] == [50] * 5 + [10] + [50] * 3
    assert sum(int((batch.labels == 1).sum()) for batch in first[:6]) == 87
    assert torch.equal(next(task.batches(8)).ids, first[8].ids)
    assert not torch.equal(first[0].ids, first[6].ids)
    assert (first[0].mask.sum(1) == 9).all()
    assert task.majority_baseline == 87 / 260


@pytest.mark.parametrize(
    "overrides",
    [
        ["schedule=RTH"],
        ["schedule=ER", "quantizer.quantized_bias=false"],
        ["schedule=static", "schedule.q_max=8", "schedule.gradient=32", "quantizer=uniform_l2"],
    ],
)
def test_smoke_runs(pairs, overrides):
    run = plan(
        *("dataset=sentence_pairs", "dataset.path=pairs", "scale=smoke", *TINY, *overrides, "training.steps=20"),
        *(f"data_root={pairs}", f"results_root={pairs}/runs"),
    )
    summary = execute(run)
    assert summary["metric"] == "test_accuracy"
    assert 0 <= summary["final"] <= 100
    assert summary["validation"]["final"] >= 0


def test_a_small_network_learns_at_8_bits(pairs):
    run = plan(
        *("dataset=sentence_pairs", "dataset.path=pairs", *TINY, "model.dropout=0"),
        *("training.epochs=15", "training.learning_rate.initial=0.003", "training.evaluation_steps=1000"),
        *(f"data_root={pairs}", f"results_root={pairs}/runs"),
    )
    assert execute(run)["final"] > 55  # a third of the pairs has each label


def test_a_missing_library_is_named_with_its_extra():
    with pytest.raises(RunError, match=r"pip install 'transformers.*' 'tokenizers"):
        require("no_such_library", "entailment")


def test_the_recipe_is_that_of_the_paper():
    run = plan("dataset=xnli", "model=bert_tiny")
    assert (run.total_steps, run.epoch.steps, run.batch_size) == (12_272, 6_136, 64)
    rate = run.config.training.learning_rate.rate
    assert rate(0, run.total_steps) == 1e-5
    assert rate(6_136, run.total_steps) == pytest.approx(0.55e-5)
    assert rate(12_272, run.total_steps) == pytest.approx(1e-6)
    assert run.config.training.optimizer.weight_decay == 0
    assert run.config.training.clip_norm == 1
