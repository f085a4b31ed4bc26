"""Speech: features, data, batches, network, CTC and decoders against formulas, brute force and other implementations."""

from __future__ import annotations

import io
import itertools
import json
import math
import tarfile
from urllib.error import URLError

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from bitcycle.dataset import BLANK, UtteranceBatches, Utterances, fetch
from bitcycle.dataset import fsdd as fsdd_module
from bitcycle.dataset.audio import decode, file_recording
from bitcycle.dataset.fsdd import Fsdd
from bitcycle.dataset.speech_features import (
    FLOOR,
    LogMel,
    differences,
    mel_filters,
    normalise,
    speech_features,
)
from bitcycle.dataset.speech_manifest import SpeechManifest, read_manifest
from bitcycle.errors import DataError
from bitcycle.model import SpeechLstmOptions, SpeechShape
from bitcycle.model.speech_lstm import stacked
from bitcycle.settings import SettingError
from bitcycle.task import SpeechRecognitionOptions
from bitcycle.task.ctc import ctc_loss, edit_distances, greedy
from bitcycle.task.prefix_search import PrefixSearch, log_add
from bitcycle.task.speech_recognition import SpeechEvaluation, losses_of, scores
from bitcycle.task.word_trigram import WordTrigram
from bitcycle.training.run import execute
from bitcycle.training.run_folder import read_json, read_records
from tests.conftest import configure, plan
from tests.speech_data import RATE, digit_rows, tones, wave_bytes, write_digits, write_manifests


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


# Features


def test_log_mel_is_the_formula():
    log_mel, generator = LogMel(RATE, bands=4), torch.Generator().manual_seed(0)
    x = torch.rand(1000, generator=generator) - 0.5
    found = log_mel(x)
    window, hop, size = 200, 80, 256
    assert found.shape == (1 + (1000 - window) // hop, 4)
    corners = [700 * (10 ** (k * 2595 * math.log10(1 + 4000 / 700) / 5 / 2595) - 1) for k in range(6)]
    for t, band in ((0, 0), (3, 2), (10, 3)):
        piece = x[t * hop : t * hop + window].double().numpy()
        tapered = piece * (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(window) / window))
        power = np.abs(np.fft.rfft(tapered, size)) ** 2
        low, middle, high = corners[band : band + 3]
        total = 0.0
        for k, value in enumerate(power):
            f = k * RATE / size
            total += value * max(0.0, min((f - low) / (middle - low), (high - f) / (high - middle)))
        assert found[t, band].item() == pytest.approx(math.log(total), abs=1e-4)


def test_log_mel_and_differences_are_those_of_torchaudio():
    torchaudio = pytest.importorskip("torchaudio")
    x = torch.randn(4000, generator=torch.Generator().manual_seed(1))
    theirs = torchaudio.transforms.MelSpectrogram(
        16000, n_fft=512, win_length=400, hop_length=160, n_mels=40, center=False
    )
    ours = LogMel(16000)(x)
    # theirs centres the window of 400 samples in the transform's 512, so that its frames begin 56 samples later
    expected = theirs(F.pad(x, (56, 56)))[:, : len(ours)].T.clamp_min(FLOOR).log()
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)
    deltas = torchaudio.functional.compute_deltas(ours.T, win_length=5).T
    torch.testing.assert_close(differences(ours[None], torch.tensor([len(ours)]))[0], deltas, rtol=1e-5, atol=1e-5)


def test_differences_are_slopes():
    x = torch.arange(9.0)[None, :, None] * torch.tensor([1.0, -2.0])
    found = differences(x, torch.tensor([9]))[0]
    assert torch.equal(found[2:-2], torch.tensor([[1.0, -2.0]]).expand(5, 2))
    assert found[0].tolist() == pytest.approx([0.5, -1.0])  # (1 * 1 + 2 * 2) / 10, the first frame repeated


def test_features_do_not_depend_on_what_an_utterance_is_batched_with():
    generator = torch.Generator().manual_seed(0)
    short, long = torch.randn(5, 3, generator=generator), torch.randn(11, 3, generator=generator)
    batch = speech_features(torch.stack([F.pad(short, (0, 0, 0, 6), value=7.0), long]), torch.tensor([5, 11]))
    torch.testing.assert_close(batch[0, :5], speech_features(short[None], torch.tensor([5]))[0])
    assert torch.equal(batch[0, 5:], torch.zeros(6, 9))
    torch.testing.assert_close(batch[1].mean(0), torch.zeros(9), atol=1e-5, rtol=0)
    torch.testing.assert_close(batch[1].std(0, unbiased=False), torch.ones(9), atol=1e-3, rtol=0)


