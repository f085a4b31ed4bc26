"""The manifest: which run fills which cell, what is superseded, and what cannot be composed yet."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

from bitcycle.configuration import SCALES
from bitcycle.files import write_csv
from bitcycle.reproduction.analysis.cells import Run, find_results
from bitcycle.reproduction.manifest import Place, plan_cells, read_manifest, record, record_launch
from bitcycle.sweep.composition import composing
from bitcycle.sweep.registry import Sweep, index_runs, read_sweep
from bitcycle.training.naming import run_hash
from tests.conftest import ROOT, configure

SWEEP = Sweep(
    grids=[{"dataset": "cifar100", "model": ["resnet38", "resnet74"], "schedule": "static", "schedule.q_max": 8}],
    trials={"paper": 3, "mini": 2},
    at_scale={"mini": {"dataset": {"cifar100": "cifar10"}, "model": "resnet8", "dataset.train_samples": 4000}},
)


def compose(run: dict[str, str]):
    return configure(*(f"{key}={value}" for key, value in run.items()))


def run_of(place: Place, seed: int = 0) -> Run:
    return Run({"scale": place.scale, "hash": place.hash, "seed": str(seed), "final": "50"}, {})


def test_cells_that_become_equal_share_a_run_and_are_labelled():
    places = plan_cells(SWEEP, "mini", compose)
    assert [place.paper["model"] for place in places] == ["resnet38", "resnet74"]
    assert len({place.hash for place in places}) == 1
    assert {place.proxy for place in places} == {"resnet8, cifar10, 4000 samples"}
    assert {place.seeds for place in places} == {(0, 1)}
    paper = plan_cells(SWEEP, "paper", compose)
    assert {place.proxy for place in paper} == {""} and len({place.hash for place in paper}) == 2
    wanted = compose({"dataset": "cifar100", "model": "resnet38", "schedule": "static", "schedule.q_max": "8"})
    assert paper[0].hash == run_hash(wanted)


def test_a_superseded_run_leaves_tables_and_verdicts_and_stays_on_record(tmp_path):
    first = record("x/y", SWEEP, "mini", compose, tmp_path)
    runs = [run_of(first[0])]
    assert len(find_results(first, runs).done) == 2
    longer = replace(SWEEP, at_scale={"mini": {**SWEEP.at_scale["mini"], "training.steps": 77}})
    kept = record("x/y", longer, "mini", compose, tmp_path, recorded={first[0].hash})
    assert [bool(place.superseded) for place in kept] == [False, False, True, True]
    assert not find_results(kept, runs).done
    assert read_manifest(tmp_path / "x" / "y.csv") == kept
    assert len(record("x/y", longer, "mini", compose, tmp_path)) == 2, "a run that nobody recorded leaves no trace"


def test_a_run_is_superseded_in_its_cell_whoever_else_has_it_or_however_it_was_computed(tmp_path):
    """The row was dropped if another cell had its run by now, or only the run with the other `training.compute` is recorded."""
    first = record("x/y", SWEEP, "mini", compose, tmp_path)
    deeper = {**SWEEP.at_scale["mini"], "model": {"resnet74": "resnet20", "resnet38": "resnet8"}}
    assert first[0].hash == first[1].hash
    changed = replace(SWEEP, at_scale={"mini": deeper})
    for recorded in (first[0].hash, first[0].otherwise):
        kept = record("x/y", changed, "mini", compose, tmp_path, recorded={recorded})
        assert [(place.cell, bool(place.superseded)) for place in kept] == [(1, False), (2, False), (2, True)]
        run = replace(run_of(first[0]), row={**run_of(first[0]).row, "hash": recorded})
        found = find_results(kept, [run])
        assert [len(cell.runs) for cell in found.cells] == [1, 0] and [len(cell.runs) for cell in found.replaced] == [1]
        record("x/y", SWEEP, "mini", compose, tmp_path)


def test_a_cell_that_cannot_be_composed_keeps_its_run(tmp_path):
    first = record("x/y", SWEEP, "mini", compose, tmp_path)
    later = record("x/y", SWEEP, "mini", lambda run: "its initial weights are not here", tmp_path)
    assert [place.hash for place in later] == [place.hash for place in first]


def test_a_run_that_differs_only_in_rounding_fills_a_cell_where_it_has_no_run_of_its_seed(tmp_path):
    """Twelve runs of a GPU, which simulates, were lost to a board whose runs on CPUs multiply codes."""
    coded = replace(SWEEP, at_scale={"mini": {**SWEEP.at_scale["mini"], "training.compute": "codes"}})
    place = record("x/y", coded, "mini", compose, tmp_path)[0]
    assert place.otherwise == record("x/z", SWEEP, "mini", compose, tmp_path)[0].hash != place.hash
    others = [replace(run_of(place, seed), row={**run_of(place, seed).row, "hash": place.otherwise}) for seed in (0, 1)]
    found = find_results([place], [*others, run_of(place, 0)]).cells[0].runs
    assert [(run.row["hash"], run.row["seed"]) for run in found] == [(place.hash, "0"), (place.otherwise, "1")]
    gone = replace(place, hash=place.otherwise, otherwise="", superseded="2026-11-27")
    assert not find_results([place, gone], others).done, "runs that the sweep replaced do not return"


def test_other_scales_stay_as_they_are(tmp_path):
    record("x/y", SWEEP, "paper", compose, tmp_path)
    both = record("x/y", SWEEP, "mini", compose, tmp_path)
    assert [place.scale for place in both] == ["paper", "paper", "mini", "mini"]


def test_two_scales_that_are_recorded_at_the_same_time_both_stay(tmp_path):
    """The later of two sweeps of an item wrote what it had read before the other's rows were there."""
    other = threading.Thread(target=lambda: record("x/y", SWEEP, "paper", compose, tmp_path))

    def meanwhile(run: dict[str, str]):
        if other.ident is None:
            other.start()
            other.join(1)  # enough to write, were it not to wait
        return compose(run)

    record("x/y", SWEEP, "mini", meanwhile, tmp_path)
    other.join()
    assert {place.scale for place in read_manifest(tmp_path / "x" / "y.csv")} == {"paper", "mini"}


