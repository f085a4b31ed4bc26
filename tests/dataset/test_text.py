"""Text: tokens, published layouts, streams and blocks."""

from __future__ import annotations

from pathlib import Path

import pyarrow
import pyarrow.parquet as parquet
import pytest
import torch

from bitcycle.dataset.text import OwnText, PennTreebank, TextSize, WikiText, WikiTextSmall, most_frequent, number_tokens
from bitcycle.dataset.token_stream import TokenBlocks, TokenStreams
from bitcycle.errors import DataError
from bitcycle.model.recurrent_language_model import RecurrentLanguageModelOptions
from bitcycle.settings import SettingError
from bitcycle.shapes import TokenShape
from bitcycle.task.language_modelling import BlockLanguageModellingOptions, LanguageModellingOptions
from tests.conftest import plan
from tests.text_data import write_text


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
    lines = (["b a b", "", "c"], ["a d"], ["d"])
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
    monkeypatch.setattr(type(options), "size", lambda self, data_root: size)
    found = options.load(tmp_path, seed=0)
    assert found.vocabulary == ("a", "b", "c", "<eos>", "<unk>")
    assert (found.train.tolist(), found.test.tolist()) == ([0, 1, 2, 3, 3, 4, 0, 3], [2, 0, 3])


def test_the_small_text_is_made_of_the_official_small_files(tmp_path, monkeypatch):
    folder = tmp_path / "wikitext2"
    folder.mkdir()
    (folder / "wiki.valid.tokens").write_text("a b\n")
    (folder / "wiki.test.tokens").write_text("a\n" * 2226 + "b c\n")
    monkeypatch.setattr(WikiTextSmall, "size", lambda self, data_root: TextSize(3, 2 * 2226, 3, 4))
    found = WikiTextSmall().load(tmp_path, seed=0)
    assert [found.vocabulary[i] for i in found.test] == ["b", "<unk>", "<eos>"]


def test_missing_and_other_data_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"ptb.train.txt.*licensed"):
        PennTreebank().load(tmp_path, seed=0)
    write_layout(tmp_path / "ptb", "ptb")
    with pytest.raises(
        DataError, match=r"has 8, 2, 3, 5 training, validation, test and distinct tokens; the complete ptb has 929589"
    ):
        PennTreebank().load(tmp_path, seed=0)
    with pytest.raises(DataError, match=r"wiki.valid.tokens"):
        WikiTextSmall().load(tmp_path, seed=0)

    with pytest.raises(DataError, match=r"Salesforce/wikitext cannot be loaded.* Put wiki.train.tokens"):
        WikiText(name="wikitext103").load(tmp_path, seed=0)
    with pytest.raises(DataError, match=r"has no train.txt"):
        plan("dataset=text", f"dataset.path={tmp_path}")
    (tmp_path / "own").mkdir()
    for split in ("train", "valid", "test"):
        (tmp_path / "own" / f"{split}.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"cannot read .*own/train.txt.* Save it as text in UTF-8"):
        plan("dataset=text", f"dataset.path={tmp_path}/own")
    (tmp_path / "ptb" / "ptb.train.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="cannot read"):
        PennTreebank().load(tmp_path, seed=0)


def test_own_text_lies_below_data_root_like_other_datasets(tmp_path):
    write_text(tmp_path / "mine")
    assert len(OwnText(path="mine").load(tmp_path, seed=0).train) == OwnText(path="mine").info(tmp_path).train_samples
    with pytest.raises(
        DataError, match=r"dataset.path=other: .*/other is not a folder. Give an absolute path or one below"
    ):
        OwnText(path="other").info(tmp_path)


def test_a_byte_order_mark_is_no_part_of_the_first_word(tmp_path):
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text("the end of the line\n", encoding="utf-8-sig")
    assert OwnText(path=".").load(tmp_path, seed=0).vocabulary == ("the", "end", "of", "line", "<eos>", "<unk>")


@pytest.mark.parametrize("unit", ["word", "byte"])
@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_an_empty_file_is_named(tmp_path, split, unit):
    (write_text(tmp_path / "text") / f"{split}.txt").write_text("")
    with pytest.raises(DataError, match=rf"text/{split}\.txt is empty. Give it text"):
        OwnText(path="text", unit=unit).info(tmp_path)


LONG_BLOCKS = ["task.sequence_length=9000", "dataset.train_samples=null", "model=transformer"]


def test_settings_that_the_text_cannot_satisfy(tmp_path):
    path = str(write_text(tmp_path / "text"))
    recurrent, info = RecurrentLanguageModelOptions, OwnText(path=path).info(tmp_path)
    for make, words in (
        (lambda: OwnText(path=path, train_samples=100_000).info(tmp_path), "has only 114 pieces of 35 tokens"),
        (lambda: OwnText(path=path, validation=0.1).info(tmp_path), "has a validation split"),
        (lambda: WikiTextSmall(name="wikitext2_bytes").info(tmp_path), "unit=word: .* use dataset=wikitext2_small"),
        (lambda: LanguageModellingOptions().epoch(info, 4000), "batch_size=4000: .* too few for 4000 streams"),
        (lambda: BlockLanguageModellingOptions(sequence_length=9000).epoch(info, 1), "less than one block"),
        (
            lambda: plan("dataset=text", f"dataset.path={path}", "task=language_modelling_blocks", *LONG_BLOCKS),
            "task.sequence_length=9000",
        ),
        (lambda: recurrent(name="gru", cell="gru"), "bias=both"),
        (
            lambda: plan("dataset=text", f"dataset.path={path}", "model=resnet8"),
            "does not accept the data of dataset=text",
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


def test_vocabulary_keeps_the_most_frequent_words() -> None:
    """ids by frequency; other words become <unk>, which stays in the vocabulary even if it is rare"""
    lines = [["b a b c", "b a"], ["c b"], ["d"]]
    text = most_frequent(number_tokens(lines, by_frequency=True), 3)
    assert text.vocabulary == ("b", "a", "<unk>")  # <eos> is as frequent as a, but comes later
    assert [part.tolist() for part in text[:3]] == [[0, 1, 0, 2, 2, 0, 1, 2], [2, 0, 2], [2, 2]]
    with_unknown = most_frequent(number_tokens([["<unk> <unk> a a a b"], ["b"], ["a"]], by_frequency=True), 2)
    assert with_unknown.vocabulary == ("a", "<unk>")
    assert [part.tolist() for part in with_unknown[:3]] == [[1, 1, 0, 0, 0, 1, 1], [1, 1], [0, 1]]


def test_vocabulary_is_the_size_of_the_networks_output(tmp_path: Path) -> None:
    """`dataset.vocabulary` counts in shapes before data are read, and is refused above the dataset's own"""
    options = WikiTextSmall(vocabulary=2000)
    assert options.info(tmp_path).shape == TokenShape(2000)
    with pytest.raises(SettingError, match=r"vocabulary=20000.*only 13777.*use at most 13777"):
        WikiTextSmall(vocabulary=20_000).info(tmp_path)
