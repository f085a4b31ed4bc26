"""Sweeps: grids, scales, seeds, composition and states."""

from __future__ import annotations

import json

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from rich.table import Table

from bitcycle.presets import FOLDERS
from bitcycle.settings import SettingError
from bitcycle.sweep.composition import Composer
from bitcycle.sweep.execution import count_states, plans_of, report, sweep_table, worst
from bitcycle.sweep.grid import command_line, expand, quoted, substitute
from bitcycle.sweep.registry import Sweep, index_runs, read_sweep
from bitcycle.training.display import console
from bitcycle.training.plan import make_plan
from hydra_plugins.bitcycle_plugins.grid_sweeper import _settings
from tests.conftest import COMPOSER, hydra_config
from tests.sweep_cases import stock

# Expansion: plain values in, plain values out.


def test_a_grid_is_the_product_of_its_lists_and_grids_follow_each_other():
    runs = expand([{"model": ["a", "b"], "q": [8, 6]}, {"model": "c"}], {})
    assert runs == [
        *({"model": model, "q": q} for model in ("a", "b") for q in ("8", "6")),
        {"model": "c"},
    ]


def test_an_entry_that_is_a_mapping_sets_several_settings_and_its_key_is_a_label():
    grid = {"method": [{"schedule": "CR", "schedule.cycles": 8}, {}], "model": "a"}
    assert expand([grid], {}) == [{"schedule": "CR", "schedule.cycles": "8", "model": "a"}, {"model": "a"}]


def test_a_later_key_of_a_grid_wins_and_the_command_line_wins_over_all():
    assert expand([{"a": {"q": 1}, "q": 2}], {}) == [{"q": "2"}]
    assert expand([{"q": [1, 2], "model": "a"}], {"q": "3"}) == [{"q": "3", "model": "a"}]


def test_no_grid_is_one_run_and_an_empty_list_is_refused():
    assert expand([], {"seed": "1"}) == [{"seed": "1"}]
    with pytest.raises(SettingError, match="no values to sweep over"):
        expand([{"model": []}], {})


def test_values_are_written_as_on_the_command_line():
    grid = {"a": None, "b": True, "c": "[3,4]", "d": 1e-5, "e": [[3, 4]]}
    assert expand([grid], {}) == [{"a": "null", "b": "true", "c": "[3,4]", "d": "1e-05", "e": "[3,4]"}]


def test_replacements_name_values_as_they_are_written_in_yaml():
    run = {"training.epochs": "2.5", "schedule.cycles": "32", "rate": "1e-05", "model": "a"}
    found = substitute(
        run, {"training.epochs": {2.5: 1}, "schedule.cycles": {32: None}, "rate": {1e-5: 0.1}, "model": {"b": "c"}}
    )
    assert found == {"training.epochs": "1", "schedule.cycles": "null", "rate": "0.1", "model": "a"}
    assert substitute({}, {"model": {"a": "b"}, "q": 3}) == {"q": "3"}  # a mapping adds nothing, a value is set for all


def test_a_path_with_an_equals_sign_is_quoted_once():
    (argument,) = command_line({"model.initial_weights": "runs/seed=0"})
    assert argument == "model.initial_weights='runs/seed=0'"
    assert command_line({"model.initial_weights": "'runs/seed=0'"}) == [argument]
    assert quoted("--config-dir=/jörg/a=b") == "--config-dir=/jörg/a=b", "which Hydra does not parse"


# Scales and seeds.

SWEEP = Sweep(
    grids=[{"model": ["resnet74", "resnet152"]}],
    trials={"paper": 2, "mini": 3},
    at_scale={"mini": {"model": {"resnet152": "resnet20", "resnet74": "resnet20"}}},
)


def test_the_first_seed_of_all_comes_before_the_second_of_any():
    assert [(run["model"], run["seed"]) for run in SWEEP.expand()] == [
        *(("resnet74", "0"), ("resnet152", "0"), ("resnet74", "1"), ("resnet152", "1")),
    ]


def test_runs_that_a_scale_makes_equal_are_one():
    assert [(run["model"], run["seed"]) for run in SWEEP.expand("mini")] == [("resnet20", str(k)) for k in range(3)]


def test_the_command_line_wins_over_scales_and_seeds():
    fixed = {"model": "resnet8", "seed": "7"}
    assert SWEEP.expand("mini", fixed) == [fixed]


