"""Planes, sharpness and corruptions: formulas and golden numbers."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bitcycle.errors import RunError
from bitcycle.reproduction.measurement.corruption import CORRUPTIONS, Corruption, corrupt
from bitcycle.reproduction.measurement.job import Job, TrainedNetwork
from bitcycle.reproduction.measurement.plane import Plane, plane_through
from bitcycle.reproduction.measurement.sharpness import Sharpness, find_sharpness
from bitcycle.reproduction.measurement.vector import flatten
from bitcycle.training.finished_run import load_run
from tests.reproduction.measurement.conftest import CPU, DOMAINS, job

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
    plane = Plane(points=2, samples=50, batch_norm_samples=64)
    hlhlp, tuned = phased
    networks = (TrainedNetwork(tuned.folder, 1), TrainedNetwork(tuned.folder), TrainedNetwork(hlhlp.folder))
    runs = [load_run(network.folder.path, phase=network.phase) for network in networks]
    assert [run.precision.weight for run in runs] == [32, 2, 2]
    plane.prepare(runs, CPU)
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
    result = Job(plane, networks).run()
    assert len(result.rows) == 3 + 4
    assert result.header["facts"]["places"][0] == [0, 0]
    assert [part["phase"] for part in result.header["runs"]] == [1, None, None]


def test_networks_of_another_kind_share_no_plane(phased, trained):
    runs = [load_run(made.folder.path) for made in (*phased, trained)]
    runs[2].model.conv1 = torch.nn.Linear(2, 2)
    with pytest.raises(RunError, match="same model and dataset"):
        Plane().prepare(runs, CPU)


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


def test_sharpness_of_a_gated_network_leaves_out_its_gates(gated):
    """The gates are off in the float network; it ended with an error of PyTorch."""
    names = dict(load_run(gated.folder.path).model.named_parameters())
    facts = job(Sharpness(epsilons=[1e-3], iterations=1, samples=16), gated).run().header["facts"]
    weights = sum(value.numel() for name, value in names.items() if not name.startswith("gates."))
    assert facts["weights"] == weights < sum(value.numel() for value in names.values())


def test_sharpness_of_a_network(phased):
    result = job(Sharpness(epsilons=[1e-2, 1e-4], iterations=3, samples=60), phased[0]).run()
    wide, narrow = result.numbers("sharpness_percent")
    assert wide > narrow >= 0
    assert result.numbers("loss")[0] == pytest.approx(result.numbers("loss")[1])
    inside = job(Sharpness(epsilons=[1e-2], iterations=3, samples=60, subspace=5), phased[0]).run()
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
    images = trained.config.dataset.load(trained.config.data_folder, 0).test
    for index in range(60):
        folder = tmp_path / "fog" / "3" / f"{int(images.labels[index])}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images.pixels[index, :, :, 0].numpy()).save(folder / f"{index}.png")
    options = Corruption(folder=str(tmp_path), severities=[3])
    result = job(options, trained).run()
    assert [row["corruption"] for row in result.rows] == ["none", "fog"]
    clean = Corruption(corruptions=[])
    assert clean.prepare([run], CPU)[0] == 1 and clean.conditions == [("none", 0)], "an empty list computed all of them"
    few = Corruption(folder=str(tmp_path), severities=[3], samples=1)  # of one class only
    few.prepare([run], CPU)
    assert len(few.images("fog", 3)) == len(few.clean) == 1
    with torch.no_grad():
        first = (images.pixels[:60].float() - 255 * trained.config.dataset.mean[0]) / (
            255 * trained.config.dataset.std[0]
        )
        wrong = run.model(first.permute(0, 3, 1, 2)).argmax(1) != images.labels[:60]
    assert result.numbers("error_percent")[1] == pytest.approx(100 * float(wrong.float().mean()), abs=1.7)
