"""The choices of a network with gates and their cost, as plain numbers without tensors."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from bitcycle.hardware import Workload
from bitcycle.hardware.operation import FLOAT_PRECISION, Operation
from bitcycle.precision import Precision
from bitcycle.schedule import Dfq

Counts = Sequence[Sequence[int]]
"""Samples by block and option."""


class Block(NamedTuple):
    """A gated block.

    Attributes:
        name: its name in the model.
        module: the name of the original block in the gated model, the prefix of its operations.
        shortcut: the name of its shortcut module, if that has layers; otherwise empty.
        can_skip: whether its input, or the shortcut's output, can replace its output.
    """

    name: str
    module: str
    shortcut: str
    can_skip: bool


@dataclass(frozen=True)
class BlockCosts:
    """The cost term of DFQ, in units of the mean block weight.

    Attributes:
        table: cost of one sample by block and option: W_l c_k plus, unless skipped, depthwise convolutions at their own bits.
        reference: cost of one sample in float32, the denominator of cp.
    """

    table: tuple[tuple[float, ...], ...]
    reference: float

    def compute_percentage(self, counts: Counts) -> float | None:
        """cp of the counted samples; None if there are none."""
        samples = sum(counts[0])
        total = sum(n * cost for row, costs in zip(counts, self.table) for n, cost in zip(row, costs))
        return 100 * total / (samples * self.reference) if samples else None


@dataclass(frozen=True)
class Choices:
    """The gated blocks of a network and their options."""

    blocks: tuple[Block, ...]
    gates: Dfq

    @cached_property
    def precisions(self) -> tuple[Precision | None, ...]:
        """The bits of each option; None skips the block."""
        return self.gates.precisions

    def operations(self, counts: Counts) -> Iterator[tuple[str, Precision, int]]:
        """(module, precision, samples) for a cost meter, where the longest name decides; a skip costs a float shortcut."""
        for block, row in zip(self.blocks, counts):
            for precision, samples in zip(self.precisions, row):
                if precision is not None:
                    yield block.module, precision, samples
                if block.shortcut:
                    yield block.shortcut, FLOAT_PRECISION if precision is None else precision, samples

    def histograms(self, counts: Counts) -> dict[str, Counter[Precision]]:
        """The counts of `operations` by module."""
        histograms: defaultdict[str, Counter[Precision]] = defaultdict(Counter)
        for module, precision, samples in self.operations(counts):
            histograms[module][precision] += samples
        return histograms

    def shares(self, counts: Counts) -> dict[str, dict[str, float]]:
        """The share of the samples that chose each option: {block: {"0/0": 0.1, "2/6": 0.9, ...}}."""
        return {
            block.name: {word: round(n / max(sum(row), 1), 4) for word, n in zip(self.gates.words, row)}
            for block, row in zip(self.blocks, counts)
        }

    def costs(self, workload: Workload) -> BlockCosts:
        """Costs of the options.

            cost_lk = W_l c_k + D_l  (0 for a skip),    c_k = (a_k w + g_k w + a_k g_k) / 1024,    reference = 3 sum (W_l + F_l)

        with W_l = 1, D_l = F_l = 0 if blocks have equal weight; else W_l the multiply-accumulates of a sample at the chosen
        bits, F_l those of the depthwise convolutions and D_l the same at their fixed bits; all divided by the mean W_l.

        Source: FracTrain's released code, train_dfq.py; its denominator has D_l for 3 F_l.
        """
        weights, fixed, fixed_float = [], [], []
        for block in self.blocks:
            operations = _within(workload, block.module)
            weights.append(float(sum(o.macs for o in operations if o.fixed_precision is None)))
            depthwise = [o for o in operations if o.fixed_precision is not None and not o.is_float]
            fixed.append(sum(o.macs * _bits(o.fixed_precision) / 1024 for o in depthwise))
            fixed_float.append(3.0 * sum(o.macs for o in depthwise))
        if self.gates.facts.block_weight == "equal":
            weights, fixed, fixed_float = [1.0] * len(weights), [0.0] * len(fixed), [0.0] * len(fixed)
        mean = sum(weights) / len(weights)
        table = tuple(
            tuple(0.0 if p is None else (weight * _bits(p) / 1024 + constant) / mean for p in self.precisions)
            for weight, constant in zip(weights, fixed)
        )
        return BlockCosts(table, (3 * sum(weights) + sum(fixed_float)) / mean)

    def extremes(self, workload: Workload, samples: int) -> tuple[Counts, Counts]:
        """The choices with the fewest and the most bit operations, for a number of samples."""
        least: list[list[int]] = []
        most: list[list[int]] = []
        for block in self.blocks:
            costs = [
                (self._bit_operations(block, precision, workload), option)
                for option, precision in enumerate(self.precisions)
                if precision is not None or block.can_skip
            ]
            for chosen, counts in ((min(costs), least), (max(costs), most)):
                counts.append([samples * (option == chosen[1]) for option in range(len(self.precisions))])
        return least, most

    def _bit_operations(self, block: Block, precision: Precision | None, workload: Workload) -> int:
        if precision is None:
            skipped = _within(workload, block.shortcut) if block.shortcut else []
            return sum(o.macs * _bits(o.precision(FLOAT_PRECISION)) for o in skipped)
        return sum(o.macs * _bits(o.precision(precision)) for o in _within(workload, block.module))


class Tally:
    """Accumulates choices over a run, and returns those since a reader's last query."""

    def __init__(self, choices: Choices) -> None:
        self.totals = [[0] * len(choices.precisions) for _ in choices.blocks]
        self.read: dict[str, list[list[int]]] = {}

    def add(self, counts: Counts) -> None:
        """Count more samples."""
        self.totals = [[a + b for a, b in zip(*rows)] for rows in zip(self.totals, counts)]

    def since_last(self, reader: str) -> Counts:
        """The counts since the last query of `reader`, or all."""
        before = self.read.get(reader)
        self.read[reader] = [list(row) for row in self.totals]
        return self.totals if before is None else [[a - b for a, b in zip(*rows)] for rows in zip(self.totals, before)]

    def state_dict(self) -> dict[str, Any]:
        """The counts, for a checkpoint."""
        return {"totals": self.totals, "read": dict(self.read)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.totals, self.read = state["totals"], dict(state["read"])


def _within(workload: Workload, module: str) -> list[Operation]:
    return [o for o in workload.operations if o.module == module or o.module.startswith(f"{module}.")]


def _bits(precision: Precision | None) -> int:
    """Bit operations of the three products for each multiply-accumulate: w a + w g + a g."""
    assert precision is not None
    w, a, g = precision
    return w * a + w * g + a * g
