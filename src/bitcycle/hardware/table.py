"""The cost of a run as a text table: by layer group, by pass, in total, at static q_max, and the saving."""

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from bitcycle.hardware.base import CONVENTIONS, PASSES, Cost, HardwareOptions, LayerCost
from bitcycle.hardware.operation import Operation, Workload
from bitcycle.precision import Precision

MOST_GROUPS = 16
"""With more modules than this, layers are grouped by kind."""


@dataclass(frozen=True)
class Measure:
    """A cost in one unit: title, costs of the layers, total, and ratio to static q_max."""

    title: str
    layers: tuple[LayerCost, ...]
    total: float
    relative_to_static: float
    scale: float = 1.0

    def of(self, names: Container[str] | None = None, passes: Iterable[str] = PASSES) -> float:
        """Cost of the layers with these names, or of all, in the given passes."""
        layers = [layer for layer in self.layers if names is None or layer.name in names]
        return float(sum(getattr(layer, name) for layer in layers for name in passes)) * self.scale

    @property
    def static(self) -> str:
        """Total at static q_max; empty if no sample was counted, since the ratio is then undefined."""
        return f"{self.total / self.relative_to_static:.4g}" if self.relative_to_static else ""

    def cell(self, value: float) -> str:
        """A value with its share of the total."""
        return f"{value:.4g} ({value / self.total:.0%})" if self.total else f"{value:.4g}"


@dataclass(frozen=True)
class CostTable:
    """A table of text: `columns` are titles, `sections` groups of rows, `notes` the totals in words."""

    columns: list[str]
    sections: list[list[list[str]]]
    notes: list[str]


def cost_table(workload: Workload, hardware: HardwareOptions, cost: Cost, reference: Precision) -> CostTable:
    """Return the table of a cost computed by `hardware`; `hardware=all` shows the cost models side by side."""
    measures = list(_measures(cost))
    static = "/".join(map(str, reference))
    macs = Counter({operation.name: operation.macs for operation in workload.operations})
    rows = [
        [title, str(len(names)), bits, f"{sum(macs[name] for name in names) / workload.samples / 1e6:.2f}"]
        + [measure.cell(measure.of(names)) for measure in measures]
        for (title, bits), names in _groups(workload, hardware, cost).items()
    ]
    passes = [[name.replace("_", " "), "", "", "", *(m.cell(m.of(passes=[name])) for m in measures)] for name in PASSES]
    total = ["total", str(len(workload.operations)), "", f"{workload.macs / workload.samples / 1e6:.2f}"]
    sums = [
        total + [f"{m.total:.4g}" for m in measures],
        [f"static {static}", "", "", "", *(m.static for m in measures)],
        ["saved", "", "", "", *(f"{100 * (1 - m.relative_to_static):.1f} %" for m in measures)],
    ]
    columns = ["layers", "count", "bits", "MMACs", *(measure.title for measure in measures)]
    return CostTable(columns, [rows, passes, sums], [_counting(hardware), *_notes(cost, static)])


def saving(relative: float, static: str) -> str:
    """Describe a cost relative to static q_max in words."""
    if relative <= 1:
        return f"{100 * (1 - relative):.1f} % less than static {static} bits"
    return f"{relative:.2f} times static {static} bits"


def _measures(cost: Cost) -> Iterable[Measure]:
    yield Measure("GBitOps", cost.layers, cost.gbitops, cost.relative_to_static, 1e-9)
    for name, part in (cost.by_hardware or {"": cost}).items():
        if part.energy_j is not None and part.energy_relative_to_static is not None:
            yield Measure(f"{name} J".strip(), part.energy_layers, part.energy_j, part.energy_relative_to_static)
        if part.latency_s is not None and part.latency_relative_to_static is not None:
            yield Measure(f"{name} s".strip(), part.latency_layers, part.latency_s, part.latency_relative_to_static)


def _groups(workload: Workload, hardware: HardwareOptions, cost: Cost) -> dict[tuple[str, str], list[str]]:
    """Rows of the table: part of the network and its bits -> names of layers."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for title, operation in _titled(workload.operations):
        groups[title, _bits(operation, hardware)].append(operation.name)
    known = {operation.name for operation in workload.operations}
    for layer in cost.layers:
        if layer.name not in known:
            groups[layer.name, "schedule"].append(layer.name)
    return groups


def _titled(operations: tuple[Operation, ...]) -> list[tuple[str, Operation]]:
    """Title of each operation: first name component that is not common to all, or its kind if there are too many."""
    paths = [operation.module.split(".") for operation in operations]
    common = 0
    while len({tuple(path[: common + 1]) for path in paths}) == 1 and all(len(path) > common + 1 for path in paths):
        common += 1
    titles = [path[common] for path in paths]
    if len(set(titles)) > MOST_GROUPS:
        titles = [operation.kind for operation in operations]
    return list(zip(titles, operations))


def _bits(operation: Operation, hardware: HardwareOptions) -> str:
    if operation.is_float:
        charged = hardware.precision_of(operation, Precision(1, 1, 1)) == Precision(1, 1, 1)
        return "32, as schedule" if charged else "32"
    return "schedule" if operation.fixed_precision is None else "/".join(map(str, operation.fixed_precision))


def _counting(hardware: HardwareOptions) -> str:
    rules = ", ".join(f"{rule}={hardware.rule(rule)}" for rule in CONVENTIONS[hardware.convention])
    return f"counted as {hardware.convention}: {rules}"


def _notes(cost: Cost, static: str) -> Iterable[str]:
    less = saving(cost.relative_to_static, static)
    yield f"{cost.gbitops:.4g} GBitOps = {cost.effective_macs:.4g} effective MACs; {less}"
    for name, part in (cost.by_hardware or {"": cost}).items():
        prefix = f"{name}: " if name else ""
        if part.energy_j is not None and part.energy_relative_to_static is not None:
            less = saving(part.energy_relative_to_static, static)
            yield f"{prefix}energy {part.energy_j:.4g} J{_parts(part.energy_parts)}; {less}"
        if part.latency_s is not None and part.latency_relative_to_static is not None:
            less = saving(part.latency_relative_to_static, static)
            yield f"{prefix}latency {part.latency_s:.4g} s = {part.latency_s / 3600:.4g} h{_parts(part.latency_parts)}; {less}"
        if part.average_power_w is not None:
            yield f"{prefix}average power {part.average_power_w:.3g} W, {part.dram_bits:.4g} bits of external memory"


def _parts(parts: Mapping[str, float]) -> str:
    total = sum(parts.values())
    return f" ({', '.join(f'{name} {value / total:.0%}' for name, value in parts.items())})" if total else ""
