"""What was found on a machine: a line of text, whether it is fine, and what to do if it is not."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table
from rich.text import Text

from bitcycle.errors import EXIT_DATA_MISSING, EXIT_DONE, EXIT_FAILED, EXIT_WRONG_CONFIGURATION

OK, WARNING, PROBLEM = "ok", "warning", "problem"
STYLES = {OK: "green", WARNING: "yellow", PROBLEM: "bold red"}
DATA, CONFIGURATION = "data", "configuration"
"""Topics of the data and of the settings of the named run or sweep; their problems have exit codes of their own."""


@dataclass(frozen=True)
class Finding:
    """A finding; with a warning a run works, with a problem it does not. `remedy` says what to do, `values` are for programs."""

    topic: str
    text: str
    state: str = OK
    remedy: str = ""
    values: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.state == OK or self.remedy, "what is not fine ends with what to do"


def amount(topic: str, text: str, available: int, least: int, enough: int, remedy: str, **values: Any) -> Finding:
    """A finding on an amount that is a problem below `least` and a warning below `enough`."""
    state = PROBLEM if available < least else WARNING if available < enough else OK
    return Finding(topic, text, state, "" if state == OK else remedy, {"available": available, **values})


def exit_code(findings: Sequence[Finding]) -> int:
    """0 if there is no problem, 2 if settings are wrong, 3 if data of the named run are missing, 1 for any other problem."""
    topics = {finding.topic for finding in findings if finding.state == PROBLEM}
    codes = {CONFIGURATION: EXIT_WRONG_CONFIGURATION, DATA: EXIT_DATA_MISSING}
    return next((code for topic, code in codes.items() if topic in topics), EXIT_FAILED if topics else EXIT_DONE)


def describe(findings: Sequence[Finding]) -> dict[str, Any]:
    """The findings as plain values: the content of `bitcycle doctor json`."""
    return {"exit_code": exit_code(findings), "findings": [asdict(finding) for finding in findings]}


def row(finding: Finding) -> Table:
    """A finding with its remedy as one row of a table, which is shown as soon as it is known."""
    words = Text(finding.text)
    if finding.remedy:
        words.append(f"\n-> {finding.remedy}", STYLES[finding.state] if finding.state != OK else "dim")
    shown = Table.grid(padding=(0, 2))
    for width in (7, 16, None):
        shown.add_column(width=width)
    shown.add_row(Text(finding.state, STYLES[finding.state]), Text(finding.topic), words)
    return shown
