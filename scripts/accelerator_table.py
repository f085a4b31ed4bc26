"""The table of settings that ran on the pretended accelerator, from the record of tests/accelerator/record.py."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from bitcycle.files import markdown_table, read_csv

RECORD = Path(__file__).parent.parent / "results" / "summary" / "accelerator.csv"
HARDWARE = RECORD.with_name("hardware.csv")
ROUNDING = 1e-6
"""Relative difference of two losses up to which float32 sums in another order explain it."""


def accelerator_table() -> str:
    """Each recorded run: whether it finished and resumed exactly, and what its steady steps waited for; pairs by quantizer."""
    rows = read_csv(RECORD)
    lines = [
        (
            row["case"],
            row["error"] or "yes",
            "yes" if row["same"] == "True" else "no",
            row["steady"],
            row["waits"] or ("none" if int(row["steady"]) else "no steady step in this run"),
        )
        for row in rows
        if row["steady"]
    ]
    resumed = markdown_table(("run", "trains and evaluates", "resumes exactly", "steady steps", "waits in them"), lines)
    return f"{resumed}\n\n{_pairs([row for row in rows if not row['steady']])}"


def _pairs(rows: Sequence[Mapping[str, str]]) -> str:
    """What each quantizer was combined with in the runs that were not resumed."""
    met: dict[str, list[set[str]]] = {}
    for row in rows:
        quantizer, *others = row["case"].split(", ")
        columns = met.setdefault(quantizer, [set() for _ in range(4)])
        for column, value in zip(columns, others):
            column.add(value)
    lines = [(quantizer, *(", ".join(sorted(column)) for column in columns)) for quantizer, columns in met.items()]
    wrong = [f"{row['case']}: {row['error']}" for row in rows if row["error"]]
    words = f"Trained and evaluated there, without a resume: {len(rows)} small runs, {'; '.join(wrong) or 'none with an error'}."
    return f"{words}\n\n{markdown_table(('quantizer', 'schedules', 'networks', 'compute', 'formats'), lines)}"


def hardware_table() -> str:
    """What the same runs did on real hardware, from the record of tests/accelerator/hardware.py."""
    rows = read_csv(HARDWARE)
    wrong = [f"{row['case']}: {row['error']}" for row in rows if row["error"]]
    resumed = [row for row in rows if row["same"]]
    exact = [row["case"] for row in resumed if row["same"] == "True"]
    graphs = [row for row in rows if row["graphs"]]
    equal = [row for row in graphs if row["graphs"].endswith(" equal")]
    waits: dict[str, list[str]] = {}
    for row in rows:
        if row["waits"]:
            waits.setdefault(row["waits"].replace("a wait at ", ""), []).append(row["case"])
    differences = {row["case"]: _difference(row) for row in rows if row["first_loss_cpu"]}
    far = {case: found for case, found in differences.items() if found > ROUNDING}
    listed = ", ".join(f"`{case}` ({found:.1g})" for case, found in sorted(far.items(), key=lambda item: item[1]))
    waiting = "; ".join(f"{what.replace('; ', ' and ')} ({_cases(cases)})" for what, cases in waits.items())
    number = sum(map(len, waits.values()))
    devices = ", ".join(sorted({_device(row) for row in rows}))
    close = len(differences) - len(far)
    lines = [
        f"{devices}: {len(rows)} of these runs, {'; '.join(wrong) or 'none with an error'}.",
        f"Killed and resumed: {len(exact)} of {len(resumed)} end with the same weights and the same log, bit for bit.",
        f"With and without CUDA graphs: {len(equal)} of the {len(graphs)} runs that replay steps are equal, bit for bit.",
        f"The host waits in steady steps of {number} of {len(rows)} runs, in {waiting}.",
        f"The loss of the first step is that of the CPU up to {ROUNDING:g} in {close} of {len(differences)} runs, further in"
        f" {listed}.",
    ]
    return "\n".join(f"- {line}" for line in lines)


def _cases(cases: Sequence[str]) -> str:
    return ", ".join(f"`{case}`" for case in cases)


def _difference(row: Mapping[str, str]) -> float:
    return abs(float(row["first_loss"]) / float(row["first_loss_cpu"]) - 1)


def _device(row: Mapping[str, str]) -> str:
    return f"{row['device']}, PyTorch {row['torch']}"
