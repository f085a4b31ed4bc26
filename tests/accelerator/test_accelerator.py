"""Runs on a pretended accelerator stay on it, need no float64 there, resume exactly, and do not wait in a steady step."""

from __future__ import annotations

import json

import pytest

from bitcycle.doctor.finding import OK
from bitcycle.files import read_csv
from bitcycle.quantizer import QUANTIZERS
from tests.accelerator.case import golden_tests, outcome, record, self_check
from tests.accelerator.record import RECORD
from tests.conftest import _processes
from tests.settings import RESUME, run_of

ALLOWED = {
    "speech": {
        "task/ctc.py:ctc_loss": "with deterministic algorithms, CTC's gradient is summed on the CPU: PyTorch has no other way",
        "training/loop.py:train_step": "the way back of the same gradient",
        "a library": "the backward pass of the same copy",
    },
    "node_classification with sampled neighbours": {
        "dataset/neighbours.py:_layer": "the size of the next layer is the number of new neighbours found",
    },
    "schedule=dfq, chosen backward passes": {
        "layer/gates/gated_block.py:_replayed": "what is computed depends on the choices of the gates: one wait for each block",
    },
    "language_modelling_blocks": {
        "model/transformer_language_model.py:losses": "rare words are computed only for the targets that are rare",
    },
}
"""Case -> function that may wait in a steady step, and the reason."""
ALLOWED["speech hlhlp"] = ALLOWED["speech"]

QUICK = {
    "node_classification",
    "node_classification with sampled neighbours",
    "language_modelling_blocks",
    "language_modelling hlhlp",
    "task=recommendation",
    "optimizer=adam",
}
"""Cases of the default tests: each way of holding state on a device once. `make test-all` runs every row of the settings."""


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
    assert set(found["values"]["compared"]) == {*QUANTIZERS} - {"none"}
    assert all(compared["share"] == 0 for compared in found["values"]["compared"].values())


def test_the_golden_tests_pass_there(found_there):
    assert found_there(golden_tests) == 0


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case not in QUICK)) for case in RESUME]
)
def test_runs_on_an_accelerator(case, found_there, tmp_path):
    found = found_there(outcome, run_of(case), tmp_path)
    assert found["error"] is None, found["error"]
    assert found["same"], "a resumed run differs"
    allowed = ALLOWED.get(case, {})
    waits = {what: count for what, count in found["found"].items() if what.rpartition(" at ")[2] not in allowed}
    assert not waits, f"in {found['steady']} steady steps"


def test_the_record_of_the_documents_is_complete_and_without_errors():
    rows = read_csv(RECORD)
    assert [row["case"] for row in rows] == list(RESUME)
    assert all(not row["error"] and row["same"] == "True" for row in rows)
