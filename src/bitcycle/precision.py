"""Precision: the bits of weights, activations and gradients."""

import operator
from collections.abc import Iterable
from itertools import groupby
from typing import Any, NamedTuple

from bitcycle.settings import SettingError

FLOAT = 32
"""The number of bits that denotes float32, that is, no quantization."""


class Precision(NamedTuple):
    """Bits of one training step; 32 means float32, not quantized.

    >>> Precision(weight=3, activation=3, gradient=8)
    Precision(weight=3, activation=3, gradient=8)
    """

    weight: int
    activation: int
    gradient: int


def read_precision(given: Any) -> Precision:
    """A precision given by a user, who may write three whole numbers. Raises SettingError for anything else.

    >>> read_precision((3, 3, 8))
    Precision(weight=3, activation=3, gradient=8)
    """
    if type(given) is Precision and type(given[0]) is type(given[1]) is type(given[2]) is int:
        return given
    try:
        return Precision(*map(operator.index, given))
    except TypeError as error:
        remedy = "use three numbers of bits: weight, activation, gradient"
        raise SettingError("precision", given, "is not a precision", remedy) from error


def effective(precision: Precision) -> Precision:
    """The effective precision of a step: if weights and activations are float, so are gradients.

    >>> effective(Precision(32, 32, 8))
    Precision(weight=32, activation=32, gradient=32)
    """
    return precision if min(precision.weight, precision.activation) < FLOAT else precision._replace(gradient=FLOAT)


def joined(course: Iterable[tuple[Precision, int]]) -> list[tuple[Precision, int]]:
    """A course with adjacent parts of equal precision merged and empty parts removed.

    >>> joined([(Precision(3, 3, 8), 2), (Precision(4, 4, 8), 0), (Precision(3, 3, 8), 1)])
    [(Precision(weight=3, activation=3, gradient=8), 3)]
    """
    parts = groupby((part for part in course if part[1]), key=lambda part: part[0])
    return [(precision, sum(steps for _, steps in group)) for precision, group in parts]
