"""Noise for speech: the ratio of signal to noise holds exactly, each noise is what it is called, and a finished run is tested."""

from __future__ import annotations

import math
from dataclasses import asdict
from itertools import pairwise

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from bitcycle.errors import DataError, RunError
from bitcycle.reproduction.measurement.after_sweep import read_entry
from bitcycle.reproduction.measurement.artifacts import read_result
from bitcycle.reproduction.measurement.job import run_command
from bitcycle.reproduction.measurement.noise import NAMES, NoiseTest, make_noise, mix, read_snr
from bitcycle.settings import SettingError
from bitcycle.training.finished_run import load_run, read_run_config
from bitcycle.training.run import execute
from tests.conftest import plan
from tests.reproduction.measurement.conftest import CPU
from tests.speech_data import RATE, tones, wave_bytes, write_manifests


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def speech():
    return [torch.from_numpy(tones("abcd" * 3, seed)).float() for seed in range(5)]


@given(st.floats(-30, 60), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3), st.integers(0, 99))
def test_the_ratio_of_signal_to_noise_is_exact(snr, signal_scale, noise_scale, seed):
    x = signal_scale * torch.randn(500, dtype=torch.float64, generator=generator(seed))
    n = noise_scale * torch.rand(500, dtype=torch.float64, generator=generator(seed))
    added = mix(x, n, snr) - x
    assert 10 * math.log10(x.square().mean() / added.square().mean()) == pytest.approx(snr, abs=1e-6)
    torch.testing.assert_close(added / added.norm(), n / n.norm(), rtol=1e-6, atol=1e-6)


def test_silence():
    assert torch.equal(mix(torch.zeros(9), torch.ones(9), 5), torch.zeros(9))
    with pytest.raises(DataError, match="noise is silent"):
        mix(torch.ones(9), torch.zeros(9), 5)


@pytest.mark.parametrize("name", NAMES)
def test_noises_follow_from_the_seed(name, speech):
    noise = make_noise(name, RATE, speech)
    first = noise(1000, generator(1))
    assert first.shape == (1000,)
    assert first.dtype == torch.float64
    assert torch.equal(first, noise(1000, generator(1)))
    assert not torch.equal(first, noise(1000, generator(2)))
    assert first.square().mean() > 0
    assert noise(1, generator(1)).shape == (1,)


def power(noise: torch.Tensor, low: float, high: float) -> float:
    """Power between two frequencies in Hz."""
    spectrum = torch.fft.rfft(noise).abs().square()
    frequencies = torch.arange(len(spectrum)) * RATE / len(noise)
    return float(spectrum[(frequencies >= low) & (frequencies < high)].sum())


def test_octaves_of_pink_and_white_noise(speech):
    octaves = [(250, 500), (500, 1000), (1000, 2000), (2000, 4000)]
    pink, white = (make_noise(name, RATE, speech)(2**16, generator()) for name in ("pink", "white"))
    of_pink, of_white = ([power(x, *octave) for octave in octaves] for x in (pink, white))
    assert [b / a for a, b in pairwise(of_pink)] == pytest.approx([1] * 3, rel=0.1)
    assert [b / a for a, b in pairwise(of_white)] == pytest.approx([2] * 3, rel=0.1)


def test_hum_is_at_multiples_of_50_hz(speech):
    hum = make_noise("hum", RATE, speech)(RATE, generator())
    found = [power(hum, 50 * k - 2, 50 * k + 2) for k in range(1, 12)]
    assert [value / found[0] for value in found[:10]] == pytest.approx([1 / k**2 for k in range(1, 11)], rel=1e-6)
    assert found[10] < 1e-12 * found[0]


def test_speech_shaped_noise_has_the_spectrum_of_speech(speech):
    noise = make_noise("speech_shaped", RATE, speech)(2**15, generator())
    bands = [(low, low + 400) for low in range(0, 1600, 400)]
    of_noise, of_speech = ([power(x, *band) for band in bands] for x in (noise, torch.cat(speech)))
    shares = [[value / sum(values) for value in values] for values in (of_noise, of_speech)]
    assert shares[0] == pytest.approx(shares[1], abs=0.05)


def test_modulated_noise_swells_twice_a_second(speech):
    noise = make_noise("modulated", RATE, speech)(4 * RATE, generator())
    loudness = noise.square().reshape(-1, 100).mean(1)
    spectrum = torch.fft.rfft(loudness - loudness.mean()).abs()
    assert int(spectrum.argmax()) == 8, "8 times in 4 seconds"


def test_babble_is_speech(speech):
    alone = make_noise("babble", RATE, [torch.ones(10)])(50, generator())
    assert torch.equal(alone, torch.full((50,), 8.0, dtype=torch.float64))
    talkers = make_noise("babble", RATE, speech)(4000, generator())
    assert power(talkers, 250, 750) > 0.9 * power(talkers, 0, 4000)


