"""Derivation of each cost number of the papers from networks, schedules and cost models; see `published_costs.py`."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor, nn

from bitcycle.hardware import (
    FLOAT_PRECISION,
    HARDWARE,
    PUBLISHED_IMAGES,
    BitOps,
    Cost,
    HardwareOptions,
    Workload,
    trace,
)
from bitcycle.layer import quantize_model
from bitcycle.model import MODELS
from bitcycle.precision import Precision
from bitcycle.schedule import Schedule, schedule
from bitcycle.shapes import ImageShape

STEPS, BATCH = 64_000, 128
EIGHT = Precision(8, 8, 8)
MORE_THAN = float("inf")
"""Tolerance of a number printed as a lower bound."""
READ = "~"
"""Relation of a number read from a figure."""


@dataclass(frozen=True)
class Number:
    """A published number; `schedule` and `relation` as in the CSV files."""

    paper: str
    table: str
    model: str
    dataset: str
    method: str
    fw: str
    bw: str
    metric: str
    published: float
    note: str = ""
    schedule: str = ""
    relation: str = "="


@dataclass(frozen=True)
class Derived:
    """Our value of a number, its relative tolerance, and a note."""

    ours: float
    tolerance: float
    note: str = ""


Book = list[Number]
"""All numbers of all papers."""

Derivation = Callable[[Number, Book], Derived | str]
"""Our value of a number, or the reason why it cannot be derived."""


class LanguageModel(nn.Module):
    """The network of Better Schedules' PTB experiments: one LSTM of 800 units and a decoder to 10,000 words."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.decoder = nn.LSTM(800, 800), nn.Linear(800, 10_000)

    def forward(self, embedded: Tensor) -> Tensor:
        return self.decoder(self.lstm(embedded)[0])  # type: ignore[no-any-return]


@cache
def language_model() -> Workload:
    """A mini-batch of 20 streams and 35 words, as one sample."""
    return trace(LanguageModel(), torch.zeros(35, 20, 800), samples=1)


@cache
def network(model: str, dataset: str) -> Workload:
    """An image classifier for ImageNet or, with 10 classes, for CIFAR: the papers print one cost for both datasets."""
    name = "mobilenet_v2" if model == "MobileNetV2" else model.lower().replace("-", "")
    if dataset == "ImageNet":
        import torchvision  # takes seconds to import

        return trace(getattr(torchvision.models, name)(weights=None), torch.zeros(1, 3, 224, 224))
    float_network = MODELS[name]().build(ImageShape(3, 32, 10))
    return trace(quantize_model(float_network, "sbm"), torch.zeros(1, 3, 32, 32))


@cache
def cpt_schedule(fw: str, bw: str) -> Schedule:
    """Static precision ("8") or CPT's cosine ("3-8"), with constant gradient bits."""
    low, _, high = fw.partition("-")
    if not high:
        return schedule("static", q_max=int(low), gradient=int(bw), total_steps=STEPS)
    bits = {"q_min": int(low), "q_max": int(high), "gradient_min": int(bw), "gradient_max": int(bw)}
    return schedule("CR", **bits, cycles=32, total_steps=STEPS, period_rounding="floor")


def cost_of(hardware: HardwareOptions, work: Workload, bound: Schedule, samples_per_step: int = BATCH) -> Cost:
    """The cost of a whole run with a schedule."""
    histogram = {precision: steps * samples_per_step for precision, steps in bound.histogram.items()}
    return hardware.cost(work, histogram, bound.reference)


# CPT


@cache
def cpt_cost(hardware: str, model: str, dataset: str, fw: str, bw: str) -> Cost:
    """The cost of a run of CPT."""
    return cost_of(HARDWARE[hardware](convention="cpt"), network(model, dataset), cpt_schedule(fw, bw))


