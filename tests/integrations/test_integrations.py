"""Callbacks for the trainers of other libraries, run on a CPU with tiny networks."""

from __future__ import annotations

import random

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitcycle
from bitcycle.layer.products.quantized_product import QuantizedProduct, penalty
from bitcycle.layer.state import PrecisionState
from bitcycle.settings import SettingError

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")


def data(kind: str) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 50, (16, 8), generator=generator)
    if kind == "vit":
        images = torch.randn(16, 3, 8, 8, generator=generator)
        return [{"pixel_values": x, "labels": torch.tensor(i % 2)} for i, x in enumerate(images)]
    return [{"input_ids": x, "labels": x} for x in tokens]


def network(kind: str) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    if kind == "bert":
        return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=50, **sizes))
    if kind == "gpt2":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=50, n_positions=8)
        )
    return transformers.ViTForImageClassification(transformers.ViTConfig(image_size=8, patch_size=4, **sizes))


def trainer(kind: str, folder, stop_after: int | None = None, schedule="CR", **changed):
    from bitcycle.integrations.transformers import PrecisionCallback

    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = state.global_step == stop_after

    settings = {
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "save_steps": 2,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "lr_scheduler_type": "constant",
    }
    arguments = transformers.TrainingArguments(str(folder), **settings | changed)
    callback = PrecisionCallback(schedule, cycles=2, q_min=3, q_max=8)
    callbacks = [callback, *([Stop()] if stop_after else [])]
    return transformers.Trainer(network(kind), arguments, train_dataset=data(kind), callbacks=callbacks), callback


