"""Graph layers, networks and data: the authors' numbers, what is charged, and runs on small graphs in the published layouts."""

from __future__ import annotations

import copy
import itertools
import shutil
import sys
from urllib.error import URLError

import numpy as np
import pytest
import torch

import bitcycle.layer.sparse as edges_module
from bitcycle.dataset import citation, fetch, ogbn
from bitcycle.dataset.graph import scaled
from bitcycle.dataset.neighbours import SAMPLERS, DglSampler, NeighbourSampler, choose, edges_of
from bitcycle.errors import DataError
from bitcycle.layer import QuantizedGraphConvolution, QuantizedSageConvolution, quantize_model
from bitcycle.layer.sparse import Edges, make_edges, neighbour_mean, neighbour_sum
from bitcycle.model import GraphShape
from bitcycle.model.graph_network import Gcn, GraphNorm, GraphSage
from bitcycle.quantizer import Sbm
from bitcycle.quantizer.sbm import SbmRows
from bitcycle.randomness import derive
from bitcycle.schedule import Precision
from bitcycle.settings import SettingError
from bitcycle.training.run import build_trainer, execute
from bitcycle.training.run_folder import read_records
from tests.conftest import GOLDEN, configure, plan
from tests.graph_data import TINY, write_citation, write_ogbn

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
        rows = edges_module.destination_of_each(layer.offsets)
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
    torch.testing.assert_close(GraphNorm("tensor")(x), (x - x.mean()) / (x.var(correction=0) + 1e-5).sqrt())
    expected = (x - x.mean(1, keepdim=True)) / (x.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(GraphNorm("node")(x), expected)
    assert GraphNorm("none")(x) is x


BETTER = ["hardware.convention=better", "hardware.count=weights_and_norm"]


def test_arxiv_costs_what_the_released_code_counts():
    """Linear layers 58,958,458,880 and 4 for each element of a layer norm, in each of 1000 steps, without data."""
    found = plan("dataset=ogbn_arxiv", "schedule=static", "schedule.q_max=8", *BETTER)
    linear = sum(operation.macs for operation in found.workload.operations if operation.kind == "linear")
    assert linear == 58_958_458_880
    assert linear + 4 * found.workload.layer_norm_elements == 59_652_087_808
    assert found.cost().effective_macs == 59_652_087_808 * (8 * 8 + 2 * 8 * 8) / 1024 * 1000
    assert (found.total_steps, found.batch_size, found.epoch.steps) == (1000, 90_941, 1)
    assert found.parameters == (128 * 512 + 512) + (512 * 512 + 512) + (512 * 40 + 40)
    aggregated = [operation for operation in found.workload.operations if operation.kind == "aggregation"]
    assert [(o.product.m, o.product.n) for o in aggregated] == [(2_484_941, n) for n in (128, 512, 40)]


def test_products_costs_what_the_released_code_counts_on_average():
    found = plan("dataset=ogbn_products", *BETTER)
    linear = sum(operation.macs for operation in found.workload.operations if operation.kind == "linear")
    assert linear + 4 * found.workload.layer_norm_elements == pytest.approx(3_670_697_915, rel=1e-4)
    assert (found.total_steps, found.workload.samples) == (15_440, 1024)
    assert found.parameters == (2 * 100 * 512 + 512) + (2 * 512 * 47 + 47)


@pytest.mark.parametrize(("aggregation", "bits"), [("float", (32, 32, 32)), ("quantized", (3, 3, 8))])
@pytest.mark.parametrize("dataset", ["ogbn_arxiv", "ogbn_products"])
def test_aggregation_is_charged_at_its_bits(dataset, aggregation, bits):
    found = plan(f"dataset={dataset}", f"model.aggregation={aggregation}")
    for operation in found.workload.operations:
        charged = operation.precision(Precision(3, 3, 8))
        assert charged == (Precision(*bits) if operation.kind == "aggregation" else Precision(3, 3, 8)), operation.name
        assert (operation.kind == "aggregation") == operation.name.endswith("aggregate")


def test_the_papers_recipes():
    arxiv, products = configure("dataset=ogbn_arxiv"), configure("dataset=ogbn_products")
    assert (arxiv.model.name, arxiv.model.layers, arxiv.model.hidden, arxiv.model.norm) == ("gcn", 3, 512, "tensor")
    assert (arxiv.dataset.edges, arxiv.dataset.self_loops, arxiv.dataset.features) == (
        "symmetrised",
        True,
        "standardised",
    )
    rate = arxiv.training.learning_rate
    assert rate.rate(0, 1000) == 1e-3
    assert rate.rate(1000, 1000) == pytest.approx(1e-4)
    assert (products.model.name, products.model.layers, products.dataset.neighbours) == ("graphsage", 2, [32, 32])
    assert products.training.learning_rate.initial == 3e-4
    assert (arxiv.task.loss, products.task.loss) == ("cross_entropy", "cross_entropy")


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Plans of smoke runs on a tiny graph."""
    monkeypatch.setitem(citation.SIZES, "cora", TINY)
    write_citation(tmp_path)

    def make(*overrides: str):
        where = f"data_root={tmp_path}", f"results_root={tmp_path}/runs", "scale=smoke"
        return plan("dataset=cora", "training.steps=24", *where, *overrides)

    return make


SMOKE = [
    ["schedule=RTH", "model.norm=node", "model.layers=3"],
    ["schedule=deficit", "schedule.unit=epoch", "schedule.end=10", "model.aggregation=quantized", "task.loss=raw_nll"],
    ["schedule=CR", "model.quantized_norm=true", "quantizer.bifurcate=16"],
    ["quantizer=dorefa", "schedule=ETV"],
    ["quantizer=uniform_l2", "schedule=LR", "schedule.cycles=4", "schedule.gradient_min=32", "model=graphsage"],
    ["model=graphsage", "dataset.neighbours=[3,3]", "model.aggregation=quantized", "task.evaluation_neighbours=full"],
]


@pytest.mark.parametrize("overrides", SMOKE, ids=" ".join)
def test_runs(small, overrides):
    found = small(*overrides)
    summary = execute(found)
    assert summary["cost"]["total"] == found.cost().summary()
    assert summary["metric"] == "test_accuracy"
    assert summary["validation"].keys() == {"final", "best", "test_at_best"}
    if "task.loss=raw_nll" in overrides:  # unbounded below
        records = [r for r in read_records(found.folder.metrics) if r["kind"] == "train"]
        assert records[-1]["loss"] < 0


@pytest.mark.parametrize("more", [["model.norm=tensor"], ["model=graphsage", "dataset.neighbours=[4,4]"]])
def test_the_network_learns(small, more):
    learning = ["training.steps=150", "training.evaluation_steps=150", "training.learning_rate.initial=0.02"]
    found = small(*learning, "model.hidden=32", "model.dropout=0", *more)
    assert execute(found)["final"] > 55  # chance is about 30


def test_a_step_sees_the_whole_graph_or_a_batch(small):
    whole, sampled = small(), small("model=graphsage", "dataset.neighbours=[3,3]")
    assert (whole.epoch.steps, whole.epoch.samples_per_step) == (1, TINY.train)
    assert (sampled.epoch.steps, sampled.epoch.samples_per_step) == (3, 16)
    tasks = [build_trainer(found, torch.device("cpu")).task for found in (whole, sampled)]
    assert len(next(tasks[0].batches(5)).labels) == TINY.train
    sizes = [len(batch.labels) for batch in itertools.islice(tasks[1].batches(1), 4)]
    assert sizes == [16, 8, 16, 16]
    later = next(itertools.islice(tasks[1].batches(0), 4, None)), next(tasks[1].batches(4))
    assert torch.equal(later[0].features, later[1].features)
    assert torch.equal(later[0].labels, later[1].labels)


def test_scaling_of_features():
    x = torch.tensor([[1.0, 5.0, 0.0], [3.0, 5.0, 0.0], [0.0, 0.0, 0.0]])
    standard = scaled(x, "standardised")
    torch.testing.assert_close(standard.mean(0), torch.zeros(3))
    torch.testing.assert_close(standard.std(0, correction=0), torch.tensor([1.0, 1.0, 0.0]))
    rows = torch.tensor([[1 / 6, 5 / 6, 0.0], [3 / 8, 5 / 8, 0.0], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(scaled(x, "row_normalised"), rows)
    assert scaled(x, "raw") is x


@pytest.mark.parametrize(
    ("edges", "loops", "expected"),
    [
        ("given", False, [(0, 1), (1, 0), (1, 2), (2, 2)]),
        ("symmetrised", False, [(0, 1), (1, 0), (1, 2), (2, 1), (2, 2)]),
        ("doubled", False, [(0, 1), (0, 1), (1, 0), (1, 0), (1, 2), (2, 1), (2, 2), (2, 2)]),
        ("symmetrised", True, [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 1), (2, 2)]),
    ],
)
def test_treatment_of_edges(edges, loops, expected):
    options = citation.Citation(name="cora", edges=edges, self_loops=loops)
    treated = options.treated(torch.tensor([[0, 1, 1, 2], [1, 0, 2, 2]]), 3)
    assert sorted(map(tuple, treated.T.tolist())) == expected


OGBN = {"ogbn_arxiv": "time", "ogbn_products": "sales_ranking"}


@pytest.mark.parametrize("name", OGBN)
def test_official_layout_of_ogb(tmp_path, monkeypatch, name):
    """`ogb` reads its csv files, and once more what it has saved."""
    pytest.importorskip("ogb")
    twice = name == "ogbn_products"  # whose archive lists each edge once
    monkeypatch.setitem(ogbn.SIZES, name, TINY._replace(edges=TINY.edges * (1 + twice)))
    content = write_ogbn(tmp_path / name, OGBN[name], TINY)
    edges = content["edge"].T
    edges = np.concatenate([edges, edges[::-1]], axis=1) if twice else edges
    for saved in (False, True):
        assert (tmp_path / name / "processed" / "data_processed").is_file() == saved
        raw = ogbn.Ogbn(name=name).read(tmp_path)
        assert torch.equal(raw.features, torch.from_numpy(content["node-feat"]))
        assert raw.labels.tolist() == content["node-label"].flatten().tolist()
        assert raw.edges.tolist() == edges.tolist()
        assert raw.train.tolist() == content["train"].tolist()
        assert raw.validation.tolist() == content["valid"].tolist()
    graph = ogbn.Ogbn(name=name, edges="symmetrised", train_samples=7, test_samples=100).load(tmp_path)
    assert (len(graph.train), len(graph.validation), len(graph.test)) == (7, TINY.validation, TINY.test)
    assert torch.equal(graph.edges.offsets, graph.edges.back_offsets)


def test_ogb_scores_what_it_has_read(tmp_path, monkeypatch):
    pytest.importorskip("ogb.nodeproppred")
    asked, evaluate = [], sys.modules["ogb.nodeproppred"].Evaluator.eval

    def recorded(self, given):
        asked.append(self.name)
        return evaluate(self, given)

    monkeypatch.setattr("ogb.nodeproppred.Evaluator.eval", recorded)
    predicted, labels = torch.tensor([1, 2, 3]), torch.tensor([1, 2, 0])
    assert ogbn.Ogbn(name="ogbn_products").accuracy(predicted, labels) == 2 / 3
    assert citation.Citation(name="cora").accuracy(predicted, labels) == 2 / 3
    monkeypatch.setitem(ogbn.SIZES, "ogbn_arxiv", TINY)
    write_ogbn(tmp_path / "ogbn_arxiv", "time", TINY)
    run = plan(
        *("dataset=ogbn_arxiv", "scale=smoke", "training.steps=4", "model.hidden=8"),
        *(f"data_root={tmp_path}", f"results_root={tmp_path}/runs"),
    )
    assert 0 <= execute(run)["final"] <= 100
    assert set(asked) == {"ogbn-products", "ogbn-arxiv"}


def test_another_graph_is_refused(tmp_path):
    pytest.importorskip("ogb")
    write_ogbn(tmp_path / "ogbn_arxiv", "time", TINY)
    with pytest.raises(DataError, match=r"169343, 1166243, 128, 90941, 29799, 48603"):
        ogbn.Ogbn(name="ogbn_arxiv").load(tmp_path)


def test_missing_and_damaged_data_say_what_to_do(tmp_path, monkeypatch):
    def offline(*arguments, **options):
        raise URLError("no network")

    pytest.importorskip("ogb")
    monkeypatch.setattr(fetch, "urlopen", offline)
    with pytest.raises(DataError, match=r"no network.*ogbn_arxiv is not in .*arxiv\.zip.*cora is a small graph"):
        ogbn.Ogbn(name="ogbn_arxiv").load(tmp_path)
    with pytest.raises(DataError, match=r"cora\.npz is missing.*kimiyoung/planetoid"):
        citation.Citation(name="cora").load(tmp_path)
    (tmp_path / "cora").mkdir()
    (tmp_path / "cora" / "cora.npz").write_bytes(b"torn")
    with pytest.raises(DataError, match="cannot read"):
        citation.Citation(name="cora").load(tmp_path)
    write_ogbn(tmp_path / "ogbn_arxiv", "time", TINY)
    (tmp_path / "ogbn_arxiv" / "raw" / "node-label.csv.gz").write_bytes(b"torn")
    with pytest.raises(DataError, match="cannot read"):
        ogbn.Ogbn(name="ogbn_arxiv").load(tmp_path)
    (tmp_path / "ogbn_arxiv" / "RELEASE_v1.txt").unlink()
    with pytest.raises(DataError, match=r"lacks RELEASE_v1\.txt"):
        ogbn.Ogbn(name="ogbn_arxiv").load(tmp_path)


def test_a_saved_file_runs_no_code(tmp_path):
    pytest.importorskip("ogb")
    write_ogbn(tmp_path / "ogbn_arxiv", "time", TINY)
    (tmp_path / "ogbn_arxiv" / "processed").mkdir()
    torch.save({"graph": pytest.raises}, tmp_path / "ogbn_arxiv" / "processed" / "data_processed")
    with pytest.raises(DataError, match="cannot read"):
        ogbn.Ogbn(name="ogbn_arxiv").load(tmp_path)


@pytest.mark.parametrize(
    ("overrides", "field", "message"),
    [
        (["dataset.validation=0.1"], "dataset.validation", "comes with a validation split"),
        (["dataset.neighbours=[3]"], "model.layers", "1 layers of neighbours"),
        (["quantizer=dorefa", "model.aggregation=quantized"], "quantizer.name", "no ranges per row"),
        (["model=resnet8"], "model.name", "is not made for the data of dataset=cora"),
        (["task=classification"], "task.name", "cannot learn from dataset=cora"),
        (["schedule=dfq"], "schedule", ""),
    ],
    ids=str,
)
def test_bad_settings(small, overrides, field, message):
    with pytest.raises(SettingError) as error:
        small(*overrides)
    assert str(error.value).startswith(field)
    assert message in str(error.value)


def test_a_missing_graph_is_downloaded(tmp_path, monkeypatch):
    pytest.importorskip("ogb")
    monkeypatch.setitem(ogbn.SIZES, "ogbn_arxiv", TINY)
    write_ogbn(tmp_path / "server" / "arxiv", "time", TINY)
    shutil.make_archive(str(tmp_path / "arxiv"), "zip", tmp_path / "server")
    monkeypatch.setattr(ogbn, "ARCHIVES", f"{tmp_path.as_uri()}/")
    options, root = ogbn.Ogbn(name="ogbn_arxiv"), tmp_path / "data"
    first = options.load(root)
    (tmp_path / "arxiv.zip").unlink()
    assert torch.equal(first.features, options.load(root).features)


def dgl_graph():
    """A graph of dgl with self-loops, and the same edges."""
    dgl = pytest.importorskip("dgl", reason="dgl ends with Python 3.11")
    graph = dgl.add_self_loop(dgl.rand_graph(20, 60))
    return graph, make_edges(torch.stack(graph.edges()), 20)


def test_graph_convolution_is_that_of_dgl():
    graph, edges = dgl_graph()
    theirs = pytest.importorskip("dgl.nn").GraphConv(7, 5)
    ours = QuantizedGraphConvolution(7, 5)
    with torch.no_grad():
        ours.weight.copy_(theirs.weight)
        ours.bias.copy_(theirs.bias.normal_())
    ours.precision.set(Precision(32, 32, 32))
    x = torch.randn(20, 7)
    for found in (edges, edges_of(graph)):
        torch.testing.assert_close(ours(x, found), theirs(graph, x), rtol=1e-6, atol=1e-6)


def test_sage_convolution_is_that_of_dgl_on_its_own_blocks():
    graph, edges = dgl_graph()
    theirs = pytest.importorskip("dgl.nn").SAGEConv(7, 5, "mean")
    ours = QuantizedSageConvolution(7, 5)
    with torch.no_grad():
        ours.neighbour.weight.copy_(theirs.fc_neigh.weight)
        ours.own.weight.copy_(theirs.fc_self.weight)
        ours.bias.copy_(theirs.fc_self.bias.normal_())
    for layer in (ours.neighbour, ours.own):
        layer.precision.set(Precision(32, 32, 32))
    x = torch.randn(20, 7)
    torch.testing.assert_close(ours(x, edges), theirs(graph, x), rtol=1e-6, atol=1e-6)
    sampler = DglSampler(edges, [3])
    seen = sampler.sample(torch.tensor([4, 1]), 0)
    _, _, (block,) = _same_sample(sampler, torch.tensor([4, 1]), 0)
    torch.testing.assert_close(ours(x[seen.nodes], seen.edges[0]), theirs(block, x[seen.nodes]), rtol=1e-6, atol=1e-6)


def _same_sample(sampler: DglSampler, seeds: torch.Tensor, *key: int):
    sampler.dgl.seed(derive(*key) & 0x7FFFFFFF)
    return sampler.sampler.sample(sampler.graph, seeds)


def test_training_with_the_sampler_of_dgl_can_begin_at_any_step(small):
    pytest.importorskip("dgl", reason="dgl ends with Python 3.11")
    made = small("model=graphsage", "dataset.neighbours=[3,3]", "dataset.sampler=dgl")
    task = build_trainer(made, torch.device("cpu")).task
    undisturbed = list(itertools.islice(task.batches(0), 5))
    for one, other in zip(next(task.batches(4)), undisturbed[4], strict=True):
        assert str(one) == str(other)
    assert not torch.equal(undisturbed[0].features, undisturbed[3].features)
    assert execute(made)["metric"] == "test_accuracy"