def test_silence_and_less_than_a_window_have_features():
    log_mel = LogMel(RATE)
    found = log_mel(torch.zeros(50))
    assert found.shape == (1, 40)
    assert torch.equal(found, torch.full((1, 40), math.log(FLOOR)))
    assert torch.equal(normalise(found[None], torch.tensor([1])), torch.zeros(1, 1, 40))
    assert [log_mel.frames(samples) for samples in (1, 200, 279, 280, 360)] == [1, 1, 1, 2, 3]


def test_mel_bands_cover_all_frequencies():
    filters = mel_filters(40, 257, 16000)
    assert filters.shape == (257, 40)
    assert (filters.sum(0) > 0).all()
    torch.testing.assert_close(filters.sum(1)[8:240], torch.ones(232), atol=1e-5, rtol=0)


# Recordings


@pytest.mark.parametrize("width", [1, 2, 4])
def test_waves_of_all_widths(width):
    signal = tones("ab", 0)
    samples, rate = decode(wave_bytes(signal, width=width), "x")
    assert rate == RATE
    torch.testing.assert_close(samples, torch.from_numpy(signal).float(), rtol=0, atol=2 / 2 ** min(8 * width, 24))


def test_other_formats_are_decoded_by_soundfile(tmp_path):
    soundfile = pytest.importorskip("soundfile")
    signal = tones("ab", 0)
    soundfile.write(tmp_path / "x.flac", signal, RATE)
    found = file_recording(tmp_path / "x.flac", "ab").waveform(RATE)
    torch.testing.assert_close(found, torch.from_numpy(signal).float(), rtol=0, atol=1e-4)


def test_recordings_that_cannot_be_used(tmp_path):
    file = tmp_path / "x.wav"
    with pytest.raises(DataError, match=r"cannot read .*x\.wav"):
        file_recording(file, "a").waveform(RATE)
    file.write_bytes(b"noise")
    with pytest.raises(DataError, match=r"cannot decode .*x\.wav"):
        file_recording(file, "a").waveform(RATE)
    file.write_bytes(wave_bytes(tones("a", 0), rate=16000))
    with pytest.raises(DataError, match=r"dataset\.sampling_rate=16000"):
        file_recording(file, "a").waveform(RATE)
    file.write_bytes(wave_bytes(tones("a", 0), channels=2))
    with pytest.raises(DataError, match="2 channels"):
        file_recording(file, "a").waveform(RATE)
    file.write_bytes(wave_bytes(np.zeros(0)))
    with pytest.raises(DataError, match="no samples"):
        file_recording(file, "a").waveform(RATE)


# Data sets


def test_digits_are_split_by_the_number_of_the_recording(data_root):
    options = Fsdd()
    splits = options.read(data_root)
    assert tuple(map(len, splits)) == (2100, 300, 300)
    info = options.info(data_root / "nowhere")  # known without reading
    assert (info.train_samples, info.test_samples) == (2100, 300)
    assert info.shape == SpeechShape(120, 16, 42)
    assert options.alphabet(data_root) == tuple("efghinorstuvwxz")
    names = [recording.name for recording in splits.validation]
    assert names[0].startswith("row 300 of"), "recordings 0 to 4 come first, 60 of each number"


def test_digits_as_a_folder_are_the_same(data_root, rows, tmp_path):
    (tmp_path / "fsdd" / "recordings").mkdir(parents=True)
    for row in rows:
        (tmp_path / "fsdd" / "recordings" / row["audio"]["path"]).write_bytes(row["audio"]["bytes"])
    first, second = Fsdd().read(data_root), Fsdd().read(tmp_path)
    for split, other in zip(first, second, strict=True):
        assert [r.transcript for r in split] == [r.transcript for r in other]
        assert [r.read() for r in split[:70]] == [r.read() for r in other[:70]]


def test_missing_digits_say_what_to_do(tmp_path, monkeypatch):
    def offline(*_arguments, **_options):
        raise URLError("no network")

    monkeypatch.setattr(fetch, "urlopen", offline)
    with pytest.raises(DataError, match=r"no network.*recordings/"):
        Fsdd().read(tmp_path)


