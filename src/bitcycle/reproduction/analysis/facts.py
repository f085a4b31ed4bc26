"""What claims and plots can ask of a cell: its facts, and selectors of cells by these facts.

A claim's `where`, `a`, `b` and `minus` are selectors; `match` and `by` name facts. `contrast.py` pairs the selected cells.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from bitcycle.reproduction.analysis import labels
from bitcycle.reproduction.analysis.cells import Cell
from bitcycle.reproduction.analysis.claim_functions import cost_of
from bitcycle.reproduction.analysis.metrics import PHASE, estimate_of

Selector = Mapping[str, Any]
"""Fact or setting -> its value, or a list of allowed values."""

FACTS: dict[str, Callable[[Cell], Any]] = {
    "model": labels.model_of,
    "data": labels.dataset_of,
    "aggregation": labels.aggregation_of,
    "schedule": labels.schedule_of,
    "method": labels.method_of,
    "fw": labels.forward_bits,
    "bw": labels.backward_bits,
    "high": lambda cell: labels.highest_bits(labels.forward_bits(cell)),
    "bounds": lambda cell: "/".join(
        str(labels.highest_bits(bits)) for bits in (labels.forward_bits(cell), labels.backward_bits(cell))
    ),
    "phases": labels.phase_method,
    "phase_bits": lambda cell: ",".join(map(str, labels.phase_bits(cell))),
    "levels": lambda cell: labels.NAMED_LEVELS.get(str(cell.setting("quantizer")), ""),
    "precision": labels.precision_of,
    "split": lambda cell: f"{labels.split_of(cell):.3g}",
    "steps": lambda cell: int(cell.runs[0].row["total_steps"]) if cell.runs else cell.setting("training.steps"),
    "start": lambda cell: float(cell.setting("schedule.start")) if labels.schedule_of(cell) == "delayed" else 0.0,
    "window": lambda cell: "{:g}-{:g}".format(*labels.window_of(cell)),
    "window_start": lambda cell: f"{labels.window_of(cell)[0]:g}",
    "window_end": lambda cell: labels.window_of(cell)[1],
    "after_window": lambda cell: f"{float(cell.setting('training.epochs') or 0) - labels.window_of(cell)[1]:g}",
    "first_stage": lambda cell: (cell.setting("schedule.stages") or [0])[0],
    "formula_cost": lambda cell: round(cost_of(labels.schedule_of(cell)), 2),
    "rate": lambda cell: cell.setting("training.learning_rate.initial", 0.1),
    **{name: getattr(labels, name) for name in ("cpt_method", "stages_method", "partial_method", "cpt_method_bits")},
    "window_kind": lambda cell: labels.window_edge(cell)[0],
    "window_edge": lambda cell: labels.window_edge(cell)[1],
    "up_to": lambda cell: f"up to {labels.highest_bits(labels.forward_bits(cell))} bits",
    "cycles": lambda cell: float(cell.setting("schedule.cycles") or 1),
    "epsilon": lambda cell: cell.setting("schedule.epsilon") if labels.schedule_of(cell) == "pfq" else None,
    "alpha": lambda cell: float(cell.setting("schedule.alpha", 0.3)),
    "training seconds": lambda cell: statistics.median(run.training_seconds or 0.0 for run in cell.runs),
    "steps per second": lambda cell: f"{found.mean:.1f}" if (found := estimate_of(cell, "steps_per_second")) else "",
    "q_min found": lambda cell: ", ".join(sorted({str(run.row["q_min"]) for run in cell.runs})),
    "at the ends of phases": lambda cell: ", ".join(
        f"{found.mean:.4g}"
        for n in range(len(labels.phase_bits(cell)))
        if (found := estimate_of(cell, f"{PHASE}{n + 1}"))
    ),
}
"""Facts about a cell that claims and plots can refer to; any other name is a setting."""


def fact(cell: Cell, name: str) -> Any:
    """A fact or setting of a cell."""
    return FACTS[name](cell) if name in FACTS else cell.setting(name)


def as_list(value: Any) -> list[Any]:
    """Wrap a single value in a list."""
    return list(value) if isinstance(value, list) else [value]


def matches(cell: Cell, selector: Selector) -> bool:
    """Whether a cell matches a selector."""
    return all(str(fact(cell, name)) in map(str, as_list(value)) for name, value in selector.items())


def select(cells: Iterable[Cell], *selectors: Selector) -> list[Cell]:
    """The cells, with or without runs, that match every selector."""
    return [cell for cell in cells if all(matches(cell, selector) for selector in selectors)]


def agreeing(cell: Cell, others: Sequence[Cell], match: Sequence[str]) -> list[Cell]:
    """The cells that agree with a given one on the facts `match`."""
    return [other for other in others if all(fact(other, name) == fact(cell, name) for name in match)]


def described(selector: Selector) -> str:
    """A selector in words.

    >>> described({"schedule": ["RR", "RTH"], "high": 8})
    'schedule RR or RTH, high 8'
    """
    return ", ".join(
        f"{key.replace('_', ' ')} {' or '.join(map(str, as_list(value)))}" for key, value in selector.items()
    )
