"""The benchmark: what its numbers mean, and that every network and quantizer of it can be measured."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch
from torch import nn

from bitcycle.benchmark import __main__ as command
from bitcycle.benchmark import networks as networks_module
from bitcycle.benchmark.__main__ import arguments, measure
from bitcycle.benchmark.measure import interleaved, peak_bytes, summarise
from bitcycle.benchmark.networks import VARIANTS, Network, measure_networks
from bitcycle.benchmark.table import FOLDER, recorded, tables
from bitcycle.benchmark.throughput import images_per_second, write
from bitcycle.shapes import ImageShape

CPU = torch.device("cpu")


def small_network(*_arguments: Any) -> dict[str, Network]:
    def build() -> nn.Module:
        return nn.Sequential(
            *(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3)),
            *(nn.Flatten(), nn.Linear(144, 10)),
        )

    return {
        "small": Network(build, networks_module._images("resnet8", 2, ImageShape(3, 12, 10)).batch, "2 images of 12x12")
    }


@pytest.mark.parametrize("words", [[], ["--quick"], ["--quick", "--output"], ["--parts", "data"]])
def test_a_partial_benchmark_does_not_replace_the_record(words, tmp_path, monkeypatch, capsys):
    record = {
        "environment": {"processor": "one", "threads": 1, "packages": {"torch": "2"}},
        "date": "2026-01-01",
        "rounds": 1,
        "clock": "wall",
        "load_average": {"before": [0.0], "after": [0.0]},
    }
    monkeypatch.setattr(command, "FOLDER", tmp_path / "records")
    monkeypatch.setattr(command, "measure", lambda chosen, keep: record)
    chosen = tmp_path / "chosen.json"
    monkeypatch.setattr(sys, "argv", ["benchmark", *words, *([str(chosen)] if "--output" in words else [])])
    command.main()
    assert (tmp_path / "records").exists() == (words == [])
    assert chosen.exists() == ("--output" in words)
    assert ("Not saved" in capsys.readouterr().out) == (words in (["--quick"], ["--parts", "data"]))


def test_ratios_are_medians_of_rounds():
    found = summarise({"float": [1.0, 2.0, 4.0], "slow": [2.0, 3.0, 12.0]}, "float")
    assert found["slow"] == {"ms": 3000.0, "ratio": 2.0, "ratio_low": 1.5, "ratio_high": 3.0, "rounds": 3}
    assert found["float"]["ratio"] == 1


def test_variants_take_turns_and_the_first_rounds_do_not_count():
    order: list[str] = []
    seconds = interleaved({name: lambda name=name: order.append(name) for name in "ab"}, 3, CPU, warm_up=2)
    assert order == list("ababababab")
    assert {name: len(values) for name, values in seconds.items()} == {"a": 3, "b": 3}


def test_peak_memory_counts_what_lives_at_once():
    def both_at_once() -> None:
        _first, _second = torch.empty(1000), torch.empty(2000)

    def one_after_the_other() -> None:
        torch.empty(1000)
        torch.empty(2000)

    assert peak_bytes(both_at_once, CPU) == pytest.approx(12_000, abs=200)
    assert peak_bytes(one_after_the_other, CPU) == pytest.approx(8_000, abs=200)


def test_a_network_in_every_variant(monkeypatch):
    monkeypatch.setattr(networks_module, "networks", small_network)
    monkeypatch.setattr(networks_module, "compiler_works", lambda device: False)
    [(name, found)] = measure_networks(["small"], 2, CPU)
    assert name == "small"
    assert list(found["variants"]) == [name for name in VARIANTS if "DFQ" not in name]
    assert all(values["ms"] > 0 and values["peak_mib"] >= 0 for values in found["variants"].values())


def test_a_record_makes_tables(tmp_path, monkeypatch):
    monkeypatch.setattr(networks_module, "networks", small_network)
    monkeypatch.setattr(networks_module, "compiler_works", lambda device: False)
    chosen = arguments(["--quick", "--parts", "networks"])
    assert (chosen.networks, chosen.rounds) == (["resnet20", "lstm"], 3)
    chosen.networks, chosen.rounds, chosen.device, chosen.threads = ["small"], 2, "cpu", torch.get_num_threads()
    kept: list[dict[str, Any]] = []
    record = measure(chosen, kept.append)
    assert len(kept) == 1
    write(tmp_path / "record.json", record)
    text = tables(json.loads((tmp_path / "record.json").read_text()))
    assert "| `small`, 2 images of 12x12 |" in text
    assert record["environment"]["packages"]["torch"] in text


def test_data_alone():
    assert images_per_second(CPU, batches=2, batch_size=8) > 0


def test_recorded_benchmarks_are_whole(tmp_path, monkeypatch):
    assert len(list(FOLDER.glob("*.json"))) == recorded().count("torch 2")
    for file in FOLDER.glob("*.json"):
        record = json.loads(file.read_text())
        write(tmp_path / file.name, {name: part for name, part in record.items() if name != "networks"})
    monkeypatch.setattr("bitcycle.benchmark.table.FOLDER", tmp_path)
    assert "images/s" in recorded(), "a record may lack the networks"


def test_a_check_finds_what_became_slower(tmp_path, monkeypatch, capsys):
    def networks(ratio: float) -> dict[str, Any]:
        return {
            "resnet20": {"variants": {"static 8": {"ratio": ratio, "ratio_low": ratio - 0.01, "ratio_high": ratio}}}
        }

    monkeypatch.setattr(command, "FOLDER", tmp_path)
    monkeypatch.setattr(command, "processor", lambda device: "one")
    monkeypatch.setattr(command, "instruction_set", lambda: "avx2")
    monkeypatch.setattr(sys, "argv", ["benchmark", "--check", "--networks", "resnet20", "--device", "cpu"])
    for ratio, code, said in ((1.0, 2, "is missing"), (1.14, 0, "no ratio"), (1.2, 1, "static 8: 1.20 times float32")):
        monkeypatch.setattr(command, "measure", lambda chosen, keep, ratio=ratio: {"networks": networks(ratio)})
        with pytest.raises(SystemExit) as exit:
            command.main()
        assert exit.value.code == code
        assert said in capsys.readouterr().out
        write(tmp_path / "one-avx2-1-threads.json", {"networks": networks(1.0)})
    monkeypatch.setattr(sys, "argv", ["benchmark", "--check", "--networks", "lstm", "--device", "cpu"])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    assert "has none of these networks" in capsys.readouterr().out, "all networks were measured instead"
    write(tmp_path / "one-avx2-1-threads-words.json", {"networks": {"lstm": networks(1.0)["resnet20"]}})
    monkeypatch.setattr(command, "measure", lambda chosen, keep: {"networks": {"lstm": networks(1.2)["resnet20"]}})
    with pytest.raises(SystemExit, match="1"):
        command.main()
    assert "lstm, static 8: 1.20" in capsys.readouterr().out, "a second record of this hardware was not read"
