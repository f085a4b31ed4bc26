"""Node classification: published costs and recipes, small runs, data in the published layouts."""

from __future__ import annotations

import itertools
import shutil
import sys
from urllib.error import URLError

import numpy as np
import pytest
import torch

from bitcycle.dataset import graph as graphs
from bitcycle.dataset import sources
from bitcycle.dataset.graph import GRAPH_SIZES, Citation, Ogbn, scaled
from bitcycle.dataset.neighbours import DglSampler, edges_of
from bitcycle.errors import DataError
from bitcycle.files import read_records
from bitcycle.layer import QuantizedGraphConvolution, QuantizedSageConvolution
from bitcycle.module.sparse import Edges, make_edges
from bitcycle.precision import Precision
from bitcycle.randomness import derive
from bitcycle.settings import SettingError
from bitcycle.training.loop import Trainer
from bitcycle.training.run import execute
from tests.conftest import configure, plan
from tests.graph_data import TINY, write_citation, write_ogbn


def block(src, dst, sources: int, destinations: int) -> Edges:
    """The edges of a bipartite block."""
    whole = make_edges(torch.stack([src, dst]).long(), sources)
    return Edges(whole.offsets[: destinations + 1], whole.sources)


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
    monkeypatch.setitem(GRAPH_SIZES, "cora", TINY)
    write_citation(tmp_path)

    def make(*overrides: str):
        where = f"data_root={tmp_path}", f"results_root={tmp_path}/runs", "scale=smoke"
        return plan("dataset=cora", "training.steps=24", *where, *overrides)

    return make


SMOKE = [
    ["schedule=RTH", "model.norm=node", "model.layers=3"],
    ["schedule=deficit", "schedule.unit=epoch", "schedule.end=10", "model.aggregation=quantized", "task.loss=raw_nll"],
    ["schedule=CR", "model.quantized_norm=true"],
    ["quantizer=dorefa", "schedule=ETV"],
    ["quantizer=uniform_l2", "schedule=LR", "schedule.cycles=4", "schedule.gradient_min=32", "model=graphsage"],
    ["model=graphsage", "dataset.neighbours=[3,3]", "model.aggregation=quantized"],
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
    tasks = [Trainer(found, torch.device("cpu")).task for found in (whole, sampled)]
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
    options = Citation(name="cora", edges=edges, self_loops=loops)
    treated = options.treated(torch.tensor([[0, 1, 1, 2], [1, 0, 2, 2]]), 3)
    assert sorted(map(tuple, treated.T.tolist())) == expected


OGBN = {"ogbn_arxiv": "time", "ogbn_products": "sales_ranking"}


@pytest.mark.parametrize("name", OGBN)
def test_official_layout_of_ogb(tmp_path, monkeypatch, name):
    """`ogb` reads its csv files, and once more what it has saved."""
    pytest.importorskip("ogb")
    twice = name == "ogbn_products"  # whose archive lists each edge once
    monkeypatch.setitem(GRAPH_SIZES, name, TINY._replace(edges=TINY.edges * (1 + twice)))
    content = write_ogbn(tmp_path / name, OGBN[name], TINY)
    edges = content["edge"].T
    edges = np.concatenate([edges, edges[::-1]], axis=1) if twice else edges
    for saved in (False, True):
        assert (tmp_path / name / "processed" / "data_processed").is_file() == saved
        raw = Ogbn(name=name).read(tmp_path)
        assert torch.equal(raw.features, torch.from_numpy(content["node-feat"]))
        assert raw.labels.tolist() == content["node-label"].flatten().tolist()
        assert raw.edges.tolist() == edges.tolist()
        assert raw.train.tolist() == content["train"].tolist()
        assert raw.validation.tolist() == content["valid"].tolist()
    graph = Ogbn(name=name, edges="symmetrised", train_samples=7, test_samples=100).load(tmp_path, seed=0)
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
    assert Ogbn(name="ogbn_products").accuracy(predicted, labels) == 2 / 3
    assert Citation(name="cora").accuracy(predicted, labels) == 2 / 3
    monkeypatch.setitem(GRAPH_SIZES, "ogbn_arxiv", TINY)
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
        Ogbn(name="ogbn_arxiv").load(tmp_path, seed=0)


def test_missing_and_damaged_data_say_what_to_do(tmp_path, monkeypatch):
    def offline(*arguments, **options):
        raise URLError("no network")

    pytest.importorskip("ogb")
    monkeypatch.setattr(sources, "urlopen", offline)
    with pytest.raises(DataError, match=r"no network.*ogbn_arxiv is not in .*arxiv\.zip.*cora is a small graph"):
        Ogbn(name="ogbn_arxiv").load(tmp_path, seed=0)
    with pytest.raises(DataError, match=r"cora is not in .*cora\.npz.*kimiyoung/planetoid"):
        Citation(name="cora").load(tmp_path, seed=0)
    (tmp_path / "cora").mkdir()
    (tmp_path / "cora" / "cora.npz").write_bytes(b"torn")
    with pytest.raises(DataError, match="cannot read"):
        Citation(name="cora").load(tmp_path, seed=0)
    write_ogbn(tmp_path / "ogbn_arxiv", "time", TINY)
    (tmp_path / "ogbn_arxiv" / "raw" / "node-label.csv.gz").write_bytes(b"torn")
    with pytest.raises(DataError, match="cannot read"):
        Ogbn(name="ogbn_arxiv").load(tmp_path, seed=0)
    (tmp_path / "ogbn_arxiv" / "RELEASE_v1.txt").unlink()
    with pytest.raises(DataError, match=r"lacks RELEASE_v1\.txt"):
        Ogbn(name="ogbn_arxiv").load(tmp_path, seed=0)


def test_a_saved_file_runs_no_code(tmp_path):
    pytest.importorskip("ogb")
    write_ogbn(tmp_path / "ogbn_arxiv", "time", TINY)
    (tmp_path / "ogbn_arxiv" / "processed").mkdir()
    torch.save({"graph": pytest.raises}, tmp_path / "ogbn_arxiv" / "processed" / "data_processed")
    with pytest.raises(DataError, match="cannot read"):
        Ogbn(name="ogbn_arxiv").load(tmp_path, seed=0)


@pytest.mark.parametrize(
    ("overrides", "field", "message"),
    [
        (["dataset.validation=0.1"], "dataset.validation", "has a validation split"),
        (["dataset.neighbours=[3]"], "model.layers", "1 layers of neighbours"),
        (["quantizer=dorefa", "model.aggregation=quantized"], "quantizer.name", "no ranges per row"),
        (["model=resnet8"], "model.name", "does not accept the data of dataset=cora"),
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
    monkeypatch.setitem(GRAPH_SIZES, "ogbn_arxiv", TINY)
    write_ogbn(tmp_path / "server" / "arxiv", "time", TINY)
    shutil.make_archive(str(tmp_path / "arxiv"), "zip", tmp_path / "server")
    monkeypatch.setattr(graphs, "ARCHIVES", f"{tmp_path.as_uri()}/")
    options, root = Ogbn(name="ogbn_arxiv"), tmp_path / "data"
    first = options.load(root, seed=0)
    (tmp_path / "arxiv.zip").unlink()
    assert torch.equal(first.features, options.load(root, seed=0).features)


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
    task = Trainer(made, torch.device("cpu")).task
    undisturbed = list(itertools.islice(task.batches(0), 5))
    for one, other in zip(next(task.batches(4)), undisturbed[4], strict=True):
        assert str(one) == str(other)
    assert not torch.equal(undisturbed[0].features, undisturbed[3].features)
    assert execute(made)["metric"] == "test_accuracy"