def cpt(number: Number, book: Book) -> Derived | str:
    """Tables 2 and 3 and figure 5."""
    run = number.model, number.dataset.replace("CIFAR-100", "CIFAR-10/100"), number.fw, number.bw
    mobile = number.model == "MobileNetV2"
    if number.metric == "gbitops_saving_pct":
        return Derived(cpt_cost("bitops", *run).saving_percent, 0.03)
    if number.metric == "gbitops":
        gbitops = cpt_cost("bitops", *run).gbitops
        return Derived(gbitops, 0.022, "read to about 1 %") if number.relation == READ else Derived(gbitops, 0.012)
    cost = cpt_cost("zc706", *run)
    assert cost.latency_s is not None and cost.latency_relative_to_static is not None
    if number.metric == "latency_saving_pct":
        return Derived(100 * (1 - cost.latency_relative_to_static), 0.3 if mobile else 0.05)
    return Derived(cost.latency_s / 3600, 0.08 if mobile else 0.03)


def cpt_text(number: Number, book: Book) -> Derived | str:
    """The saving stated in section 3.2."""
    cost = cpt_cost("bitops", number.model, "CIFAR-10/100", number.fw, number.bw)
    return Derived(cost.saving_percent, 0.01, "table 2 prints 37.1 for it, from rounded costs")


def cpt_language(number: Number, book: Book) -> Derived | str:
    """Table 5: ratios only."""
    if number.metric == "gbitops":
        return "7.5e12 (Transformer) and 2.1e10 (LSTM) forward MACs are implied, which no stated size and length gives"
    bound = cpt_schedule(number.fw, number.bw)
    cost = cost_of(BitOps(convention="cpt"), language_model(), bound)
    if number.metric == "gbitops_saving_pct":
        unexplained = "unexplained: the formula fits all other rows" if number.fw == "4-6" else ""
        return Derived(cost.saving_percent, 0.03, unexplained)
    at_8 = cost_of(BitOps(convention="cpt"), language_model(), cpt_schedule("8", "8"))
    return Derived(cost.gbitops / at_8.gbitops, 0.01, "of two printed costs")


# Better Schedules

PTB_STEPS = 1327 * 40
PTB_ELEMENTWISE = 15_200_000
"""Elementwise operations of a PTB mini-batch that the released code counts in addition to products."""

BETTER_SCHEDULES = {
    "static": ("static", 5, 2, PTB_STEPS),
    "Large group (RR, RTH)": ("RR", 5, 2, PTB_STEPS),
    "CR": ("CR", 5, 2, PTB_STEPS),
    "Medium group": ("CR", 5, 2, 6136 * 2),
    "ETV": ("ETV", 5, 8, 1430 * 120),
}
"""Schedule as printed -> name, q_min, cycles and steps of the experiment."""


def better(number: Number, book: Book) -> Derived | str:
    """Numbers in the text on PTB, XNLI, VOC and OGBN-Products; relative costs do not depend on the network."""
    name, q_min, cycles, steps = BETTER_SCHEDULES[number.schedule]
    if number.dataset == "OGBN-Products":
        name, q_min, cycles, steps = "RR", 3, 8, 193 * 80
    bound = schedule(name, q_min=q_min, q_max=8, cycles=cycles, total_steps=steps)
    cost = cost_of(BitOps(convention="better"), language_model(), bound, samples_per_step=1)
    if number.metric == "bitops_saving_pct":
        return Derived(cost.saving_percent, 0.1, "a round number in the text")
    if number.metric == "bitops_saving_factor":
        return Derived(1 / cost.relative_to_static, MORE_THAN, "printed as more than 2")
    scale = 1 + PTB_ELEMENTWISE / language_model().macs
    return Derived(cost.effective_macs * scale / 1e13, 0.03, "printed as GBitOps; the unit is 1e13 operations")


# FracTrain

STATIC_METHODS = ("WAGEUBN", "DoReFa", "SBM")
COMPUTE_PERCENTAGE = {"DFQ": 3.0, "FracTrain": statistics.mean((1.5, 2, 2.5, 3))}
"""Of a whole run (table 3; the mean of its stages, appendix G)."""


def bit_mix(percentage: float) -> dict[Precision, int]:
    """Assumed bits of a network with unpublished learned bits, from its compute percentage.

    Weights of 4 bits; activations and gradients between two of the paper's options, mixed to give `percentage`.
    """
    options = [Precision(4, a, g) for a, g in ((3, 6), (4, 6), (4, 8), (6, 8))]
    costs = [100 * (w * a + w * g + a * g) / 3072 for w, a, g in options]
    upper = next(index for index, cost in enumerate(costs) if cost >= percentage)
    share = (percentage - costs[upper - 1]) / (costs[upper] - costs[upper - 1])
    samples = round(share * PUBLISHED_IMAGES)
    return {options[upper - 1]: PUBLISHED_IMAGES - samples, options[upper]: samples}


