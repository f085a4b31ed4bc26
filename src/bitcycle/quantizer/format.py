"""Base class of quantizers whose bits select one of a few number formats."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from bitcycle.quantizer.base import ROLES, QuantizerOptions
from bitcycle.quantizer.element import Element
from bitcycle.schedule import FLOAT, Precision
from bitcycle.settings import setting


@dataclass
class FormatOptions(QuantizerOptions):
    """Options of a quantizer with formats. The lowest and highest bits of a schedule must be those of a format."""

    between: str = setting(
        "next",
        "bits of a schedule between two formats: next: use (and count) the next wider format, or refuse",
        choices=("next", "refuse"),
    )

    def formats(self, role: str) -> Mapping[int, Element]:
        """The formats of tensors of `role` by their bits."""
        raise NotImplementedError

    @property
    def scale_share(self) -> Fraction:
        """Bits per element for storing scales."""
        return Fraction(0)

    def bits(self, role: str) -> Sequence[int]:
        return sorted(self.formats(role))

    def available(self, precision: Precision) -> Precision:
        """The bits of the formats used for `precision`; bits outside the range of formats are unchanged."""
        return Precision(*(self._next(role, bits) for role, bits in zip(ROLES, precision)))

    def _next(self, role: str, bits: int) -> int:
        offered = self.bits(role)
        if bits == FLOAT or self.between == "refuse" or not offered[0] < bits < offered[-1]:
            return bits
        return next(wider for wider in offered if wider >= bits)

    def check(self, precisions: Iterable[Precision]) -> None:
        super().check(map(self.available, precisions))

    def check_ends(self, lowest: Precision, highest: Precision) -> None:
        super().check([lowest, highest])

    def storage_bits(self, role: str) -> Mapping[int, Fraction]:
        offered = self.bits(role)
        return {bits: self._next(role, bits) + self.scale_share for bits in range(offered[0], offered[-1] + 1)}
