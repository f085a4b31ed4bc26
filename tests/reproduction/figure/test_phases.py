"""The picture of HLHLp's phases: what is drawn, relative to the float phase."""

from __future__ import annotations

import runpy

import pytest

from tests.conftest import ROOT

SCRIPT = runpy.run_path(str(ROOT / "scripts" / "hlhlp_phases.py"))
TOP, by_setting = SCRIPT["TOP"], SCRIPT["by_setting"]

COMMON = {"hidden": "100", "data": "wikitext2_small", "vocabulary": "2000", "samples": "3000", "chance": "2000"}


def rows(setting: str, seed: int, *perplexities: float) -> list[dict[str, str]]:
    return [
        {
            **COMMON,
            "setting": setting,
            "seed": str(seed),
            "phase": str(number),
            "steps": "600",
            "test_perplexity": str(value),
        }
        for number, value in enumerate(perplexities, start=1)
    ]


def test_a_panel_has_the_paper_and_each_seed_relative_to_the_float_phase():
    made = (
        rows("schedule.ratio=1", 0, 80, 120, 84, 110) + rows("", 1, 80, 100, 80_000, 100) + rows("", 0, 50, 60, 55, 60)
    )
    assert by_setting(made) == {
        "": {"0": [50, 60, 55, 60], "1": [80, 100, 80_000, 100]},
        "schedule.ratio=1": {"0": [80, 120, 84, 110]},
    }
    figure = SCRIPT["phases_beside_the_paper"](made, [95.32, 99.12, 92.25, 96.97])
    first, second = figure.axes
    drawn = [list(line.get_ydata()) for line in first.lines]
    assert drawn[:2] == [[1, 1.2, 1.1, 1.2], [1, 1.25, TOP, 1.25]], "a diverged phase ends at the edge of the panel"
    assert drawn[2] == pytest.approx([1, 99.12 / 95.32, 92.25 / 95.32, 96.97 / 95.32])
    assert [text.get_text() for text in first.texts] == ["1e+03"], "and its ratio is written"
    assert second.get_title() == "ratio=1"
