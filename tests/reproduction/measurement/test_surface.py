"""Loss surfaces: directions, golden numbers, and files that are the same whether interrupted or not."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from bitcycle.errors import RunError
from bitcycle.files import read_records
from bitcycle.reproduction.measurement.artifacts import read_result
from bitcycle.reproduction.measurement.job import Job, TrainedNetwork, run_command
from bitcycle.reproduction.measurement.surface import Surface, directions, filter_normalised
from bitcycle.training.finished_run import load_run
from bitcycle.training.run_folder import RunFolder
from tests.reproduction.measurement.conftest import CPU, DOMAINS, job


def test_a_loaded_run_gives_configuration_and_metrics(trained):
    """`config` and `metrics` are public: docs/own-models.md uses them."""
    run = load_run(trained.folder.path)
    assert (run.config.model.name, run.config.training.batch_size) == ("resnet8", run.plan.config.training.batch_size)
    assert run.metrics == read_records(trained.folder.metrics) and run.metrics[0]["step"] == 4


def test_the_gates_of_a_loaded_run_choose_as_in_its_last_evaluation(gated):
    """They were off, so that all blocks had the highest bits."""
    surface = Surface(points=3, split="test", samples=None)
    surface.prepare([load_run(gated.folder.path)], CPU)
    last = [record for record in read_records(gated.folder.metrics) if record["kind"] == "evaluation"][-1]
    assert float(surface.rows(1)[1]["loss"]) == pytest.approx(last["test_loss"], rel=1e-5)


def test_weights_of_the_checkpoint_before_the_last_are_refused(trained, tmp_path):
    """They were measured, with a warning, as if they were those of the end."""
    folder = RunFolder(tmp_path / "seed=0")
    shutil.copytree(trained.folder.path, folder.path)
    state = folder.checkpoint.load()
    folder.checkpoint.save({**state, "step": state["step"] - 1})
    folder.checkpoint.save(state)
    load_run(folder.path)
    folder.checkpoint.last.write_bytes(b"damaged, and longer than its checksum")
    with pytest.raises(RunError, match=r"last checkpoint in .* is damaged"):
        load_run(folder.path)
    shutil.rmtree(folder.checkpoint.folder)
    with pytest.raises(RunError, match=r"last checkpoint in .* is damaged or missing"):
        load_run(folder.path)


# Directions


def test_filters_of_directions_are_as_long_as_those_of_the_weights(trained):
    model = load_run(trained.folder.path).model
    found = directions(model, seed=3, axis="x")
    for name, weight in model.named_parameters():
        if weight.dim() < 2:
            assert not found[name].any(), name
        else:
            lengths = (found[name].flatten(1).norm(dim=1), weight.detach().flatten(1).norm(dim=1))
            torch.testing.assert_close(*lengths, rtol=1e-5, atol=1e-7)
    assert all(torch.equal(value, found[name]) for name, value in directions(model, 3, "x").items())
    for other in (directions(model, 4, "x"), directions(model, 3, "y")):
        assert not torch.equal(other["conv1.weight"], found["conv1.weight"])


def test_golden_filter_normalisation():
    with np.load(DOMAINS / "loss_surface.npz") as golden:
        for kind in ("conv", "linear"):
            drawn, weight, wanted = (
                torch.from_numpy(golden[f"filter__{kind}__{name}"]) for name in ("direction", "w", "normalised")
            )
            torch.testing.assert_close(filter_normalised(drawn, weight), wanted, rtol=1e-9, atol=1e-12)


# Surfaces


def test_the_middle_of_the_surface_is_the_last_evaluation(trained):
    surface = Surface(points=3, split="test", samples=None)
    surface.prepare([load_run(trained.folder.path)], CPU)
    middle = surface.rows(1)[1]
    last = [record for record in read_records(trained.folder.metrics) if record["kind"] == "evaluation"][-1]
    assert (float(middle["x"]), float(middle["y"])) == (0, 0)
    assert float(middle["loss"]) == pytest.approx(last["test_loss"], rel=1e-5)
    assert float(middle["error_percent"]) == pytest.approx(100 - last["test_accuracy"], abs=1e-3)
    assert surface.rows(0)[0]["loss"] != middle["loss"]
    assert surface.rows(1)[1] == middle, "a point does not depend on those before it"


def test_through_the_quantizers_or_in_plain_numbers(phased):
    """A step far below the quantizer's does not reach the first decimals of quantized weights, but moves plain numbers."""
    options = Surface(points=3, extent=1e-4, samples=50)
    spread = {}
    for precision in ("run", "float"):
        surface = replace(options, precision=precision)
        _, facts = surface.prepare([load_run(phased[0].folder.path)], CPU)
        surface.point(0, 0)
        weights = surface.model.conv1.weight.detach()
        spread[precision] = len(weights.unique())
        assert facts["bits"] == ([2, 32] if precision == "run" else [32, 32])
    assert spread["float"] == 3 < spread["run"], "ternary numbers take the place of the master weights"


