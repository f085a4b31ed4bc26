"""Quantizers whose formats are those of a schedule."""

from collections.abc import Sequence
from dataclasses import fields, replace

from bitcycle.quantizer.base import QuantizerOptions
from bitcycle.quantizer.block import BlockOptions
from bitcycle.quantizer.mx import Mx
from bitcycle.schedule import Schedule
from bitcycle.settings import SettingError

FORWARD = {"mxfp4": "mxfp4_e2m1", "mxfp6": "mxfp6_e2m3", "mxfp8": "mxfp8_e4m3"}
"""Families of formats -> the one for weights and activations."""
GRADIENT = FORWARD | {"mxfp8": "mxfp8_e5m2"}
"""Families of formats -> the one for gradients."""


def with_formats(options: QuantizerOptions, schedule: Schedule) -> QuantizerOptions:
    """The options of a quantizer with the formats of `schedule`; unchanged for a schedule over bits. Raises SettingError
    for a quantizer without formats in blocks."""
    lists = schedule.options.format_lists
    if lists is None or options.name == "none":
        return options
    if not isinstance(options, BlockOptions):
        problem = f"quantizer={options.name} does not have these formats"
        remedy = "use quantizer=mx, or a recipe of 4 bits"
        raise SettingError("schedule.formats", list(lists[0]), problem, remedy)
    shared = {field.name: getattr(options, field.name) for field in fields(BlockOptions)}
    made = Mx(**shared) if not isinstance(options, Mx) else options
    forward, gradient = _named(lists[0], FORWARD), _named(lists[1], GRADIENT)
    return replace(
        made,
        forward_formats=forward or made.forward_formats,
        gradient_formats=gradient or made.gradient_formats,
    )


def _named(formats: Sequence[str], families: dict[str, str]) -> list[str]:
    return [families.get(name, name) for name in formats if name != "float"]
