"""Runs on a pretended accelerator stay on it, need no float64 there, resume exactly, and do not wait in a steady step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from bitcycle.doctor.finding import OK
from bitcycle.files import read_csv
from bitcycle.model import MODELS
from bitcycle.quantizer import QUANTIZERS
from bitcycle.schedule import SCHEDULES
from tests.accelerator import hardware
from tests.accelerator.case import golden_tests, noticed, outcome, record, self_check
from tests.accelerator.covering import (
    COMPUTING,
    NETWORKS,
    OTHER_NETWORKS,
    PARTS,
    RECORD,
    SCHEDULE_KINDS,
    outcomes,
    rows,
    rows_of,
)
from tests.conftest import _processes
from tests.settings import RESUME, run_of

ALLOWED = {
    "task/ctc.py:ctc_loss": "with deterministic algorithms, CTC's gradient is summed on the CPU: PyTorch has no other way",
    "dataset/neighbours.py:_layer": "the size of the next layer is the number of new neighbours found",
    "layer/gates/gated_block.py:_replayed": "what is computed depends on the choices of the gates: one wait for each block",
    "model/recurrent_language_model.py:forward": "cuDNN's LSTM, which a float network runs, waits inside; quantized cells do not",
    "quantizer/base.py:learns_from": "a layer whose input was all zeros looks at the next one, too, before it sets a range",
}
"""Function that may wait in a steady step -> the reason."""
WITH_CTC = {"training/loop.py:passes": "the way back of the same gradient", "a library": "its backward pass"}
"""The same, where CTC waits."""

QUICK = {"node_classification with sampled neighbours", "language_modelling hlhlp", "optimizer=adam"}
"""Cases that are killed and resumed in the default tests; `make test-all` runs every row of the settings."""


def unexplained(waits: Mapping[str, int]) -> set[str]:
    """Waits without a reason."""
    places = {what: what.rpartition(" at ")[2] for what in waits}
    allowed = {*ALLOWED, *(WITH_CTC if "task/ctc.py:ctc_loss" in places.values() else ())}
    return {what for what, place in places.items() if place not in allowed}


@pytest.fixture
def found_there(tmp_path):
    """What a function finds in a process with the pretended accelerator."""

    def call(function, *arguments):
        target = tmp_path / "found.json"
        process = _processes().Process(target=record, args=(target, function, *arguments))
        process.start()
        process.join()
        assert process.exitcode == 0, "the process died"
        return json.loads(target.read_text())

    return call


def test_the_doctor_compares_every_quantizer_with_the_cpu(found_there):
    [found] = found_there(self_check)
    assert found["state"] == OK and found["text"].startswith("pretended:0 against the CPU")
    assert found["values"]["shares"] == dict.fromkeys([name for name in QUANTIZERS if name != "none"], 0)


def test_the_device_notices_what_makes_a_real_one_wait_or_fail(found_there):
    found = found_there(noticed)
    assert "tensors of two devices" in found.pop("two devices") and "float64" in found.pop("float64")
    assert found == {
        "blocking": ["a blocking copy from the host"],
        "not pinned": ["a copy from memory that is not pinned"],
        "pinned": [],
        "value": ["a value is read"],
        "size": ["nonzero"],
        "sum": [],
    }


def test_the_golden_tests_pass_there(found_there):
    assert found_there(golden_tests) == 0


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case not in QUICK)) for case in RESUME]
)
def test_runs_on_an_accelerator(case, found_there, tmp_path):
    found = found_there(outcome, run_of(case), tmp_path)
    assert found["error"] is None, found["error"]
    assert found["same"], "a resumed run differs"
    assert not unexplained(found["found"]), f"in {found['steady']} steady steps"


@pytest.mark.parametrize("part", range(PARTS))
def test_pairs_of_settings_stay_on_the_device(part, found_there):
    found = found_there(outcomes, part)
    assert not {row: what for row, what in found.items() if isinstance(what, str)}, "errors"
    assert not {row: waits for row, waits in found.items() if unexplained(waits)}


def test_the_pairs_leave_nothing_out():
    met = [set(values) for values in zip(*rows_of("sbm"))]
    assert met[1:4] == [{*SCHEDULE_KINDS}, {*NETWORKS}, {*COMPUTING}]
    assert {SCHEDULES[name].kind for name in SCHEDULE_KINDS} == {preset.kind for preset in SCHEDULES.values()}
    tried = {MODELS[name.partition(" ")[0]].kind for name in [*NETWORKS, *OTHER_NETWORKS, "retinanet"]}
    assert {preset.kind.__name__ for preset in MODELS.values() if preset.kind not in tried} == {
        "ResNetExtraSkipImagenet"
    }


def test_the_record_of_the_documents_is_complete_and_without_errors():
    recorded = {row["case"]: row for row in read_csv(RECORD)}
    assert [*recorded] == [*RESUME, *(row.name for part in range(PARTS) for row in rows(part))]
    assert not any(row["error"] for row in recorded.values())
    assert all(recorded[case]["same"] == "True" for case in RESUME)


def test_the_record_of_hardware_is_complete_and_without_errors():
    recorded = {row["case"]: row for row in read_csv(hardware.RECORD)}
    expected = {*RESUME, *(row.name for part in range(PARTS) for row in rows(part))}
    assert {*recorded} == expected
    replayed = {case for case, row in recorded.items() if row["graphs"]}
    assert {f"schedule={name}" for name in ("static", "CR", "RTH", "pfq", "hlhlp", "partial_pretrain")} <= replayed
    assert {
        f"quantizer={name}" for name in QUANTIZERS if name != "dorefa"
    } <= replayed  # which adapts after each change
    assert not any(row["error"] for row in recorded.values())
    assert all(recorded[case]["same"] == "True" for case in RESUME)
    assert all(row["graphs"].endswith(" equal") for row in recorded.values() if row["graphs"])
    assert not {
        case: row["waits"]
        for case, row in recorded.items()
        if unexplained(dict.fromkeys(filter(None, row["waits"].split("; ")), 1))
    }


@pytest.mark.parametrize("case", ["initial weights", "task=recommendation"])
def test_a_run_brings_its_data_into_a_folder_that_is_missing(case: str, tmp_path: Path, found_there) -> None:
    """As the repetitions with CUDA graphs did not: on an H200 both rows ended in an error."""
    assert found_there(outcome, run_of(case), tmp_path / "other" / "graphs")["error"] is None