@pytest.mark.parametrize("kind", ["bert", "gpt2", "vit"])
def test_the_trainer_of_transformers(kind, tmp_path):
    whole, callback = trainer(kind, tmp_path / "whole")
    whole.train()
    logs = [record for record in whole.state.log_history if "loss" in record]
    schedule = bitcycle.schedule("CR", cycles=2, q_min=3, q_max=8, total_steps=4)
    assert [record["bits_weight"] for record in logs] == [schedule(step).weight for step in range(4)]
    assert callback.control.cost().samples == 32
    assert 0 < logs[-1]["cost_relative_to_static"] < 1

    first, _ = trainer(kind, tmp_path / "parts", stop_after=2)
    first.train()
    second, resumed = trainer(kind, tmp_path / "parts")
    second.train(resume_from_checkpoint=True)
    assert resumed.control.cost() == callback.control.cost()
    for name, value in whole.model.state_dict().items():
        found = second.model.state_dict()[name]
        torch.testing.assert_close(found, value, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")


def test_a_tracker_after_the_callback_receives_bits_and_cost(tmp_path):
    """Those of report_to, which the Trainer calls first, do not, as docs/own-models.md says."""
    from bitcycle.integrations.transformers import PrecisionCallback

    received = []

    class Tracker(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **_):
            received.append(dict(logs))

    plain, _ = trainer("vit", tmp_path, max_steps=1, save_strategy="no")
    callbacks = [PrecisionCallback("static", q_max=4), Tracker()]
    transformers.Trainer(network("vit"), plain.args, train_dataset=data("vit"), callbacks=callbacks).train()
    assert received[0]["bits_weight"] == 4 and received[0]["gbitops"] > 0


class Clipped(nn.Module):
    """A network with a layer that follows a ReLU, as PACT requires."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))

    def forward(self, x, labels):
        logits = self.layers(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def test_a_training_after_an_interrupted_one_has_each_penalty_once(tmp_path):
    from bitcycle.integrations.transformers import PrecisionCallback

    losses = []

    class Interrupt(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **_):
            output = model(torch.ones(1, 4), torch.tensor([0]))
            plain = F.cross_entropy(output["logits"], torch.tensor([0]))
            losses.append((output["loss"].item(), (plain + penalty(model, plain)).item()))
            if len(losses) == 1:
                raise KeyboardInterrupt

    plain, _ = trainer("vit", tmp_path, max_steps=1)
    sets = [{"x": torch.ones(4), "labels": torch.tensor(i % 2)} for i in range(16)]
    precision = PrecisionCallback("static", "pact_binary", q_max=1, gradient=32)
    whole = transformers.Trainer(Clipped(), plain.args, train_dataset=sets, callbacks=[precision, Interrupt()])
    with pytest.raises(KeyboardInterrupt):
        whole.train()
    whole.train()
    for found, expected in losses:
        assert found == pytest.approx(expected, abs=1e-6)


def test_a_checkpoint_outside_the_output_folder_is_resumed_exactly_or_refused(tmp_path):
    """Its cost and the state of its schedule silently started at 0."""
    whole, callback = trainer("bert", tmp_path / "whole")
    whole.train()
    first, _ = trainer("bert", tmp_path / "parts", stop_after=2)
    first.train()
    saved = tmp_path / "parts" / "checkpoint-2"
    second, _ = trainer("bert", tmp_path / "elsewhere")
    with pytest.raises(SettingError, match=r"checkpoint-2.* Remedy: .*TrainingArguments\(resume_from_checkpoint="):
        second.train(resume_from_checkpoint=str(saved))
    second, resumed = trainer("bert", tmp_path / "elsewhere", resume_from_checkpoint=str(saved))
    second.train(resume_from_checkpoint=str(saved))
    assert resumed.control.cost() == callback.control.cost()


def test_the_last_checkpoint_may_be_asked_for_in_the_arguments(tmp_path):
    """Trainer takes True, the callback ended the resumed training with a TypeError."""
    first, _ = trainer("bert", tmp_path, stop_after=2)
    first.train()
    second, resumed = trainer("bert", tmp_path, resume_from_checkpoint=True)
    second.train(resume_from_checkpoint=second.args.resume_from_checkpoint)
    assert resumed.control.cost().samples == 32


def test_what_the_trainer_of_transformers_cannot_train(tmp_path):
    """The first two trained in float32 with a warning, the third stayed at the last step's bits, the last lost its setting."""
    from bitcycle.integrations.transformers import PrecisionCallback

    whole, callback = trainer("bert", tmp_path, max_steps=3)
    whole.train()
    assert (
        callback.control.schedule.length.steps_per_epoch == 2
    )  # of 16 samples in batches of 4, two of them accumulated
    whole, _ = trainer("bert", tmp_path)
    whole.model_init = lambda: network("bert")
    with pytest.raises(SettingError, match=r"is not converted, as it .* Remedy: convert it in model_init"):
        whole.train()
    whole = transformers.Trainer(network("bert"), whole.args, train_dataset=data("bert"))
    whole.add_callback(PrecisionCallback("CR", cycles=1))
    with pytest.raises(SettingError, match="give the callback to Trainer"):
        whole.train()
    short = bitcycle.schedule("CR", cycles=2, total_steps=3)
    for schedule, options, problem in (
        (short, {}, "is bound to 3 steps, and training has 4"),
        (short, {"q_min": 4}, "no effect"),
    ):
        callbacks = [PrecisionCallback(schedule, **options)]
        whole = transformers.Trainer(network("bert"), whole.args, train_dataset=data("bert"), callbacks=callbacks)
        with pytest.raises(SettingError, match=problem):
            whole.train()


class StatefulLoader:
    """Batches that Lightning can go on with in the middle of an epoch."""

    def __init__(self, loader) -> None:
        self.loader, self.done = loader, 0

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self):
        for number, batch in enumerate(self.loader, 1):
            if number > self.done:
                self.done = number
                yield batch
        self.done = 0

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]


