"""The history of every claim's verdict: results/summary/claims_history.csv has one row for each change of verdict or test.

`make figures` adds a row when a verdict or its rule changes. The rows before 24 November 2026 were read from the versions of
claims.csv in the repository's history, once.
"""

from collections.abc import Iterable, Mapping
from datetime import UTC, date, datetime
from pathlib import Path

from bitcycle.files import read_csv, write_csv
from bitcycle.reproduction.analysis.verdict import DECIDED, ClaimResult

COLUMNS = ("date", "claim_id", "scale", "verdict", "estimate", "low", "high", "n", "rule", "reason")


def updated(
    history: Iterable[Mapping[str, str]], rows: Iterable[Mapping[str, str]], today: str
) -> list[Mapping[str, str]]:
    """The history with a row for each claim whose verdict or rule differs from the last one recorded."""
    found = list(history)
    last = {(row["claim_id"], row["scale"]): row for row in found}
    for row in rows:
        now = {name: row.get(name) or "" for name in COLUMNS} | {"date": today, "claim_id": row["claim_id"]}
        before = last.get((now["claim_id"], now["scale"]))
        if before is None and not now["scale"]:
            continue  # never tested so far
        if before is None or (before["verdict"], before["rule"]) != (now["verdict"], now["rule"]):
            found.append(now)
            last[now["claim_id"], now["scale"]] = now
    return found


def update(path: Path, claims: Path) -> None:
    """Add today's changes of a claims.csv to a history."""
    rows = updated(read_csv(path, missing_ok=True), read_csv(claims), datetime.now(UTC).date().isoformat())
    write_csv(path, COLUMNS, rows)


def withdrawn(history: Iterable[Mapping[str, str]], now: Iterable[ClaimResult]) -> list[str]:
    """The claims that were decided once, at some scale, and are not any more."""
    once = {row["claim_id"] for row in history if row["verdict"].startswith(DECIDED)}  # the scale may follow
    return sorted(once - {row.claim_id for row in now if row.verdict in DECIDED})


def before(history: Iterable[Mapping[str, str]], day: date) -> dict[tuple[str, str], Mapping[str, str]]:
    """The last row of each claim and scale before a day."""
    return {(row["claim_id"], row["scale"]): row for row in history if date.fromisoformat(row["date"]) < day}
