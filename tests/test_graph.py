"""Graph layers, networks and data: the authors' numbers, what is charged, and runs on small graphs in the published layouts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bitcycle.layer import QuantizedGraphConvolution, QuantizedSageConvolution
from bitcycle.model.edges import Edges, make_edges
from bitcycle.quantizer import Sbm
from bitcycle.schedule import Precision
from tests.conftest import GOLDEN

FOLDER = GOLDEN.parent / "golden-domains"


def arrays(name: str) -> dict[str, torch.Tensor]:
    with np.load(FOLDER / f"{name}.npz") as found:
        return {key: torch.from_numpy(np.asarray(found[key])) for key in found.files}


def block(src, dst, sources: int, destinations: int) -> Edges:
    """The edges of a bipartite block."""
    whole = make_edges(torch.stack([src, dst]).long(), sources)
    return Edges(whole.offsets[: destinations + 1], whole.sources)


def golden_cases(name: str) -> list[tuple[str, str, int, int]]:
    found = [key.split("__") for key in arrays(name)]
    return sorted(
        {
            (case, mode, int(bits[1:]), int(gradient[1:]))
            for case, mode, bits, gradient, _ in (parts for parts in found if len(parts) == 5)
        }
    )


def check_layer(layer, edges, golden, case, mode, bits, gradient, names) -> None:
    layer.precision_state.set(Precision(bits or 32, bits or 32, gradient or 32))
    if bits and not gradient:
        layer.precision_state.gradient_bits.zero_()
    x = golden[f"{case}__x"].clone().requires_grad_()
    y = layer(x, edges)
    y.backward(golden[f"{case}__gy"])
    torch.testing.assert_close(y, golden[f"{case}__{mode}__b{bits}__y"], rtol=1e-6, atol=1e-6)
    gradients = {"gx": x.grad, **{f"g{name}": parameter.grad for name, parameter in names.items()}}
    for name, found in gradients.items():
        expected = golden[f"{case}__{mode}__b{bits}__g{gradient}__{name}"]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(("case", "mode", "bits", "gradient"), golden_cases("gnn_graphconv"))
def test_graph_convolution_golden(case, mode, bits, gradient):
    golden = arrays("gnn_graphconv")
    edges = make_edges(torch.stack([golden["src"], golden["dst"]]), int(golden["num_nodes"]))
    weight, bias = golden[f"{case}__w"], golden[f"{case}__bias"]
    layer = QuantizedGraphConvolution(*weight.shape, mode == "qagg", quantizer=Sbm(stochastic=False))
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    layer.precision_state = layer.precision
    check_layer(layer, edges, golden, case, mode, bits, gradient, {"w": layer.weight, "bias": layer.bias})


def test_quantized_norm_golden():
    golden = arrays("gnn_graphconv")
    edges = make_edges(torch.stack([golden["src"], golden["dst"]]), int(golden["num_nodes"]))
    weight = golden["quant_norm__w"]
    layer = QuantizedGraphConvolution(*weight.shape, quantized_norm=True, quantizer=Sbm(stochastic=False))
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(golden["quant_norm__bias"])
    layer.precision.set(Precision(4, 4, 8))
    torch.testing.assert_close(layer(golden["quant_norm__x"], edges), golden["quant_norm__b4__y"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("case", "mode", "bits", "gradient"), golden_cases("gnn_sage"))
def test_sage_convolution_golden(case, mode, bits, gradient):
    golden = arrays("gnn_sage")
    edges = block(golden["src"], golden["dst"], int(golden["num_src"]), int(golden["num_dst"]))
    out_features, in_features = golden[f"{case}__w_neigh"].shape
    layer = QuantizedSageConvolution(in_features, out_features, mode == "qagg", quantizer=Sbm(stochastic=False))
    with torch.no_grad():
        layer.neighbour.weight.copy_(golden[f"{case}__w_neigh"])
        layer.own.weight.copy_(golden[f"{case}__w_self"])
        layer.bias.copy_(golden[f"{case}__bias"])
    layer.precision_state = layer.own.precision
    names = {"w_neigh": layer.neighbour.weight, "w_self": layer.own.weight, "bias": layer.bias}
    check_layer(layer, edges, golden, case, mode, bits, gradient, names)