def test_every_sweep_has_a_manifest_that_is_up_to_date():
    """What is compared is cheap: every cell of the grids has its row; hashes are compared where sweeps are composed."""
    from bitcycle.sweep.grid import expand
    from bitcycle.sweep.registry import read_sweep

    for path in sorted((ROOT / "sweeps").glob("*/*.yaml")):
        rows = read_manifest(ROOT / "results" / "manifest" / Path(path.parent.name, f"{path.stem}.csv"))
        cells = expand(read_sweep(path).grids, {})
        wanted = {str(sorted((key, value) for key, value in cell.items() if key != "seed")) for cell in cells}
        for scale in SCALES:
            assert sum(row.scale == scale and not row.superseded for row in rows) == len(wanted), (path, scale)


def test_a_sweep_that_is_changed_back_has_its_runs_again(tmp_path):
    """They stayed superseded, as the superseded rows counted as known."""
    (tmp_path / "sweeps" / "x").mkdir(parents=True)
    path, done, seen = tmp_path / "sweeps" / "x" / "y.yaml", set(), []
    with composing(ROOT / "conf") as compose:
        for steps in (100, 200, 100):
            grid = f"{{dataset: digits, model: resnet8, training.steps: {steps}}}"
            path.write_text(f"hydra: {{sweeper: {{title: t, grids: [{grid}]}}}}")
            runs = index_runs(read_sweep(path).expand("paper", {"scale": "paper"}), compose)
            record_launch("x/y", "paper", [run.key[1] for run in runs], compose, tmp_path)
            done |= {run.key[1] for run in runs}
            write_csv(
                tmp_path / "results" / "summary" / "runs.csv",
                ["scale", "hash"],
                [{"scale": "paper", "hash": name} for name in done],
            )
            places = read_manifest(tmp_path / "results" / "manifest" / "x" / "y.csv")
            seen.append([place.hash for place in places if not place.superseded])
    assert seen[0] == seen[2] != seen[1]
