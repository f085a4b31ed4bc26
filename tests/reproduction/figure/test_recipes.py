"""The board of 4-bit recipes, from made-up runs."""

from __future__ import annotations

import importlib
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from bitcycle.files import write_csv
from bitcycle.reproduction.analysis.cells import Cell, Results, Run
from bitcycle.reproduction.analysis.claims import read_claims
from bitcycle.reproduction.analysis.contrast import Pool
from bitcycle.reproduction.analysis.facts import select
from bitcycle.reproduction.analysis.items import BOARDS, Item
from bitcycle.reproduction.figure import recipes
from bitcycle.reproduction.figure.data import ItemData
from bitcycle.reproduction.figure.table import as_records
from bitcycle.reproduction.manifest import read_manifest
from bitcycle.sweep.composition import composing
from tests.conftest import ROOT
from tests.reproduction.figures_cases import made_up

NVFP4 = {
    "quantizer": "nvfp4_pretraining",
    "schedule": "late_switch",
    "quantizer__float_share": 0.15,
    "quantizer__hadamard": "[wgrad]",
    "quantizer__square_weights": "true",
    "quantizer__stochastic": "true",
    "schedule__share": 0.18,
}


def cell(*losses: float, gbitops: float, **settings: object) -> Cell:
    """A cell with these bits per byte."""
    common = {"model": "llama", "dataset": "wikitext2_bytes", "training__steps": 500, "schedule": "static"}
    found = made_up(*losses, scale="mini", gbitops=gbitops, **{**common, **settings})
    for run, loss in zip(found.runs, losses, strict=True):
        run.__dict__["curve"] = {"final": {"test_bits_per_byte": loss}}
    return found


def board(*cells: Cell) -> ItemData:
    runs = [run for one in cells for run in one.runs]
    item = Item("board", "four_bit", "board", "recipes", "board/four_bit")
    return ItemData(item, Results("mini", tuple(cells)), root=ROOT, pool=Pool(runs))


@pytest.fixture
def data() -> ItemData:
    return board(
        cell(2.3, 2.4, 2.5, gbitops=500.0, quantizer="none", training__steps=250),
        cell(2.0, 2.1, 2.2, gbitops=1000.0, quantizer="none"),
        cell(2.1, 2.2, 2.3, gbitops=100.0, quantizer="mx", schedule__q_max=8),
        cell(2.5, 2.6, 2.7, gbitops=50.0, quantizer="mx", schedule__q_max=8, training__steps=250),
        cell(2.21, 2.30, 2.42, gbitops=200.0, **NVFP4),
        cell(2.41, 2.50, 2.63, gbitops=200.0, **{**NVFP4, "quantizer__hadamard": "[]"}),
        cell(2.31, 2.42, 2.50, gbitops=150.0, **{**NVFP4, "schedule__share": 0.05}),
    )


def test_arms_have_names_costs_and_gaps_paired_by_seed(data: ItemData) -> None:
    arms = {arm.name: arm for arm in recipes.arms_of(data)}
    assert list(arms) == [
        "MXFP8, 50 % of the steps",
        "MXFP8",
        "NVFP4 recipe, last 5 % float",
        "NVFP4 recipe",
        "NVFP4 recipe without Hadamard",
        "float, 50 % of the steps",
        "float",
    ]
    assert arms["MXFP8"].cost == pytest.approx(0.1)
    gap = arms["MXFP8"].gap
    assert gap is not None and gap.mean == pytest.approx(0.1) and gap.n == 3
    assert arms["float"].gap is None


def test_picture_names_every_arm_but_float(data: ItemData) -> None:
    drawing = recipes.draw_recipes(data)
    assert drawing is not None
    named = [text.get_text() for text in drawing.figure.axes[1].get_yticklabels()]
    assert named == [f"{arm.name}   {arm.cost:.2f}" for arm in recipes.arms_of(data) if arm.gap]


