"""The files in sweeps/: each parses, has as many runs as the inventory of experiments says, and every run is valid."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from bitcycle.configuration import GROUPS, SCALES, RunConfig, read_config
from bitcycle.errors import DataError
from bitcycle.files import read_csv
from bitcycle.sweep.grid import Overrides
from bitcycle.sweep.registry import Sweep, read_sweep
from bitcycle.training.naming import run_hash, run_path
from bitcycle.training.plan import make_plan
from tests.conftest import COMPOSER, ROOT

SWEEPS = ROOT / "sweeps"
FILES = sorted(path.relative_to(SWEEPS).with_suffix("").as_posix() for path in SWEEPS.glob("*/*.yaml"))

# Number of trainings that the inventory of experiments states for an item, shared ones included.
STATED = {
    "better/fig3": 528,
    "better/fig4": 66,
    "better/fig5": 12,
    "better/fig6": 264,
    "better/fig7": 132,
    "better/fig8": 78,  # 48 in the inventory, and static runs of the ten longer lengths
    "better/table1": 36,
    "cpt/fig1": 3,
    "cpt/fig4": 2,
    "cpt/fig5": 54,
    "cpt/fig6": 4,
    "cpt/fig7": 100,
    "cpt/fig8": 160,
    "cpt/table1": 32,
    "cpt/table2": 48,
    "cpt/table3": 12,
    "cpt/table4": 4,
    "cpt/table5": 8,
    "cpt/table6": 18,
    "cpt/table7": 24,
    "cpt/table8": 6,
    "partial/fig1": 216,
    "partial/fig2": 216,
    "partial/fig3": 240,
    "partial/table1": 24,
    "fractrain/fig1": 2,
    "fractrain/fig3": 32,
    "fractrain/fig4": 13,
    "fractrain/fig5": 68,
    "fractrain/fig6": 10,
    "fractrain/fig7": 64,
    "fractrain/fig8": 1,
    "fractrain/table1": 12,
    "fractrain/table2": 4,
    "fractrain/table3": 20,
    "fractrain/table4": 4,
    "fractrain/table6": 8,
    "hlhlp/table1": 96,  # 66 in the inventory, and fine-tuning as long as HLHLp
    "hlhlp/table2": 6,
    "hlhlp/table3": 22,
    "hlhlp/table4": 17,
    "hlhlp/table5": 3,
    "hlhlp/table6": 4,
    "hlhlp/appE": 40,
    # Ours; no paper has them.
    "board/methods": 200,
    "board/underfitting": 55,
    "board/formats": 90,
    "board/four_bit": 75,
    "board/all_images": 96,
    "board/gain": 240,
    "board/fewer_bits": 28,
    # Ten trainings in two sweeps, as the second begins from the weights of the first.
    "fractrain/table5_pretraining": 2,
    "fractrain/table5": 8,
    # No trainings are stated: evaluations or timings of the runs of other items, and a choice of rates beside its figure.
    "cpt/fig2": 3,
    "fractrain/sec4.6-fpga": 4,
    "partial/table2": 8,
    "better/fig7_rates": 66,
    "hlhlp/fig1": 3,
    "hlhlp/appD": 5,
    "hlhlp/appF": 3,
    "hlhlp/appH": 3,
}

FILES_OF_WEIGHTS = ("model.initial_weights", "model.backbone_weights", "model.weights")
"""Settings whose files need not be there for a test of the configuration."""


@cache
def sweep(item: str) -> Sweep:
    return read_sweep(SWEEPS / f"{item}.yaml")


@cache
def _configuration(settings: tuple[tuple[str, str], ...]) -> RunConfig:
    return read_config(COMPOSER(dict(settings)))


def configuration(run: Overrides, scale: str) -> RunConfig:
    """The configuration of a run; runs that differ by their seed alone are composed once."""
    kept = {key: value for key, value in run.items() if key != "seed" and key not in FILES_OF_WEIGHTS}
    return _configuration(tuple(sorted({**kept, "scale": scale}.items())))


def hashes(item: str, scale: str = "paper", **chosen: str) -> set[str]:
    """Names of the runs of an item whose settings have these values, written with __ for a dot."""
    wanted = {key.replace("__", "."): value for key, value in chosen.items()}
    runs = [run for run in sweep(item).expand(scale) if all(run.get(k) == v for k, v in wanted.items())]
    return {run_hash(configuration(run, scale)) for run in runs}


def test_every_item_of_the_inventory_has_its_file():
    assert set(FILES) == set(STATED)


@pytest.mark.parametrize("item", FILES)
def test_a_file_has_as_many_runs_as_it_and_the_inventory_say(item):
    found = sweep(item)
    assert found.runs == STATED[item]
    names = {(run_hash(configuration(run, "paper")), run["seed"], weights_of(run)) for run in found.expand("paper")}
    assert len(names) == len(found.expand("paper")) == found.runs


def weights_of(run: Overrides) -> str:
    return " ".join(run.get(key, "") for key in FILES_OF_WEIGHTS)


@pytest.mark.parametrize("item", FILES)
def test_every_run_is_valid_at_every_scale(item):
    for scale in SCALES:
        for run in sweep(item).expand(scale):
            assert configuration(run, scale).scale == scale


def test_runs_can_be_planned_at_smoke_scale():
    """The last run of an item with each network and dataset, as a sample; needs no data."""
    configurations = [configuration(sweep(item).expand("smoke")[-1], "smoke") for item in FILES]
    for config in {(config.model.name, config.dataset.name): config for config in configurations}.values():
        assert make_plan(config).total_steps <= 200


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_runs_can_be_planned_at_paper_scale(every, tmp_path):
    """One run with each network and dataset, or every run; without weights, and without data, of which only the lists of
    recordings that a user makes must be there."""
    runs = [run for item in FILES for run in sweep(item).expand("paper")]
    kinds = {(run.get("model"), run.get("dataset")): run for run in runs}.values()
    missing = []
    configs = [configuration(run, "paper") for run in (runs if every else kinds)]
    for config in {id(config): config for config in configs}.values():
        try:
            make_plan(replace(config, data_root=str(tmp_path)))
        except DataError as error:
            missing.append(str(error))
    assert missing and all("set dataset.train_manifest" in words for words in missing)


@pytest.mark.parametrize("item", FILES)
def test_a_file_opens_with_its_four_facts(item):
    lines = (SWEEPS / f"{item}.yaml").read_text().splitlines()
    found = sweep(item)
    paper = item.partition("/")[0]
    assert lines[0] == "# @package _global_"
    facts = lines[1 : next(number for number, line in enumerate(lines) if not line.startswith("#"))]
    assert facts[0].startswith(f"# {paper}, ") and found.title.startswith(f"{paper}, ")
    published = f"results/published/{found.published}.csv" if found.published else "# published: nothing"
    assert facts[1].startswith("# published: ") and published in " ".join(facts)
    assert f"# {found.runs} run" in "\n".join(facts) and "(an estimate)" in "\n".join(facts)
    commands = [f"python train.py -m +sweeps={item} scale=smoke"]
    commands += [f"python -m bitcycle analyse {item} scale=smoke"] if found.analyses else []
    assert facts[-1].endswith("; ".join(commands))
    assert set(found.trials) == set(SCALES) and found.hours > 0


@pytest.mark.parametrize("item", FILES)
def test_stand_ins_are_said(item):
    """Another dataset than the paper's is named in the note."""
    found, said = sweep(item), {"digits": "digits", "cifar10": "CIFAR-10", "cora": "Cora", "citeseer": "Citeseer"}
    said["cifar10_16"] = "the regime `"  # sweeps/regimes.yaml says what it is
    paper = {run["dataset"] for run in found.expand("paper")}
    for scale in ("mini", "smoke"):
        used = {run["dataset"] for run in found.expand(scale)} - paper
        for dataset in used if scale == "mini" else used - {"digits"}:
            names = {"sick": "SICK", "movielens_100k": "MovieLens-100K", **said}
            assert names.get(dataset, dataset) in found.note, (item, scale, dataset)