def test_digits_are_downloaded(tmp_path, monkeypatch, rows):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for row in rows:
            member = tarfile.TarInfo(f"{fsdd_module.ARCHIVE}/recordings/{row['audio']['path']}")
            member.size = len(row["audio"]["bytes"])
            tar.addfile(member, io.BytesIO(row["audio"]["bytes"]))
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "digits.tar.gz").write_bytes(stream.getvalue())
    monkeypatch.setattr(fsdd_module, "URL", (tmp_path / "server" / "digits.tar.gz").as_uri())
    assert len(Fsdd().read(tmp_path).train) == 2100


def test_incomplete_digits_are_refused(tmp_path, rows):
    with pytest.raises(DataError, match="holds 2099, 300, 300 recordings"):
        Fsdd().read(write_digits(tmp_path, rows[:-1]))
    (tmp_path / "fsdd" / "fsdd.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match="cannot be loaded"):
        Fsdd().read(tmp_path)


def test_digits_are_refused_what_they_lack(data_root):
    with pytest.raises(SettingError, match="at most 2100"):
        Fsdd(train_samples=2101).info(data_root)
    with pytest.raises(SettingError, match="comes with a validation split"):
        Fsdd(validation=0.1)


def test_lists_of_both_kinds(data_root, tmp_path):
    info = SpeechManifest().info(data_root)
    assert (info.train_samples, info.test_samples) == (48, 12)
    assert info.shape.symbols == len(" abcd") + 1
    lines = [{"audio": "a.wav", "transcript": " one  two "}, {"audio": "/b.wav", "transcript": "three"}]
    (tmp_path / "list.jsonl").write_text("\n".join(map(json.dumps, lines)))
    recordings = read_manifest(tmp_path / "list.jsonl")
    assert [r.transcript for r in recordings] == ["one two", "three"]
    assert [r.name for r in recordings] == [str(tmp_path / "a.wav"), "/b.wav"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("list.csv", None, "is missing"),
        ("list.csv", "audio,transcript\n", "lists no recording"),
        ("list.csv", "audio,transcript\na.wav,\n", "line 2 of"),
        ("list.csv", "path,text\na.wav,b\n", "line 2 of"),
        ("list.jsonl", "{", "cannot read"),
        ("list.jsonl", '{"audio": "a.wav"}', "line 1 of"),
    ],
)
def test_wrong_lists_say_what_is_wrong(tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=words):
        read_manifest(tmp_path / name)


# Batches


@pytest.fixture(scope="module")
def utterances(data_root):
    options = SpeechManifest(sampling_rate=RATE)
    return options.utterances(options.read(data_root).train, options.alphabet(data_root))


@pytest.mark.parametrize("pool", [1, 3])
def test_batches_follow_from_seed_and_epoch(utterances, pool):
    batches = UtteranceBatches(utterances, 7, pool, seed=0)
    per_epoch = batches.epoch.steps
    first, second = batches.order(0), batches.order(1)
    assert [len(batch) for batch in first] == [batches.epoch.samples_of(step) for step in range(per_epoch)]
    assert sorted(torch.cat(first).tolist()) == list(range(48))
    assert torch.cat(first).tolist() != torch.cat(second).tolist()
    assert torch.cat(first).tolist() != torch.cat(UtteranceBatches(utterances, 7, pool, seed=1).order(0)).tolist()
    undisturbed = list(itertools.islice(batches.starting_at(0), 2 * per_epoch))
    for step in (1, per_epoch - 1, per_epoch, per_epoch + 2):
        for tensor, other in zip(next(batches.starting_at(step)), undisturbed[step], strict=True):
            assert torch.equal(tensor, other)


def test_pools_pad_less(utterances):
    def padded(pool: int) -> int:
        batches = UtteranceBatches(utterances, 8, pool, seed=0).order(0)
        return sum(len(batch) * int(utterances.lengths[batch].max()) for batch in batches)

    assert padded(6) < padded(1)


def test_a_batch_holds_what_was_recorded(utterances, data_root):
    options = SpeechManifest(sampling_rate=RATE)
    recordings, alphabet = options.read(data_root).train, options.alphabet(data_root)
    batch = utterances.batch(torch.tensor([3, 0]))
    for row, number in enumerate((3, 0)):
        log_mel = options.log_mel(recordings[number].waveform(RATE))
        expected = speech_features(log_mel[None], torch.tensor([len(log_mel)]))[0]
        torch.testing.assert_close(batch.features[row, : batch.lengths[row]], expected)
        symbols = batch.targets[row, : batch.target_lengths[row]].tolist()
        assert "".join(alphabet[symbol - 1] for symbol in symbols) == recordings[number].transcript
    assert torch.equal(batch.targets[1, 2:], torch.full((7,), BLANK))


