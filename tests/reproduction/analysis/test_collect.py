"""Rows of runs.csv."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

import pytest

from bitcycle.errors import RunError
from bitcycle.files import read_csv
from bitcycle.reproduction.analysis import collect
from bitcycle.reproduction.analysis.collect import collect_folders, is_accuracy, summary_row
from bitcycle.training.finished_run import read_run_config


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"metric": "test_map", "unit": "%", "higher_is_better": "True"}, True),
        ({"metric": "test_cer", "unit": "%", "higher_is_better": "False"}, False),
        ({"metric": "test_score", "unit": "", "higher_is_better": "True"}, False),
        (
            {"metric": "test_accuracy", "unit": "", "higher_is_better": "False"},
            False,
        ),  # the record counts, not the name
        ({"metric": "test_accuracy", "unit": "", "higher_is_better": ""}, True),  # recorded before direction was
        ({"metric": "test_perplexity"}, False),
    ],
)
def test_direction_and_unit_of_a_metric_are_recorded(row, expected):
    assert is_accuracy(row) is expected


def test_a_run_records_direction_and_unit(finished_digits):
    row = summary_row(finished_digits().folder)
    assert (row["metric"], row["unit"], row["higher_is_better"]) == ("test_accuracy", "%", "True")
    assert is_accuracy(row)


def test_two_campaigns_that_add_to_one_file_at_a_time_lose_no_row(finished_digits, tmp_path, monkeypatch):
    """Each had read the file before the other wrote it."""
    folders, summary = [finished_digits(f"seed={seed}").folder for seed in (0, 1)], tmp_path / "summary" / "runs.csv"
    monkeypatch.setattr(collect, "copy_results", lambda *_: time.sleep(0.3))
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda folder: collect_folders([folder], summary), folders))
    assert [row["seed"] for row in read_csv(summary)] == ["0", "1"]


DAMAGES = {
    "torn": (
        lambda text: text[:-30],
        r"has \d+ whole lines, and the evaluation after the last step, \d+, is not among",
    ),
    "empty": (lambda text: b"", "has 0 whole lines"),
    "no JSON": (lambda text: text.replace(b'"step"', b"step", 1), "line 1 of"),
    "no UTF-8": (lambda text: text.replace(b"evaluation", b"\xff\xfe", 1), r"line \d+ of .*utf-8"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_run_stops_no_other_and_is_named(damage, finished_digits, copied_digits, tmp_path):
    """A torn last evaluation was collected as if the run had ended before it, and a damaged line stopped all."""
    change, words = DAMAGES[damage]
    broken, whole, summary = copied_digits(), finished_digits("seed=1"), tmp_path / "summary" / "runs.csv"
    broken.folder.metrics.write_bytes(change(broken.folder.metrics.read_bytes()))
    with pytest.raises(RunError, match=rf"(?s)1 finished run was not collected.*{words}.*; restore the file") as caught:
        collect_folders([broken.folder, whole.folder], summary)
    assert str(broken.folder.metrics) in str(caught.value)
    assert [row["seed"] for row in read_csv(summary)] == ["1"]
    assert len(list((summary.parent / "curves").iterdir())) == 1


@pytest.mark.parametrize("content", [b"", b"schedule: {name: [static", b"\xff\xfe", b"- schedule", b"seed: 0"])
def test_damaged_settings_of_a_run_stop_no_other_and_are_named(content, finished_digits, copied_digits, tmp_path):
    """A damaged config.yaml stopped the collection with a traceback."""
    broken, whole, summary = copied_digits(), finished_digits("seed=1"), tmp_path / "summary" / "runs.csv"
    broken.folder.config.write_bytes(content)
    with pytest.raises(
        RunError, match=r"(?s)1 finished run was not collected.*is damaged.*; restore the file"
    ) as caught:
        collect_folders([broken.folder, whole.folder], summary)
    assert str(broken.folder.config) in str(caught.value)
    assert [row["seed"] for row in read_csv(summary)] == ["1"]
    with pytest.raises(RunError, match=r"is damaged.*; restore the file"):
        read_run_config(broken.folder)


def test_a_torn_line_of_a_run_in_progress_is_no_damage(copied_digits, tmp_path):
    begun = copied_digits().folder
    begun.status.write_text(json.dumps(begun.read_status() | {"state": "running"}))
    begun.metrics.write_bytes(begun.metrics.read_bytes()[:-30])
    assert collect_folders([begun], tmp_path / "runs.csv") == []


@pytest.mark.parametrize("missing", ["counting", "at_q_max", "hash"])
def test_a_summary_of_another_version_stops_no_other_and_is_named(missing, finished_digits, copied_digits, tmp_path):
    """A KeyError kept all runs out of the summary."""
    broken, whole, summary = copied_digits(), finished_digits("seed=1"), tmp_path / "summary" / "runs.csv"
    content = broken.folder.read_summary()
    del content[missing]
    broken.folder.summary.write_text(json.dumps(content))
    with pytest.raises(RunError, match="1 finished run was not collected") as caught:
        collect_folders([broken.folder, whole.folder], summary)
    assert str(broken.folder.path) in str(caught.value) and missing in str(caught.value)
    assert [row["seed"] for row in read_csv(summary)] == ["1"]


def test_when_a_run_started_is_collected(finished_digits, tmp_path):
    (row,) = collect_folders([finished_digits().folder], tmp_path / "runs.csv")
    assert datetime.fromisoformat(row["started"]) <= datetime.fromisoformat(row["finished"])


def test_an_older_copy_of_a_run_does_not_replace_it(finished_digits, copied_digits, tmp_path, capsys):
    """The folder whose path came last won, as of a backup below the results, without a word."""
    run, old, summary = finished_digits().folder, copied_digits().folder, tmp_path / "runs.csv"
    old.summary.write_text(json.dumps({**old.read_summary(), "final": 1.23, "finished": "2020-01-01T00:00:00+00:00"}))
    for order in ((run, old), (old, run)):
        (row,) = collect_folders(order, summary)
        assert float(row["final"]) == run.read_summary()["final"]
    assert f"skipping {old.path}: it finished before" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["<<<<<<< HEAD\nscale,hash,seed\nmini,0,1\n", "scale,hash,seed\nmini,0\n"])
def test_a_damaged_summary_is_named(text, tmp_path):
    """A KeyError did not say which file it was about."""
    (tmp_path / "runs.csv").write_text(text)
    with pytest.raises(RunError, match=r"runs.csv, line 2: does not have the columns .* Restore"):
        collect_folders([], tmp_path / "runs.csv")
