"""Public networks, converted, against a reference in float64; the table of docs/own-models.md."""

from __future__ import annotations

import csv
import sys

import pytest

from tests.conftest import ROOT

pytest.importorskip("torchvision")
pytest.importorskip("transformers.integrations.moe", reason="the reference of experts needs transformers 5")
sys.path.insert(0, str(ROOT / "scripts"))
import support_matrix
from support_networks import NETWORKS
from support_table import RECORD

QUICK = [
    ("torchvision", "swin_v2"),
    ("transformers", "falcon"),
    ("transformers", "mixtral"),
    ("torch", "unet"),
]
ALL = [(library, name) for library, networks in NETWORKS.items() for name in networks]
TOLERANCE = 1e-6
"""Some models of transformers compute softmax and norms in float32."""


def check(library: str, name: str) -> None:
    row = support_matrix.examine(library, name)
    assert row.deviation < TOLERANCE
    assert row.share > 0.3 and row.out_of_reach < 0.2
    # of SAM's prompts only points are given
    assert row.without_gradient == (12 if name == "sam" else 0)
    [recorded] = [
        entry for entry in csv.DictReader(RECORD.open()) if (entry["library"], entry["network"]) == (library, name)
    ]
    assert float(recorded["share"]) == pytest.approx(row.share, abs=0.01)


@pytest.mark.parametrize(("library", "name"), QUICK)
def test_a_network_computes_what_the_reference_does(library, name):
    check(library, name)


@pytest.mark.slow
@pytest.mark.parametrize(("library", "name"), [case for case in ALL if case not in QUICK])
def test_every_network_computes_what_the_reference_does(library, name):
    check(library, name)


def test_the_reference_notices_a_wrong_rounding(monkeypatch):
    rounded = support_matrix.affine
    monkeypatch.setattr(support_matrix, "affine", lambda x, bits, dims: rounded(x, bits + 1, dims))
    assert support_matrix.examine("torch", "unet").deviation > 0.01


def test_the_record_is_of_these_networks():
    with RECORD.open() as file:
        assert [(row["library"], row["network"]) for row in csv.DictReader(file)] == ALL