@pytest.mark.parametrize("quantizer", ["sbm", "none"])
@pytest.mark.parametrize(("stateful", "stop"), [(True, 1), (True, 2), (False, 2), (False, 1)])
def test_the_trainer_of_lightning(stateful, stop, quantizer, tmp_path):
    """Two batches an epoch, resumed after one or two. A loader without state restarts the epoch, in float32 as well."""
    lightning = pytest.importorskip("lightning.pytorch")
    from bitcycle.integrations.lightning import PrecisionCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

        def training_step(self, batch, _index):
            return self.net(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def fit(steps: int, folder, checkpoint=None):
        torch.manual_seed(1)
        loader = torch.utils.data.DataLoader(torch.randn(8, 6), batch_size=4)
        callback = PrecisionCallback(bitcycle.schedule("CR", cycles=2, q_min=3, q_max=8, total_steps=4))
        saving = lightning.callbacks.ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
        callbacks = [saving, *([callback] if quantizer == "sbm" else [])]
        trainer = lightning.Trainer(max_steps=steps, default_root_dir=folder, callbacks=callbacks, **quiet)
        module = Module()
        trainer.fit(module, StatefulLoader(loader) if stateful else loader, ckpt_path=checkpoint)
        return module, callback, trainer

    module, callback, trainer = fit(4, tmp_path / "whole")
    fit(stop, tmp_path / "parts")
    resumed, after, _ = fit(4, tmp_path / "parts", tmp_path / "parts" / f"step={stop}.ckpt")
    if quantizer == "sbm":
        assert callback.control.cost().samples == 16
        assert trainer.callback_metrics["bits_weight"] == 8
        assert after.control.cost() == callback.control.cost()
    exact = all(torch.equal(resumed.state_dict()[name], value) for name, value in module.state_dict().items())
    assert exact == (stateful or stop == 2)


@pytest.mark.parametrize(("stateful", "stop"), [(True, 1), (True, 3), (False, 2), (False, 4)])
def test_lightning_resumes_dropout_and_the_order_of_samples(stateful, stop, tmp_path):
    """Two batches an epoch and a validation, which draws random numbers, too; other random numbers pass before resuming."""
    lightning = pytest.importorskip("lightning.pytorch")
    from bitcycle.integrations.lightning import PrecisionCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 1))

        def training_step(self, batch, _index):
            return self.net(batch + random.random() + numpy.random.rand()).square().mean()

        def validation_step(self, batch, _index):
            self.net(batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def fit(steps: int, seed: int, folder, checkpoint=None):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(2))
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed)
        loader = torch.utils.data.DataLoader(x, batch_size=4, shuffle=not stateful)
        callback = PrecisionCallback(bitcycle.schedule("CR", cycles=2, total_steps=6))
        saving = lightning.callbacks.ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
        if not stateful:
            saving = lightning.callbacks.ModelCheckpoint(folder, every_n_epochs=1, save_top_k=-1, filename="{step}")
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
        trainer = lightning.Trainer(max_steps=steps, default_root_dir=folder, callbacks=[saving, callback], **quiet)
        module = Module()
        validation = torch.utils.data.DataLoader(x, batch_size=4)
        trainer.fit(module, StatefulLoader(loader) if stateful else loader, validation, ckpt_path=checkpoint)
        return module.state_dict()

    whole = fit(6, 1, tmp_path / "whole")
    fit(stop, 1, tmp_path / "parts")
    resumed = fit(6, 5, tmp_path / "parts", tmp_path / "parts" / f"step={stop}.ckpt")
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


@pytest.mark.parametrize("limit", [{"max_epochs": 2}, {"max_steps": 8}])
@pytest.mark.parametrize("kind", ["layers", "gan"])
def test_lightning_modules_of_several_networks(kind, limit, tmp_path):
    """A layer of its own (a head) was refused as a network without quantized layers; of a GAN, no cost was known."""
    lightning = pytest.importorskip("lightning.pytorch")
    from bitcycle.integrations.lightning import PrecisionCallback

    class Layers(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.hidden, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1)

        def training_step(self, batch, _index):
            return self.head(self.hidden(self.body(batch))).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Gan(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization, self.head = False, nn.Linear(8, 4)

        def training_step(self, batch, _index):
            for optimizer, x in zip(self.optimizers(), (batch, self.head(batch.repeat(1, 2)))):
                loss = self.hidden(self.body(x)).square().mean()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()

        def configure_optimizers(self):
            return torch.optim.SGD(self.hidden.parameters(), lr=0.1), torch.optim.SGD(self.head.parameters(), lr=0.1)

    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    callback = PrecisionCallback("CR", cycles=1, q_min=3, q_max=8)
    trainer = lightning.Trainer(**limit, accelerator="cpu", callbacks=[callback], default_root_dir=tmp_path, **quiet)
    module = Layers() if kind == "layers" else Gan()
    loader = torch.utils.data.DataLoader(torch.randn(32, 4), batch_size=4)
    trainer.fit(module, loader)
    steps = 8 if "max_steps" in limit else 16
    batches = steps // 2 if kind == "gan" and "max_steps" in limit else steps  # two steps in each batch
    length = callback.control.schedule.length
    assert (length.total_steps, length.steps_per_epoch) == (steps, 8)
    assert callback.control.next_step in (steps, steps - 1)
    assert 0 < callback.control.cost().relative_to_static < 1
    names = {layer.name.partition("#")[0] for layer in callback.control.cost().layers}
    assert names == {"body", "hidden", "head"}
    assert callback.control.cost().samples == 4 * batches
    if "max_epochs" in limit:
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module, loader)  # goes on, and so does the cost
        assert callback.control.cost().samples == 4 * 24
    assert not hasattr(module.head, "precision") and module.hidden.precision.precision == callback.control.precision


