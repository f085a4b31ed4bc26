"""A trained network leaves as integers, as ONNX, or from a run's folder."""

from __future__ import annotations

import copy
import logging

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm

import bitcycle
from bitcycle.precision import Precision
from bitcycle.quantizer import Sbm
from bitcycle.settings import SettingError


def network(quantizer: str, precision: Precision) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3, groups=2), nn.ReLU()
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(6 * 16, 5))
    model = bitcycle.quantize_model(model, quantizer, float_layers=["0"])
    model[3].precision.set(precision)
    x = torch.randn(4, 3, 6, 6)
    for _ in range(20):
        model(x)
    return model.eval(), x


@pytest.mark.parametrize(
    ("quantizer", "bits"), [("sbm", 8), ("sbm", 3), ("dorefa", 4), ("uniform_l2", 4), ("pact_binary", 1), ("ttq", 2)]
)
def test_integer_weights_come_back(quantizer, bits, tmp_path):
    model, x = network(quantizer, Precision(bits, bits, 32))
    expected = model(x)
    tensors = bitcycle.finalize(model, path=tmp_path / "model.safetensors")
    integers = tensors["3:integers"]
    assert integers.dtype in (torch.int8, torch.uint8)
    assert integers.shape == model[3].weight.shape
    assert len(integers.unique()) <= 2**bits
    other, _ = network(quantizer, Precision(bits, bits, 32))
    with torch.no_grad():
        other[3].weight.zero_()
    bitcycle.load_finalized(other, tmp_path / "model.safetensors")
    torch.testing.assert_close(other(x), expected, rtol=0, atol=0)
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("quantizer", ["sbm", "dorefa", "uniform_l2", "fp8"])
def test_a_new_model_learns_from_the_file_which_inputs_are_signed(quantizer, tmp_path):
    def built() -> nn.Module:
        return bitcycle.quantize_model(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)), quantizer, float_layers=[])

    model, x = built(), torch.randn(16, 6)
    for _ in range(5):
        model(x)
    bitcycle.finalize(model.eval(), path=tmp_path / "model.safetensors")
    other = bitcycle.load_finalized(built(), tmp_path / "model.safetensors")
    torch.testing.assert_close(other(x), model(x), rtol=0, atol=0)


def test_a_model_takes_one_file_after_another(tmp_path):
    """The second was once a NotImplementedError."""
    x = torch.randn(4, 3, 6, 6)
    model, _ = network("sbm", Precision(8, 8, 32))
    files = [tmp_path / "first.safetensors", tmp_path / "second.safetensors"]
    for bits, file in zip((3, 8), files):
        bitcycle.finalize(model, bits, file)
    expected = bitcycle.load_finalized(network("sbm", Precision(8, 8, 32))[0], files[1])(x)
    other = bitcycle.load_finalized(network("sbm", Precision(8, 8, 32))[0], files[0])
    assert torch.equal(bitcycle.load_finalized(other, files[1])(x), expected)


def test_final_weights_are_not_finalized_at_other_bits(tmp_path):
    """The file once said 3 bits, and its weights had 256 values."""
    model, _ = network("sbm", Precision(8, 8, 32))
    bitcycle.finalize(model, path=tmp_path / "model.safetensors")
    bitcycle.load_finalized(model, tmp_path / "model.safetensors")
    assert bitcycle.finalize(model)["3:integers"].shape == model[3].weight.shape
    with pytest.raises(SettingError, match=r"bits=3: the weight of layer '3' is final at 8 bits"):
        bitcycle.finalize(model, 3)


