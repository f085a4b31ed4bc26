"""Trainings by other libraries with our callbacks, for `tests.fuzz`: each goes on from the newest checkpoint that is whole."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

STEPS = 16


@dataclass(frozen=True)
class Training:
    """A training by another library.

    Args:
        train: called with a folder and a seed; resumes what it finds there, and writes `result.pt`.
        schedule: its name.
        saved: pattern of the files that show that a checkpoint is there.
    """

    train: Callable[[Path, int], None]
    schedule: str
    saved: str

    def compare(self, killed: Path, unbroken: Path) -> None:
        """Weights and cost must be the same."""
        found, expected = (torch.load(folder / "result.pt", weights_only=True) for folder in (killed, unbroken))
        assert found.pop("cost") == expected.pop("cost"), "cost differs"
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def _finish(folder: Path, model: nn.Module, control: Any) -> None:
    torch.save({"cost": repr(control.cost()), "model": model.state_dict()}, folder / "result.pt")


def _transformers(kind: str, schedule: str) -> Callable[[Path, int], None]:
    def train(folder: Path, seed: int) -> None:
        from tests.integrations.test_integrations import trainer

        made, callback = trainer(kind, folder, schedule=schedule, max_steps=STEPS, save_steps=1, seed=seed)
        made.train(resume_from_checkpoint=_newest_whole(folder))
        _finish(folder, made.model, callback.control)

    return train


def _newest_whole(folder: Path) -> str | None:
    """The newest checkpoint of transformers whose last file has been written: it does not write atomically."""
    numbered = {int(path.name.partition("-")[2]): path for path in folder.glob("checkpoint-*")}
    for number in sorted(numbered, reverse=True):
        try:
            json.loads((numbered[number] / "bitcycle.json").read_text())
        except (OSError, ValueError):
            continue
        return str(numbered[number])
    return None


def _lightning(folder: Path, seed: int) -> None:
    import lightning.pytorch as lightning

    from bitcycle.integrations.lightning import PrecisionCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

        def training_step(self, batch: Any, _index: int) -> Any:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    class Save(lightning.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(folder / "new.ckpt")
            os.replace(folder / "new.ckpt", folder / "last.ckpt")

    torch.manual_seed(seed)
    loader = torch.utils.data.DataLoader(torch.randn(8, 6), batch_size=8)
    callback = PrecisionCallback("RTH", cycles=2, q_min=3, q_max=8)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(
        max_steps=STEPS, default_root_dir=folder, callbacks=[callback, Save()], enable_checkpointing=False, **quiet
    )
    module, last = Module(), folder / "last.ckpt"
    trainer.fit(module, loader, ckpt_path=last if last.exists() else None)
    _finish(folder, module, callback.control)


def _installed(*names: str) -> bool:
    return all(importlib.util.find_spec(name) for name in names)


CALLBACKS: dict[str, Training] = {}
"""What is trained -> how; empty where the libraries are not installed."""


def preload() -> None:
    """Import what the trainings need, before they are forked."""
    for library, tests in (
        ("transformers", "tests.integrations.test_integrations"),
        ("lightning", "lightning.pytorch"),
    ):
        if any(name.startswith(library) for name in CALLBACKS):
            importlib.import_module(tests)


if _installed("transformers", "accelerate"):
    CALLBACKS |= {
        f"transformers {kind}": Training(_transformers(kind, schedule), schedule, "checkpoint-*/bitcycle.json")
        for kind, schedule in (("bert", "CR"), ("gpt2", "RTH"))
    }
if _installed("lightning"):
    CALLBACKS["lightning"] = Training(_lightning, "RTH", "last.ckpt")
