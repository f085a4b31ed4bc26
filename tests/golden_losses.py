"""The losses of 20 steps of every method, kept in tests/data/golden/losses.json: what a faster step must not change.

`python -m tests.golden_losses` writes the file anew. Do so only for a change that is meant to change results.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bitcycle.files import read_records
from bitcycle.layer.codes import support
from bitcycle.model import MODELS
from bitcycle.shapes import ImageShape
from bitcycle.training.run import execute
from tests.conftest import GOLDEN, plan
from tests.settings import CHOOSING, QUANTIZER_SCHEDULES, QUICK_STAGES

STEPS = 20
SHORT = ["dataset=digits", "model=resnet8", "scale=smoke", "dataset.train_samples=64", "dataset.test_samples=16"]
SHORT += [f"training.steps={STEPS}", "training.batch_size=8", "training.evaluation_steps=10", "training.log_steps=1"]
SHORT += ["training.threads=1"]

RECIPES = ("nvfp4_pretraining", "mxfp4_backward")
"""Presets of quantizers that are here already; their gradients are tested against the papers' equations."""

METHODS: dict[str, list[str]] = {
    "float": ["quantizer=none"],
    "static": ["schedule=static"],
    "compute=codes": ["schedule=RTH", "schedule.cycles=2", "training.compute=codes"],
    "RTH": ["schedule=RTH", "schedule.cycles=2"],
    "pfq": ["schedule=pfq", *QUICK_STAGES],
    "dfq": ["schedule=dfq"],
    "dfq, chosen": ["schedule=dfq", "schedule.backward=chosen"],
    "fractrain": ["schedule=fractrain", *QUICK_STAGES],
    "hlhlp": ["schedule=hlhlp", *CHOOSING],
    "partial_pretrain": ["schedule=partial_pretrain", "model=resnet8_extra_skip", "quantizer=pact_binary"],
    "mobilenet_v2": [
        "model=mobilenet_v2",
        "schedule=static",
        "training.batch_size=4",
        "training.learning_rate.initial=0.01",
    ],
    "dorefa": ["quantizer=dorefa", "schedule=CR", "schedule.cycles=2"],
    **{name: [f"quantizer={name}", *options] for name, options in QUANTIZER_SCHEDULES.items() if name not in RECIPES},
}
"""Method -> overrides of its run."""


@contextmanager
def one_thread() -> Iterator[None]:
    """The order of sums depends on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def losses(method: str, *more: str) -> list[float]:
    """The training loss of each step."""
    with one_thread(), tempfile.TemporaryDirectory() as folder:
        run = plan(*SHORT, *METHODS[method], f"results_root={folder}", *more)
        execute(run)
        return [record["loss"] for record in read_records(run.folder.metrics) if record["kind"] == "train"]


def arithmetic() -> str:
    """A fingerprint of PyTorch's own sums here, and of whether ours are in integers.

    Where it is that of the file, equal programs have equal losses.
    """
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = MODELS["resnet8"]().build(ImageShape(1, 8, 10)).to(memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        for _ in range(3):  # what differs in the last digit spreads
            x = torch.randn(8, 1, 8, 8).contiguous(memory_format=torch.channels_last)
            optimizer.zero_grad()
            network(x).log_softmax(1).square().mean().backward()
            optimizer.step()
        parts = [parameter.detach().contiguous() for parameter in network.parameters()]
    sums = b"".join(part.numpy().tobytes() for part in parts)
    integers = b"integers" if support.library() is not None else b""
    return hashlib.sha256(sums + integers).hexdigest()[:16]


def write() -> None:
    """Write the file."""
    found = {method: losses(method) for method in METHODS}
    (GOLDEN / "losses.json").write_text(json.dumps({"arithmetic": arithmetic(), "losses": found}, indent=1) + "\n")


if __name__ == "__main__":
    write()