@pytest.mark.parametrize("build", [lambda: network("sbm", Precision(3, 3, 8)), lambda: language_model("sbm")])
def test_final_weights_are_neither_trained_nor_used_at_other_bits(build, tmp_path):
    """They were once not quantized again, and nothing said so."""
    model, x = build()
    expected = model(x)
    bitcycle.finalize(model, path=tmp_path / "model.safetensors")
    bitcycle.load_finalized(model, tmp_path / "model.safetensors")
    bits = model[3].precision.precision.weight if isinstance(model, nn.Sequential) else 8
    control = bitcycle.PrecisionController(model, bitcycle.schedule("CR", q_min=2, q_max=6, total_steps=8))
    for change in (lambda: control.use((4, 4, 8)), lambda: control.use((32, 32, 32)), lambda: control.step(0)):
        change()
        with pytest.raises(
            ValueError, match=rf"bits=.*weight of layer '.*' is final at {bits} bits. Remedy: load a file"
        ):
            model(x)
    control.use((bits, bits, 32))
    assert torch.equal(model(x), expected)
    with torch.no_grad():
        model.train()(x)  # as for statistics of batch norm
    with pytest.raises(
        ValueError, match=r"training=True: the weight of layer .* is final .* Remedy: train the model that"
    ):
        model(x)


def test_layers_with_final_weights_that_are_frozen_may_be_trained_around(tmp_path):
    model, x = network("sbm", Precision(8, 8, 32))
    bitcycle.finalize(model, path=tmp_path / "model.safetensors")
    bitcycle.load_finalized(model, tmp_path / "model.safetensors").train()
    for layer in (model[3], model[6]):
        layer.weight.requires_grad_(False)
    model(x).sum().backward()
    assert model[0].weight.grad is not None


def test_weights_that_are_loaded_into_final_ones_are_refused(tmp_path):
    """A training checkpoint was once evaluated without quantization."""
    model, x = network("sbm", Precision(3, 3, 32))
    checkpoint = copy.deepcopy(model.state_dict())
    bitcycle.finalize(model, path=tmp_path / "model.safetensors")
    expected = bitcycle.load_finalized(model, tmp_path / "model.safetensors")(x)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    assert torch.equal(model(x), expected)
    model.load_state_dict(checkpoint)
    with pytest.raises(ValueError, match="weight=3: the weight of layer '3' has changed since load_finalized"):
        model(x)


