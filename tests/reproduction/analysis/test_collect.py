"""Rows of runs.csv."""

import pytest

from bitcycle.reproduction.analysis.collect import is_accuracy, summary_row


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