def test_claims_compare_the_recipe_with_one_ingredient_left_out(data: ItemData) -> None:
    claims = {row["claim"]: row for row in recipes.tables(data)[1].records}
    row = next(row for claim, row in claims.items() if "Hadamard transform of the weight" in claim)
    assert float(row["with minus without, bits per byte"]) == pytest.approx(-0.2, abs=1e-3)
    assert row["n"] == "2" and len(claims) == 7  # the first look, at half of the planned seeds
    untested = next(row for claim, row in claims.items() if "15 %" in claim)
    assert untested["with minus without, bits per byte"] == ""


def test_the_page_about_formats_shows_arms_and_verdicts(
    data: ItemData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    excerpts = importlib.import_module("board")
    monkeypatch.setattr(excerpts, "PAGE", tmp_path / "methods.md")
    assert excerpts.recipes_board().startswith("No run of this board is recorded yet")
    records = as_records(recipes.tables(data))
    write_csv(tmp_path / "four_bit.csv", list(dict.fromkeys(name for row in records for name in row)), records)
    text = excerpts.recipes_board()
    assert "| NVFP4 recipe without Hadamard | 500 | 2.51 | 3 | +0.413 |" in text
    assert text.count("arXiv 2509.25149") == 5 and text.count("arXiv 2502.20586") == 2


def planned_cells(board: str, run: Run) -> list[Cell]:
    """The arms of a board at mini scale, each with a run of its settings that is not trained."""
    cells = []
    with composing(ROOT / "conf") as compose:
        for place in read_manifest(ROOT / "results" / "manifest" / "board" / f"{board}.csv"):
            if place.scale == "mini" and not place.superseded:
                settings = json.loads(json.dumps(asdict(compose(dict(place.ours))), default=str))
                row = {**run.row, "total_steps": str(settings["training"]["steps"])}
                cells.append(Cell(dict(place.paper), dict(place.ours), (Run(row, settings),)))
    return cells


@pytest.mark.parametrize("board", sorted(folder.name for folder in (ROOT / BOARDS).iterdir()))
def test_a_claim_of_a_board_compares_two_arms(board: str, data: ItemData) -> None:
    """Those of the board of gains: three lengths of two networks, with three static runs for each. Two claims of the board of all
    images are about the eight schedules whose results were unknown: a trend, and their mean."""
    cells, usual = planned_cells(board, data.results.runs[0]), [6, 18] if board == "gain" else [1, 1]
    eight = {"board/all_images-c5": [8], "board/all_images-c6": [8, 1]}
    for claim in read_claims(ROOT / BOARDS / board):
        found = [len(select(cells, claim.where, arm)) for arm in (claim.a, *claim.arms)]
        assert found == eight.get(claim.id, usual), claim.id


def test_arms_of_the_sweep_have_distinct_names_and_claims_their_two_arms(data: ItemData) -> None:
    cells = planned_cells("four_bit", data.results.runs[0])
    names = [recipes.arm_name(cell, 1000) for cell in cells]
    assert len(set(names)) == len(names) == 25
    compared = {
        recipes.arm_name(left_out, 1000): [recipes.arm_name(cell, 1000) for cell in select(cells, claim.where, claim.a)]
        for claim in read_claims(ROOT / BOARDS / "four_bit")
        for left_out in select(cells, claim.where, claim.b)
    }
    without = ("float layers", "Hadamard", "square scales", "stochastic rounding", "late switch")
    nvfp4 = {f"NVFP4 recipe without {name}": ["NVFP4 recipe"] for name in without}
    mxfp4 = {f"MXFP4 recipe without {name}": ["MXFP4 recipe"] for name in ("Hadamard", "stochastic rounding")}
    assert compared == nvfp4 | mxfp4


def test_without_float_there_is_no_board(data: ItemData) -> None:
    cells = tuple(cell for cell in data.results.cells if cell.setting("quantizer") != "none")
    assert recipes.draw_recipes(replace(data, results=Results("mini", cells))) is None