def test_a_folder_of_recordings_is_a_noise(tmp_path):
    with pytest.raises(DataError, match="neither one of the noises white"):
        make_noise(str(tmp_path), RATE, [])
    (tmp_path / "car.wav").write_bytes(wave_bytes(tones("a", 0)))
    noise = make_noise(str(tmp_path), RATE, [])
    recorded = torch.from_numpy(tones("a", 0))
    torch.testing.assert_close(noise(len(recorded), generator()), recorded, rtol=0, atol=1e-4)
    assert noise(1000, generator()).shape == (1000,)


def test_ratios_are_read():
    assert read_snr("-5") == (-5.0, -5.0)
    with pytest.raises(ValueError, match="not an SNR"):
        read_snr("loud")
    with pytest.raises(ValueError, match="write 5:15"):
        read_snr("15:5")


@pytest.mark.parametrize("written", ["5:15", "1:0", "-5:15", "nan"])
def test_a_range_that_yaml_reads_as_a_number_is_refused(written):
    """A sweep file with snr: [5:15] tested at 315 dB, that is without noise."""
    entry = yaml.safe_load(f"{{kind: noise, snr: [{written}]}}")
    with pytest.raises(SettingError, match=r'too large in dB. Remedy: .* quotation marks: "5:15"'):
        read_entry(entry, "paper")
    assert read_entry({"kind": "noise", "snr": ["5:15"]}, "paper")[0][0].snr == ["5:15"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a small finished run with quantized LSTM layers."""
    folder = tmp_path_factory.mktemp("noise")
    made = plan(
        *("scale=smoke", "dataset=speech_manifest", "dataset.sampling_rate=8000", "dataset.nominal_seconds=0.1"),
        *("dataset.train_samples=24", "dataset.test_samples=6", "training.batch_size=8", "training.steps=12"),
        *("training.evaluation_steps=6", "model.hidden=8", "model.layers=2", "schedule=CR", "schedule.cycles=2"),
        *("training.learning_rate.initial=0.02", "model.dropout=0"),
        *(f"data_root={write_manifests(folder, train=24)}", f"results_root={folder}/runs"),
    )
    execute(made)
    return made


def test_a_finished_run_is_what_it_was(finished):
    run = load_run(finished.folder.path)
    assert asdict(run.plan.config) == asdict(finished.config)
    assert run.plan.hash == finished.hash
    assert list(run.precision) == list(finished.schedule(11))
    with pytest.raises(RunError, match="no finished run"):
        load_run(finished.folder.path.parent)
    finished.folder.below("none").path.mkdir()
    with pytest.raises(RunError, match="cannot be read"):
        read_run_config(finished.folder.below("none"))


def test_without_noise_the_test_is_the_last_evaluation(finished):
    test = NoiseTest(noises=[])
    units, _ = test.prepare([load_run(finished.folder.path)], CPU)
    (row,) = test.rows(0)
    assert units == 1
    assert row["cer_percent"] == finished.folder.read_summary()["final"]


def test_network_and_features_are_on_the_device(finished, monkeypatch):
    """Its header named a device that had computed nothing."""
    test, meta = NoiseTest(noises=[]), torch.device("meta")
    test.prepare([load_run(finished.folder.path)], meta)
    found = []

    def record(model, utterances, split):
        found.extend([*model.parameters(), *utterances.log_mel])
        return {"test_cer": 0.0, "test_wer": 0.0}

    monkeypatch.setattr(test.evaluation, "measure", record)
    test.rows(0)
    assert {tensor.device for tensor in found} == {meta}


def test_the_command_writes_a_table(finished):
    arguments = [str(finished.folder.path), "--noises", "white,hum", "--snr", "0,5:15"]
    assert run_command(NoiseTest, None, arguments) == 0
    (path,) = finished.folder.analyses.glob("noise-*.csv")
    found = read_result(path)
    conditions = [("none", ""), ("white", "0"), ("white", "5:15"), ("hum", "0"), ("hum", "5:15")]
    assert [(row["noise"], row["snr_db"]) for row in found.rows] == conditions
    assert found.complete
    assert found.header["facts"]["utterances"] == 6


def test_each_recording_has_its_own_noise(finished):
    test, other = NoiseTest(), NoiseTest(seed=1)
    for each in (test, other):
        each.prepare([load_run(finished.folder.path)], CPU)
    noise = test.made["white"]
    mixed = list(test.noisy("white", noise, (5.0, 5.0)))
    added = [y - x for x, y in zip(test.waveforms, mixed, strict=True)]
    for x, n in zip(test.waveforms, added, strict=True):
        assert 10 * math.log10(x.double().square().mean() / n.double().square().mean()) == pytest.approx(5, abs=1e-3)
    assert not torch.equal(added[0][:100] / added[0].norm(), added[1][:100] / added[1].norm())
    assert not torch.equal(next(other.noisy("white", noise, (5.0, 5.0))), mixed[0])


def test_the_command_refuses(finished, capsys, tmp_path):
    folder = str(finished.folder.path)
    assert run_command(NoiseTest, None, [str(tmp_path)]) == 1
    assert run_command(NoiseTest, None, [folder, "--noises", str(tmp_path)]) == 3
    assert run_command(NoiseTest, None, [folder, "--snr", "loud"]) == 2
    assert "not an SNR in dB" in capsys.readouterr().err
