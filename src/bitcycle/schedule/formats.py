"""Schedules over number formats: a list ordered by cost, whose index takes the place of the bits.

A precision remains a triple of numbers: the bits of a format select it, so a list has at most one format of each width.
`bitcycle.quantizer.with_formats` passes the lists to the quantizer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Optional

from bitcycle.precision import FLOAT
from bitcycle.schedule.base import ScheduleOptions
from bitcycle.settings import SettingError, default_of, nearest, setting

FORMAT_BITS: dict[str, int] = {
    **dict.fromkeys(("nvfp4", "mxfp4", "mxfp4_e2m1"), 4),
    **dict.fromkeys(("mxfp6", "mxfp6_e2m3", "mxfp6_e3m2"), 6),
    **dict.fromkeys(("mxfp8", "mxfp8_e4m3", "mxfp8_e5m2", "mxint8"), 8),
    "float": FLOAT,
}
"""Formats by name, with the bits that select them. mxfp6 is E2M3; mxfp8 is E4M3, and E5M2 for gradients."""


@dataclass
class FormatLevels(ScheduleOptions):
    """Options of a schedule over formats or bits; formats determine q_min and q_max."""

    formats: Optional[list[str]] = setting(
        None,
        "number formats in ascending order of cost, as [nvfp4,mxfp6,mxfp8]: the schedule runs over their index instead of bits"
        " (quantizer mx, nvfp4 or a recipe of these); null: over bits",
    )
    gradient_formats: Optional[list[str]] = setting(
        None,
        "formats of gradients, over which the schedule runs too; null: always the last of `formats` (late_switch: `formats`)",
    )

    def validate(self) -> None:
        self._read_formats()
        super().validate()

    def _read_formats(self) -> None:
        """Set q_min and q_max from the formats. Raises SettingError for a list that is not in order, or for other bits."""
        if self.formats is None:
            if self.gradient_formats is not None:
                problem = "needs the formats of the forward pass"
                raise SettingError("gradient_formats", self.gradient_formats, problem, "set schedule.formats, too")
            return
        check_order("formats", self.formats)
        if self.gradient_formats is not None:
            check_order("gradient_formats", self.gradient_formats)
        bits = bits_of(self.formats)
        self._take_bits({"q_min": bits[0], "q_max": bits[-1]}, "formats")

    def _take_bits(self, bits: Mapping[str, int], formats: str) -> None:
        """Set options from formats. Raises SettingError if they are given other bits."""
        for name, value in bits.items():
            given = getattr(self, name)
            if given not in (value, default_of(type(self).__dataclass_fields__[name])):
                raise SettingError(name, given, f"contradicts {formats}, which have {value} bits there", "leave it out")
            setattr(self, name, value)

    @property
    def format_lists(self) -> tuple[Sequence[str], Sequence[str]] | None:
        if self.formats is None:
            return None
        return self.formats, self.formats[-1:] if self.gradient_formats is None else self.gradient_formats


def bits_of(formats: Sequence[str]) -> list[int]:
    """The bits of formats.

    >>> bits_of(["nvfp4", "mxfp6", "mxfp8"])
    [4, 6, 8]
    """
    return [FORMAT_BITS[name] for name in formats]


def check_order(field: str, formats: Sequence[str]) -> None:
    """Raise SettingError unless the formats have ascending numbers of bits, one format for each."""
    for name in formats:
        if name not in FORMAT_BITS:
            raise SettingError(field, name, "is not a number format", nearest(name, FORMAT_BITS))
    bits = bits_of(formats)
    if not bits or any(low >= high for low, high in pairwise(bits)):
        example = sorted({width: name for name, width in zip(formats, bits)}.items())
        remedy = f"write [{','.join(name for _, name in example)}]" if bits else "name at least one, as [nvfp4,mxfp8]"
        raise SettingError(field, formats, "is not in ascending order of cost with one format of each width", remedy)