SHARED = [
    ("cpt/table2 static and fractrain/table3", "cpt/table2", "fractrain/table3", {"model": "resnet74"}, {}, 6),
    ("cpt/table2 and cpt/fig5", "cpt/table2", "cpt/fig5", {}, {}, 12),
    ("cpt/table2 and cpt/fig1", "cpt/table2", "cpt/fig1", {}, {}, 2),
    ("cpt/table2 and cpt/table6", "cpt/table2", "cpt/table6", {}, {}, 6),
    ("cpt/table2 and cpt/table8", "cpt/table2", "cpt/table8", {}, {}, 1),
    ("cpt/table7 column 0", "cpt/fig5", "cpt/table7", {"schedule": "CR"}, {}, 4),
    ("cpt/fig6 and cpt/fig5", "cpt/fig5", "cpt/fig6", {}, {}, 3),
    ("cpt/fig8 N = 32", "cpt/fig5", "cpt/fig8", {"schedule": "CR"}, {"schedule__cycles": "32"}, 2),
    ("cpt/fig8 N = 8 and CR of better/fig3", "better/fig3", "cpt/fig8", {"schedule": "CR"}, {"schedule": "CR"}, 1),
    ("static runs of better/fig3 and cpt/fig5", "better/fig3", "cpt/fig5", {"schedule": "static"}, {}, 6),
    ("better/table1 without a period", "better/fig3", "better/table1", {}, {"schedule": "static"}, 2),
    ("better/fig5 and better/fig6", "better/fig6", "better/fig5", {}, {}, 4),
    ("better/fig8 without a period", "better/fig6", "better/fig8", {}, {"schedule": "static"}, 1),
    ("better/fig7_rates and better/fig7", "better/fig7", "better/fig7_rates", {}, {}, 22),
    ("fractrain/fig1 and fractrain/fig3", "fractrain/fig3", "fractrain/fig1", {}, {}, 2),
    ("fractrain/fig3 and fractrain/fig4", "fractrain/fig3", "fractrain/fig4", {}, {}, 2),
    ("fractrain/fig3 and fractrain/fig7", "fractrain/fig3", "fractrain/fig7", {}, {}, 32),
    ("fractrain/fig3 and fractrain/fig5", "fractrain/fig3", "fractrain/fig5", {}, {}, 4),
    ("fractrain/table3 and fractrain/fig5", "fractrain/table3", "fractrain/fig5", {}, {"schedule": "dfq"}, 4),
    ("fractrain/table3 and fractrain/fig3", "fractrain/table3", "fractrain/fig3", {}, {}, 4),
    ("fractrain/table3 and fractrain/fig6", "fractrain/table3", "fractrain/fig6", {}, {}, 10),
    ("fractrain/table3 and fractrain/fig8", "fractrain/table3", "fractrain/fig8", {}, {}, 1),
    ("fractrain/table3 and the FPGA", "fractrain/table3", "fractrain/sec4.6-fpga", {}, {}, 4),
    ("fractrain/table1 and fractrain/fig5", "fractrain/table1", "fractrain/fig5", {}, {}, 2),
    ("fractrain/table2 and fractrain/table4", "fractrain/table2", "fractrain/table4", {}, {}, 1),
    ("partial/fig1 and partial/fig2", "partial/fig1", "partial/fig2", {}, {}, 72),
    ("partial/fig1 and partial/table1", "partial/fig1", "partial/table1", {}, {}, 8),
    ("partial/fig1 and partial/fig3", "partial/fig1", "partial/fig3", {"model": "resnet20_extra_skip"}, {}, 11),
    ("partial/table1 and partial/table2", "partial/table1", "partial/table2", {}, {}, 8),
    ("hlhlp/table1 and hlhlp/fig1", "hlhlp/table1", "hlhlp/fig1", {}, {}, 3),
    ("hlhlp/table1 and hlhlp/appH", "hlhlp/table1", "hlhlp/appH", {}, {}, 3),
    ("hlhlp/table2 and hlhlp/appD", "hlhlp/table2", "hlhlp/appD", {}, {}, 1),
    ("hlhlp/table5 and hlhlp/appF", "hlhlp/table5", "hlhlp/appF", {}, {}, 3),
    ("hlhlp/table6 (A) and hlhlp/appE", "hlhlp/appE", "hlhlp/table6", {}, {}, 1),
]


