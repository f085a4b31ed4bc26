"""Analyses of finished networks: formulas, golden numbers, and files that are the same whether interrupted or not."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import warnings
from dataclasses import replace

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bitcycle.analysis.claims import read_claims
from bitcycle.analysis.collect import collect
from bitcycle.analysis.judge import judge
from bitcycle.analysis.landscape import rise, rise_around
from bitcycle.analysis.results import Cell, Results
from bitcycle.analysis.verdict import NOT_RUN, UNDECIDED
from bitcycle.errors import RunError
from bitcycle.figure import cpt
from bitcycle.figure.data import ItemData
from bitcycle.figure.landscape import radial_rise
from bitcycle.figure.schedules import UNDATED
from bitcycle.measurement import after_sweep
from bitcycle.measurement.after_sweep import analyse, groups_of, read_entry, sweeps_with_analyses
from bitcycle.measurement.artifacts import Result, read_result
from bitcycle.measurement.command import run_command
from bitcycle.measurement.corruption import CorruptionOptions
from bitcycle.measurement.corruptions import CORRUPTIONS, corrupt
from bitcycle.measurement.finished_run import load_run
from bitcycle.measurement.job import Job, Network
from bitcycle.measurement.measurement import flatten
from bitcycle.measurement.plane import Plane, PlaneOptions, plane_through
from bitcycle.measurement.sharpness import SharpnessOptions, find_sharpness
from bitcycle.measurement.surface import Surface, SurfaceOptions, directions, filter_normalised
from bitcycle.settings import SettingError
from bitcycle.sweep import Sweep
from bitcycle.sweep.grid import as_text
from bitcycle.training.run import execute
from bitcycle.training.run_folder import RunFolder, read_records
from tests.conftest import ROOT, plan
from tests.test_figures import ITEMS, made_up

DOMAINS = ROOT / "tests" / "data" / "golden-domains"
CPU = torch.device("cpu")
SMALL = ("dataset=digits", "model=resnet8", "scale=smoke", "training.batch_size=16", "training.evaluation_steps=4")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run with few bits, and its settings."""
    root = tmp_path_factory.mktemp("trained")
    made = plan(*SMALL, "schedule=CR", "schedule.cycles=2", "training.steps=8", f"results_root={root}/runs")
    execute(made)
    return made


@pytest.fixture(scope="module")
def phased(tmp_path_factory):
    """Finished runs of HLHLp and of fine-tuning."""
    root = tmp_path_factory.mktemp("phased")
    common = (*SMALL, "quantizer=uniform_l2", "training.steps=16", f"results_root={root}/runs")
    plans = [plan(*common, f"schedule={name}", "schedule.ratio=10") for name in ("hlhlp", "fine_tuning")]
    for made in plans:
        execute(made)
    return plans


def job(options, *plans, phase=None):
    return Job(options, tuple(Network(made.folder, phase) for made in plans))


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
    options = SurfaceOptions(points=3, split="test", samples=None)
    surface = Surface(options, load_run(trained.folder.path), CPU)
    middle = surface.rows(1)[1]
    last = [record for record in read_records(trained.folder.metrics) if record["kind"] == "evaluation"][-1]
    assert (float(middle["x"]), float(middle["y"])) == (0, 0)
    assert float(middle["loss"]) == pytest.approx(last["test_loss"], rel=1e-5)
    assert float(middle["error_percent"]) == pytest.approx(100 - last["test_accuracy"], abs=1e-3)
    assert surface.rows(0)[0]["loss"] != middle["loss"]
    assert surface.rows(1)[1] == middle, "a point does not depend on those before it"


def test_through_the_quantizers_or_in_plain_numbers(phased):
    """A step far below the quantizer's does not reach the first decimals of quantized weights, but moves plain numbers."""
    options = SurfaceOptions(points=3, extent=1e-4, samples=50)
    spread = {}
    for precision in ("run", "float"):
        surface = Surface(replace(options, precision=precision), load_run(phased[0].folder.path), CPU)
        surface.point(0, 0)
        weights = surface.model.conv1.weight.detach()
        spread[precision] = len(weights.unique())
        assert surface.facts["bits"] == ([2, 32] if precision == "run" else [32, 32])
    assert spread["float"] == 3 < spread["run"], "ternary numbers take the place of the master weights"