@pytest.mark.parametrize("averaging_is_first", [False, True])
def test_averaged_weights_of_lightning_observe_batches_outside_of_the_schedule(averaging_is_first, tmp_path):
    """The epoch that StochasticWeightAveraging adds for batch norm, without steps, ended in a step outside of the run, or
    lengthened the schedule."""
    lightning = pytest.importorskip("lightning.pytorch")
    from bitcycle.integrations.lightning import PrecisionCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 1))

        def training_step(self, batch, _index):
            return self.net(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    callback = PrecisionCallback("CR", q_min=3, q_max=8, cycles=1)
    averaging = lightning.callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=1, annealing_epochs=1)
    callbacks = [averaging, callback] if averaging_is_first else [callback, averaging]
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(
        max_epochs=2, default_root_dir=tmp_path, callbacks=callbacks, accelerator="cpu", **quiet
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=4))
    assert callback.control.cost().samples == 16 and callback.control.schedule.length.total_steps == 4


def test_a_training_of_unknown_length_is_refused(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")
    from bitcycle.integrations.lightning import PrecisionCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def training_step(self, batch, _index):
            return self.net(batch).square().mean()

    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    callbacks = [PrecisionCallback("CR")]
    trainer = lightning.Trainer(
        max_epochs=-1, accelerator="cpu", callbacks=callbacks, default_root_dir=tmp_path, **quiet
    )
    with pytest.raises(SettingError, match=r"unknown length\. Remedy: limit the trainer's steps"):
        trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(8, 4)))


