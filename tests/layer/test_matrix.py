"""Every task with every schedule and with every quantizer: it trains, or is refused for a reason that stands here."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from bitcycle.files import read_json, read_records
from bitcycle.quantizer import QUANTIZERS
from bitcycle.schedule import SCHEDULES
from bitcycle.settings import SettingError
from bitcycle.task import TASKS as KNOWN_TASKS
from bitcycle.training.run import execute
from tests.conftest import plan
from tests.made_data import with_made_data
from tests.settings import OPTIONS, QUANTIZER_SCHEDULES, TASKS

SHORT = ["training.steps=8", "training.epochs=null", "training.evaluation_steps=8", "training.log_steps=2"]
FOUR_PHASES = ["quantizer=uniform_l2", "schedule.candidates=2", "schedule.alpha=0.1", "training.evaluation_steps=2"]
TWO_CYCLES = ["schedule.cycles=2"]
SCHEDULE_OPTIONS = {
    **OPTIONS,
    **dict.fromkeys(("cosine_anneal", "triangular", "gradient_cycle", "delayed"), TWO_CYCLES),
    **dict.fromkeys(("hlhlp", "hlhlhlp", "fine_tuning"), FOUR_PHASES),
    "partial_pretrain": ["quantizer=pact_binary"],
    "range_test": ["schedule.level_steps=1", "schedule.window=1", "schedule.stop=false"],
}

NO_BLOCKS = "the network names no blocks"
ALL_FLOAT = "no layer of the model would be quantized"
NEGATIVE = "PACT would clip the negative inputs"
GATED = ("schedule=dfq", "schedule=fractrain")
BINARY = ("schedule=partial_pretrain", "quantizer=pact_binary")
REFUSED = {
    **{(task, choice): NO_BLOCKS for task in TASKS if task != "classification" for choice in GATED},
    **{(task, choice): ALL_FLOAT for task in ("language_modelling", "node_classification") for choice in BINARY},
    **{(task, "quantizer=ttq"): ALL_FLOAT for task in ("language_modelling", "node_classification")},
    **{
        (task, choice): NEGATIVE
        for task in ("detection", "entailment", "speech_recognition", "language_modelling_blocks")
        for choice in BINARY
    },
}
"""What makes no sense, and why; everything else trains."""


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Iterator[dict[str, list[str]]]:
    """The runs of the table, with data made for them once."""
    with pytest.MonkeyPatch.context() as patch:
        yield {
            task: with_made_data(overrides, tmp_path_factory.mktemp(task), patch) for task, overrides in TASKS.items()
        }


CHOICES = [f"schedule={name}" for name in SCHEDULES] + [f"quantizer={name}" for name in QUANTIZERS]
QUICK = [task for task in TASKS if task != "detection"]
IN_TURN = {choice: QUICK[i % len(QUICK)] for i, choice in enumerate(CHOICES)}
CASES = [
    pytest.param(task, choice, id=f"{task} {choice}", marks=() if IN_TURN[choice] == task else pytest.mark.slow)
    for choice in CHOICES
    for task in TASKS
]
"""All pairs. `make test` trains each choice with one quick task in turn, `make test-all` all of them."""


@pytest.mark.parametrize(("task", "choice"), CASES)
def test_it_trains_or_says_why_not(task, choice, made, tmp_path):
    group, _, name = choice.partition("=")
    more = SCHEDULE_OPTIONS.get(name, []) if group == "schedule" else QUANTIZER_SCHEDULES.get(name, ["schedule=CR"])
    start = ["dataset=digits", "model=resnet8"] if task == "classification" else []
    overrides = [*start, "scale=smoke", f"results_root={tmp_path}", *made[task], choice, *more, *SHORT]
    if (task, choice) in REFUSED:
        with pytest.raises(SettingError, match=REFUSED[task, choice]):
            plan(*overrides)
        return
    run = plan(*overrides)
    execute(run)
    summary = read_json(run.folder.summary)
    assert math.isfinite(summary["final"])
    steps = [record for record in read_records(run.folder.metrics) if record["kind"] == "train"]
    assert all(math.isfinite(record["loss"]) for record in steps)


def test_all_tasks_are_here():
    assert set(TASKS) == set(KNOWN_TASKS)
