"""Verdicts: the statistical rule, its preconditions, claims as data, and errors of earlier verdicts that stay mended."""

from __future__ import annotations

from bitcycle.analysis.verdict import SUPPORTED, UNDECIDED, ClaimResult, read_claim_results, write_claims


def test_verdicts_are_read_as_they_were_written(tmp_path):
    found = [
        ClaimResult("a/t-c1", "a/t", "a", 'one, "two"', verdict=SUPPORTED, decided=True, estimate=1.25, n=3, df=2.0),
        ClaimResult("a/t-c2", "a/t", "a", "three", verdict=UNDECIDED, holds=False, p_raw=0.25, seeds_needed=9),
    ]
    write_claims(found, tmp_path / "x" / "claims.csv")
    assert read_claim_results(tmp_path / "x" / "claims.csv") == found
