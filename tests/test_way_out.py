"""A trained network leaves as integers, as ONNX, or from a run's folder."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bitcycle
from bitcycle.schedule import Precision


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


def test_other_files_are_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="finalize"):
        bitcycle.load_finalized(network("sbm", Precision(8, 8, 8))[0], tmp_path / "other.safetensors")


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
