"""The controlled experiments of results/notes/verdicts.md: one setting is changed, and results are paired by seed."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bitcycle.files import markdown_table, read_csv
from bitcycle.reproduction.analysis.cells import read_runs
from bitcycle.reproduction.analysis.collect import SUMMARY
from bitcycle.reproduction.analysis.metrics import reading

ROOT = Path(__file__).parent.parent

Settings = Mapping[str, Any]
RECIPE: Mapping[str, Any] = {"steps": 1000, "evaluation_steps": 500, "learning_rate": {"name": "piecewise"}}
IMAGES: Settings = {
    "dataset": {"name": "cifar10_16", "part": "all", "train_samples": 640, "test_samples": None},
    "model": {"name": "resnet8"},
    "training": RECIPE,
}
WORDS: Settings = {"dataset": {"name": "wikitext2_small", "vocabulary": 2000, "train_samples": 3000}}
GRU: Settings = {"dataset": {"vocabulary": 2000}, "model": {"name": "gru_hlhlp"}, "training": {"steps": 2000}}
THREE_LEVELS: Mapping[str, Any] = {"name": "uniform_l2", "activation_levels": "unit"}
FIRST_PHASE: Settings = {"metric": "phase: 1"}
"""No setting: the arm's result is that at the end of the first phase."""
BEST: Settings = {"metric": "best"}
"""No setting: the results of all arms are their best evaluations, as the papers report them."""
FLOAT: Settings = {"quantizer": {"name": "none"}, "schedule": {"name": "static"}}
SBM: Settings = {"quantizer": {"name": "sbm"}}


def _schedule(name: str, **options: Any) -> Settings:
    return {"schedule": {"name": name, **options}}


WITHOUT_SKIPPING = [[2, 6], [3, 6], [4, 6], [4, 12], [6, 8], [6, 12]]
DFQ = _schedule("dfq", target=3.0, backward="chosen", options="paper", weight_bits=None)


def _fixed_stages(bits: Sequence[int]) -> Settings:
    gradients, boundaries = [6, 8, 12, 16], [0.1, 0.2, 0.3]
    return _schedule("pfq_manual", stages=bits, gradient_stages=gradients, boundaries=boundaries)


