"""Tables and lists of claims in README.md, docs/results.md and results/notes/verdicts.md, from the verdicts of `make figures`."""

from __future__ import annotations

from collections import Counter
from datetime import date
from pathlib import Path

from bitcycle.files import markdown_table, read_csv
from bitcycle.reproduction.analysis import history
from bitcycle.reproduction.analysis.verdict import (
    COMPUTED,
    NO_TEST,
    NOT_TESTED,
    UNDECIDED,
    ClaimResult,
    read_claim_results,
)

CLAIMS = Path(__file__).parent.parent / "results" / "summary" / "claims.csv"
HISTORY = CLAIMS.with_name("claims_history.csv")
RULE_CHANGED = date(2026, 11, 24)
"""Day on which all claims were judged anew by the rule of docs/results.md."""


def claims_table() -> str:
    """Every claim that was tested, with its estimate and rule; `make figures` writes the verdicts."""
    rows = [row for row in read_claim_results(CLAIMS) if row.estimate is not None and row.verdict != NO_TEST]
    titles = ("claim", "verdict", "estimate, interval", "n, trainings", "p, corrected", "seeds needed", "scope")
    lines = []
    for row in rows:
        interval = "" if row.low is None else f" ({row.low:+.2f} to {row.high:+.2f})"
        state = row.verdict if row.decided or not row.leaning else f"{row.verdict}, leaning {row.leaning}"
        p = ", ".join(f"{value:.2g}" for value in (row.p_raw, row.p_corrected) if value is not None)
        needed = "" if row.seeds_needed is None else row.seeds_needed if row.seeds_needed > (row.n or 0) else "no more"
        found = f"{row.estimate:+.2f} {row.unit}{interval}", f"{row.n}, {row.trainings}", p, needed
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
    # a single seed may have no test
    undecided = sum(row.verdict == "undecided" and row.p_raw is not None for row in tested)
    weak = sum(row.verdict == NOT_TESTED for row in tested)
    counts = (
        f"{computed} claims are computed from schedules and cost models alone; {undecided} were tested and remain undecided;"
        f" {weak} have trainings, but less than half the power at the published effect."
    )
    return "\n".join([*sorted(sentences, key=lambda text: ("leaning" in text[:12], text)), "", counts])


def untested_table() -> str:
    """Claims that have runs but no test, with the reason."""
    rows = [row for row in read_claim_results(CLAIMS) if row.verdict == NO_TEST]
    lines = [(f"{row.claim_id}: {row.sentence}", row.reason, row.scope) for row in rows]
    return markdown_table(("claim", "reason for no test", "scope"), lines) if rows else "None."


def excluded_list() -> str:
    """Undecided claims whose interval excludes an effect as large as the published one."""
    rows = [row for row in read_claim_results(CLAIMS) if row.verdict == UNDECIDED and row.published_inside is False]
    return "\n".join(f"- {row.claim_id}: {row.sentence}" for row in rows) or "None."


def judged_anew() -> str:
    """Every claim whose verdict differs from the last one before the rule changed: before, now, reason."""
    before = history.before(read_csv(HISTORY), RULE_CHANGED)
    last = {claim: row["verdict"] for (claim, _), row in before.items()}
    lines = []
    for row in read_claim_results(CLAIMS):
        was = before.get((row.claim_id, row.scale), {}).get("verdict") or last.get(row.claim_id)
        if was is not None and was != row.verdict and row.verdict != COMPUTED:
            lean = f", leaning {row.leaning}" if row.leaning and not row.decided else ""
            lines.append((f"{row.claim_id}: {row.sentence}", was, row.verdict + lean, row.reason or _why(row)))
    return markdown_table(("claim", "before", "now", "reason"), lines) if lines else "None."


def _why(row: ClaimResult) -> str:
    return (
        ""
        if row.p_corrected is None
        else f"corrected p = {row.p_corrected:.2g} (p = {row.p_raw:.2g}, {row.looks} looks)"
    )


def withdrawn_line() -> str:
    """How many verdicts were withdrawn, and where the reasons are."""
    gone = history.withdrawn(read_csv(HISTORY), read_claim_results(CLAIMS))
    return (
        f"{len(gone)} claims were called supported or contradicted at some time and are not any more: their tests were changed"
        " after results, their looks were corrected too weakly, they tested less than their sentence, or their runs were not"
        " those of the paper's method. [Every change of a verdict](results/notes/claim-history.md) is on record."
    )


def history_list() -> str:
    """For each claim that was ever tested, its verdicts with dates, estimates and reasons."""
    sentences = {row.claim_id: row.sentence for row in read_claim_results(CLAIMS)}
    rows = read_csv(HISTORY)
    parts = []
    for claim in dict.fromkeys(row["claim_id"] for row in rows):
        own = [row for row in rows if row["claim_id"] == claim]
        lines = [_entry(row, last) for row, last in zip(own, [None, *own])]
        parts.append(f"### {claim}\n\n{sentences.get(claim, '')}\n\n" + "\n".join(lines))
    return "\n\n".join(parts)


def _entry(row: dict[str, str], last: dict[str, str] | None) -> str:
    number = f", {float(row['estimate']):+.3g}" if row["estimate"] else ""
    interval = f" ({float(row['low']):+.3g} to {float(row['high']):+.3g})" if row["low"] and row["high"] else ""
    seeds = f", n = {row['n']}" if row["n"] else ""
    test = f"; test: {row['rule']}" if row["rule"] and (last is None or last["rule"] != row["rule"]) else ""
    reason = f"; {row['reason']}" if row["reason"] else ""
    return f"- {row['date']}: **{row['verdict']}**{number}{interval}{seeds}{test}{reason}"