def test_a_grid_can_have_seeds_of_its_own():
    sweep = Sweep(grids=[{"quantizer": "none", "seed": 0}, {"quantizer": "sbm"}], trials={"paper": 2})
    assert [(run["quantizer"], run["seed"]) for run in sweep.expand()] == [("none", "0"), ("sbm", "0"), ("sbm", "1")]


def test_an_unknown_scale_is_refused():
    with pytest.raises(SettingError, match="did you mean 'mini'"):
        SWEEP.expand("min")
    for field in ({"trials": {"min": 3}}, {"at_scale": {"min": {"model": "resnet8"}}}):
        with pytest.raises(SettingError, match=r"=min: is not one of the scales.*did you mean 'mini'"):
            Sweep(**field)  # whose runs at mini scale were those at paper scale, with one seed


@pytest.mark.parametrize(
    "text", ["runs: 3", "hydra: {sweeper: {colour: red}}", "hydra: {sweeper: 3}", "a: [", "hydra:"]
)
def test_a_file_that_is_no_sweep_is_refused(tmp_path, text):
    path = tmp_path / "sweep.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SettingError, match=r"see sweeps/README\.md for the form of a sweep"):
        read_sweep(path)


@pytest.mark.parametrize(
    ("field", "text", "remedy"),
    [
        ("trials", "3", "a number of seeds per scale"),
        ("trials", "{smoke: '3'}", "a number of seeds per scale"),
        ("trials", "{smoke: -1}", "a number of seeds per scale"),
        ("grids", "{model: [resnet8, resnet20]}", "a list of mappings"),
        ("grids", "[model]", "a list of mappings"),
        ("at_scale", "{smoke: interpolating}", "a mapping per scale"),
        ("at_scale", "[smoke]", "a mapping per scale"),
    ],
)
def test_a_field_of_another_form_is_named(field, text, remedy, tmp_path):
    """Most ended in an AttributeError or a TypeError that named neither file nor field."""
    path = tmp_path / "sweep.yaml"
    path.write_text(f"hydra: {{sweeper: {{{field}: {text}}}}}")
    with pytest.raises(SettingError, match=rf"sweep\.yaml.*{field}=.*has the wrong form\. Remedy: write {remedy}"):
        read_sweep(path)


def test_a_sweep_file_is_read(tmp_path):
    path = tmp_path / "sweep.yaml"
    path.write_text("hydra: {sweeper: {title: t, runs: 2, grids: [{seed: [0, 1]}], at_scale: {smoke: {a: {3: 4}}}}}")
    found = read_sweep(path)
    assert (found.title, found.runs, found.grids) == ("t", 2, [{"seed": [0, 1]}])
    assert substitute({"a": "3"}, found.at_scale["smoke"]) == {"a": "4"}


# Composition.


def test_composing_in_two_steps_is_composing_in_one():
    asked = []

    def ask(arguments):
        asked.append(arguments)
        return hydra_config(arguments)

    composer = Composer(ask)
    runs = [
        {"schedule": "CR", "schedule.cycles": cycles, "training.steps": "null", "training.epochs": "2", "seed": "1"}
        for cycles in ("2", "4")
    ]
    runs.append({"schedule": "CR", "quantizer.depthwise_bits": "[8,16]", "results_root": "a/b=c"})
    runs.append({"schedule": "CR", "quantizer": "dorefa", "schedule.q_min": "4"})
    for run in runs:
        found = composer(run)
        assert OmegaConf.to_yaml(found) == OmegaConf.to_yaml(hydra_config(command_line(run)))
    assert asked == [[]]  # not one for each combination: schedules and quantizers are presets


@pytest.mark.parametrize("key", ["++schedule.q_min", "+schedule.qmin", "++quantizer.layer_bits.head"])
def test_what_hydras_syntax_adds_to_a_group_is_not_lost(key):
    """The group was inserted whole after it: a typo was no error, and runs counted as done that nobody had trained."""
    run = {"schedule": "RTH", "quantizer": "dorefa", key: "5"}
    try:
        expected = OmegaConf.to_yaml(hydra_config(command_line(run)))
    except HydraException as error:
        with pytest.raises(type(error)):
            Composer(hydra_config)(run)
    else:
        assert OmegaConf.to_yaml(Composer(hydra_config)(run)) == expected


