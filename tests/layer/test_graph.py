"""Graph layers against golden values and matrix products."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

import bitcycle.module.sparse as edges_module
from bitcycle.dataset.neighbours import SAMPLERS, NeighbourSampler, choose
from bitcycle.layer import QuantizedGraphConvolution, QuantizedSageConvolution, quantize_model
from bitcycle.model.graph_network import Gcn, GraphSage, norm
from bitcycle.module.sparse import Edges, make_edges, neighbour_mean, neighbour_sum
from bitcycle.precision import Precision
from bitcycle.quantizer import Sbm
from bitcycle.quantizer.sbm import SbmRows
from bitcycle.shapes import GraphShape
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


@pytest.mark.parametrize("mode", ["fpagg", "qagg"])
@pytest.mark.parametrize("bits", [0, 3, 8])
def test_gcn_golden(mode, bits):
    golden = arrays("gnn_gcn")
    edges = make_edges(torch.stack([golden["src"], golden["dst"]]), int(golden["num_nodes"]))
    options = Gcn(name="gcn", hidden=16, aggregation="quantized" if mode == "qagg" else "float")
    model = options.build(GraphShape(10, 5, int(golden["num_nodes"]), len(golden["src"])))
    model.load_state_dict({key[7:]: value for key, value in golden.items() if key.startswith("param__")})
    model = quantize_model(model).eval()
    model.layers[0].precision.set(Precision(bits or 32, bits or 32, 8))
    torch.testing.assert_close(model(golden["x"], [edges]), golden[f"{mode}__b{bits}__logits"], rtol=1e-5, atol=1e-5)


def random_edges(nodes: int, count: int) -> tuple[Edges, torch.Tensor]:
    """Edges, some of them twice, and their matrix [destinations, sources]."""
    pairs = torch.randint(nodes, (2, count), generator=torch.Generator().manual_seed(0))
    matrix = torch.zeros(nodes, nodes, dtype=torch.float64)
    matrix.index_put_((pairs[1], pairs[0]), torch.ones(count, dtype=torch.float64), accumulate=True)
    return make_edges(pairs, nodes), matrix


def test_sum_over_neighbours_is_a_matrix_product_both_ways():
    edges, matrix = random_edges(20, 50)
    h = torch.randn(20, 7, dtype=torch.float64, requires_grad=True)
    y, upstream = neighbour_sum(h, edges), torch.randn(20, 7, dtype=torch.float64)
    y.backward(upstream)
    torch.testing.assert_close(y, matrix @ h)
    torch.testing.assert_close(h.grad, matrix.T @ upstream)
    without_way_back = neighbour_sum(h, Edges(edges.offsets, edges.sources))
    torch.testing.assert_close(torch.autograd.grad(without_way_back, h, upstream)[0], h.grad)
    torch.testing.assert_close(neighbour_mean(h, edges), matrix @ h / matrix.sum(1, keepdim=True).clamp_min(1))


@pytest.mark.parametrize("sizes", [(7, 3), (3, 7)])
def test_constant_features_are_quantized_once_for_each_precision(sizes, monkeypatch):
    edges, _ = random_edges(20, 50)
    torch.manual_seed(0)
    layer, x = QuantizedGraphConvolution(*sizes), torch.rand(20, sizes[0])
    quantized = []
    quantize = SbmRows.forward
    monkeypatch.setattr(SbmRows, "forward", lambda rows, h, bits: quantized.append(h) or quantize(rows, h, bits))

    def weight_gradient(features: torch.Tensor) -> torch.Tensor:
        layer.precision.begin_step(0)
        layer(features, edges).square().sum().backward()
        gradient, layer.weight.grad = layer.weight.grad, None
        return gradient

    def calls_of_features() -> int:
        return sum(h.shape == x.shape for h in quantized)

    for bits in (3, 8, 3):
        layer.precision.set(Precision(bits, bits, 8))
        expected = weight_gradient(x.clone())
        quantized.clear()
        for _ in range(6):
            assert torch.equal(weight_gradient(x), expected)
        if sizes[0] > sizes[1]:  # else the aggregate is quantized, which is made in each call
            assert calls_of_features() <= 3
    x[0] += 1  # changed in place
    assert torch.equal(weight_gradient(x), weight_gradient(x.clone()))
    again = copy.deepcopy(layer)
    assert torch.equal(again(x, edges), layer(x, edges))
    other, _ = random_edges(20, 30)
    assert torch.equal(layer(x, other), layer(x.clone(), other))


def test_segments_add_up_to_the_same(monkeypatch):
    """What a GPU computes, here on a CPU, all columns at once and some at a time."""
    edges, matrix = random_edges(20, 50)
    h = torch.randn(20, 7, dtype=torch.float64)
    for elements in (1 << 28, 100):
        monkeypatch.setattr(edges_module, "SEGMENT_ELEMENTS", elements)
        torch.testing.assert_close(edges_module._sum_of_segments(h, edges.offsets, edges.sources), matrix @ h)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_sampled_neighbours_are_distinct_edges_of_the_graph(sampler):
    if sampler == "dgl":
        pytest.importorskip("dgl", reason="dgl ends with Python 3.11")
    _, matrix = random_edges(40, 400)
    matrix = (matrix > 0).double()
    pairs = matrix.nonzero().T.flip(0)
    sampler = SAMPLERS[sampler](make_edges(pairs, 40), [3, 5])
    seeds = torch.tensor([7, 0, 31])
    found, again = sampler.sample(seeds, 0, "train", 4), sampler.sample(seeds, 0, "train", 4)
    assert torch.equal(found.nodes, again.nodes)
    assert all(torch.equal(*both) for both in zip(found.edges[0][:2], again.edges[0][:2]))
    assert not torch.equal(found.nodes, sampler.sample(seeds, 0, "train", 5).nodes)
    assert torch.equal(found.nodes[:3], seeds)
    assert len(found.nodes.unique()) == len(found.nodes)
    for layer, count in zip(found.edges, (3, 5)):
        rows = edges_module.destination_of_each(layer.offsets, len(layer.sources))
        taken = torch.stack([found.nodes[rows], found.nodes[layer.sources.long()]])
        assert (matrix[taken[0], taken[1]] == 1).all()
        assert len(taken.unique(dim=1).T) == len(taken.T)
        degrees = matrix.sum(1)[found.nodes[: layer.destinations]]
        assert torch.equal(layer.offsets.diff().double(), degrees.clamp_max(count))


def test_every_set_of_neighbours_is_equally_likely():
    chosen = choose(torch.full((60_000,), 5), torch.arange(60_000), 3, key=11).sort(1).values
    _, counts = chosen.unique(dim=0, return_counts=True)
    assert len(counts) == 10
    chi_square = ((counts - 6000) ** 2 / 6000).sum()
    assert chi_square < 27.9  # exceeded once in a thousand, at nine degrees of freedom


@pytest.mark.parametrize("kind", [GraphSage, Gcn])
def test_all_neighbours_sampled_is_the_whole_graph(kind):
    edges, _ = random_edges(30, 200)
    model = kind(name="x", layers=2, hidden=8, norm="node").build(GraphShape(6, 3, 30, 200)).eval()
    x, seeds = torch.randn(30, 6), torch.arange(30)
    seen = NeighbourSampler(edges, [200, 200]).sample(seeds, 0)
    torch.testing.assert_close(model(x[seen.nodes], seen.edges), model(x, [edges]))


def test_norms():
    x = torch.randn(5, 6) + 3
    torch.testing.assert_close(norm(x, "tensor"), (x - x.mean()) / (x.var(correction=0) + 1e-5).sqrt())
    expected = (x - x.mean(1, keepdim=True)) / (x.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(norm(x, "node"), expected)
    assert norm(x, "none") is x


def test_sums_of_rows_are_made_where_the_features_are():
    """The stored elements were made on the default device, the CPU, wherever the features were."""
    h, edges = torch.randn(4, 3), Edges(torch.tensor([0, 1, 2, 2, 4]), torch.tensor([1, 0, 3, 2]))
    expected = edges_module._sum_of_rows(h, edges.offsets, edges.sources)
    with torch.device("meta"):  # another default device
        assert torch.equal(edges_module._sum_of_rows(h, edges.offsets, edges.sources), expected)