def test_a_file_with_float_weights_follows_one_with_final_weights(tmp_path):
    """Their layers once left them unquantized at all bits."""
    model, x = network("sbm", Precision(8, 8, 32))
    for bits in (3, 32):
        bitcycle.finalize(model, bits, tmp_path / f"{bits}.safetensors")
    other = copy.deepcopy(model)
    for bits in (3, 32):
        bitcycle.load_finalized(other, tmp_path / f"{bits}.safetensors")
    for network_ in (model, other):
        network_[3].precision.set(Precision(4, 4, 32))
    assert torch.equal(other(x), model(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_final_weights_have_the_type_of_the_model(dtype, tmp_path):
    """They were once float32, on the CPU, and the forward pass raised a RuntimeError."""
    model, x = network("sbm", Precision(4, 4, 32))
    model, x = model.to(dtype), x.to(dtype)
    expected = model(x)
    bitcycle.finalize(model, path=tmp_path / "model.safetensors")
    found = bitcycle.load_finalized(model, tmp_path / "model.safetensors")(x)
    torch.testing.assert_close(
        found, expected, rtol=0, atol=2 * torch.finfo(torch.float32 if dtype == torch.float64 else dtype).eps
    )


def test_final_weights_are_not_encoded_again(tmp_path):
    """With compute=codes on a CPU with integer products, or a GPU, that once was a NotImplementedError."""
    model = bitcycle.quantize_model(nn.Sequential(nn.Linear(4, 4)), float_layers=[], compute="codes")
    bitcycle.finalize(model, path=tmp_path / "model.safetensors")
    assert bitcycle.load_finalized(model, tmp_path / "model.safetensors")[0].computation is None


def test_other_files_are_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    (tmp_path / "torn.safetensors").write_bytes(b"torn")
    for name, problem in (("other", "was not written by"), ("torn", "cannot be read")):
        with pytest.raises(SettingError, match=problem):
            bitcycle.load_finalized(network("sbm", Precision(8, 8, 8))[0], tmp_path / f"{name}.safetensors")


@pytest.mark.parametrize("bits", [4, 8])
def test_onnx_with_integer_nodes_equals_the_simulation(bits, tmp_path):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    model, x = network("sbm", Precision(bits, bits, 32))
    difference = bitcycle.export_onnx(model, tmp_path / "model.onnx", x)
    assert difference < 1e-4 * float(model(x).abs().max())
    kinds = [node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node]
    assert kinds.count("QuantizeLinear") == 2
    assert kinds.count("DequantizeLinear") == 4


class Tied(nn.Module):
    """A language model: attention, a recurrent layer, and a head that shares its weight with the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.recurrent = nn.LSTM(8, 8, bidirectional=False, batch_first=True)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.recurrent(x)[0])


def language_model(quantizer: str, **options) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model, x = bitcycle.quantize_model(Tied(), quantizer, float_layers=[]), torch.randint(20, (3, 6))
    for _ in range(20):
        model(x)
    return model.eval(), x


@pytest.mark.parametrize("quantizer", ["sbm", "uniform_l2", "wageubn"])
def test_attention_recurrent_and_tied_weights_come_back(quantizer, tmp_path):
    model, x = language_model(quantizer)
    expected = model(x)
    tensors = bitcycle.finalize(model, path=tmp_path / "model.safetensors")
    assert {"attention.query:integers", "attention.value:integers", "recurrent.hidden_l0:integers"} < set(tensors)
    assert "embedding.weight" in tensors  # which is read as float32 numbers, though the head reads it as integers
    assert not {"attention.in_proj_weight", "recurrent.weight_hh_l0", "head.weight"} & set(tensors)
    other, _ = language_model(quantizer)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    bitcycle.load_finalized(other, tmp_path / "model.safetensors")
    torch.testing.assert_close(other(x), expected, rtol=0, atol=0)


def test_weights_are_finalized_at_other_bits_than_they_were_trained_at(tmp_path):
    model, x = network("uniform_l2", Precision(8, 8, 32))
    bitcycle.finalize(model, 3, tmp_path / "model.safetensors")
    other, _ = network("uniform_l2", Precision(8, 8, 32))
    bitcycle.load_finalized(other, tmp_path / "model.safetensors")
    model[3].precision.set(Precision(3, 3, 32))
    torch.testing.assert_close(other(x), model(x), rtol=0, atol=0)


@pytest.mark.parametrize("bits", [np.int64(3), (3, 3, 32)])
def test_bits_may_be_any_whole_numbers(bits):
    model, _ = network("sbm", Precision(8, 8, 32))
    expected, tensors = bitcycle.finalize(model, 3), bitcycle.finalize(model, bits)
    assert tensors["3:bits"] == 3
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_layers_have_the_bits_of_the_schedule_unless_fixed():
    """If the first layer had fixed bits, all others once got them."""
    layers = nn.Conv2d(4, 4, 3, groups=4), nn.Flatten(), nn.Linear(16, 5)
    model = bitcycle.quantize_model(nn.Sequential(*layers), Sbm(depthwise_bits=[8, 16]), float_layers=[])
    model[2].precision.set(Precision(3, 3, 8))
    tensors = bitcycle.finalize(model)
    assert (tensors["0:bits"], tensors["2:bits"]) == (8, 3)


@pytest.mark.parametrize("quantizer", ["mx", "nvfp4"])
def test_weights_in_blocks_are_refused(quantizer):
    with pytest.raises(ValueError, match=rf"{quantizer}.*state_dict"):
        bitcycle.finalize(language_model(quantizer)[0])


@pytest.mark.parametrize("kind", ["weight_norm", "prune", "recurrent"])
def test_weights_that_are_recomputed_are_refused_until_they_are_permanent(kind, tmp_path):
    model = bitcycle.quantize_model(nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4)), float_layers=[])
    if kind == "prune":
        prune.l1_unstructured(model[0], "weight", 0.5)
    else:
        weight_norm(*(model[1], "weight_hh_l0") if kind == "recurrent" else (model[0],))
    with pytest.raises(SettingError, match=r"recomputes its weight.*Remedy: make it permanent"):
        bitcycle.finalize(model)
    if kind == "prune":
        prune.remove(model[0], "weight")
        bitcycle.finalize(model.eval(), path=tmp_path / "model.safetensors")
        x = torch.randn(3, 2, 4)
        expected, _ = model(x)
        assert torch.equal(bitcycle.load_finalized(model, tmp_path / "model.safetensors")(x)[0], expected)


def test_the_file_of_another_model_is_refused(tmp_path):
    bitcycle.finalize(network("sbm", Precision(8, 8, 8))[0], path=tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="only one of the two"):
        bitcycle.load_finalized(language_model("sbm")[0], tmp_path / "model.safetensors")


@pytest.mark.parametrize("quantizer", ["sbm", pytest.param("dorefa", marks=pytest.mark.slow)])
def test_onnx_of_attention_and_recurrent_layers(quantizer, tmp_path):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    model, x = language_model(quantizer)
    difference = bitcycle.export_onnx(model, tmp_path / "model.onnx", x[:, :2])
    assert difference < 1e-4 * float(model(x).abs().max())


class Tokens(nn.Module):
    """A language model of one layer: numbers of words [N, T] -> logits [N, T, 20]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    def forward(self, x):
        return self.head(self.layer(self.embedding(x)))


def images(samples: int, size: int) -> torch.Tensor:
    return torch.randn(samples, 3, size, size)


def words(samples: int, length: int) -> torch.Tensor:
    return torch.randint(20, (samples, length))


@pytest.mark.parametrize(
    ("kind", "bits"),
    [
        ("images", 4),
        ("words", 4),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("images", 8), ("words", 2))),
    ],
)
def test_onnx_takes_other_batches_and_lengths(kind, bits, tmp_path, caplog, recwarn):
    """The file took only batches of the size that it was exported with, and a warning per layer was printed."""
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    if kind == "images":
        layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.ReLU()]
        model, make = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)), images
    else:
        model, make = Tokens(), words
    model = bitcycle.quantize_model(model, float_layers=[])
    bitcycle.PrecisionController(model, bitcycle.schedule("static", q_max=bits, total_steps=9)).step(0)
    for _ in range(3):
        model(make(4, 9))
    model.eval()
    for exported in (1, 4) if kind == "images" else (1,):
        recwarn.clear()
        bitcycle.export_onnx(model, tmp_path / "model.onnx", make(exported, 9))
        assert not recwarn.list and not [r for r in caplog.records if r.levelno >= logging.WARNING]
        session = runtime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
        for samples, size in ((1, 9), (7, 9), (3, 12)):
            x = make(samples, size)
            [found] = session.run(None, {session.get_inputs()[0].name: x.numpy()})
            torch.testing.assert_close(torch.from_numpy(found), model(x).detach(), rtol=1e-4, atol=1e-5)