def test_what_an_own_preset_sets_in_other_groups_is_not_lost(tmp_path, monkeypatch):
    (tmp_path / "dataset").mkdir()
    text = "# @package _global_\ndefaults: [digits@dataset, _self_]\nschedule: {q_min: 5}\n"
    (tmp_path / "dataset" / "mine.yaml").write_text(text)
    monkeypatch.setenv(FOLDERS, str(tmp_path))
    assert Composer(hydra_config)({"schedule": "RTH", "dataset": "mine"}).schedule.q_min == 5
    assert Composer(hydra_config)({"schedule": "RTH", "dataset": "digits"}).schedule.q_min == 3


def test_settings_of_a_sweep_are_named_without_hydras_signs_and_folders_without_quotes():
    """Seed 0 was trained for ++seed=3, and weights below a quoted folder were not found."""
    words = [
        "++seed=3",
        "++schedule.q_min=3,4",
        "results_root='/a b/c=d'",
        "++quantizer.layer_bits.head=4",
        "+sweeps=x",
    ]
    fixed, swept = _settings(OverridesParser.create().parse_overrides(words))
    assert fixed == {"seed": "3", "results_root": "/a b/c=d", "++quantizer.layer_bits.head": "4"}
    assert swept == {"schedule.q_min": ["3", "4"]}


def test_runs_that_compute_the_same_are_one_and_wrong_ones_are_kept(tmp_path):
    runs = [
        {"schedule": "static", "schedule.q_min": "3"},
        {"schedule": "static", "schedule.q_min": "5"},
        {"schedule": "static", "schedule.q_min": "3", "seed": "1"},
        {"schedule": "RTH", "schedule.cycles": "3"},
    ]
    found = stock(runs, tmp_path)
    assert [run.state for run in found] == ["missing", "missing", "wrong"]
    assert [run.overrides for run in found] == [runs[0], runs[2], runs[3]]
    assert found[0].folder.path.parent == found[1].folder.path.parent
    assert "odd number of cycles" in found[2].problem
    assert count_states([run.state for run in found]) == "3 runs: 2 missing, 1 wrong"


def test_a_wrong_seed_is_wrong_among_right_ones():
    found = index_runs([{"seed": seed} for seed in ("-1", "0", "1.5", "2")], COMPOSER.checked)
    assert [run.path is None for run in found] == [True, False, True, False]


def test_settings_that_follow_the_seed_are_those_of_each_run():
    """They were those of the first seed: the other runs were looked for in folders of other names, and trained again."""
    steps = [{"seed": seed, "schedule": "CR", "training.steps": "1${seed}"} for seed in ("0", "1", "2", "1.5")]
    found = index_runs(steps, COMPOSER.checked)
    assert [run.config and run.config.training.steps for run in found] == [10, 11, 12, None]
    assert len({run.folder.path.parent for run in found[:3]}) == 3


def test_states_follow_the_folders(tmp_path):
    runs = [{"seed": str(seed)} for seed in range(5)]
    folders = [run.folder for run in stock(runs, tmp_path)]
    for folder in folders[:4]:
        folder.path.mkdir(parents=True)
    folders[0].write_status("done", 4, 4)
    folders[0].summary.write_text('{"final": 1}')
    folders[1].write_status("failed", 1, 4, "no memory")
    folders[2].checkpoint.last.parent.mkdir()
    folders[2].checkpoint.last.touch()
    found = stock(runs, tmp_path)
    with folders[3].lock():
        states = [run.state for run in found]
        launched = report(found, "", "false")
    assert states == ["done", "failed", "resumable", "running", "missing"]
    assert found[1].reason == "no memory"
    assert launched == [found[1], found[2], found[4]]
    assert count_states(states) == "5 runs: 1 done, 1 running, 1 resumable, 1 failed, 1 missing"


def test_a_report_names_wrong_runs_and_is_json_if_asked(tmp_path, capsys):
    found = stock([{"seed": "0"}, {"schedule": "RTH", "schedule.cycles": "3"}], tmp_path)
    assert report(found, "a title", "json") == found[:1]
    out, err = capsys.readouterr()
    good, wrong = json.loads(out)
    assert good["state"] == "missing" and good["run_dir"] == str(found[0].folder.path) and good["problem"] is None
    assert wrong["state"] == "wrong" and "cycles" in wrong["problem"]
    assert "a title: 2 runs" in err and "wrong configuration: schedule.cycles=3" in err