@pytest.mark.parametrize("precision", ["run", "float"])
def test_networks_of_phases_are_those_that_were_evaluated(phased, precision):
    """Activations are float in these runs, so that quantized weights as plain numbers give the same."""
    options = SurfaceOptions(points=3, split="test", samples=None, precision=precision)
    for made in phased:
        for number, phase in enumerate(made.folder.read_summary()["phases"], 1):
            last = number == len(made.schedule.phases)
            run = load_run(made.folder.path, phase=None if last else number)
            middle = Surface(options, run, CPU).point(0, 0)
            wanted = phase["final"] if last else phase["best"]
            assert float(middle["error_percent"]) == pytest.approx(100 - wanted, abs=1e-3), (number, phase)


def test_an_interrupted_surface_is_the_undisturbed_one(trained, monkeypatch, tmp_path):
    options = SurfaceOptions(points=5, samples=40)
    whole = job(options, trained)
    whole.run()
    shutil.copytree(trained.folder.path, tmp_path / "seed=0", ignore=shutil.ignore_patterns("analyses"))
    cut = Job(options, (Network(RunFolder(tmp_path / "seed=0")),))
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


def interrupt():
    raise KeyboardInterrupt


def test_the_command_line_and_what_it_refuses(trained, tmp_path, capsys):
    folder = str(trained.folder.path)
    assert run_command(SurfaceOptions, None, [folder, "--points", "3", "--samples", "20"]) == 0
    assert "9 rows" in capsys.readouterr().out
    assert run_command(SurfaceOptions, None, [str(tmp_path)]) == 1
    assert run_command(SurfaceOptions, None, [f"{folder}@1"]) == 1
    assert "keeps no such weights" in capsys.readouterr().err
    assert run_command(SurfaceOptions, None, [folder, "--points", "4"]) == 2
    assert "points=4" in capsys.readouterr().err


# Planes


def test_golden_plane():
    with np.load(DOMAINS / "loss_surface.npz") as golden:
        models = torch.from_numpy(golden["plane__models"])
        basis = plane_through(*models)
        for name in ("u", "v"):
            torch.testing.assert_close(getattr(basis, name), torch.from_numpy(golden[f"plane__{name}"]))
        np.testing.assert_allclose(basis.places, golden["plane__coordinates"], rtol=1e-9, atol=1e-9)
        for i, j in itertools.product(range(5), repeat=2):
            x, y = golden["plane__grid_xy"][i, j]
            torch.testing.assert_close(basis.at(x, y), torch.from_numpy(golden["plane__grid_weights"][i, j]))


@given(st.integers(0, 99), st.floats(-5, 5), st.floats(1e-3, 1e3))
def test_the_three_networks_lie_on_the_plane(seed, along, size):
    generator = torch.Generator().manual_seed(seed)
    first, side, other = size * torch.randn(3, 40, generator=generator, dtype=torch.float64)
    three = (first, first + side, first + along * side + other)
    basis = plane_through(*three)
    for vector, place in zip(three, basis.places, strict=True):
        torch.testing.assert_close(basis.at(*place), vector, rtol=1e-9, atol=1e-9 * size)
    assert float(basis.u @ basis.v) == pytest.approx(0, abs=1e-12)
    assert float(basis.v.norm()) == pytest.approx(1)


def test_three_networks_on_a_line_have_no_plane():
    one, two = torch.randn(2, 9, dtype=torch.float64)
    for third in (one, two, one + 3 * (two - one)):
        with pytest.raises(RunError, match="lie on a line"):
            plane_through(one, two, third)


def test_a_plane_through_phases(phased):
    options = PlaneOptions(points=2, samples=50, batch_norm_samples=64)
    hlhlp, tuned = phased
    networks = (Network(tuned.folder, 1), Network(tuned.folder), Network(hlhlp.folder))
    runs = [load_run(network.folder.path, phase=network.phase) for network in networks]
    assert [run.precision.weight for run in runs] == [32, 2, 2]
    plane = Plane(options, runs, CPU)
    rows = plane.rows(0)
    assert [row["network"] for row in rows] == ["1", "2", "3"]
    found = flatten(plane.model.parameters())  # the last point was the third network
    alone = load_run(hlhlp.folder.path)
    alone.make_float()
    torch.testing.assert_close(found, flatten(alone.model.parameters()), rtol=1e-5, atol=1e-6)
    plane.training.estimate_batch_norm(alone.model)
    loss, error = plane.measure(alone.model)
    assert float(rows[2]["loss"]) == pytest.approx(loss, rel=1e-4)
    assert float(rows[2]["error_percent"]) == pytest.approx(error)
    result = Job(options, networks).run()
    assert len(result.rows) == 3 + 4
    assert result.header["facts"]["places"][0] == [0, 0]
    assert [part["phase"] for part in result.header["runs"]] == [1, None, None]


