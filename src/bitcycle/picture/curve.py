"""The curve of a run: its records as columns, at most POINTS of them, as pictures need them."""

from collections.abc import Mapping, Sequence
from typing import Any

POINTS = 200
"""Maximum number of points of a training curve; longer ones are averaged."""
ALLOCATION_SHARES = (5 / 160, 45 / 160, 85 / 160, 1.0)
"""Fractions of a run at which the bits chosen by gates are kept: epochs 5, 45 and 85 as in FracTrain, figure 8, and the end."""
MEANS = ("loss", "accuracy")
"""Values of the training batches, of which a training curve keeps means."""
AT_Q_MAX = "_at_q_max"
"""Suffix of the metrics that were measured at q_max."""


def curve_of(records: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the records of a run to columns.

    Returns:
        metric; evaluations: step, value, at_q_max, gbitops, weight, activation, gradient; training: step, loss, accuracy on the
        training batches in percent, the bits, and cp and cp_target if the network chooses its bits; final: all numbers of the
        last evaluation; initial_weights (their metric in float), phases, range_test, observations and allocation if the run has
        them.
    """
    tests = [record for record in records if record["kind"] == "evaluation"]
    metric = str(summary["metric"])
    found: dict[str, Any] = {
        "metric": metric,
        "evaluations": {
            "step": [record["step"] for record in tests],
            "value": [record[metric] for record in tests],
            "at_q_max": [record.get(metric + AT_Q_MAX) for record in tests],
            "gbitops": [(record.get("cost") or {}).get("gbitops") for record in tests],
            **_bits(tests),
        },
        "training": _thinned([record for record in records if record["kind"] == "train"]),
        "final": {
            name: value for test in tests[-1:] for name, value in test.items() if isinstance(value, (int, float))
        },
    }
    if start := [record for record in records if record["kind"] == "initial_weights"]:
        found["initial_weights"] = start[0][metric]
    if summary.get("phases"):
        found["phases"] = summary["phases"]
    if test := summary.get("found", {}).get("range_test"):
        observed = [record for record in records if record["kind"] == "observation"]
        found["range_test"] = {**test, "q_min": summary["found"]["q_min"]}
        found["observations"] = _columns(observed[:: -(-len(observed) // (5 * POINTS)) or 1], ("step", "accuracy"))
    if allocation := _allocations(tests, summary["total_steps"]):
        found["allocation"] = allocation
    return found


def _bits(records: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    names = ("weight", "activation", "gradient")
    return {name: [record["precision"][index] for record in records] for index, name in enumerate(names)}


def _thinned(records: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """At most POINTS points, each the last record of a group with the mean loss and accuracy of the group."""
    size = -(-len(records) // POINTS) or 1
    groups = [records[start : start + size] for start in range(0, len(records), size)]
    last = [group[-1] for group in groups]
    found: dict[str, list[Any]] = {
        "step": [record["step"] for record in last],
        **{name: [_mean(name, group) for group in groups] for name in MEANS if last and name in last[-1]},
        **_bits(last),
    }
    if last and "cp" in last[-1]:
        found |= _columns(last, ("cp", "cp_target"))
    return found


def _mean(name: str, group: Sequence[Mapping[str, Any]]) -> Any:
    return _rounded(sum(record[name] for record in group) / len(group))


def _columns(records: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, list[Any]]:
    return {name: [_rounded(record.get(name)) for record in records] for name in names}


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _allocations(tests: Sequence[Mapping[str, Any]], total_steps: int) -> dict[str, Any]:
    """Step -> block -> option -> share of samples, for the evaluations nearest to ALLOCATION_SHARES."""
    chosen = [record for record in tests if record.get("allocation")]
    moments = [share * total_steps for share in ALLOCATION_SHARES if chosen]
    nearest = [min(chosen, key=lambda record: abs(record["step"] - moment)) for moment in moments]
    return {str(record["step"]): record["allocation"] for record in nearest}
