"""Low precision for most of the run, higher precision for the rest."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bitcycle.precision import Precision
from bitcycle.schedule.base import RunLength
from bitcycle.schedule.formats import FormatLevels, bits_of
from bitcycle.settings import SettingError, setting


@dataclass
class LateSwitch(FormatLevels):
    """q_min bits (or the first of two formats), then q_max (the second) for the last `share` of the run.

        precision(t) = q_min for t < round((1 - share) T), q_max from then on

    Gradients switch together with weights and activations, unless `gradient_formats` names a single format.

    Source: NVIDIA 2025, "Pretraining large language models with NVFP4" (arXiv 2509.25149), appendix D, which leaves NVFP4 for
    BF16 for the last 18 % of a run. Differs in switching to float32, as bfloat16 is not simulated.
    """

    q_min: Any = setting(4, "bits until the switch", minimum=1, maximum=32)
    q_max: int = setting(32, "bits from the switch on; 32: float32", minimum=1, maximum=32)
    share: float = setting(0.18, "part of the run after the switch (NVFP4, appendix D: 0.18)", minimum=0, maximum=1)

    def validate(self) -> None:
        super().validate()
        if self.formats is not None and len(self.formats) != 2:
            raise SettingError("formats", self.formats, "is not a pair", "name two formats, as [nvfp4,mxfp8]")
        if self.gradient_formats is not None and len(self.gradient_formats) > 2:
            raise SettingError(
                "gradient_formats", self.gradient_formats, "has more than two", "name one or two formats"
            )

    def check_length(self, length: RunLength) -> None:
        if 0 < self.share < 1 and self._switch(length) in (0, length.total_steps):
            problem = f"leaves none of the run's {length.total_steps} steps on one side of the switch"
            raise SettingError("share", self.share, problem, "train longer, or choose another share")

    @property
    def format_lists(self) -> tuple[Sequence[str], Sequence[str]] | None:
        return None if self.formats is None else (self.formats, self.gradient_formats or self.formats)

    @property
    def reference(self) -> Precision:
        return self._side(1)

    def precision(self, step: int, length: RunLength) -> Precision:
        return self._side(int(step >= self._switch(length)))

    def changes(self, length: RunLength) -> Sequence[int]:
        return (0, self._switch(length))

    def _switch(self, length: RunLength) -> int:
        return round((1 - self.share) * length.total_steps)

    def _side(self, side: int) -> Precision:
        """The precision before (0) or after (1) the switch."""
        forward = (self.q_min, self.q_max)[side]
        gradients = bits_of(self.gradient_formats) if self.gradient_formats else [self.q_min, self.q_max]
        return Precision(forward, forward, gradients[min(side, len(gradients) - 1)])