def test_networks_of_another_kind_share_no_plane(phased, trained):
    runs = [load_run(made.folder.path) for made in (*phased, trained)]
    runs[2].model.conv1 = torch.nn.Linear(2, 2)
    with pytest.raises(RunError, match="differ in kind"):
        Plane(PlaneOptions(), runs, CPU)


# Sharpness


@pytest.mark.parametrize("case", json.loads((DOMAINS / "epsilon_sharpness.json").read_text()), ids=lambda c: c["kind"])
def test_golden_sharpness(case):
    x, centre, hessian = (torch.tensor(case[name], dtype=torch.float64) for name in ("x", "center", "H"))
    matrix = None if case["A"] is None else torch.tensor(case["A"], dtype=torch.float64)

    def quadratic(w: torch.Tensor) -> tuple[float, torch.Tensor]:
        return float(case["f0"] + 0.5 * (w - centre) @ hessian @ (w - centre)), hessian @ (w - centre)

    found = find_sharpness(quadratic, x, case["epsilon"], matrix=matrix)
    assert found.loss == pytest.approx(case["f_x"], rel=1e-9)
    if matrix is not None:  # the box has two maxima here, and the way up from its middle leads to the lower one
        assert 0.75 * case["sharpness"] < found.sharpness <= case["sharpness"]
        return
    assert found.largest == pytest.approx(case["f_max"], rel=1e-9)
    assert found.sharpness == pytest.approx(case["sharpness"], rel=1e-6)


@given(
    st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 3), st.sampled_from([-1.0, 1.0])), min_size=1, max_size=6),
    st.floats(1e-4, 0.5),
)
def test_sharpness_of_a_diagonal_quadratic_is_at_the_outer_corner(terms, epsilon):
    """f = sum h_i w_i^2 / 2 is largest where each |w_i| has grown by r_i = eps (|w_i| + 1)."""
    h, size, sign = (torch.tensor(column, dtype=torch.float64) for column in zip(*terms))
    w = size * sign
    found = find_sharpness(lambda v: (float(0.5 * h @ v.square()), h * v), w, epsilon, iterations=20)
    corner = 0.5 * float(h @ (w.abs() + epsilon * (w.abs() + 1)).square())
    assert found.largest == pytest.approx(corner, rel=1e-6)
    assert found.sharpness == pytest.approx(100 * (corner - found.loss) / (1 + found.loss), rel=1e-5, abs=1e-6)


def test_sharpness_of_a_network(phased):
    result = job(SharpnessOptions(epsilons=[1e-2, 1e-4], iterations=3, samples=60), phased[0]).run()
    wide, narrow = result.numbers("sharpness_percent")
    assert wide > narrow >= 0
    assert result.numbers("loss")[0] == pytest.approx(result.numbers("loss")[1])
    inside = job(SharpnessOptions(epsilons=[1e-2], iterations=3, samples=60, subspace=5), phased[0]).run()
    assert inside.numbers("sharpness_percent")[0] >= 0


