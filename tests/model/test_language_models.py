"""Networks of language modelling: sizes of the papers, costs, initial weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bitcycle.hardware import trace
from bitcycle.layer import QuantizedEmbedding, quantize_model
from bitcycle.model import MODELS
from bitcycle.model.recurrent_language_model import RecurrentLanguageModelOptions, hold_at_zero
from bitcycle.settings import SettingError
from bitcycle.shapes import TokenShape
from tests.conftest import plan


def parameters(name: str, vocabulary: int = 10_000) -> int:
    with torch.device("meta"):
        model = MODELS[name]().build(TokenShape(vocabulary))
    return sum(parameter.numel() for parameter in model.parameters())


def test_parameters_of_the_papers_networks():
    """Embedding V E, recurrent 4 H (E + H) and one bias of 4 H (HLHLp: two), softmax V H + V."""
    assert parameters("lstm") == 8_000_000 + 4 * 800 * 1600 + 3200 + 8_010_000
    assert parameters("lstm2") == 6_500_000 + 2 * (4 * 650 * 1300 + 2600) + 6_510_000
    assert parameters("lstm_hlhlp") == 3_000_000 + 4 * 300 * 600 + 2 * 1200 + 3_010_000
    assert parameters("gru_hlhlp") == 3_000_000 + 3 * 300 * 600 + 2 * 900 + 3_010_000


def test_parameters_of_the_transformers():
    """Layers as counted by hand."""
    layer = 4 * (512 * 512 + 512) + 2 * 512 * 2048 + 2048 + 512 + 4 * 512
    assert parameters("transformer", 267_735) == 6 * layer + 2 * 512 + 267_735 * 512


def test_cost_of_penn_treebank_is_that_of_the_released_code():
    """9.184e9 multiply-accumulates of the linear products of a batch of 20 x 35 (get_flops.py of cpt_ptb); all are quantized."""
    planned = plan("dataset=ptb", "schedule=static")
    workload = planned.workload
    assert planned.parameters == 21_133_200
    assert workload.macs / workload.samples * 20 * 35 == 9_184_000_000
    products = [operation for operation in workload.operations if operation.macs]
    assert all(operation.fixed_precision is None for operation in products)
    assert {operation.module for operation in products} == {"rnn.input_l0", "rnn.hidden_l0", "decoder"}
    without_gradient = [o.name for o in products if not o.input_gradients]
    assert without_gradient == ["rnn.hidden_l0"]  # the state before the first step comes as values


def test_products_of_the_transformer():
    """18.87M multiply-accumulates a word in the linear layers, as FracTrain counts, and those of attention; all quantized."""
    model = quantize_model(MODELS["transformer"]().build(TokenShape(50)), "sbm")
    workload = trace(model, torch.zeros(256, 1, dtype=torch.long), samples=256)
    linear, attention = ([o for o in workload.operations if o.kind == kind] for kind in ("linear", "matmul"))
    layers = [o for o in linear if not o.is_float]
    assert sum(o.macs for o in layers) / workload.samples == 6 * (4 * 512**2 + 2 * 512 * 2048) == 18_874_368
    assert [o.name for o in linear if o.is_float] == ["head"]
    assert sum(o.macs for o in attention) / workload.samples == 6 * 2 * 256 * 512
    assert all(o.fixed_precision is None for o in attention)


@pytest.mark.parametrize(
    ("choice", "float_layers"), [("all", set()), ("products", {"embedding"}), ("recurrent", {"embedding", "decoder"})]
)
def test_what_is_quantized(choice, float_layers):
    for quantizer in ("sbm", "uniform_l2"):
        model = RecurrentLanguageModelOptions(name="lstm", hidden=4, quantize=choice).build(TokenShape(7))
        model = quantize_model(model, quantizer)
        layers = {"embedding": model.embedding, "decoder": model.decoder, "rnn": model.rnn}
        assert {name for name, layer in layers.items() if not hasattr(layer, "precision")} == float_layers
        if choice != "recurrent":
            assert (model.decoder.bias_quantizer is not None) == (quantizer == "sbm")


def test_the_embedding_has_as_many_values_as_its_bits_say():
    embedding = QuantizedEmbedding(10, 100)
    embedding.precision.set(embedding.precision.precision._replace(weight=2))
    rows = embedding(torch.arange(10))
    assert all(len(row.unique()) == 4 for row in rows)
    rows.sum().backward()
    assert torch.equal(embedding.weight.grad, torch.ones(10, 100))


def test_initial_weights():
    torch.manual_seed(0)
    model = RecurrentLanguageModelOptions(name="lstm", hidden=100).build(TokenShape(50))
    assert float(model.rnn.weight_hh_l0.detach().abs().max()) == pytest.approx(0.1, rel=0.01)
    assert float(model.embedding.weight.detach().abs().max()) == pytest.approx(0.1, rel=0.01)
    assert not model.decoder.bias.any() and not model.rnn.bias_hh_l0.any()
    wide = RecurrentLanguageModelOptions(name="lstm", hidden=400, recurrent_range=0.1, bias="both").build(
        TokenShape(50)
    )
    for parameter in wide.rnn.parameters():
        assert float(parameter.detach().abs().max()) == pytest.approx(0.1, rel=0.01)


def test_a_bias_held_at_zero_is_neither_trained_nor_saved():
    """The float layer computes what a layer with a second bias of zero computes."""
    torch.manual_seed(0)
    rnn, other = nn.LSTM(3, 4), nn.LSTM(3, 4)
    other.load_state_dict(rnn.state_dict())
    nn.init.zeros_(other.bias_hh_l0)
    hold_at_zero(rnn, "bias_hh_l0")
    x = torch.randn(5, 2, 3)
    torch.testing.assert_close(rnn(x), other(x))
    assert "bias_hh_l0" not in rnn.state_dict()
    rnn(x)[0].sum().backward()
    assert all(parameter.grad is not None for parameter in rnn.parameters())
    torch.testing.assert_close(rnn.double()(x.double())[0].float(), other(x)[0])


TINY_TRANSFORMER = {"width": 16, "heads": 2, "feedforward": 32, "layers": 2}


def test_a_transformer_sees_no_word_to_come():
    torch.manual_seed(0)
    model = MODELS["transformer"](**TINY_TRANSFORMER).build(TokenShape(20)).eval()
    tokens = torch.randint(20, (7, 2))
    changed = tokens.clone()
    changed[4] = (changed[4] + 1) % 20
    logits, other = model(tokens)[0], model(changed)[0]
    assert logits.shape == (7, 2, 20)
    torch.testing.assert_close(logits[:4], other[:4])
    assert (logits[4:] - other[4:]).abs().amax(dim=(1, 2)).min() > 1e-4


def test_a_width_that_heads_do_not_divide_is_refused():
    with pytest.raises(SettingError, match="divisible by 7 heads"):
        MODELS["transformer"](heads=7)
