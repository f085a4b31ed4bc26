"""The controller's interface to the gates of a model: sets their target; counts, logs and saves their choices."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from bitcycle.hardware import CostMeter, Workload
from bitcycle.layer.choices import BlockCosts, Tally
from bitcycle.layer.gate import Gates
from bitcycle.layer.twin import modules_of


class GateRecord:
    """Records the choices of gates; for a model without gates all values are empty."""

    def __init__(self, model: nn.Module) -> None:
        self.gates: Sequence[Gates] = modules_of(model, Gates)
        self.tallies = [Tally(gates.choices) for gates in self.gates]
        self.costs: list[BlockCosts] = []
        self.target: float | None = None

    def set_workload(self, workload: Workload) -> None:
        """Set the products of the model, which determine the cost of each option."""
        self.costs = [gates.choices.costs(workload) for gates in self.gates]
        for gates, costs in zip(self.gates, self.costs):
            gates.set_costs(costs)

    def begin_step(self, target: float | None) -> None:
        """Activate the gates with a target cost of `target` percent of float32 (None: no target)."""
        self.target = target
        self.choose(True)
        for gates in self.gates:
            gates.target.fill_(100.0 if target is None else target)

    def choose(self, active: bool) -> None:
        """Let the gates choose, or use the bits of the model's other layers in all blocks."""
        for gates in self.gates:
            gates.active = active

    def count_choices(self, counting: bool) -> None:
        """Set whether choices in training mode are counted."""
        for gates in self.gates:
            gates.counting = counting

    def count(self, meter: CostMeter) -> None:
        """Fetch and count the choices since the last call; synchronises with the device."""
        for gates, tally in zip(self.gates, self.tallies):
            counts = gates.take()
            tally.add(counts)
            for operation, precision, samples in gates.choices.operations(counts):
                meter.add(precision, samples, operation)

    def training_values(self) -> dict[str, Any]:
        """Values to log with the training loss: `cp` of the steps since the last call, and its target."""
        values: dict[str, Any] = {}
        for tally, costs in zip(self.tallies, self.costs):
            values |= {"cp": costs.compute_percentage(tally.since_last("training")), "cp_target": self.target}
        return values

    def evaluation_values(self) -> dict[str, Any]:
        """Values to log with an evaluation: the shares of options chosen by training samples since the last call."""
        values: dict[str, Any] = {}
        for gates, tally in zip(self.gates, self.tallies):
            values["allocation"] = gates.choices.shares(tally.since_last("evaluation"))
        return values

    def summary(self) -> dict[str, Any]:
        """The mean cp and the shares of the options over the whole run."""
        values: dict[str, Any] = {}
        for gates, tally, costs in zip(self.gates, self.tallies, self.costs):
            percentage = costs.compute_percentage(tally.totals)
            values["gates"] = {"mean_cp": percentage, "allocation": gates.choices.shares(tally.totals)}
        return values

    def state_dict(self) -> dict[str, Any]:
        """The counts, for a checkpoint."""
        return {"tallies": [tally.state_dict() for tally in self.tallies]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for tally, saved in zip(self.tallies, state["tallies"]):
            tally.load_state_dict(saved)