def test_a_plain_loop_with_accelerate():
    from accelerate import Accelerator

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = bitcycle.quantize_model(
        nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    )
    control = bitcycle.PrecisionController(model, bitcycle.schedule("CR", cycles=2, total_steps=4))
    accelerator.register_for_checkpointing(control)
    loader = torch.utils.data.DataLoader(torch.randn(16, 6), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for step, batch in enumerate(loader):
        control.step(step)
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    assert control.cost().samples == 16


@pytest.mark.parametrize(("kind", "quantizer"), [("bert", "sbm"), ("vit", "dorefa"), ("gpt2", "uniform_l2")])
def test_a_saved_model_comes_back_converted(kind, quantizer, tmp_path):
    """Findings on networks of others, line 3."""
    model = bitcycle.quantize_model(network(kind), quantizer, float_layers=[] if kind == "vit" else None)
    control = bitcycle.PrecisionController(model, bitcycle.schedule("static", q_max=4, gradient=32, total_steps=1))
    control.step(0)
    batch = {key: value[None] for key, value in data(kind)[0].items()}
    model.train()(**batch)
    model.eval().save_pretrained(tmp_path)
    found = type(model).from_pretrained(tmp_path)
    assert found.state_dict().keys() == model.state_dict().keys()
    torch.testing.assert_close(found(**batch).logits, model(**batch).logits, rtol=0, atol=0)
    assert (
        control.states[0].precision == next(m for m in found.modules() if hasattr(m, "precision")).precision.precision
    )
    found.save_pretrained(tmp_path / "again")
    assert type(model).from_pretrained(tmp_path / "again")(**batch).logits.equal(model(**batch).logits)


@pytest.mark.parametrize("wrapped", [False, True])
def test_float_layers_of_a_saved_model_are_its_own(wrapped, tmp_path):
    """Those within its backbone lost their prefix, and those of an enclosing network were added."""
    model = network("vit")
    whole = nn.ModuleDict({"head": nn.Linear(4, 4), "net": model}) if wrapped else model
    bitcycle.quantize_model(whole, float_layers=["*.projection", "*classifier", *["head"] * wrapped])
    batch = {key: value[None] for key, value in data("vit")[0].items()}
    model.train()(**batch)
    model.eval().save_pretrained(tmp_path)
    found = type(model).from_pretrained(tmp_path)
    assert found.state_dict().keys() == model.state_dict().keys()
    assert found(**batch).logits.equal(model(**batch).logits)


def test_attention_caps_scores_and_refuses_sinks():
    """Gemma 2 has the one and gpt-oss the other; both were ignored."""
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

    from bitcycle.integrations.transformers import attention

    module = nn.Module()
    module.num_key_value_groups = 1
    operands, options = torch.randn(3, 2, 2, 4, 8), {"scaling": 0.5, "softcap": 0.7}
    found, expected = (f(module, *operands, None, **options) for f in (attention, eager_attention_forward))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    with pytest.raises(SettingError, match="attention sinks"):
        attention(module, *operands, None, s_aux=torch.zeros(2))


def seen_bits(model: nn.Module) -> dict[bool, set[int]]:
    """The bits of weights in later forward passes, in training mode (True) and in evaluation mode."""
    state = next(module for module in model.modules() if isinstance(module, PrecisionState))
    seen: dict[bool, set[int]] = {True: set(), False: set()}

    def look(module: nn.Module, *_: object) -> None:
        if module.training or not torch.is_grad_enabled():
            seen[module.training].add(int(state.weight_bits))

    next(m for m in model.modules() if isinstance(m, QuantizedProduct)).register_forward_pre_hook(look)
    return seen


def low_schedule():
    """A schedule whose first steps have 3 bits."""
    return bitcycle.schedule("CR", q_min=3, q_max=8, cycles=1, total_steps=100)


@pytest.mark.parametrize(("word", "expected"), [("q_max", 8), ("step", 3)])
def test_evaluations_of_transformers_are_at_the_chosen_precision(word, expected, tmp_path):
    from bitcycle.integrations.transformers import PrecisionCallback

    plain, _ = trainer("bert", tmp_path, save_strategy="no")
    plain.args.eval_strategy, plain.args.eval_steps = transformers.trainer_utils.IntervalStrategy.STEPS, 1
    callback = PrecisionCallback(low_schedule(), evaluate_at=word)
    sets = {"train_dataset": data("bert"), "eval_dataset": data("bert")}
    whole = transformers.Trainer(network("bert"), plain.args, callbacks=[callback], **sets)
    seen = seen_bits(whole.model)
    whole.train()
    whole.evaluate()
    assert seen == {True: {3}, False: {expected}}
    with pytest.raises(SettingError, match="evaluate_at=best"):
        PrecisionCallback("CR", evaluate_at="best")
    whole.save_model(tmp_path / "saved")
    saved = transformers.BertForMaskedLM.from_pretrained(tmp_path / "saved")
    callback = PrecisionCallback("CR", q_min=3, q_max=8, cycles=1, evaluate_at=word)
    later = transformers.Trainer(saved, plain.args, callbacks=[callback], eval_dataset=data("bert"))
    seen = seen_bits(saved)
    later.evaluate()  # in a process that has not trained: it was at the saved bits, whatever had been asked for
    assert seen == {True: set(), False: {expected}}


@pytest.mark.parametrize(("word", "expected"), [("q_max", 8), ("step", 3)])
def test_evaluations_of_lightning_are_at_the_chosen_precision(word, expected, tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")
    from bitcycle.integrations.lightning import PrecisionCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

        def training_step(self, batch, _index):
            return self.net(batch).square().mean()

        def validation_step(self, batch, _index):
            self.net(batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    loader = torch.utils.data.DataLoader(torch.randn(8, 6), batch_size=4)
    module = Module()
    module.net = bitcycle.quantize_model(module.net)
    seen = seen_bits(module)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    callback = PrecisionCallback(low_schedule(), evaluate_at=word)
    whole = lightning.Trainer(
        max_epochs=2, num_sanity_val_steps=0, default_root_dir=tmp_path, callbacks=[callback], **quiet
    )
    whole.fit(module, loader, loader)
    assert seen[True] == {3} and expected in seen[False]
    seen[False].clear()  # the trace of the first batch runs in evaluation mode, too
    whole.validate(module, loader)
    assert seen == {True: {3}, False: {expected}}
    whole.save_checkpoint(tmp_path / "last.ckpt")
    name, bound = PrecisionCallback("CR", q_min=3, q_max=8, cycles=1, evaluate_at=word), low_schedule()
    for each in (name, PrecisionCallback(bound, evaluate_at=word), callback):
        later = lightning.Trainer(default_root_dir=tmp_path, callbacks=[each], **quiet)
        module = Module()
        module.net = bitcycle.quantize_model(module.net)
        seen = seen_bits(module)
        # in a process that has not trained, or has trained another module
        later.validate(module, loader, ckpt_path=tmp_path / "last.ckpt")
        assert seen == {True: set(), False: {expected}}


@pytest.mark.parametrize(
    "made", ["once", "again", "converted", "in setup", "head in setup", "converted in setup", "nowhere"]
)
def test_networks_that_lightning_makes_late_are_converted_or_refused(made, tmp_path):
    """Lightning's own hook for making networks came after the conversion: they stayed float, or no layer was found."""
    lightning = pytest.importorskip("lightning.pytorch")
    from bitcycle.integrations.lightning import PrecisionCallback

    def network():
        parts = nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2)
        return bitcycle.quantize_model(nn.Sequential(*parts)) if made.startswith("converted") else nn.Sequential(*parts)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = None
            self.scale = nn.Parameter(torch.ones(()))

        def configure_model(self):
            late = made in ("in setup", "converted in setup", "nowhere")
            if not late and (self.network is None or made == "again"):
                self.network = network()

        def setup(self, stage):
            if made in ("in setup", "converted in setup"):
                self.network = network()
            if made == "head in setup":
                self.head = nn.Linear(2, 2)

        def training_step(self, batch, _index):
            return (self.scale * (self.network or nn.Identity())(batch)).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    trainer = lightning.Trainer(
        max_steps=2, accelerator="cpu", callbacks=[PrecisionCallback("static")], default_root_dir=tmp_path, **quiet
    )
    module, data = Module(), torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=4)
    refused = {"again": "after the conversion", "in setup": "after the conversion", "head in setup": "model=head"}
    if message := {**refused, "nowhere": "none can be"}.get(made):
        with pytest.raises(SettingError, match=message):
            trainer.fit(module, data)
        return
    trainer.fit(module, data)
    assert sum(isinstance(part, QuantizedProduct) for part in module.modules()) == 1


def test_a_module_of_lightning_may_skip_its_first_batch(tmp_path):
    """The cost was asked for before any forward pass had been seen."""
    lightning = pytest.importorskip("lightning.pytorch")
    from bitcycle.integrations.lightning import PrecisionCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def training_step(self, batch, index):
            return None if index == 0 else self.net(batch).square().mean()

    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    callback = PrecisionCallback("CR", cycles=1, q_min=3, q_max=8)
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", callbacks=[callback], default_root_dir=tmp_path, **quiet
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(12, 4), batch_size=4))
    assert callback.control.cost().samples == 8
    assert trainer.logged_metrics["gbitops"] == pytest.approx(callback.control.cost().gbitops)


