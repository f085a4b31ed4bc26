"""Quantized torch.nn.MultiheadAttention, alone and in PyTorch's transformers."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import bitcycle
from bitcycle.layer import QuantizedProduct
from bitcycle.precision import Precision
from bitcycle.settings import SettingError

N, L, E = 3, 5, 8


@pytest.mark.parametrize("batch_first", [True, False])
def test_gradients_have_samples_in_dimension_0(batch_first, monkeypatch):
    """Projections once had one range per sample instead of one per position, and with dorefa the reverse."""
    model = bitcycle.quantize_model(nn.MultiheadAttention(E, 2, batch_first=batch_first), float_layers=[])
    shapes = {}
    for name, product in model.named_modules():
        if isinstance(product, QuantizedProduct):
            quantizer = product.gradient_quantizer
            monkeypatch.setattr(
                quantizer,
                "quantize",
                lambda gradient, *rest, name=name, plain=quantizer.quantize: (
                    shapes.setdefault(name, tuple(gradient.shape)) and plain(gradient, *rest)
                ),
            )
    x = torch.randn(N, L, E) if batch_first else torch.randn(L, N, E)
    model(x, x, x)[0].square().sum().backward()
    assert shapes == {
        **dict.fromkeys(("query", "key", "value", "out_proj"), (N, L, E)),
        "scores": (N, 2, L, L),
        "mixture": (N, 2, L, E // 2),
    }


def test_results_do_not_depend_on_the_layout():
    torch.manual_seed(0)
    first = nn.MultiheadAttention(E, 2, batch_first=True)
    second = nn.MultiheadAttention(E, 2)
    second.load_state_dict(first.state_dict())
    gradients = []
    for plain in (first, second):
        model = bitcycle.quantize_model(plain, float_layers=[])
        bitcycle.PrecisionController(model, bitcycle.schedule("static", q_max=4, total_steps=1)).step(0)
        torch.manual_seed(1)
        x = torch.randn(N, L, E)
        y = model(x, x, x)[0] if plain.batch_first else model(*[x.transpose(0, 1)] * 3)[0].transpose(0, 1)
        y.square().sum().backward()
        gradients.append([y, *(parameter.grad for parameter in model.parameters())])
    assert all(map(torch.equal, *gradients))


def test_an_encoder_evaluates_padded_batches():
    """Its fast path makes nested tensors, which no quantized layer takes."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, 2, 16, batch_first=True)
    plain = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    model = bitcycle.quantize_model(copy.deepcopy(nn.TransformerEncoder(layer, 2)), float_layers=[]).eval()
    model.layers[0].linear1.precision.set(Precision(32, 32, 32))
    x, padding = torch.randn(N, L, E), torch.zeros(N, L, dtype=torch.bool)
    padding[0, 3:] = True
    with torch.no_grad():
        found, expected = (network(x, src_key_padding_mask=padding) for network in (model, plain))
    torch.testing.assert_close(found[~padding], expected[~padding])


@pytest.mark.parametrize(
    ("build", "spoil"),
    [
        (lambda: nn.LSTM(E, E), lambda layer: weight_norm(layer, "weight_hh_l0")),
        (lambda: nn.MultiheadAttention(E, 2), lambda layer: weight_norm(layer, "in_proj_weight")),
        (lambda: nn.MultiheadAttention(E, 2), lambda layer: weight_norm(layer.out_proj)),
    ],
)
def test_recomputed_weights_of_larger_layers_are_refused_by_name(build, spoil):
    """They ended in a KeyError and an AttributeError; what the message recommends works."""
    layer = build()
    spoil(layer)
    with pytest.raises(SettingError, match=r"layer '0'.*to the converted model instead"):
        bitcycle.quantize_model(nn.Sequential(layer), float_layers=[])
    model = bitcycle.quantize_model(nn.Sequential(build()), float_layers=[])[0]
    spoil(model)
    x = torch.randn(L, N, E)
    y, _ = model(x, x, x) if isinstance(model, nn.MultiheadAttention) else model(x)
    y.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("masks", "error"),
    [
        ({"is_causal": True}, RuntimeError),
        ({"attn_mask": torch.zeros(L, L + 1)}, RuntimeError),
        ({"key_padding_mask": torch.zeros(N, L - 1, dtype=torch.bool)}, (RuntimeError, AssertionError)),
        ({"attn_mask": torch.ones(L, L, dtype=torch.uint8)}, AssertionError),
    ],
)
def test_masks_that_pytorch_refuses_are_refused(masks, error):
    """The first was without effect, the next two were cut or extended to fit, and the last was added to the scores."""
    x, plain = torch.randn(N, L, E), nn.MultiheadAttention(E, 2, batch_first=True)
    for model in (plain, bitcycle.quantize_model(copy.deepcopy(plain), float_layers=[])):
        with pytest.raises(error):
            model(x, x, x, **masks)


def test_weights_are_returned_after_dropout():
    """As PyTorch's; they were once returned before it, so a loss on them had other gradients."""
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(E, 2, dropout=0.5, batch_first=True)
    model = bitcycle.quantize_model(copy.deepcopy(plain), float_layers=[])
    model.precision.set(Precision(32, 32, 32))
    x, found = torch.randn(N, L, E), []
    for attention in (plain, model):
        torch.manual_seed(1)
        found.append(attention(x, x, x))
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
