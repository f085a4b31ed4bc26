"""What the callbacks of Lightning and transformers pass to schedules that adapt, and keep of them in checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import bitcycle
from bitcycle.layer.state import PrecisionState
from bitcycle.settings import SettingError

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tests.integrations.test_integrations import StatefulLoader, data, network, trainer  # noqa: E402

PFQ: dict[str, Any] = {
    "stages": [3, 4, 6, 8],
    "gradient_stages": [6, 6, 8, 8],
    "epsilon": 0.9,
    "alpha": 0.5,
    "window": 2,
    "epoch_steps": 2,
}


def expected_bits(losses: list[float], steps: int) -> list[int]:
    """The bits of PFQ in a loop of one's own, which passes the mean of every two losses."""
    schedule = bitcycle.schedule("pfq", total_steps=steps, **PFQ)
    bits = []
    for step in range(steps):
        bits.append(schedule(step).weight)
        if step % 2:
            schedule.observe(sum(losses[step - 1 : step + 1]) / 2, 0.0)
    return bits


@pytest.mark.parametrize("accumulated", [1, 2])
def test_schedules_that_adapt_receive_the_loss_of_transformers(accumulated, tmp_path):
    """PFQ never advanced: the Trainer gives a callback no loss, and `observe` had to be called from elsewhere."""
    from bitcycle.integrations.transformers import PrecisionCallback

    def fit(folder, stop=None):
        class Stop(transformers.TrainerCallback):
            def on_step_end(self, args, state, control, **_):
                control.should_training_stop = state.global_step == stop

        common = {"logging_steps": 1, "save_steps": 1, "report_to": [], "use_cpu": True, "disable_tqdm": True}
        sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": accumulated, "max_steps": 12}
        arguments = transformers.TrainingArguments(str(folder), **common, **sizes)
        callbacks = [PrecisionCallback(bitcycle.schedule("pfq", total_steps=12, **PFQ)), Stop()]
        made = transformers.Trainer(network("vit"), arguments, train_dataset=data("vit"), callbacks=callbacks)
        made.train(resume_from_checkpoint=(folder / "checkpoint-5").exists())
        return [record for record in made.state.log_history if "loss" in record]

    whole = fit(tmp_path / "whole")
    bits = [record["bits_weight"] for record in whole]
    assert len(set(bits)) > 1 and bits == expected_bits([record["loss"] for record in whole], 12)
    fit(tmp_path / "parts", stop=5)
    assert fit(tmp_path / "parts")[-1] == whole[-1]


@pytest.mark.parametrize("accumulated", [1, 2])
def test_schedules_that_adapt_receive_the_loss_of_lightning(accumulated, tmp_path):
    """As those of transformers: with one or two batches a step, resumed within an interval."""
    lightning = pytest.importorskip("lightning.pytorch")
    from bitcycle.integrations.lightning import PrecisionCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
            self.losses: list[float] = []
            self.bits: list[float] = []

        def training_step(self, batch, _index):
            loss = self.net(batch).square().mean()
            self.losses.append(loss.item())
            self.bits.append(next(m for m in self.modules() if isinstance(m, PrecisionState)).precision.weight)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def fit(steps, folder, checkpoint=None):
        x = torch.randn(24, 6, generator=torch.Generator().manual_seed(2))
        callback = PrecisionCallback(bitcycle.schedule("pfq", total_steps=12, **PFQ))
        saving = lightning.callbacks.ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
        trainer = lightning.Trainer(
            max_steps=steps,
            accumulate_grad_batches=accumulated,
            default_root_dir=folder,
            callbacks=[callback, saving],
            **quiet,
        )
        module, loader = Module(), StatefulLoader(torch.utils.data.DataLoader(x, batch_size=4))
        trainer.fit(module, loader, ckpt_path=checkpoint)
        return module

    whole = fit(12, tmp_path / "whole")
    losses = [sum(whole.losses[i : i + accumulated]) / accumulated for i in range(0, len(whole.losses), accumulated)]
    bits = whole.bits[::accumulated]
    assert len(set(bits)) > 1 and bits == expected_bits(losses, 12)
    fit(5, tmp_path / "parts")
    resumed = fit(12, tmp_path / "parts", tmp_path / "parts" / "step=5.ckpt")
    assert resumed.bits == whole.bits[5 * accumulated :] and resumed.losses == whole.losses[5 * accumulated :]


def test_what_a_callback_cannot_do_for_a_schedule_is_said(caplog, tmp_path):
    made, callback = trainer("vit", tmp_path)
    callback.schedule, callback.options = bitcycle.schedule("range_test", total_steps=60), {}
    with pytest.raises(SettingError, match="resets the network"):
        made.train()
    callback.schedule = bitcycle.schedule("fine_tuning", total_steps=4)
    with caplog.at_level("WARNING"):
        made.train()
    assert "schedule fine_tuning has phases" in caplog.text


def test_trials_of_a_search_keep_their_state_in_their_own_checkpoints(tmp_path):
    """A search of hyperparameters saves to a folder for each trial; the state of the schedule lay beside these, in a checkpoint
    without weights, which the Trainer would have resumed from."""

    class Search(transformers.TrainerCallback):
        """What Trainer.hyperparameter_search tells callbacks."""

        def on_step_begin(self, args, state, control, **_):
            state.is_hyper_param_search = True

    for number in range(2):
        made, _ = trainer("vit", tmp_path, seed=number)
        made.add_callback(Search())
        made._get_output_dir = lambda trial, number=number: str(tmp_path / f"run-{number}")
        made.train()
    found = sorted(str(file.relative_to(tmp_path)) for file in tmp_path.rglob("bitcycle.json"))
    assert found == [f"run-{number}/checkpoint-{step}/bitcycle.json" for number in range(2) for step in (2, 4)]