STATIC_8 = _schedule("static", q_max=8, gradient=None)
PFQ = _schedule("pfq", stages=[3, 4, 6, 8], gradient_stages=[6, 6, 8, 8], epsilon=0.05, alpha=0.3)
TO_STATIC = ("ResNet-8", "accuracy", "difference to static 8 bits")
EXPERIMENTS: dict[str, tuple[Sequence[str], Settings, dict[str, Settings]]] = {
    **{
        f"PFQ {steps:,}": (
            TO_STATIC,
            IMAGES | SBM | {"training": {**RECIPE, "steps": steps}},
            {f"static 8 bits, {steps:,} steps": STATIC_8, f"PFQ, {steps:,} steps": PFQ},
        )
        for steps in (1000, 2000)
    },
    "activations": (
        ("GRU", "perplexity", "difference to float"),
        GRU,
        {
            "float": FLOAT,
            "2-bit weights, 2-bit activations": _schedule("hlhlp", bits=[32, 2, 8, 2], activation_bits=[32, 2, 8, 2]),
            "2-bit weights, 32-bit activations": _schedule("hlhlp", activation_bits=[32] * 4),
        },
    ),
    **{
        f"GRU, {words}": (
            (f"GRU, {words}", "perplexity", "difference to its float phase"),
            {
                "dataset": {"vocabulary": 2000},
                "model": {"name": "gru_hlhlp", "hidden": cells},
                "quantizer": quantizer,
                "training": {"steps": 5600},
                **_schedule("hlhlp", bits=bits),
            },
            {"float, the first phase": FIRST_PHASE, "2 bits, after four phases": {}},
        )
        for words, cells, quantizer, bits in (
            ("100 cells", 100, THREE_LEVELS, [32, 2, 8, 2]),
            ("200 cells", 200, THREE_LEVELS, [32, 2, 8, 2]),
            ("four levels", 100, {"name": "multibit"}, [32, 2, 32, 2]),
        )
    },
    "GRU, longer float phase": (
        ("GRU", "perplexity", "difference to (D)"),
        {**GRU, "training": {"steps": 8000}},
        {
            "(D): 110 epochs of float training, 30 with 2 bits": {
                **_schedule("hlhlp", bits=[32, 2], lengths=[110, 30]),
                "training": {"steps": 5600},
            },
            "110 of float training, HLHLp's three phases of 30": _schedule("hlhlp", bits=[32, 2, 8, 2]),
            "110 of float training, 90 with 2 bits": _schedule("hlhlp", bits=[32, 2], lengths=[110, 90]),
            "the float network that all three start from": {**FIRST_PHASE, **_schedule("hlhlp", bits=[32, 2])},
        },
    ),
    "ResNet-20, equal length": (
        ("ResNet-20", "accuracy", "difference to HLHLp"),
        {
            "dataset": {"name": "cifar10_16", "train_samples": None, "validation": 0.1},
            "model": {"name": "resnet20"},
            "training": {"steps": 11_200},
            "quantizer": {"name": "uniform_l2"},
        },
        {
            "HLHLp: 4,000 steps of float training, three phases of 2,400": _schedule("hlhlp", lengths=None, alpha=0.01),
            "the same, rates of the later phases from a tenth of the first": _schedule(
                "hlhlp", lengths=None, alpha=0.1
            ),
            "fine-tuning: 4,000 of float training, 2,400 with 2 bits": {
                **_schedule("fine_tuning", lengths=None),
                "training": {"steps": 6400},
            },
            "fine-tuning, as long as HLHLp: 8,800 of float training, 2,400 with 2 bits": _schedule(
                "fine_tuning", lengths=[22, 6]
            ),
            "the float network that HLHLp starts from, 4,000 steps": {
                **FIRST_PHASE,
                **_schedule("hlhlp", lengths=None, alpha=0.01),
            },
            "the longer float network, 8,800 steps": {**FIRST_PHASE, **_schedule("fine_tuning", lengths=[22, 6])},
            "a float network as long as HLHLp, 11,200 steps": FLOAT,
        },
    ),
    "ResNet-8, converged": (
        ("ResNet-8", "accuracy", "difference to float"),
        {
            "dataset": {"name": "cifar10_16", "train_samples": 10_000, "draw": "once"},
            "model": {"name": "resnet8"},
            "training": {"steps": 4200},
            "quantizer": {"name": "uniform_l2"},
        },
        {
            "one float network, 160 epochs": {"metric": "initial weights", **_schedule("hlhlp", alpha=0.01)},
            "HLHLp from its weights, later phases at a hundredth of the first rate": _schedule("hlhlp", alpha=0.01),
            "HLHLp from its weights, later phases at a tenth of it": _schedule("hlhlp", alpha=0.1),
            "the same, at the end of its phase with 8 bits": {"metric": "phase: 2", **_schedule("hlhlp", alpha=0.1)},
        },
    ),
    **{
        f"deficits, {total} epochs": (
            ("ResNet-8", "accuracy", "difference to static 8 bits of equal length"),
            {
                "dataset": {"name": "cifar10_16", "train_samples": 10_000, "draw": "by_seed"},
                "model": {"name": "resnet8"},
                "training": {"epochs": total},
                **SBM,
            },
            {
                f"static 8 bits, {total} epochs": _schedule("static", q_max=8),
                f"4 bits for {deficit} epochs, then 8 bits for 36": _schedule("deficit", q_min=4, end=deficit),
                "static 8 bits, 36 epochs": {**_schedule("static", q_max=8), "training": {"epochs": 36}},
            },
        )
        for deficit, total in ((10, 46), (40, 76))
    },
    **{
        f"Transformer {steps:,}": (
            ("Transformer", "perplexity", "difference to static 8 bits"),
            WORDS | SBM | {"model": {"name": "transformer"}, "training": {"steps": steps}},
            {
                f"static 8 bits, {steps:,} steps": STATIC_8,
                f"CPT 4-8 bits, {steps:,} steps": _schedule("CR", q_min=4, q_max=8, cycles=32),
            },
        )
        for steps in (1024, 2048)
    },
    **{
        f"Transformer, PFQ {steps:,}": (
            ("Transformer", "perplexity", "difference to static 8 bits"),
            WORDS | SBM | {"model": {"name": "transformer"}, "training": {"steps": steps}},
            {
                f"static 8 bits, gradients 16, {steps:,} steps": _schedule("static", q_max=8, gradient=16),
                f"PFQ, {steps:,} steps": _schedule("pfq", stages=[3, 4, 6, 8], gradient_stages=[6, 8, 12, 16]),
            },
        )
        for steps in (1024, 2048)
    },
    "speech activations": (
        ("CTC LSTM", "CER", "difference to float"),
        {"dataset": {"name": "fsdd"}, "model": {"name": "speech_lstm_small"}, "training": {"steps": 2500}},
        {
            "float": FLOAT,
            "2-bit weights, 2-bit activations": _schedule("hlhlp", activation_bits=[32, 2, 8, 2]),
            "2-bit weights, 32-bit activations": _schedule("hlhlp", activation_bits=[32] * 4),
        },
    ),
    "fractrain weights": (
        TO_STATIC,
        IMAGES | SBM,
        {
            "static 8 bits": STATIC_8,
            "FracTrain, 4-bit weights": _schedule("fractrain", target=1.5, weight_bits=None),
            "FracTrain, 8-bit weights": _schedule("fractrain", target=1.5, weight_bits=8),
        },
    ),
    "DFQ": (
        ("ResNet-8", "best accuracy", "difference to static 6 bits"),
        IMAGES | SBM | BEST | {"seeds": range(480, 492)},
        {
            "static 6 bits, gradients 12": _schedule("static", q_max=6, gradient=12),
            "DFQ, target 3 %": DFQ,
            "the same without skipping": _schedule("dfq", target=3.0, backward="chosen", options=WITHOUT_SKIPPING),
            "the same with weights of 6 bits": _schedule(
                "dfq", target=3.0, backward="chosen", options="paper", weight_bits=6
            ),
        },
    ),
    "PFQ on MobileNetV2": (
        ("MobileNetV2", "best accuracy", "difference to static 8 bits"),
        IMAGES | SBM | BEST | {"model": {"name": "mobilenet_v2"}},
        {
            "static 8 bits, gradients 16": _schedule("static", q_max=8, gradient=16),
            "PFQ: 4, 4, 6, 8 bits": _schedule("pfq", stages=[4, 4, 6, 8], gradient_stages=[6, 8, 12, 16]),
            "the same bits, 8 bits after 30 % of the steps": _fixed_stages([4, 4, 6, 8]),
            "6 bits instead of 4, 8 bits after 20 % of the steps": _fixed_stages([6, 6, 8, 8]),
        },
    ),
    **{
        f"Citeseer, {aggregation} aggregation": (
            (f"GCN, {aggregation} aggregation", "accuracy", "difference to static 8 bits"),
            SBM | {"dataset": {"name": "citeseer"}, "model": {"name": "gcn_small", "aggregation": aggregation}},
            {
                "static 8 bits": _schedule("static", q_max=8, gradient=None),
                "RTH 3-8 bits": _schedule("RTH", q_min=3, q_max=8),
                "RTH 5-8 bits": _schedule("RTH", q_min=5, q_max=8),
            },
        )
        for aggregation in ("float", "quantized")
    },
}
"""Part of a document -> columns, settings of all trainings, and what differs; the first arm is the reference."""