def test_unknown_characters_have_no_symbol():
    utterances = Utterances([torch.zeros(3, 2)] * 2, ["abc", "x"], "ab")
    batch = utterances.batch(torch.tensor([0, 1]))
    assert batch.targets.tolist() == [[1, 2], [0, 0]]
    assert batch.target_lengths.tolist() == [2, 0]


# Network


@pytest.mark.parametrize(
    ("options", "shape", "parameters"),
    [
        (SpeechLstmOptions(), SpeechShape(120, 16, 42), 5_509_136),
        (SpeechLstmOptions(hidden=128), SpeechShape(120, 16, 42), 394_256),
        (SpeechLstmOptions(hidden=10, layers=2, stack=3), SpeechShape(6, 5, 42), None),
    ],
)
def test_parameters_are_those_of_the_formula(options, shape, parameters):
    with torch.device("meta"):
        model = options.build(shape)
    inputs = [shape.features * options.stack, *[options.hidden] * (options.layers - 1)]
    formula = sum(4 * options.hidden * (size + options.hidden) + 8 * options.hidden for size in inputs)
    formula += (options.hidden + 1) * shape.symbols
    assert sum(p.numel() for p in model.parameters()) == formula
    assert parameters in (None, formula)


def test_products_of_an_utterance(data_root):
    """Per frame and layer 4 H (I + H) products, and H S of the output layer."""
    found = plan("dataset=fsdd", "model=speech_lstm", "quantizer=none", f"data_root={data_root}").workload.macs
    assert found == 42 * (4 * 512 * (120 + 512) + 2 * 4 * 512 * 1024 + 512 * 16)


def test_the_network_sees_the_past_only():
    torch.manual_seed(0)
    model = SpeechLstmOptions(hidden=5, stack=2).build(SpeechShape(3, 4, 10)).eval()
    x = torch.randn(2, 7, 3)
    y = model(x)
    assert y.shape == (2, 4, 4)
    assert model.output_lengths(torch.tensor([1, 2, 3, 7])).tolist() == [1, 1, 2, 4]
    torch.testing.assert_close(model(F.pad(x, (0, 0, 0, 9)))[:, :4], y)
    changed = x.clone()
    changed[:, 4:] += 1
    torch.testing.assert_close(model(changed)[:, :2], y[:, :2])


def test_a_delayed_answer_has_heard_so_many_frames_more():
    """Answer t of a delay of 2 is what the network says at t + 2; behind the last frame lie zeros, however long the batch is."""
    torch.manual_seed(0)
    plain = SpeechLstmOptions(hidden=5, stack=2).build(SpeechShape(3, 4, 10)).eval()
    model = SpeechLstmOptions(hidden=5, stack=2, delay=2).build(SpeechShape(3, 4, 10)).eval()
    model.load_state_dict(plain.state_dict())
    x = torch.randn(2, 8, 3)
    y = model(x)
    assert y.shape == (2, 4, 4)
    torch.testing.assert_close(y, plain(F.pad(x, (0, 0, 0, 4)))[:, 2:])
    torch.testing.assert_close(model(F.pad(x, (0, 0, 0, 6)))[:, :4], y)
    changed = x.clone()
    changed[:, 6:] += 1
    assert [torch.allclose(model(changed)[:, t], y[:, t]) for t in range(4)] == [True, False, False, False]


def test_frames_are_stacked_in_order():
    x = torch.arange(10.0).reshape(1, 5, 2)
    assert stacked(x, 2).tolist() == [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 0]]]
    assert stacked(x, 1) is x or torch.equal(stacked(x, 1), x)


def test_dropout_is_on_all_connections_that_are_not_recurrent():
    shape = SpeechShape(3, 4, 10)
    assert SpeechLstmOptions().build(shape).dropout_input.p == 0.5
    model = SpeechLstmOptions(hidden=5, dropout=1.0, dropout_input=0.0).build(shape).train()
    assert torch.equal(model(torch.randn(1, 3, 3)), model.output.bias.expand(1, 3, 4))


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


# Decoding with a language model


