"""The Llama decoder: what the recipes quantize, causality, cost."""

from __future__ import annotations

import math

import pytest
import torch

import bitcycle
from bitcycle.model import MODELS
from bitcycle.quantizer import QUANTIZERS
from bitcycle.settings import SettingError
from bitcycle.shapes import TokenShape
from bitcycle.training.loop import Trainer
from bitcycle.training.run import execute
from tests.conftest import plan
from tests.made_data import TEXT, with_made_data

pytest.importorskip("transformers")
TINY = {"layers": 2, "width": 32, "heads": 2, "feedforward": 48}


def tiny() -> torch.nn.Module:
    torch.manual_seed(0)
    return MODELS["llama"](**TINY).build(TokenShape(256)).eval()


@pytest.mark.parametrize("quantizer", ["none", "mx", "nvfp4_pretraining"])
def test_a_byte_does_not_depend_on_later_ones(quantizer):
    model = tiny()
    if quantizer == "mx":  # nvfp4 has a scale of the whole tensor
        model = bitcycle.quantize_model(model, quantizer)
    tokens = torch.randint(256, (12, 3))
    changed = tokens.clone()
    changed[8:] = 0
    torch.testing.assert_close(model(tokens)[0][:8], model(changed)[0][:8])


@pytest.mark.parametrize("quantizer", ["mx", "nvfp4_pretraining", "mxfp4_backward"])
def test_the_linear_layers_of_the_decoder_are_quantized(quantizer):
    options = QUANTIZERS[quantizer](float_share=0.0)
    model = bitcycle.quantize_model(tiny(), options)
    kinds = {rule.name.rpartition(".")[2]: rule.treatment for rule in model.conversion_rules}
    linear = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert {name for name, treatment in kinds.items() if treatment == "quantized"} == linear
    assert {"lm_head", "score_product", "value_product"} == {
        n for n, treatment in kinds.items() if treatment == "float"
    }


def test_the_last_layers_stay_float():
    model = bitcycle.quantize_model(tiny(), "nvfp4_pretraining")
    left = [rule.name for rule in model.conversion_rules if rule.reason.startswith("float_share")]
    assert left == [f"llama.model.layers.1.mlp.{name}_proj" for name in ("up", "down")]  # round(0.15 * 14)


def test_gradients_of_a_step_of_each_recipe_are_finite():
    for quantizer, name in (("nvfp4_pretraining", "late_switch"), ("mxfp4_backward", "mxfp4_backward")):
        schedule = bitcycle.schedule(name, total_steps=10)
        model = bitcycle.quantize_model(tiny().train(), quantizer, schedule=schedule)
        control = bitcycle.PrecisionController(model, schedule)
        control.step(0)
        model(torch.randint(256, (16, 4)))[0].square().sum().backward()
        assert all(parameter.grad.isfinite().all() and parameter.grad.any() for parameter in model.parameters())


def test_products_of_the_decoder():
    workload = plan("dataset=wikitext2_bytes", "quantizer=mx", "schedule=static").workload
    macs = {
        kind: sum(o.macs for o in workload.operations if o.kind == kind) / workload.samples
        for kind in ("linear", "matmul")
    }
    assert macs["linear"] == 4 * (4 * 256**2 + 3 * 256 * 688) + 256 * 256
    assert macs["matmul"] == 4 * 2 * 256 * 256  # sequences of 256
    assert all(o.is_float for o in workload.operations if o.kind == "matmul")


@pytest.mark.parametrize(
    "recipe",
    [
        "quantizer=nvfp4_pretraining schedule=late_switch schedule.share=0.5",
        "quantizer=mxfp4_backward schedule=mxfp4_backward",
        "quantizer=nvfp4_pretraining schedule=CR schedule.cycles=1 schedule.formats=[nvfp4,mxfp6,mxfp8]",
    ],
)
def test_a_run_of_each_recipe_on_bytes(recipe, tmp_path, monkeypatch):
    overrides = [
        *("dataset=text", f"dataset.path={TEXT}", "dataset.unit=byte", "model=llama", "training=llama"),
        *("task=language_modelling_blocks", "task.sequence_length=16", "scale=smoke", "training.steps=4"),
        *("dataset.train_samples=20", "dataset.test_samples=5", "training.evaluation_steps=2"),
        *("model.layers=1", "model.width=16", "model.heads=2", "model.feedforward=16", f"results_root={tmp_path}/runs"),
        *recipe.split(),
    ]
    planned = plan(*with_made_data(overrides, tmp_path, monkeypatch))
    assert math.isfinite(execute(planned)["final"])
    trainer = Trainer(planned, torch.device("cpu"))
    metrics = trainer.task.measure(trainer.model.eval(), "test")
    assert metrics["test_bits_per_byte"] == pytest.approx(metrics["test_loss"] / math.log(2))
    assert 7 < metrics["test_bits_per_byte"] < 9  # about 8 with random weights


def test_bytes_have_no_vocabulary_to_choose():
    with pytest.raises(SettingError, match="has 256 tokens"):
        plan("dataset=wikitext2_bytes", "dataset.vocabulary=100")
    with pytest.raises(SettingError, match="in bytes is not known"):
        plan("dataset=ptb", "dataset.unit=byte")