def experiment(name: str) -> str:
    """Final accuracies or perplexities of some settings, and their differences to the first one, paired by seed. Exits if runs of
    several settings agree with an arm."""
    columns, common, arms = EXPERIMENTS[name]
    runs = read_runs(read_csv(ROOT / SUMMARY, missing_ok=True), ROOT / SUMMARY)
    lines = []
    reference: dict[str, float] = {}
    for arm, own in arms.items():
        wanted = {**common, **own}
        metric, seeds = wanted.pop("metric", "final"), wanted.pop("seeds", None)
        agreeing = [
            run for run in runs if _agrees(run.settings, wanted) and (not seeds or int(run.row["seed"]) in seeds)
        ]
        if len({run.row["hash"] for run in agreeing}) > 1:
            sys.exit(f"experiment {name}, {arm}: runs of several settings agree; name what tells them apart")
        found = {run.row["seed"]: value for run in agreeing if (value := reading(run, metric)) is not None}
        difference = difference_in_words(found, reference) if reference and found else ""
        reference = reference or found
        shared = metric == "initial weights" and len(set(found.values())) == 1  # one network that all seeds begin from
        values = [*found.values()][: 1 if shared else None]
        lines += [(arm, mean_in_words(values), difference)] if found else []
    return markdown_table(columns, lines)


def _agrees(settings: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    return all(
        _agrees(settings[key], value) if isinstance(value, Mapping) else settings.get(key) == value
        for key, value in wanted.items()
    )


def mean_in_words(finals: Sequence[float]) -> str:
    """Mean, standard deviation (if n > 1) and n."""
    deviation = f" ± {statistics.stdev(finals):.2f}" if len(finals) > 1 else ""
    return f"{statistics.fmean(finals):.2f}{deviation} (n = {len(finals)})"


def difference_in_words(finals: Mapping[str, float], reference: Mapping[str, float]) -> str:
    """Mean paired difference over common seeds, its standard error (if n > 1) and n; empty without common seeds."""
    differences = [finals[seed] - reference[seed] for seed in sorted(finals.keys() & reference.keys())]
    if not differences:
        return ""
    error = f" ± {statistics.stdev(differences) / len(differences) ** 0.5:.2f}" if len(differences) > 1 else ""
    return f"{statistics.fmean(differences):+.2f}{error} (n = {len(differences)})"
