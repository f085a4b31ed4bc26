"""Names of networks, datasets, methods and precisions as the papers print them."""

import re
from functools import cache

from bitcycle.precision import FLOAT
from bitcycle.presets import Presets
from bitcycle.reproduction.analysis.cells import PARTS, Cell
from bitcycle.settings import Settings

IMAGES = {"cifar10": 10, "cifar10_16": 10, "cifar100": 100, "digits": 10, "imagenet": 1000}
"""Number of classes of the image datasets, all balanced."""
SAVINGS_GROUPS = {"Large": ("RR", "RTH"), "Medium": ("LR", "LT", "CR", "CT", "RTV", "ETV"), "Small": ("ER", "ETH")}
"""Groups by savings (Better Schedules, section 3.2)."""
STAGED = ("pfq", "pfq_manual")
"""Schedules with stages of increasing precision."""
GATED = ("dfq", "fractrain")
"""Schedules whose bits are chosen by gates."""
PHASED = ("hlhlp", "fine_tuning", "hlhlhlp")
"""Schedules whose phases have fixed bits of the weights."""


@cache
def label_of(group: str, name: object) -> str:
    """The papers' name of a model, dataset, schedule or quantizer: `label` in its file.

    >>> label_of("model", "resnet74"), label_of("model", "resnet20_extra_skip"), label_of("model", "other")
    ('ResNet-74', 'ResNet-20', 'other')
    """
    presets: Presets[Settings] = Presets(group)
    return presets[name].label if isinstance(name, str) and name in presets else str(name)


def our_model(cell: Cell) -> str:
    """The network of our runs, with its size if that is a setting."""
    label, hidden = label_of("model", cell.actual("model")), cell.actual("model.hidden")
    if cell.actual("model") == "transformer":
        return f"{label} with {cell.actual('model.layers')} layers of width {cell.actual('model.width')}"
    return label if hidden is None else f"{re.sub(r' [0-9]+$', '', label)} with {hidden} hidden units"


def our_data(cell: Cell) -> str:
    """The data of our runs, with part, vocabulary size and number of samples if these are settings, and the remark on them."""
    name, vocabulary, samples = map(cell.actual, ("dataset", "dataset.vocabulary", "dataset.train_samples"))
    kind = "images" if name in IMAGES else "pieces of 35 words" if vocabulary and name != "sick" else "samples"
    words = [label_of("dataset", name), *filter(None, [PARTS.get(cell.actual("dataset.part"))])]
    words += [f"vocabulary of {vocabulary:,}"] if vocabulary else []
    words += [f"{samples:,} {kind}"] if samples else []
    return ", ".join([*words, cell.remark] if cell.remark else words)


def proxy_label(cell: Cell) -> str:
    """NETWORK, DATA[, vocabulary of N][, N images] of a cell whose runs are a proxy, and how many samples are left for training
    if some are held out for validation; empty for runs at the paper's setting."""
    run = cell.runs[0]
    if run.row["scale"] == "paper" and not cell.is_proxy:
        return ""
    samples = run.number("train_samples") if cell.actual("dataset.validation") else None
    return f"{our_model(cell)}, {our_data(cell)}" + (f" ({int(samples):,} for training)" if samples else "")


def model_of(cell: Cell) -> str:
    """The paper's name of a cell's network."""
    return label_of("model", cell.setting("model"))


def dataset_of(cell: Cell) -> str:
    """The paper's name of a cell's data."""
    return label_of("dataset", cell.setting("dataset"))


def panel_of(cell: Cell) -> str:
    """Network and data, with the aggregation of graph networks."""
    return ", ".join(filter(None, (model_of(cell), dataset_of(cell), aggregation_of(cell))))


def aggregation_of(cell: Cell) -> str:
    """FP-Agg or Q-Agg for graph networks, otherwise empty."""
    if model_of(cell).split()[0] not in ("GCN", "GraphSAGE"):
        return ""
    return "Q-Agg" if cell.setting("model.aggregation") == "quantized" else "FP-Agg"


def schedule_of(cell: Cell) -> str:
    """The name of its schedule."""
    return str(cell.setting("schedule", "static"))


def is_float(cell: Cell) -> bool:
    """Whether nothing is quantized."""
    if schedule_of(cell) == "partial_pretrain" and float(cell.setting("schedule.split") or 0) == 1:
        return True
    static = schedule_of(cell) == "static"
    return cell.setting("quantizer", "sbm") == "none" or (static and (cell.setting("schedule.q_max") or 0) >= FLOAT)


def savings_group(name: str) -> str:
    """The savings group of a schedule of the suite; empty for others."""
    return next((group for group, members in SAVINGS_GROUPS.items() if name in members), "")