@pytest.mark.parametrize(
    ("one", "other", "of_one", "of_other", "count"), [case[1:] for case in SHARED], ids=[c[0] for c in SHARED]
)
def test_items_share_runs(one, other, of_one, of_other, count):
    assert len(hashes(one, **of_one) & hashes(other, **of_other)) == count


@pytest.mark.parametrize(
    ("item", "first", "scale"),
    [
        *(("fractrain/table5", "fractrain/table5_pretraining", scale) for scale in SCALES),
        *(("hlhlp/table2", "hlhlp/table2" if scale == "mini" else "cpt/table4", scale) for scale in SCALES),
        *(("hlhlp/appD", "hlhlp/fig1" if scale == "mini" else "cpt/table4", scale) for scale in SCALES),
    ],
)
def test_weights_of_another_sweep_are_looked_for_where_it_leaves_them(item, first, scale):
    wanted = {run["model.initial_weights"] for run in sweep(item).expand(scale) if "model.initial_weights" in run}
    left = {str(Path(run_path(configuration(run, scale)))) for run in sweep(first).expand(scale)}
    assert wanted <= left


def test_a_table_that_prints_energies_has_ours():
    """Its runs counted bit operations alone, so that the columns of energy and latency stayed empty."""
    tables = {
        item: ROOT / "results" / "published" / f"{sweep(item).published}.csv" for item in FILES if sweep(item).published
    }
    with_energy = [item for item, path in tables.items() if "energy" in {row.get("metric") for row in read_csv(path)}]
    assert with_energy
    for item in with_energy:
        for scale in SCALES:
            models = {configuration(run, scale).hardware.name for run in sweep(item).expand(scale)}
            assert models <= {"bitfusion", "all"}, f"{item}, {scale}"


def test_named_options_exist():
    """A misspelled option of a group would be reported run by run; here once, with the file."""
    for item in FILES:
        for scale in SCALES:
            for run in sweep(item).expand(scale):
                for group in GROUPS.keys() & run.keys():
                    assert run[group] in GROUPS[group], f"{item}: {group}={run[group]}"