@pytest.mark.parametrize("precision", ["run", "float"])
def test_networks_of_phases_are_those_that_were_evaluated(phased, precision):
    """Activations are float in these runs, so that quantized weights as plain numbers give the same."""
    surface = Surface(points=3, split="test", samples=None, precision=precision)
    for made in phased:
        for number, phase in enumerate(made.folder.read_summary()["phases"], 1):
            last = number == len(made.schedule.phases)
            run = load_run(made.folder.path, phase=None if last else number)
            surface.prepare([run], CPU)
            middle = surface.point(0, 0)
            wanted = phase["final"] if last else phase["best"]
            assert float(middle["error_percent"]) == pytest.approx(100 - wanted, abs=1e-3), (number, phase)


def test_an_interrupted_surface_is_the_undisturbed_one(trained, monkeypatch, tmp_path):
    options = Surface(points=5, samples=40)
    whole = job(options, trained)
    whole.run()
    shutil.copytree(trained.folder.path, tmp_path / "seed=0", ignore=shutil.ignore_patterns("analyses"))
    cut = Job(options, (TrainedNetwork(RunFolder(tmp_path / "seed=0")),))
    rows = Surface.rows
    with monkeypatch.context() as patch:
        patch.setattr(Surface, "rows", lambda self, unit: interrupt() if unit == 2 else rows(self, unit))
        with pytest.raises(KeyboardInterrupt):
            cut.run()
    assert read_result(cut.path).header["done"] == 2 and not read_result(cut.path).complete
    seen = []
    with monkeypatch.context() as patch:
        patch.setattr(Surface, "rows", lambda self, unit: [*rows(self, unit), seen.append(unit)][:-1])
        cut.run()
    assert seen == [2, 3, 4]
    assert cut.path.read_bytes() == whole.path.read_bytes()
    assert len(whole.run().rows) == 25


def test_a_result_that_cannot_be_written_is_one_line(trained, tmp_path, monkeypatch):
    """A traceback, after which the other analyses of a sweep did not begin."""
    shutil.copytree(trained.folder.path, tmp_path / "seed=0", ignore=shutil.ignore_patterns("analyses"))

    def fail(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("bitcycle.reproduction.measurement.job.write_result", fail)
    with pytest.raises(RunError, match=r"Read-only file system\. Remedy: free space"):
        Job(Surface(points=3, samples=20), (TrainedNetwork(RunFolder(tmp_path / "seed=0")),)).run()


def interrupt():
    raise KeyboardInterrupt


def test_the_command_line_and_what_it_refuses(trained, tmp_path, capsys):
    folder = str(trained.folder.path)
    assert run_command(Surface, None, [folder, "--points", "3", "--samples", "20"]) == 0
    assert "9 rows" in capsys.readouterr().out
    assert run_command(Surface, None, [str(tmp_path)]) == 1
    assert run_command(Surface, None, [f"{folder}@1"]) == 1
    assert "has no weights of this phase" in capsys.readouterr().err
    assert run_command(Surface, None, [folder, "--points", "4"]) == 2
    assert "points=4" in capsys.readouterr().err
