"""What the tests of sweep share."""

from __future__ import annotations

from bitcycle.settings import SettingError
from bitcycle.sweep.grid import command_line
from bitcycle.sweep.registry import index_runs
from tests.conftest import configure

SMALL = ("dataset=digits", "model=resnet8", "scale=smoke", "training.steps=4", "training.evaluation_steps=4")


# Inventory.


def stock(runs, tmp_path):
    def checked(run):
        try:
            return configure(*SMALL, *command_line(run), f"results_root={tmp_path}/runs")
        except SettingError as error:
            return str(error)

    return index_runs(runs, checked)
