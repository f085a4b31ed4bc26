"""Loss plateau indicator of progressive fractional quantization (PFQ)."""

from dataclasses import dataclass, field
from typing import Any

SCALE_EPOCHS = 10
"""Number of initial epochs whose losses set the scale of loss differences."""


@dataclass
class PlateauIndicator:
    """Detects turning points, where the loss per epoch has become flat.

    With the last `window` losses l_1 .. l_w since the last turning point and the scale S, the mean of the first ten losses
    of the run (or their largest, `peak`), a turning point is reached when the window is full and

        |l_j - l_w| / S <= threshold     for every j < w             difference = window       (as in the released code)
        |l_j - l_(j+1)| / S <= threshold  for every j < w             difference = consecutive  (FracTrain, algorithm 1)

    A turning point empties the window and multiplies the threshold by alpha, at most `max_decays` times.

    Source: FracTrain, section 3.1 and algorithm 1; released code, train_pfq.py. Differs from the code in that every turning
    point decays the threshold unless max_decays=2 is set (which makes no difference for a schedule of four stages).
    """

    threshold: float
    alpha: float
    window: int = 5
    difference: str = "window"
    scale: str = "mean10"
    max_decays: int | None = None
    epochs: int = 0
    first_losses: list[float] = field(default_factory=list)
    recent: list[float] = field(default_factory=list)
    turning_points: int = 0

    def update(self, loss: float) -> bool:
        """Record the loss of the last epoch; True at a turning point."""
        self.epochs += 1
        if len(self.first_losses) < SCALE_EPOCHS:
            self.first_losses.append(loss)
        self.recent = [*self.recent, loss][-self.window :]
        if len(self.recent) < self.window or not self._is_flat():
            return False
        self.recent = []
        self.turning_points += 1
        if self.max_decays is None or self.turning_points <= self.max_decays:
            self.threshold *= self.alpha
        return True

    @property
    def loss_scale(self) -> float:
        """S, the scale of the losses."""
        return max(self.first_losses) if self.scale == "peak" else sum(self.first_losses) / len(self.first_losses)

    def _is_flat(self) -> bool:
        later = self.recent[1:] if self.difference == "consecutive" else [self.recent[-1]] * (self.window - 1)
        return all(
            abs(earlier - loss) / self.loss_scale <= self.threshold
            for earlier, loss in zip(self.recent[:-1], later, strict=True)
        )

    def state_dict(self) -> dict[str, Any]:
        """The state of the indicator as plain numbers."""
        names = ("threshold", "epochs", "first_losses", "recent", "turning_points")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for name, value in state.items():
            setattr(self, name, value)
