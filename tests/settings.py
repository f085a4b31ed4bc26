"""One row for each schedule and each quantizer: what the resume test runs, so that a new one is covered unasked."""

from __future__ import annotations

from bitcycle.quantizer import QUANTIZERS
from bitcycle.schedule import SCHEDULES

OPTIONS = {"pfq": ["schedule.epoch_steps=2", "schedule.epsilon=0.5", "schedule.alpha=1"]}
"""Options that let a schedule show what it does in a smoke run."""

RESUME: dict[str, list[str]] = {
    **{f"schedule={name}": [f"schedule={name}", *OPTIONS.get(name, [])] for name in SCHEDULES},
    **{f"quantizer={name}": [f"quantizer={name}", "schedule=CR"] for name in QUANTIZERS},
    "model=mobilenet_v2": ["model=mobilenet_v2", "schedule=RTH", "quantizer.depthwise_bits=[8,16]"],
    "optimizer=adam": ["training.optimizer.name=adam", "training.learning_rate.initial=0.001"],
    "optimizer=nesterov": ["training.optimizer.nesterov=true", "training.learning_rate.name=cosine"],
    "streamed images": ["dataset.crop_padding=2", "dataset.flip=true", "schedule=ER"],
}
"""Name of the case -> overrides of a smoke run on the digits."""