def test_trigram_backs_off():
    model = WordTrigram(["a b a", "a b c"])
    score = {words: math.exp(model.score(*words.split())) for words in ("<s> a b", "a b c", "x b c", "x y a", "x y z")}
    expected = {"<s> a b": 1.0, "a b c": 0.5, "x b c": 0.4 * 0.5, "x y a": 0.4**2 * 3 / 8, "x y z": 0.4**3 / 8}
    assert score == pytest.approx(expected)
    assert math.exp(model.sentence("a b c")) == pytest.approx(1 * 1 * 0.5 * 1)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("weight", "bonus"), [(0.0, 0.0), (1.0, 0.0), (0.7, 0.9)])
def test_prefix_search_finds_the_best_text(seed, weight, bonus):
    """With a beam that holds everything, the text of the largest value among all texts, by brute force over paths."""
    alphabet, language = "ab ", WordTrigram(["a b", "ab a", "b"])
    generator = torch.Generator().manual_seed(seed)
    frames = (2 * torch.randn(5, 4, dtype=torch.float64, generator=generator)).log_softmax(1)

    def value(symbols: tuple[int, ...], p: float) -> float:
        words = "".join(alphabet[symbol - 1] for symbol in symbols)
        return math.log(p) + weight * language.sentence(words) + bonus * len(words.split())

    values = {symbols: value(symbols, p) for symbols, p in brute_force(frames).items()}
    best = "".join(alphabet[symbol - 1] for symbol in max(values, key=values.get)).strip()
    search = PrefixSearch(alphabet, language, 10_000, weight, bonus, least=-math.inf)
    assert search(frames.tolist()) == best


def test_a_narrow_beam_may_miss_it_and_the_usual_one_does_not():
    frames = (3 * torch.randn(9, 4, generator=torch.Generator().manual_seed(1))).log_softmax(1).tolist()
    exact = PrefixSearch("ab ", None, 5000, least=-math.inf)(frames)
    assert PrefixSearch("ab ")(frames) == exact


def test_words_decide_between_texts_that_sound_alike():
    frames = torch.tensor([[0.1, 0.5, 0.4], [0.9, 0.05, 0.05]]).log().tolist()
    assert PrefixSearch("ab")(frames) == "a"
    assert PrefixSearch("ab", WordTrigram(["b", "b"]))(frames) == "b"


def test_sum_of_logarithms():
    assert log_add(math.log(0.25), math.log(0.5)) == pytest.approx(math.log(0.75))
    assert log_add(-math.inf, -1.0) == -1.0
    assert log_add(-math.inf, -math.inf) == -math.inf


# Task


def test_rates_are_edits_over_characters(utterances):
    class Fixed(torch.nn.Module):
        def output_lengths(self, lengths):
            return lengths

        def forward(self, x):
            path = torch.zeros(x.shape[:2], dtype=torch.long)
            path[:, 0], path[:, 2] = 2, 3
            return 50 * F.one_hot(path, 6).float()  # " abcd": every text becomes "ab"

    evaluation = SpeechEvaluation(SpeechRecognitionOptions(), " abcd", utterances.transcripts)
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
    torch.testing.assert_close(outcome.loss, losses_of(task.options, logits, lengths, batch).mean())


def build_task(made):
    from bitcycle.task import TaskSetup

    config, device = made.config, torch.device("cpu")
    return config.task.build(TaskSetup(config.dataset, config.data_folder, made.info, made.batch_size, 0, device))


def test_loss_by_character(speech):
    by_utterance, by_character = (build_task(speech(f"task.loss={kind}")) for kind in ("utterance", "character"))
    model = speech("quantizer=none").build_model().eval()
    batch = next(by_utterance.batches(0))
    logits, lengths = scores(model, batch)
    losses = losses_of(by_utterance.options, logits, lengths, batch)
    expected = (losses / batch.target_lengths).mean()
    torch.testing.assert_close(by_character.train(model, batch).loss, expected)


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
    assert config.task.choose_by == "loss"


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
    "static, words by prefix search": ["task.decoder=prefix", "task.beam=4"],
    "float stand-in": ["quantizer=none", "dataset=fsdd"],
    "hlhlp": [
        *("schedule=hlhlp", "quantizer=uniform_l2", "schedule.candidates=2", "schedule.alpha=0.1"),
        *("task.choose_by=cer", "training.evaluation_steps=2"),
    ],
}


@pytest.mark.parametrize("case", RUNS)
def test_runs(speech, case):
    made = speech(*RUNS[case])
    summary = execute(made)
    assert math.isfinite(summary["final"])
    last = [r for r in read_records(made.folder.metrics) if r["kind"] == "evaluation"][-1]
    assert {"test_cer", "test_wer", "test_loss", "validation_cer", "validation_loss"} <= set(last)