def forward_bits(cell: Cell) -> str:
    """Bits of weights and activations as printed: 8, 3-8, 3,4,6,8, or "dynamic" if the network chooses them."""
    schedule, low, high = schedule_of(cell), cell.setting("schedule.q_min"), cell.setting("schedule.q_max")
    if is_float(cell):
        return str(FLOAT)
    if schedule in STAGED:
        return ",".join(map(str, cell.setting("schedule.stages")))
    if schedule in GATED:
        return "dynamic"
    if schedule in PHASED:
        return str(phase_bits(cell)[-1])
    if schedule == "range_test":
        return f"{low}-{int(high) - 1}"  # q_max is what it finds if no precision that it tests is enough
    if schedule == "static" or low == high:
        return str(high)
    return f"{low}-{high}"


def backward_bits(cell: Cell) -> str:
    """Bits of gradients as printed."""
    schedule, high = schedule_of(cell), cell.setting("schedule.q_max")
    if schedule in STAGED:
        return ",".join(map(str, cell.setting("schedule.gradient_stages")))
    if schedule in GATED:
        return "dynamic"
    if schedule in ("static", "range_test"):
        return str(cell.setting("schedule.gradient") or (FLOAT if is_float(cell) else high))
    low, top = (cell.setting(f"schedule.gradient_{end}") for end in ("min", "max"))
    low = high if low is None else low
    top = max(int(high or 0), int(low or 0)) if top is None else top
    return str(top) if low == top else f"{low}-{top}"


NAMED_LEVELS = {"ternary": "ternary", "uniform_l2": "ternary", "ttq": "ternary", "multibit": "4-level"}
"""Weight quantizers that have three or four levels at 2 bits."""


def phase_bits(cell: Cell) -> list[int]:
    """Bits of the weights in each phase."""
    return [int(bits) for bits in cell.setting("schedule.bits") or [FLOAT]]


def phase_method(cell: Cell) -> str:
    """float, fine-tuning or HLHLp."""
    if is_float(cell):
        return "float"
    return "fine-tuning" if schedule_of(cell) == "fine_tuning" or phase_bits(cell) == [FLOAT, 2] else "HLHLp"


def split_of(cell: Cell) -> float:
    """Fraction of the run in full precision."""
    if schedule_of(cell) != "partial_pretrain":
        return float(is_float(cell))
    return float(cell.setting("schedule.split") or 0)


def precision_of(cell: Cell) -> str:
    """full, partial or low: whether all, part or none of the run is in full precision."""
    return {0.0: "low", 1.0: "full"}.get(split_of(cell), "partial")


def window_of(cell: Cell) -> tuple[float, float]:
    """Start and end of the low-precision window, in the unit of the sweep: epochs, steps or fractions."""
    if schedule_of(cell) != "deficit":
        return 0.0, 0.0
    return float(cell.setting("schedule.start") or 0), float(cell.setting("schedule.end"))


def highest_bits(bits: str) -> int:
    """The highest precision in a printed one.

    >>> highest_bits("3-8"), highest_bits("6,6,8,12"), highest_bits("dynamic")
    (8, 12, 8)
    """
    numbers = [int(number) for number in re.findall(r"\d+", bits)]
    return max(numbers, default=8)


def method_of(cell: Cell) -> str:
    """The method, as CPT and FracTrain call it."""
    if is_float(cell):
        return "Full Precision"
    if schedule_of(cell) != "static":
        return label_of("schedule", schedule_of(cell))
    name = label_of("quantizer", cell.setting("quantizer", "sbm"))
    return f"{name}+CLR" if cell.setting("training.learning_rate.name") == "cyclic" else name


def cpt_method(cell: Cell) -> str:
    """The method, as CPT calls it."""
    if schedule_of(cell) == "pfq_manual":
        changing = len(cell.setting("schedule.boundaries") or []) > 2
        return "progressive precision" if changing else "static first-stage precision"
    return "CPT on gradients only" if schedule_of(cell) == "gradient_cycle" else method_of(cell)


def cpt_method_bits(cell: Cell) -> str:
    """The same with the bits."""
    method = cpt_method(cell)
    return f"{method} {'3 to 8' if method == 'progressive precision' else forward_bits(cell)} bits"


def stages_method(cell: Cell) -> str:
    """The method, as FracTrain calls it in figure 7: Manual-PFQ four-stage, Auto-PFQ two-stage, ..."""
    method = method_of(cell)
    if method not in ("PFQ", "Manual-PFQ"):
        return method
    stages = len(cell.setting("schedule.stages"))
    number = {2: "two-stage", 4: "four-stage"}.get(stages, f"{stages} stages")
    return f"{'Auto' if method == 'PFQ' else 'Manual'}-PFQ {number}"


def partial_method(cell: Cell) -> str:
    """The method, as partial pre-training calls it."""
    return {"full": "full precision", "partial": "partial pre-training"}.get(precision_of(cell), "low precision")


def window_edge(cell: Cell) -> tuple[str, float]:
    """The edge that locates a low-precision window in figure 8 of Better Schedules, and its position."""
    start, end = window_of(cell)
    return ("later window, by its beginning", start) if start else ("initial window, by its end", end)