def test_json_of_a_sweep_has_what_its_table_has(tmp_path, capsys):
    """It planned nothing: neither steps nor costs, and settings that do not fit each other were no problem."""
    runs = [{"schedule.cycles": "2"}, {"schedule": "dfq", "model": "resnet8"}, {"schedule.cycles": "32"}]
    found = stock([{"schedule": "CR", **run} for run in runs], tmp_path)
    report(found, "", "json")
    cyclic, adaptive, wrong = json.loads(capsys.readouterr().out)
    plan = make_plan(found[0].config)
    assert (cyclic["total_steps"], cyclic["cost"]) == (plan.total_steps, plan.cost().summary())
    least, most = (adaptive["cost_bounds"][name]["gbitops"] for name in ("least", "most"))
    assert adaptive["cost"] is None and 0 < least < most
    assert "use at most 4 cycles" in wrong["problem"] and wrong["cost"] is wrong["total_steps"] is None


def test_every_seed_has_its_own_plan_where_settings_follow_it(tmp_path, capsys):
    """All seeds had the steps and the cost of the first, or its error."""
    found = stock([{"training.steps": "${seed}0", "seed": seed} for seed in ("1", "2")], tmp_path)
    report(found, "", "json")
    first, second = json.loads(capsys.readouterr().out)
    assert (first["total_steps"], second["total_steps"]) == (10, 20)
    assert second["cost"]["gbitops"] == pytest.approx(2 * first["cost"]["gbitops"])


def test_a_report_says_what_runs_wait_for(tmp_path, capsys):
    first = str(tmp_path / "runs" / "seed=0")
    found = stock([{"seed": "0"}, {"model.initial_weights": first}, {"model.initial_weights": "typo.pt"}], tmp_path)
    assert report(found, "", "false") == found[:1]
    assert [run.state for run in found] == ["missing", "waiting", "wrong"]
    _, waiting, wrong = capsys.readouterr().err.splitlines()
    assert waiting.startswith(f"waiting for another run: model.initial_weights={first}: no such file or folder")
    assert wrong.startswith("wrong configuration: model.initial_weights=typo.pt")


def test_the_table_shows_what_sets_runs_apart_and_what_they_cost(tmp_path):
    found = stock([{"schedule": "static", "seed": "0"}, {"schedule": "CR", "seed": "0"}], tmp_path)
    table = sweep_table(found, "title")
    assert [str(column.header) for column in table.columns] == [
        "#",
        "schedule",
        "state",
        "steps",
        "GBitOps",
        "of static",
    ]
    assert next(iter(table.columns[5].cells)) == "1.000"


def test_a_run_that_cannot_be_planned_keeps_no_other_from_the_table(tmp_path):
    """Without the lists of its recordings, one run ended the dry run of a whole sweep, such as hlhlp/table5, without a table."""
    lists = {
        "dataset": "speech_manifest",
        "model": "speech_lstm",
        "task": "speech_recognition",
        "quantizer": "uniform_l2",
    }
    wrong = {"schedule": "CR", "schedule.cycles": "32"}
    found = stock([{"data_root": str(tmp_path), **settings} for settings in (lists, wrong, {})], tmp_path)
    plans = plans_of(found)
    assert [plan.code for plan in plans.values()] == [3, 2, 0]
    costs = list(sweep_table(found, "", plans).columns[-2].cells)
    assert "speech/train.csv" in str(costs[0]) and "use at most 4 cycles" in str(costs[1]) and float(str(costs[2])) > 0


def test_the_worst_exit_code_is_reported():
    assert worst([0, 1, 0]) == 1 and worst([1, 3]) == 3 and worst([3, 2]) == 2 and worst([2, 75]) == 75
    assert worst([-9]) == worst([139]) == 1 and worst([]) == 0


def test_a_run_with_several_values_of_a_setting_is_wrong():
    """data_root=/x,y became the text of Hydra's object for a choice."""
    words = COMPOSER.checked({"model": "resnet8", "dataset": "digits", "data_root": "/x,y"})
    assert isinstance(words, str) and words.startswith("data_root=/x,y: is a list of values, where a run has one")


def test_brackets_in_a_table_are_no_markup(capsys):
    """schedule.formats=[nvfp4,mxfp8] was an empty cell, and a text with [/x] an error."""
    table = Table("formats")
    table.add_row("[nvfp4,mxfp8] [/x]")
    console(80).print(table)
    assert "[nvfp4,mxfp8] [/x]" in capsys.readouterr().out
