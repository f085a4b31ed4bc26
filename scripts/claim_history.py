"""Read the history of verdicts from the versions of results/summary/claims.csv in git, once; `make figures` continues it."""

from __future__ import annotations

import csv
import io
import subprocess
from collections.abc import Mapping
from pathlib import Path

from bitcycle.files import write_csv
from bitcycle.reproduction.analysis.history import COLUMNS, updated
from bitcycle.reproduction.analysis.verdict import NOT_TESTED

ROOT = Path(__file__).parent.parent
CLAIMS = "results/summary/claims.csv"


def git(*words: str) -> str:
    """The output of git."""
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout


def main() -> None:
    """Write results/summary/claims_history.csv."""
    history: list[Mapping[str, str]] = []
    for line in git("log", "--reverse", "--format=%H %cs", "--", CLAIMS).splitlines():
        commit, day = line.split()
        try:
            text = git("show", f"{commit}:{CLAIMS}")
        except subprocess.CalledProcessError:
            continue  # a commit that removed the file
        rows = list(csv.DictReader(io.StringIO(text)))
        for row in rows:
            if row.get("verdict") == "not run":  # its name then
                row["verdict"] = NOT_TESTED
        if rows and "scale" in rows[0] and "verdict" in rows[0]:
            history = updated(history, rows, day)
    write_csv(ROOT / "results" / "summary" / "claims_history.csv", COLUMNS, history)


if __name__ == "__main__":
    main()
