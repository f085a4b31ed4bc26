"""Train a network of the released code and ours in lockstep, with equal weights, batches and bits, and print their
divergence.

    python scripts/twin_run.py NAME CHECKOUT [--steps 40]     one comparison; CHECKOUT is a clone of the released code
    python scripts/twin_run.py --list                         the comparisons, and which repository each needs

Both train in float64 on a CPU with gradients rounded to nearest, each with its own instance of the optimizer. The
record is written to results/summary/fidelity.csv, from which `make readme` writes results/notes/fidelity.md. The
released code is patched from outside to run today (CUDA calls on a CPU, names that libraries have removed); none of it
is part of this repository.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitcycle.files import read_csv, write_csv

sys.path.insert(0, str(Path(__file__).parent))
RECORD = Path(__file__).parent.parent / "results" / "summary" / "fidelity.csv"
EQUAL = 1e-9
"""Relative difference of losses up to which two runs count as equal; a single rounding tie broken differently exceeds
it."""


@dataclass
class Twin:
    """Two networks with equal weights.

    Attributes:
        losses: returns their loss and ours for a step, after setting the bits of the step in both.
        weights: pairs (theirs, ours) of parameters that should stay equal.
        optimizer: makes an optimizer of parameters; each network has its own.
        after: called with step, their loss and ours after each step, for schedules that depend on the loss.
    """

    losses: Callable[[int], tuple[Tensor, Tensor]]
    weights: list[tuple[nn.Parameter, nn.Parameter]]
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    after: Callable[[int, float, float], None] = lambda step, theirs, ours: None


@dataclass(frozen=True)
class Case:
    """A comparison: a module of `scripts/twins` with a function `build(checkout, variant)`, and its description."""

    module: str
    variant: str
    repository: str
    what: str


CPT, FRACTRAIN, BETTER = "RICE-EIC/CPT", "RICE-EIC/FracTrain", "wolfecameron/BetterPrecisionSchedules"
CASES = {
    "cpt-resnet38": Case("cifar", "resnet38", CPT, "ResNet-38, CR 3-8, gradients float"),
    "cpt-resnet38-gradients": Case("cifar", "resnet38-8", CPT, "ResNet-38, CR 3-8, gradients 8 bits"),
    "cpt-mobilenet": Case("cifar", "mobilenet_v2", CPT, "MobileNetV2, CR 4-8, gradients float"),
    "better-gcn": Case("graph", "float", BETTER, "GCN on Cora, RR 3-8, gradients 8 bits, float aggregation"),
    "better-gcn-quantized": Case(
        "graph", "quantized", BETTER, "GCN on Cora, RR 3-8, gradients 8 bits, quantized aggregation"
    ),
    "better-lstm": Case("language", "", BETTER, "LSTM of Penn Treebank, CR 5-8, gradients 8 bits"),
    "better-bert": Case("entailment", "", BETTER, "BERT of XNLI, two small layers, CR 5-8, gradients float"),
    "better-retinanet": Case("detection", "", BETTER, "RetinaNet of VOC, CR 5-8, gradients float"),
    "fractrain-dfq": Case("gated", "dfq", FRACTRAIN, "DFQ, ResNet-38, six options with skipping, quantized gradients"),
    "fractrain-cost": Case("gated", "cost", FRACTRAIN, "DFQ, ResNet-38, with its cost term"),
    "fractrain-stages": Case("gated", "stages", FRACTRAIN, "FracTrain, ResNet-38, cost term and rising targets"),
}


def pairs_of(
    theirs: nn.Module, ours: nn.Module, rename: Callable[[str], str | None] = str
) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Pairs of parameters matched by name, after copying their weights to ours.

    Args:
        theirs, ours: the two networks.
        rename: maps a name of their parameter to ours, or to None if the parameter is unused.

    Raises:
        ValueError: if a parameter has no counterpart of its shape.
    """
    own = dict(ours.named_parameters())
    pairs = []
    for name, parameter in theirs.named_parameters():
        if rename(name) is None:
            continue
        other = own.pop(rename(name), None)
        if other is None or other.shape != parameter.shape:
            found = "nothing" if other is None else f"the shape {tuple(other.shape)}"
            raise ValueError(f"{name} of shape {tuple(parameter.shape)} has {found} as {rename(name)} here")
        other.data.copy_(parameter.data)
        pairs.append((parameter, other))
    if own:
        raise ValueError(f"the released code has no {', '.join(own)}")
    return pairs


def released(checkout: Path, folder: str) -> None:
    """Make a folder of the checkout importable, and patch PyTorch so that it runs on a CPU."""
    if not (checkout / folder).is_dir():
        sys.exit(f"{checkout} has no folder {folder}: give a clone of the repository that --list names")
    sys.path.insert(0, str(checkout / folder))
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign, assignment]
    nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[method-assign, assignment]


def to_nearest(module: Any) -> None:
    """Make the released code round gradients to nearest, by the default of its last argument, `stochastic`."""
    module.quantize_grad.__defaults__ = (*module.quantize_grad.__defaults__[:-1], False)


def train(twin: Twin, steps: int) -> Iterator[tuple[float, float, float]]:
    """Yield their loss, the difference of losses and the largest difference of weights, step by step."""
    optimizers = [twin.optimizer([pair[side] for pair in twin.weights]) for side in (0, 1)]
    for step in range(steps):
        losses = twin.losses(step)
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        theirs, ours = (loss.item() for loss in losses)
        twin.after(step, theirs, ours)
        yield theirs, abs(theirs - ours), max((a - b).abs().max().item() for a, b in twin.weights)


def compare(name: str, checkout: Path, steps: int) -> dict[str, Any]:
    """Train one pair and return the row of the record."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    case = CASES[name]
    twin = import_module(f"twins.{case.module}").build(checkout, case.variant)
    loss = loss_difference = weight_difference = 0.0
    equal_until = 0
    for step, (loss, of_loss, of_weights) in enumerate(train(twin, steps), 1):
        loss_difference, weight_difference = max(loss_difference, of_loss), max(weight_difference, of_weights)
        equal_until = step if loss_difference <= EQUAL * abs(loss) else equal_until
        print(f"step {step:3d}  loss {loss:.6f}  differences: loss {of_loss:.1e}, weights {of_weights:.1e}", flush=True)
    commit = subprocess.run(
        ["git", "-C", checkout, "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout
    return {
        "name": name,
        "what": case.what,
        "repository": case.repository,
        "commit": commit.strip(),
        "steps": steps,
        "loss": loss,
        "loss_difference": loss_difference,
        "weight_difference": weight_difference,
        "equal_until": equal_until,
        "torch": torch.__version__,
    }


def record(row: dict[str, Any]) -> None:
    """Add a row to the record, replacing an older row of its name."""
    rows = {old["name"]: old for old in read_csv(RECORD, missing_ok=True)} | {row["name"]: row}
    write_csv(RECORD, list(row), [rows[name] for name in dict.fromkeys((*CASES, *rows)) if name in rows])


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", choices=list(CASES))
    parser.add_argument("checkout", nargs="?", type=Path, help="a clone of the released code")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    if arguments.list or arguments.name is None or arguments.checkout is None:
        print("\n".join(f"{name:24s} {case.repository:40s} {case.what}" for name, case in CASES.items()))
        return
    row = compare(arguments.name, arguments.checkout.resolve(), arguments.steps)
    record(row)
    print(", ".join(f"{key} {value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