# Corruptions


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_corruptions_grow_with_severity_and_follow_from_the_seed(name):
    torch.manual_seed(0)
    smooth = torch.nn.functional.interpolate(torch.rand(8, 3, 6, 6), (32, 32), mode="bilinear")
    images = (smooth * 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()
    changed = [corrupt(images, name, s, torch.Generator().manual_seed(1)) for s in range(1, 6)]
    distances = [float((one.float() - images.float()).square().mean()) for one in changed]
    assert distances == sorted(distances) and distances[0] > 0
    assert all(one.shape == images.shape and one.dtype == torch.uint8 for one in changed)
    assert torch.equal(changed[2], corrupt(images, name, 3, torch.Generator().manual_seed(1)))


def test_published_corruptions_are_read_from_class_folders(trained, tmp_path):
    """The network's own test images as files of one corruption give the clean error."""
    from PIL import Image

    run = load_run(trained.folder.path)
    images = trained.config.dataset.load(trained.config.data_folder).test
    for index in range(60):
        folder = tmp_path / "fog" / "3" / f"{int(images.labels[index])}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images.pixels[index, :, :, 0].numpy()).save(folder / f"{index}.png")
    options = CorruptionOptions(folder=str(tmp_path), severities=[3])
    result = job(options, trained).run()
    assert [row["corruption"] for row in result.rows] == ["none", "fog"]
    with torch.no_grad():
        first = (images.pixels[:60].float() - 255 * trained.config.dataset.mean[0]) / (
            255 * trained.config.dataset.std[0]
        )
        wrong = run.model(first.permute(0, 3, 1, 2)).argmax(1) != images.labels[:60]
    assert result.numbers("error_percent")[1] == pytest.approx(100 * float(wrong.float().mean()), abs=1.7)


# After a sweep


ENTRY = {"kind": "surface", "seeds": 2, "samples": 22, "at_scale": {"smoke": {"points": 3}}}


def test_after_a_sweep_what_has_its_runs_is_analysed_once(trained, tmp_path, capsys, monkeypatch):
    grid = {word.split("=")[0]: word.split("=")[1] for word in SMALL[:2] + SMALL[3:]}
    grid |= {"schedule": ["CR", "LR"], "schedule.cycles": 2, "training.steps": 8}
    sweep = Sweep(grids=[grid], trials={"smoke": 1}, analyses=[ENTRY])
    fixed = {"scale": "smoke", "results_root": str(trained.config.results_root)}
    assert analyse({"x/y": sweep}, {**fixed, "dry_run": "true"}, ROOT / "conf") == 0
    assert capsys.readouterr().out == "x/y: 2 to be made, 2 wait for runs\n"
    assert analyse({"x/y": sweep}, fixed, ROOT / "conf") == 0
    assert capsys.readouterr().out == "x/y: 2 made, 2 wait for runs\n"
    assert analyse({"x/y": sweep}, fixed, ROOT / "conf") == 0
    assert capsys.readouterr().out == "x/y: 2 done before, 2 wait for runs\n"
    broken = replace(sweep, analyses=[{**ENTRY, "samples": 23}, {"kind": "noise"}])
    assert analyse({"x/y": broken}, fixed, ROOT / "conf") == 1
    assert capsys.readouterr().out == "x/y: 2 made, 1 failed, 3 wait for runs\n"

    summary = tmp_path / "results" / "summary" / "runs.csv"
    collect(trained.folder.path.parent, summary)
    copies = sorted((summary.parent / "analyses").glob("smoke-*-0-surface-*.csv"))
    assert len(copies) >= 4
    assert all(read_result(path).complete for path in copies)


def test_all_sweep_files_name_analyses_that_exist():
    every = sweeps_with_analyses(ROOT)
    assert {"cpt/fig2", "cpt/fig6", "hlhlp/fig1", "hlhlp/appD", "hlhlp/appF", "hlhlp/appH"} <= set(every)
    for name, sweep in every.items():
        for scale, entry in itertools.product(("paper", "mini", "smoke"), sweep.analyses):
            several, networks = read_entry(entry, scale)
            assert several, name
            runs = sweep.expand(scale)
            for network in networks:
                wanted = {key: as_text(value) for key, value in network.items() if key != "phase"}
                assert any(wanted.items() <= run.items() for run in runs), (name, network)


def test_entries_that_are_wrong():
    for entry, words in (
        ({"kind": "surfaces"}, "did you mean 'surface'"),
        ({"kind": "surface", "point": 3}, "did you mean 'points'"),
        ({"kind": "plane", "networks": [{}]}, "needs 3 networks"),
    ):
        with pytest.raises(SettingError, match=words):
            read_entry(entry, "paper")
    with pytest.raises(SettingError, match="no such sweep"):
        sweeps_with_analyses(ROOT, ["cpt/fig22"])
    assert list(groups_of([], [], 1)) == []
    assert after_sweep.main(["cpt/fig22"], ROOT) == 2


# What the results say


def made_surface(height, points: int = 21, seed: int = 0) -> Result:
    """A surface of a function of the radius."""
    places = [-1 + 2 * index / (points - 1) for index in range(points)]
    rows = [
        {"x": f"{x:.7g}", "y": f"{y:.7g}", "loss": str(height(math.hypot(x, y))), "error_percent": "0"}
        for y, x in itertools.product(places, places)
    ]
    options = {"extent": 1.0, "points": points, "seed": seed, "split": "train", "precision": "run"}
    runs = [{"scale": "mini", "hash": "a", "seed": 0, "phase": None}]
    facts = {"samples": 10, "bits": [8, 8]}
    header = {"kind": "surface", "options": options, "units": 1, "done": 1, "facts": facts, "runs": runs}
    return Result(header, rows)


def test_rise_is_the_mean_over_a_ring():
    assert rise(made_surface(lambda r: 7 + r)) == pytest.approx(0.5, abs=0.02)
    assert rise(made_surface(lambda r: 3 * r * r)) == pytest.approx(0.75, abs=0.06)
    assert rise(made_surface(lambda r: math.nan if r > 0.5 else 1.0)) == math.inf


def test_rise_around_a_network():
    """A wall beside the second network; the third is in the middle of a basin."""
    rows = [{"network": str(k), "x": x, "y": y} for k, (x, y) in enumerate([(0, 0), (4, 0), (0, 4)], 1)]
    rows += [{"network": "", "x": i / 2, "y": j / 2} for i in range(-2, 11) for j in range(-2, 11)]
    for row in rows:
        row["error_percent"] = 60 if row["x"] > 4.2 else 10
    plane = Result({"kind": "plane"}, [{key: str(value) for key, value in row.items()} for row in rows])
    assert rise_around(plane, 3) == 0 < rise_around(plane, 2) < 25
    assert rise_around(Result({"kind": "plane"}, plane.rows[:3]), 3) is None


def cell_with(surfaces: list[Result], **settings: object) -> Cell:
    """A cell with one run that has some surfaces."""
    cell = made_up(90.0, dataset="cifar100", model="resnet74", schedule__q_max=8, **settings)
    vars(cell.runs[0])["analyses"] = surfaces
    return cell


def three_cells(slopes: dict[str, float], pairs: int = 3) -> list[Cell]:
    """Static, progressive and cyclic precision with cones of some slopes, for pairs of directions."""
    return [
        cell_with(
            [made_surface(lambda r, slope=slope: 0.5 + slope * r, seed=seed) for seed in range(pairs)], schedule=name
        )
        for name, slope in slopes.items()
    ]


@pytest.mark.parametrize(
    ("slopes", "pairs", "expected"),
    [
        ({"static": 6.0, "pfq_manual": 4.0, "CR": 3.0}, 3, -1.25),
        ({"static": 3.0, "pfq_manual": 4.0, "CR": 6.0}, 3, 1.0),
        ({"static": 3.0, "pfq_manual": 4.0, "CR": 2.0}, 0, None),
    ],
)
def test_wider_minima(slopes, pairs, expected):
    """Half of the slopes' differences, as the rise is taken at half of the radius; one network of each decides nothing."""
    claim = next(claim for claim in read_claims(ROOT / "results" / "published") if claim.id == "cpt/fig2-c1")
    (found,) = judge([claim], {claim.item: Results("paper", tuple(three_cells(slopes, pairs)))})
    assert found.verdict == (UNDECIDED if pairs else NOT_RUN)
    assert found.estimate == (None if expected is None else pytest.approx(expected, abs=0.1))


def test_contours_show_what_there_is():
    cells = three_cells({"static": 6.0, "pfq_manual": 4.0})
    data = ItemData(ITEMS["cpt/fig2"], Results("paper", (*cells, Cell({}, {}))))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure, caption = cpt.contours(data)
        flat = (cell_with([made_surface(lambda r: 20.0)], schedule="CR"),)
        cpt.contours(replace(data, results=Results("paper", flat)))
    panels = [axes for axes in figure.axes if axes.get_title()]
    assert [bool(axes.collections) for axes in panels[:2]] == [True, True]
    assert "3 pairs of random directions" in panels[2].get_title()
    assert "21 x 21 points on 10 training images" in caption
    plt.close("all")


def test_the_loss_rises_with_the_distance():
    rises = radial_rise(made_surface(lambda r: 7 + 2 * r))
    assert list(rises) == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert list(rises.values()) == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0], abs=0.05)


def test_without_measurements_there_is_no_picture():
    data = ItemData(ITEMS["cpt/fig2"], Results("mini", (cell_with([], schedule="CR"),)))
    assert cpt.contours(data) is None


def test_pictures_have_neither_dates_nor_random_names(tmp_path):
    figure, axes = plt.subplots(figsize=(1, 1))
    axes.fill_between([0, 1], [0, 1], hatch="/")  # hatches have names in SVG files
    contents = []
    for name, (suffix, metadata) in itertools.product("ab", UNDATED.items()):
        figure.savefig(tmp_path / f"{name}{suffix}", metadata=metadata)
        contents.append((tmp_path / f"{name}{suffix}").read_bytes())
    plt.close(figure)
    assert contents[:2] == contents[2:]
    assert b"<dc:date>" not in contents[1] and matplotlib.rcParams["svg.hashsalt"] == "bitcycle"