OF_ONE_LAYER = ("dorefa", "wageubn", "uniform_l2", "ternary", "multibit", "ttq", "mx", "nvfp4", "fp8")


class Masked(nn.Module):
    """Features and a factor for each sample, [N, 1], or for all, [1]."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).relu() * factor)


@pytest.mark.parametrize("each", [False, True])
def test_onnx_of_an_input_that_is_broadcast(each, tmp_path):
    """The exporter tried to free its dimension of size 1, and the error blamed the quantizer."""
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    model = bitcycle.quantize_model(Masked(), float_layers=[], sample=(torch.randn(4, 4), torch.ones(1)))

    def sample(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(batch, 4), torch.rand(batch, 1) if each else torch.rand(1)

    model(*sample(4))
    assert bitcycle.export_onnx(model.eval(), tmp_path / "model.onnx", *sample(4)) < 1e-5
    session, operands = runtime.InferenceSession(str(tmp_path / "model.onnx")), sample(7)
    names = [given.name for given in session.get_inputs()]
    [found] = session.run(None, dict(zip(names, (x.numpy() for x in operands))))
    torch.testing.assert_close(torch.from_numpy(found), model(*operands).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("quantizer", OF_ONE_LAYER)
def test_onnx_of_other_quantizers(quantizer, tmp_path):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    model, x = bitcycle.quantize_model(nn.Sequential(nn.Linear(4, 8)), quantizer, float_layers=[]), torch.randn(4, 4)
    model(x)
    if quantizer in ("mx", "nvfp4", "fp8"):
        with pytest.raises(ValueError, match="cannot be exported to ONNX"):
            bitcycle.export_onnx(model, tmp_path / "model.onnx", x)
    else:
        assert bitcycle.export_onnx(model, tmp_path / "model.onnx", x.requires_grad_()) < 1e-4


class Recurrent(nn.Module):
    """Numbers of words -> logits, by a recurrent layer."""

    def __init__(self, kind: type[nn.RNNBase], batch_first: bool) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(20, 8), kind(8, 6, batch_first=batch_first)
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        return self.head(self.layer(self.embedding(x))[0])


@pytest.mark.parametrize(("kind", "batch_first"), [(nn.LSTM, True), (nn.GRU, False)])
def test_onnx_of_a_recurrent_layer_takes_other_batches_and_refuses_other_lengths(kind, batch_first, tmp_path):
    """A file of 4 time steps declared any number of them, and returned the first 4 of 7 without an error."""
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    model = bitcycle.quantize_model(Recurrent(kind, batch_first), float_layers=[])

    def sample(batch: int, length: int) -> torch.Tensor:
        return words(batch, length) if batch_first else words(length, batch)

    model(sample(3, 4))
    bitcycle.export_onnx(model.eval(), tmp_path / "model.onnx", sample(3, 4))
    session = runtime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    x = sample(6, 4)
    [found] = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), model(x).detach(), rtol=1e-4, atol=1e-5)
    with pytest.raises(Exception, match="invalid dimensions"):
        session.run(None, {session.get_inputs()[0].name: sample(3, 7).numpy()})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("of_input", [False, True])
def test_onnx_of_other_numbers_than_float32_is_refused_before_a_file_is_written(dtype, of_input, tmp_path):
    """A file was written that onnxruntime then could not load."""
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    model = bitcycle.quantize_model(nn.Sequential(nn.Linear(4, 8)), float_layers=[])
    with pytest.raises(SettingError, match=rf"model={dtype}: only float32 .* Remedy: export a float32 copy"):
        bitcycle.export_onnx(
            model if of_input else model.to(dtype), tmp_path / "model.onnx", torch.ones(2, 4, dtype=dtype)
        )
    assert not (tmp_path / "model.onnx").exists()


def test_onnx_of_arguments_by_name_is_refused(tmp_path):
    """Expected outputs were once those without them."""
    pytest.importorskip("onnxruntime")
    model = bitcycle.quantize_model(nn.Sequential(nn.Linear(4, 8)), float_layers=[])
    for shapes in ({}, {"dynamic_shapes": None}):
        with pytest.raises(SettingError, match=r"kwargs=\['input'\]: only positional"):
            bitcycle.export_onnx(model, tmp_path / "model.onnx", kwargs={"input": torch.ones(2, 4)}, **shapes)


class Detector(nn.Module):
    """Numbers, some of them not finite, classes in bytes, and what was found."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x):
        y = self.layer(x)
        return y, y.masked_fill(y < 0, -torch.inf), y.argmax(1).to(torch.uint8), y > 0


def test_onnx_of_outputs_that_are_no_plain_numbers(tmp_path):
    """The difference of equal infinities was once NaN, which passed for none behind a first output; booleans were an error."""
    pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    model, x = bitcycle.quantize_model(Detector(), float_layers=[]), torch.randn(8, 6)
    model(x)
    assert bitcycle.export_onnx(model, tmp_path / "model.onnx", x) < 1e-5


def test_a_difference_is_the_largest_of_all_outputs():
    from bitcycle.integrations.onnx import difference

    none, infinity = torch.zeros(2), torch.tensor([torch.inf, 1.0])
    assert difference([none, infinity], [none, infinity]) == 0
    assert difference([none, infinity.isinf()], [none, none.bool()]) == 1
    assert difference([torch.tensor([1], dtype=torch.uint8)], [torch.tensor([2], dtype=torch.uint8)]) == 1
    assert difference([torch.zeros(0, 4)], [torch.zeros(0, 4)]) == 0
    for order in (1, -1):
        found, expected = [none, infinity * torch.nan][::order], [none, infinity][::order]
        assert np.isnan(difference(found, expected))
