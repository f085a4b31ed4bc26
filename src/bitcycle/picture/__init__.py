"""Pictures of single runs: what was trained, at which bits, and how well; with matplotlib, an optional dependency."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # curves are read without PyTorch
    from bitcycle.training.plan import Plan


def pictures(plan: "Plan", summary: Mapping[str, Any]) -> Iterator[Path]:
    """Draw the requested pictures of a finished run; a range test is always drawn."""
    first, tested = plan.preliminary, "range_test" in summary.get("found", {})
    if tested:
        from bitcycle.picture.run import draw_range_test

        yield draw_range_test((first or plan).folder)
    if plan.config.logging.picture and (first is not None or not tested):
        from bitcycle.picture.run import draw_run

        yield draw_run(plan)
