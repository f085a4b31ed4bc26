"""Speech data: features, recordings, datasets and batches."""

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

from bitcycle.dataset import sources
from bitcycle.dataset import speech as speech_module
from bitcycle.dataset.speech import Fsdd, Recording, SpeechManifest, file_recording, read_recordings
from bitcycle.dataset.utterances import (
    BLANK,
    FLOOR,
    LogMel,
    UtteranceBatches,
    Utterances,
    differences,
    mel_filters,
    normalise,
    speech_features,
)
from bitcycle.errors import DataError
from bitcycle.settings import SettingError
from bitcycle.shapes import SpeechShape
from tests.conftest import plan
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
    samples = Recording("x", lambda: wave_bytes(signal, width=width), "ab").waveform(RATE)
    torch.testing.assert_close(samples, torch.from_numpy(signal).float(), rtol=0, atol=2 / 2 ** min(8 * width, 24))


def test_other_formats_are_decoded_by_soundfile(tmp_path):
    soundfile = pytest.importorskip("soundfile")
    signal = tones("ab", 0)
    soundfile.write(tmp_path / "x.flac", signal, RATE)
    found = file_recording(tmp_path / "x.flac", "ab").waveform(RATE)
    torch.testing.assert_close(found, torch.from_numpy(signal).float(), rtol=0, atol=1e-4)


def test_recordings_that_cannot_be_used(tmp_path):
    soundfile = pytest.importorskip("soundfile")
    file = tmp_path / "x.wav"
    with pytest.raises(DataError, match=r"cannot read .*x\.wav"):
        file_recording(file, "a").waveform(RATE)
    file.write_bytes(b"noise")
    with pytest.raises(DataError, match=r"cannot decode .*x\.wav: Format not recognised\. Download"):
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
    soundfile.write(file, np.array([0.1, np.nan]), RATE, subtype="FLOAT")
    with pytest.raises(DataError, match=r"x\.wav has samples that are infinite or no numbers"):
        file_recording(file, "a").waveform(RATE)


# Datasets


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

    monkeypatch.setattr(sources, "urlopen", offline)
    with pytest.raises(DataError, match=r"no network.*recordings/"):
        Fsdd().read(tmp_path)


def test_digits_are_downloaded(tmp_path, monkeypatch, rows):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for row in rows:
            member = tarfile.TarInfo(f"{speech_module.ARCHIVE}/recordings/{row['audio']['path']}")
            member.size = len(row["audio"]["bytes"])
            tar.addfile(member, io.BytesIO(row["audio"]["bytes"]))
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "digits.tar.gz").write_bytes(stream.getvalue())
    monkeypatch.setattr(speech_module, "URL", (tmp_path / "server" / "digits.tar.gz").as_uri())
    assert len(Fsdd().read(tmp_path).train) == 2100


def test_incomplete_digits_are_refused(tmp_path, rows):
    with pytest.raises(DataError, match="has 2099, 300, 300 training, test and validation recordings"):
        Fsdd().read(write_digits(tmp_path, rows[:-1]))
    (tmp_path / "fsdd" / "fsdd.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match="cannot be loaded"):
        Fsdd().read(tmp_path)


def test_digits_are_refused_what_they_lack(data_root):
    with pytest.raises(SettingError, match="at most 2100"):
        Fsdd(train_samples=2101).info(data_root)
    with pytest.raises(SettingError, match="has a validation split"):
        Fsdd(validation=0.1)


def test_lists_of_both_kinds(data_root, tmp_path):
    info = SpeechManifest().info(data_root)
    assert (info.train_samples, info.test_samples) == (48, 12)
    assert info.shape.symbols == len(" abcd") + 1
    lines = [{"audio": "a.wav", "transcript": " one  two "}, {"audio": "/b.wav", "transcript": "three"}]
    (tmp_path / "list.jsonl").write_text("\n".join(map(json.dumps, lines)))
    recordings = read_recordings(tmp_path / "list.jsonl")
    assert [r.transcript for r in recordings] == ["one two", "three"]
    assert [r.name for r in recordings] == [str(tmp_path / "a.wav"), "/b.wav"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("list.csv", None, "cannot read .*No such file.*set dataset.train_manifest"),
        ("list.csv", "audio,transcript\n", "lists no recording"),
        ("list.csv", "audio,transcript\na.wav,\n", "line 2 of"),
        ("list.csv", "path,text\na.wav,b\n", "line 2 of"),
        ("list.csv", "audio,transcript\na.wav,yes, please\n", "more values than its header; put .* in quotes"),
        ("list.jsonl", "{", "cannot read"),
        ("list.jsonl", '{"audio": "a.wav"}', "line 1 of"),
        ("list.jsonl", '{"audio": "a.wav", "transcript": ["yes"]}', "line 1 of"),
    ],
)
def test_wrong_lists_say_what_is_wrong(tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=words):
        read_recordings(tmp_path / name)


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


@pytest.mark.parametrize("pool", [1, 3])
def test_fewer_utterances_than_a_batch_are_trained_on_in_every_step(utterances, pool):
    batches = UtteranceBatches(utterances, 64, pool, seed=0)
    found = list(itertools.islice(batches.starting_at(0), 2))
    assert [len(batch.lengths) for batch in found] == [48, 48]
    assert found[0].lengths.sum() == found[1].lengths.sum() == utterances.lengths.sum()


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
        log_mel = LogMel(RATE)(recordings[number].waveform(RATE))
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