@cache
def full_run(hardware: str, model: str, method: str) -> Cost:
    """The cost of a whole run."""
    static = {EIGHT: PUBLISHED_IMAGES}
    histogram = static if method in STATIC_METHODS else bit_mix(COMPUTE_PERCENTAGE[method])
    return HARDWARE[hardware](convention="fractrain").cost(network(model, "CIFAR-10"), histogram, EIGHT)


@cache
def full_macs(model: str, dataset: str, method: str = "SBM", percentage: float | None = None, bw: int = 8) -> float:
    """Effective MACs of a whole run, at 8 bits forward and `bw` backward, or at a compute percentage."""
    percentage = COMPUTE_PERCENTAGE.get(method, percentage)
    precision = Precision(8, 8, bw) if percentage is None else FLOAT_PRECISION
    options = BitOps(convention="fractrain")
    macs = options.cost(network(model, dataset), {precision: PUBLISHED_IMAGES}, EIGHT).effective_macs
    return macs if percentage is None else macs * percentage / 100


def fraction(number: Number, method: str, book: Book) -> float:
    """The fraction of the run counted in a row of table 3, up to the best accuracy, from its printed MACs."""
    macs = table3(number, method, "effective_macs", book).published
    return macs / full_macs(number.model, number.dataset, method)


def table3(number: Number, method: str, metric: str, book: Book) -> Number:
    """The number of another method or metric in the block of `number`."""
    wanted = ("FracTrain", "3", number.model, number.dataset, method, metric)
    return next(n for n in book if (n.paper, n.table, n.model, n.dataset, n.method, n.metric) == wanted)


def to_best(number: Number, hardware: str, quantity: str, method: str, book: Book) -> float:
    """Joules or seconds of a method up to its best accuracy."""
    value: float = getattr(full_run(hardware, number.model, method), quantity)
    return value * fraction(number, method, book)


def fractrain_table3(number: Number, book: Book) -> Derived | str:
    """Energy and latency follow from the printed MACs, which depend on the step of the best accuracy."""
    if number.metric == "effective_macs":
        return _fractrain_macs(number, book)
    if number.metric == "computation_saving_pct":
        return "follows from the MACs, whose best iterations are not printed"
    quantity = "energy_j" if number.metric.startswith("energy") else "latency_s"
    if number.metric.endswith("saving_pct"):
        tolerance = 0.2 if quantity == "energy_j" else 0.25
        return Derived(100 * (1 - _fractrain_ratio(number, "bitfusion", quantity, book)), tolerance, number.note)
    value = to_best(number, "bitfusion", quantity, number.method, book) / (1e3 if quantity == "energy_j" else 60)
    inconsistent = (number.model, number.dataset, number.method) == ("ResNet-38", "CIFAR-100", "DoReFa")
    note = f"{fraction(number, number.method, book):.3f} of a run, by its MACs"
    note = "its MACs contradict its energy and latency, which imply 8.9e13" if inconsistent else note
    return Derived(value, 0.04 if number.method in STATIC_METHODS else 0.08, note)


def _fractrain_macs(number: Number, book: Book) -> Derived | str:
    whole = full_macs(number.model, number.dataset, number.method)
    if (number.model, number.dataset, number.method) == ("ResNet-74", "CIFAR-10", "SBM"):
        return Derived(whole, 0.01, "a whole run: its best accuracy came last")
    return f"cost up to the best iteration, which is not printed; a whole run costs {whole:.3g}"


def _fractrain_ratio(number: Number, hardware: str, quantity: str, book: Book) -> float:
    """FracTrain relative to SBM, or to the cheapest or most expensive static method if a range is printed."""
    ours = to_best(number, hardware, quantity, "FracTrain", book)
    methods = STATIC_METHODS if number.relation.startswith("range") else ("SBM",)
    static = [to_best(number, hardware, quantity, method, book) for method in methods]
    return ours / (max(static) if number.relation == "range_max" else min(static))


