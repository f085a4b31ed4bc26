"""Runs on a pretended accelerator stay on it, need no float64 there, resume exactly, and do not wait in a steady step."""

from __future__ import annotations

import json

import pytest

from bitcycle.files import read_csv
from tests.accelerator.case import record
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


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case not in QUICK)) for case in RESUME]
)
def test_runs_on_an_accelerator(case, tmp_path):
    target = tmp_path / "outcome.json"
    process = _processes().Process(target=record, args=(run_of(case), tmp_path, target))
    process.start()
    process.join()
    assert process.exitcode == 0, "the process died"
    found = json.loads(target.read_text())
    assert found["error"] is None, found["error"]
    assert found["same"], "a resumed run differs"
    allowed = ALLOWED.get(case, {})
    waits = {what: count for what, count in found["found"].items() if what.rpartition(" at ")[2] not in allowed}
    assert not waits, f"in {found['steady']} steady steps"


def test_the_record_of_the_documents_is_complete_and_without_errors():
    rows = read_csv(RECORD)
    assert [row["case"] for row in rows] == list(RESUME)
    assert all(not row["error"] and row["same"] == "True" for row in rows)