class ClippedSum(Clipped):
    """Sums its loss over the items of all accumulated batches, as models of transformers do."""

    config = None

    def forward(self, x, labels=None, **keywords):
        logits = self.layers(x)
        if labels is None:  # the Trainer computes a loss of its own
            return {"logits": logits}
        items = keywords.get("num_items_in_batch") or len(x)
        return {"loss": F.cross_entropy(logits, labels, reduction="sum") / items, "logits": logits}


def clipping_gradients(network: type[nn.Module], folder, loss=None, **options) -> list[float]:
    """Those of alpha in one training step: of the penalty alone, as no input is clipped."""
    from bitcycle.integrations.transformers import PrecisionCallback

    found = []

    class Look(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **_):
            found.extend(float(x.grad) for name, x in model.named_parameters() if name.endswith("alpha"))

    plain, _ = trainer("vit", folder, max_steps=1, max_grad_norm=0.0, **options)
    sets = [{"x": torch.ones(4), "labels": torch.tensor(i % 2)} for i in range(16)]
    callbacks = [PrecisionCallback("static", "pact_binary", q_max=1, gradient=32), Look()]
    whole = transformers.Trainer(network(), plain.args, train_dataset=sets, callbacks=callbacks, compute_loss_func=loss)
    whole.train()
    return found


@pytest.mark.parametrize("network", [Clipped, ClippedSum])
@pytest.mark.parametrize("accumulated", [1, 4])
def test_accumulated_batches_have_one_penalty(network, accumulated, tmp_path):
    """Four batches of a model that sums over all items had four."""
    from bitcycle.quantizer.pact_binary import ALPHA, PENALTY

    found = clipping_gradients(network, tmp_path, gradient_accumulation_steps=accumulated)
    assert found == pytest.approx([2 * PENALTY * ALPHA], rel=1e-5)


def test_a_loss_without_the_penalty_is_refused_or_noticed(tmp_path, caplog):
    def loss(outputs, labels, num_items_in_batch=None):
        return F.cross_entropy(outputs["logits"], labels)

    with pytest.raises(SettingError, match=r"label_smoothing_factor=0.1: .* without the penalty .*Remedy: use 0"):
        clipping_gradients(ClippedSum, tmp_path, label_smoothing_factor=0.1)
    clipping_gradients(ClippedSum, tmp_path)
    assert "penalty" not in caplog.text
    clipping_gradients(ClippedSum, tmp_path, loss=loss)
    assert caplog.text.count("add bitcycle.layer.penalty(model) in compute_loss_func") == 1
