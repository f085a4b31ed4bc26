"""Common style of the papers' pictures: colours and markers of methods."""

from typing import NamedTuple, Optional

from matplotlib.figure import Figure

STYLES = {
    **dict.fromkeys(("static", "SBM"), ("0.35", "s")),
    **dict.fromkeys(("Full Precision", "full precision", "float"), ("black", "s")),
    **dict.fromkeys(("CPT", "partial pre-training", "HLHLp", "FP-Agg", "initial window, by its end"), ("#0072b2", "o")),
    **dict.fromkeys(("SBM+CLR", "low precision", "fine-tuning", "Q-Agg"), ("#e69f00", "D")),
    **dict.fromkeys(("progressive precision", "PFQ", "Auto-PFQ four-stage"), ("#009e73", "P")),
    "Auto-PFQ two-stage": ("#56b4e9", "v"),
    "Manual-PFQ four-stage": ("#b8a000", "X"),
    **dict.fromkeys(("DoReFa", "Manual-PFQ two-stage"), ("#8a5a00", "^")),
    "WAGEUBN": ("#b8a000", "v"),
    "DFQ": ("#cc79a7", "X"),
    "FracTrain": ("#d55e00", "*"),
    "later window, by its beginning": ("#d55e00", "D"),
}
"""Colour (colour-blind safe) and marker of each method, the same in all papers; other methods are grey circles."""
PROFILES = {"linear": "#009e73", "cosine": "#0072b2", "exponential": "#d55e00", "rex": "#aa4499"}
"""Colours of the growth profiles in Better Schedules."""
FORMS = {"repeated": "o", "vertical": "^", "horizontal": "v"}
"""Markers of its forms: repeated, triangular with mirrored values, triangular with mirrored time."""
ORDERED = "viridis"
"""Colour map for ordered values."""


class Style(NamedTuple):
    """Style of a series: label, colour, marker, and outline colour."""

    label: str
    colour: str = "0.5"
    marker: str = "o"
    edge: Optional[str] = None


class Drawing(NamedTuple):
    """A figure and its caption: what is compared, the kind of intervals, the number of seeds."""

    figure: Figure
    caption: str


def style_of(method: str) -> Style:
    """The style of a method, also with its bits.

    >>> style_of("CPT 3-8 bits")
    Style(label='CPT 3-8 bits', colour='#0072b2', marker='o', edge=None)
    >>> style_of("other")
    Style(label='other', colour='0.5', marker='o', edge=None)
    """
    return Style(method, *next((style for name, style in STYLES.items() if f"{method} ".startswith(f"{name} ")), ()))
