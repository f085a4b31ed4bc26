"""Common style of the papers' pictures: colours and markers of methods."""

from pathlib import Path
from typing import Any, NamedTuple, Optional

import yaml
from matplotlib.figure import Figure

STYLES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("styles.yaml").read_text(encoding="utf-8"))
"""Colours and markers of methods, of the boards, and of the schedules' growth profiles and forms."""
PROFILES, FORMS = STYLES["profiles"], STYLES["forms"]
ORDERED = "viridis"
"""Colour map for ordered values."""


class Style(NamedTuple):
    """Style of a series: label, colour, marker, outline colour, and size of its markers in points."""

    label: str
    colour: str = "0.5"
    marker: str = "o"
    edge: Optional[str] = None
    size: float = 5.5


class Drawing(NamedTuple):
    """A figure and its caption: what is compared, the kind of intervals, the number of seeds."""

    figure: Figure
    caption: str


def style_of(method: str) -> Style:
    """The style of a method, also with its bits.

    >>> style_of("CPT 3-8 bits")
    Style(label='CPT 3-8 bits', colour='#0072b2', marker='o', edge=None, size=5.5)
    >>> style_of("other")
    Style(label='other', colour='0.5', marker='o', edge=None, size=5.5)
    """
    return Style(
        method, *next((style for name, style in STYLES["methods"].items() if f"{method} ".startswith(f"{name} ")), ())
    )
