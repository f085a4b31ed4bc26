"""Rows of runs.csv."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from bitcycle.files import read_csv
from bitcycle.reproduction.analysis import collect
from bitcycle.reproduction.analysis.collect import collect_folders, is_accuracy, summary_row


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
