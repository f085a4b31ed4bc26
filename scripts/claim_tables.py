"""Tables and lists of claims in README.md, docs/results.md and results/notes/verdicts.md, from the verdicts of `make figures`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from bitcycle.analysis.verdict import NO_TEST, read_claim_results
from bitcycle.files import markdown_table, read_csv

CLAIMS = Path(__file__).parent.parent / "results" / "summary" / "claims.csv"


def claims_table() -> str:
    """Every claim that was tested, with its estimate and rule; `make figures` writes the verdicts."""
    rows = [row for row in read_claim_results(CLAIMS) if row.estimate is not None and row.verdict != NO_TEST]
    titles = ("claim", "verdict", "estimate, interval", "n, trainings", "p, corrected", "seeds needed", "scope")
    lines = []
    for row in rows:
        interval = "" if row.low is None else f" ({row.low:+.2f} to {row.high:+.2f})"
        state = row.verdict if row.decided or not row.leaning else f"{row.verdict}, leaning {row.leaning}"
        p = "" if row.p_raw is None else f"{row.p_raw:.2g}, {row.p_corrected:.2g}"
        found = f"{row.estimate:+.2f} {row.unit}{interval}", f"{row.n}, {row.trainings}", p, row.seeds_needed or ""
        lines.append((f"{row.claim_id}: {row.sentence}", state, *found, row.scope))
    return markdown_table(titles, lines) if rows else "None so far."


def verdicts_table() -> str:
    """Number of claims by paper and verdict; a claim tested in several scopes counts in each."""
    rows = read_csv(CLAIMS)
    verdicts = list(dict.fromkeys(row["verdict"] for row in sorted(rows, key=lambda row: row["verdict"])))
    papers = list(dict.fromkeys(row["paper"] for row in rows))
    counts = Counter((row["paper"], row["verdict"]) for row in rows)
    numbers = {verdict: [counts[paper, verdict] for paper in papers] for verdict in verdicts}
    lines = [(verdict, *(number or "" for number in row), sum(row)) for verdict, row in numbers.items()]
    return markdown_table(["verdict", *papers, "all"], lines)


def decided_list() -> str:
    """One sentence per decided or leaning claim, then the numbers of computed and of undecided claims."""
    rows = [row for row in read_claim_results(CLAIMS) if row.verdict != NO_TEST]
    tested = [row for row in rows if row.estimate is not None]
    sentences = []
    for row in tested:
        if row.decided or row.leaning:
            state = row.verdict if row.decided else f"leaning {row.leaning}"
            interval = "" if row.low is None else f", {row.low:+.2f} to {row.high:+.2f}"
            found = f"Measured: {row.estimate:+.2f} {row.unit}{interval}, n = {row.n}; {row.scope}."
            sentences.append(f"- **{state}**: {row.sentence} ({row.claim_id}). {found}")
    computed = sum(row.verdict == "computed" for row in rows)
    undecided = sum(row.p_raw is not None and not row.decided for row in tested)  # a single seed may have no test
    counts = f"{computed} claims are computed from schedules and cost models alone; {undecided} were tested and remain undecided."
    return "\n".join([*sorted(sentences, key=lambda text: ("leaning" in text[:12], text)), "", counts])


def untested_table() -> str:
    """Claims that have runs but no test, with the reason."""
    rows = [row for row in read_claim_results(CLAIMS) if row.verdict == NO_TEST]
    lines = [(f"{row.claim_id}: {row.sentence}", row.reason, row.scope) for row in rows]
    return markdown_table(("claim", "reason for no test", "scope"), lines) if rows else "None."