def fractrain_fpga(number: Number, book: Book) -> Derived | str:
    """Section 4.6; the rows of table 3 for CIFAR-100 on the board."""
    saved = 100 * (1 - _fractrain_ratio(number, "zc706", "latency_s", book))
    if number.metric == "latency_saving_pct":
        return Derived(saved, 0.1)
    return f"the board's power is not printed; were it constant, the saving would be that of latency, {saved:.1f} %"


def fractrain_table4(number: Number, book: Book) -> Derived | str:
    """ImageNet: only a run at a mean compute percentage can be derived."""
    if number.metric == "effective_macs" and number.method == "FracTrain":
        mean = statistics.mean((3, 3.5, 4, 4.5))
        return Derived(
            full_macs(number.model, number.dataset, percentage=mean), 0.08, "a whole run at the mean cp, 3.75 %"
        )
    if number.metric == "effective_macs":
        return _unknown_best(number, int(number.bw))
    return "follows from the MACs, whose best iterations are not printed"


def fractrain_table2(number: Number, book: Book) -> Derived | str:
    """PFQ on ImageNet and WikiText-103."""
    if number.dataset != "ImageNet":
        return "9e14 forward MACs are implied, which no stated size and length gives; PFQ's switches are not printed"
    return _unknown_best(number, 16) if number.method == "SBM" else "the epochs of PFQ's switches are not printed"


def fractrain_table5(number: Number, book: Book) -> Derived | str:
    """Adaptation and fine-tuning."""
    return _unknown_best(number, 8) if number.method == "SBM" else "the best iteration is not printed"


def _unknown_best(number: Number, bw: int) -> str:
    dataset = "ImageNet" if number.dataset == "ImageNet" else "CIFAR-100"
    return f"the best iteration is not printed; a whole run costs {full_macs(number.model, dataset, bw=bw):.3g}"


def because(reason: str) -> Derivation:
    """The derivation of numbers that cannot be derived, for a reason."""
    return lambda number, book: reason


SWITCHES = "the epochs of PFQ's switches and the best iteration are not printed"
DERIVATIONS: dict[str, Derivation] = {
    "cpt/table2": cpt,
    "cpt/table3": cpt,
    "cpt/fig5": cpt,
    "cpt/fig1": cpt_text,
    "cpt/table5": cpt_language,
    "cpt/fig7": because("the precision ranges are lost with the figure"),
    "better/fig4": better,
    "better/fig6": better,
    "better/fig7": better,
    "fractrain/table1": because(SWITCHES),
    "fractrain/table2": fractrain_table2,
    "fractrain/table3": fractrain_table3,
    "fractrain/table4": fractrain_table4,
    "fractrain/table5": fractrain_table5,
    "fractrain/table6": because("the gates' choices and the best iteration are not printed"),
    "fractrain/fig1": because(SWITCHES),
    "fractrain/fig3": because("the best iteration, and the epochs of PFQ's switches, are not printed"),
    "fractrain/fig5": because(
        "the best iteration, the gates' choices and the bits of the static points are not printed"
    ),
    "fractrain/fig7": because(SWITCHES),
    "fractrain/fig8": because("follows from the MACs of table 3, whose best iterations are not printed"),
    "fractrain/sec4.6-fpga": fractrain_fpga,
}
"""Table, figure or section of a paper -> the derivation of its numbers."""


def recomputed(book: Book) -> Book:
    """Numbers that follow from two printed numbers, and are comparable even if these are not."""
    found = []
    for n in book:
        if n.table == "5" and n.paper == "CPT" and (n.fw, n.method, n.metric) == ("6", "SBM", "gbitops"):
            at_8 = next(o for o in book if (o.table, o.model, o.fw, o.method) == ("5", n.model, "8", "SBM"))
            found.append(replace(n, metric="gbitops_ratio_to_fw8bw8", published=n.published / at_8.published))
        if n.table == "3" and n.method == "FracTrain" and n.metric in ("energy_kJ", "latency_min"):
            against = table3(n, "SBM", n.metric, book).published
            metric = f"{n.metric.partition('_')[0]}_saving_pct"
            saved = round(100 * (1 - n.published / against), 1)
            found.append(
                replace(n, method="FracTrain vs SBM", metric=metric, published=saved, note="of two printed costs")
            )
    return found
