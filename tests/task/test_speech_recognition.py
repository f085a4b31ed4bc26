"""Speech recognition: CTC and decoders against brute force, the task, and small runs."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bitcycle.dataset.speech import SpeechManifest
from bitcycle.dataset.utterances import BLANK
from bitcycle.files import read_json, read_records
from bitcycle.task.ctc import ctc_loss, edit_distances, greedy
from bitcycle.task.speech_recognition import SpeechEvaluation, SpeechRecognitionOptions, scores
from bitcycle.training.run import execute
from tests.conftest import configure, plan
from tests.speech_data import RATE, digit_rows, write_digits, write_manifests


@pytest.fixture(scope="module")
def rows():
    return digit_rows()


@pytest.fixture(scope="module")
def data_root(tmp_path_factory, rows):
    """Manifests and spoken digits below one folder."""
    return write_digits(write_manifests(tmp_path_factory.mktemp("speech")), rows)


@pytest.fixture
def speech(tmp_path, data_root):
    """Plans of small runs on made-up speech."""

    def make(*overrides: str, dataset: str = "speech_manifest"):
        return plan(
            *("scale=smoke", f"dataset={dataset}", "dataset.sampling_rate=8000", "dataset.nominal_seconds=0.1"),
            *("dataset.train_samples=40", "dataset.test_samples=8", "training.batch_size=8", "training.steps=20"),
            *("training.evaluation_steps=5", "model.hidden=8", f"data_root={data_root}"),
            *(f"results_root={tmp_path}/runs", *overrides),
        )

    return make


# Batches


@pytest.fixture(scope="module")
def utterances(data_root):
    options = SpeechManifest(sampling_rate=RATE)
    return options.utterances(options.read(data_root).train, options.alphabet(data_root))


# CTC


def texts_of_paths(path) -> tuple[int, ...]:
    return tuple(symbol for symbol, _ in itertools.groupby(path) if symbol != BLANK)


def brute_force(log_probabilities: torch.Tensor) -> dict[tuple[int, ...], float]:
    """p of every text, as the sum over all paths."""
    frames, symbols = log_probabilities.shape
    found: dict[tuple[int, ...], float] = {}
    for path in itertools.product(range(symbols), repeat=frames):
        p = math.exp(sum(float(log_probabilities[t, symbol]) for t, symbol in enumerate(path)))
        text = texts_of_paths(path)
        found[text] = found.get(text, 0.0) + p
    return found


def test_loss_is_the_sum_over_all_paths():
    logits = torch.randn(1, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for text, p in brute_force(logits[0].log_softmax(1)).items():
        targets = torch.tensor([text or (BLANK,)])
        loss = ctc_loss(logits, torch.tensor([5]), targets, torch.tensor([len(text)]))
        assert loss.item() == pytest.approx(-math.log(p), rel=1e-4)


def test_too_few_frames_give_no_loss_and_no_gradient():
    logits = torch.randn(2, 3, 3, requires_grad=True)
    losses = ctc_loss(logits, torch.tensor([3, 3]), torch.tensor([[1, 1, 0], [1, 2, 1]]), torch.tensor([2, 3]))
    assert (losses > 0).all()
    short = ctc_loss(logits, torch.tensor([2, 3]), torch.tensor([[1, 1, 0], [1, 2, 1]]), torch.tensor([2, 3]))
    assert short[0] == 0
    short.sum().backward()
    assert torch.equal(logits.grad[0], torch.zeros(3, 3))


def test_padding_changes_no_loss():
    logits = torch.randn(1, 6, 4)
    arguments = torch.tensor([4]), torch.tensor([[1, 3]]), torch.tensor([2])
    alone = ctc_loss(logits[:, :4], *arguments)
    torch.testing.assert_close(ctc_loss(logits, *arguments), alone)


@given(st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=6), min_size=1, max_size=4), st.integers(1, 6))
def test_greedy_merges_repeats_and_drops_blanks(paths, length):
    logits = F.one_hot(torch.tensor(paths), 4).float()
    found, counts = greedy(logits, torch.full((len(paths),), length))
    for row, path in enumerate(paths):
        assert tuple(found[row, : counts[row]].tolist()) == texts_of_paths(path[:length])
        assert (found[row, counts[row] :] == BLANK).all()


def edits_by_table(found, wanted) -> int:
    table = np.zeros((len(found) + 1, len(wanted) + 1), dtype=int)
    table[:, 0], table[0] = range(len(found) + 1), range(len(wanted) + 1)
    for i, j in itertools.product(range(1, len(found) + 1), range(1, len(wanted) + 1)):
        replaced = table[i - 1, j - 1] + (found[i - 1] != wanted[j - 1])
        table[i, j] = min(table[i - 1, j] + 1, table[i, j - 1] + 1, replaced)
    return int(table[-1, -1])


@given(st.lists(st.tuples(st.text("abc", max_size=7), st.text("abc", max_size=5)), min_size=1, max_size=4))
def test_edits_are_those_of_the_table(pairs):
    def padded(words, size):
        return torch.tensor([[*map(ord, word), *[0] * (size - len(word))] for word in words])

    found, wanted = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    lengths = torch.tensor([*map(len, found)]), torch.tensor([*map(len, wanted)])
    edits = edit_distances(padded(found, 7), lengths[0], padded(wanted, 5), lengths[1])
    assert edits.tolist() == [edits_by_table(*pair) for pair in pairs]


# Task


def test_rates_are_edits_over_characters(utterances):
    class Fixed(torch.nn.Module):
        def output_lengths(self, lengths):
            return lengths

        def forward(self, x):
            path = torch.zeros(x.shape[:2], dtype=torch.long)
            path[:, 0], path[:, 2] = 2, 3
            return 50 * F.one_hot(path, 6).float()  # " abcd": every text becomes "ab"

    evaluation = SpeechEvaluation(SpeechRecognitionOptions(), " abcd")
    found = evaluation.measure(Fixed(), utterances, "test")
    edits = sum(edits_by_table("ab", text) for text in utterances.transcripts)
    assert found["test_cer"] == pytest.approx(100 * edits / sum(map(len, utterances.transcripts)), abs=1e-4)
    words = [text.split() for text in utterances.transcripts]
    wrong = sum(edits_by_table(["ab"], text) for text in words)
    assert found["test_wer"] == pytest.approx(100 * wrong / sum(map(len, words)), abs=1e-4)


def test_accuracy_is_what_the_error_rate_leaves(speech):
    task, model = build_task(speech("quantizer=none")), speech("quantizer=none").build_model().eval()
    with torch.no_grad():
        model.output.bias[1:3] += 0.4  # lest all be blank
    batch = next(task.batches(0))
    outcome, (logits, lengths) = task.train(model, batch), scores(model, batch)
    found, counts = greedy(logits, lengths)
    rows = zip(found, counts, batch.targets, batch.target_lengths, strict=True)
    edits = sum(edits_by_table(f[:n].tolist(), w[:m].tolist()) for f, n, w, m in rows)
    assert edits > 0
    assert float(outcome.accuracy) == pytest.approx(max(0.0, 1 - edits / int(batch.target_lengths.sum())))
    torch.testing.assert_close(outcome.loss, ctc_loss(logits, lengths, batch.targets, batch.target_lengths).mean())


def build_task(made):
    from bitcycle.task import TaskSetup

    config, device = made.config, torch.device("cpu")
    return config.task.build(TaskSetup(config.dataset, config.data_folder, made.info, made.batch_size, 0, device))


def test_utterances_without_enough_frames_are_counted_once(speech, caplog):
    made = speech("quantizer=none", "model.stack=4")
    task, model = build_task(made), made.build_model()
    batches = task.batches(0)
    few = {
        name: sum(
            -(-len(frames) // 4) < len(text) + sum(a == b for a, b in itertools.pairwise(text))
            for frames, text in zip(split.log_mel, split.transcripts, strict=True)
        )
        for name, split in {"training": task.training_batches.utterances, **task.splits}.items()
    }
    assert any(few.values())
    for _ in range(2):
        task.train(model, next(batches))
    found = [record.getMessage() for record in caplog.records if "fewer frames" in record.getMessage()]
    assert [message.split()[0] for message in found] == [str(count) for count in few.values() if count]
    assert all("lower model.stack" in message for message in found)


def test_an_empty_text_has_the_error_of_guessing(speech):
    planned = speech("quantizer=none")
    task, model = build_task(planned), planned.build_model()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    model.output.bias.data[0] = 1  # the blank
    assert task.evaluate(model.eval())["test_cer"] == task.chance == 100


def test_recipe_of_the_paper():
    config = configure("dataset=fsdd", "model=speech_lstm", "training=speech")
    training = config.training
    rate = training.learning_rate
    assert (config.model.hidden, config.model.layers, config.model.dropout) == (512, 3, 0.5)
    assert (training.optimizer.name, rate.initial, rate.name, rate.factor, rate.patience) == (
        "adam",
        3e-4,
        "plateau",
        0.2,
        3,
    )
    assert (training.clip_norm, training.batch_size, training.evaluation_steps) == (4.0, 32, None)


def test_a_dry_run_needs_no_data(tmp_path):
    described = plan("dataset=fsdd", "model=speech_lstm", "training=speech", f"data_root={tmp_path}").describe()
    assert described["parameters"] == 5_509_136
    assert described["total_steps"] == 40 * 66


def test_digits_can_be_learned_a_little(speech):
    """The loss of a float network falls: frames, lengths, symbols and transcripts belong together."""
    made = speech(
        "quantizer=none",
        "model.hidden=32",
        "training.steps=60",
        "model.dropout=0",
        "training.learning_rate.initial=0.01",
    )
    execute(made)
    losses = [r["loss"] for r in read_records(made.folder.metrics) if r["kind"] == "train"]
    assert losses[-1] < 0.5 * losses[0]
    summary = read_json(made.folder.summary)
    assert summary["metric"] == "test_cer"
    assert summary["final"] < 60


RUNS = {
    "CR": ["schedule=CR", "schedule.cycles=2"],
    "dorefa": ["schedule=RTH", "schedule.cycles=2", "quantizer=dorefa"],
    "static": [],
    "float proxy": ["quantizer=none", "dataset=fsdd"],
    "hlhlp": [
        *("schedule=hlhlp", "quantizer=uniform_l2", "schedule.candidates=2", "schedule.alpha=0.1"),
        "training.evaluation_steps=2",
    ],
}


@pytest.mark.parametrize("case", RUNS)
def test_runs(speech, case):
    made = speech(*RUNS[case])
    summary = execute(made)
    assert math.isfinite(summary["final"])
    last = [r for r in read_records(made.folder.metrics) if r["kind"] == "evaluation"][-1]
    assert {"test_cer", "test_wer", "test_loss", "validation_cer", "validation_loss"} <= set(last)
