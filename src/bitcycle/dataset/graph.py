"""Graphs: nodes with features and classes, edges, and an official split of the nodes; Cora, Citeseer and two of OGB.

A sample is a node. Without `neighbours`, a training step uses the whole graph and the loss of all training nodes. With
it, a step uses `training.batch_size` training nodes and the given numbers of sampled neighbours in each layer.

Cora and Citeseer, citation graphs of a few thousand papers, are read from `data_root/NAME/NAME.npz` with the arrays feat_data,
feat_indices, feat_indptr, feat_shape (the bag-of-words matrix in compressed rows), labels, edge_index [2, E] in both
directions, train_mask, val_mask, test_mask. They are far smaller than the graphs of the papers, for tests and first
results only.
Source: Sen et al. 2008; split of Yang, Cohen, Salakhutdinov 2016 (github.com/kimiyoung/planetoid).

ogbn-arxiv (169,343 papers, split by year) and ogbn-products (2,449,029 products, split by sales rank): the package `ogb` reads
`data_root/ogbn_arxiv` and `data_root/ogbn_products` in its own layout and caches them in `processed/` there; its
`Evaluator` scores predictions. A missing folder is downloaded from the official archive. Source: Hu et al. 2020; Better
Schedules, section 4.3. The number of symmetrised edges of ogbn-arxiv is OGB's.
"""

import contextlib
import pickle
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, Optional, TypeVar

import numpy as np
import torch
from torch import Tensor

from bitcycle.dataset.base import DatasetInfo, DatasetOptions, check_whole, fixed_order, logger, missing
from bitcycle.dataset.neighbours import SAMPLERS
from bitcycle.dataset.sources import download
from bitcycle.errors import UNREADABLE, DataError
from bitcycle.module.sparse import Edges, make_edges
from bitcycle.optional_imports import require
from bitcycle.settings import setting
from bitcycle.shapes import GraphShape

E = TypeVar("E", Tensor, Edges)


class Graph(NamedTuple, Generic[E]):
    """A graph: features [N, F], labels [N] (-1: none), edges (stored: [2, E], from row 0 to row 1), and nodes of the splits."""

    features: Tensor
    labels: Tensor
    edges: E
    train: Tensor
    validation: Tensor
    test: Tensor


class GraphSize(NamedTuple):
    """Sizes of the official dataset; `edges` as given, `symmetrised` after symmetrisation."""

    nodes: int
    edges: int
    symmetrised: int
    features: int
    classes: int
    train: int
    validation: int
    test: int


GRAPH_SIZES = {
    "cora": GraphSize(2708, 10_556, 10_556, 1433, 7, 140, 500, 1000),
    "citeseer": GraphSize(3327, 9104, 9104, 3703, 6, 120, 500, 1000),
    "ogbn_arxiv": GraphSize(169_343, 1_166_243, 2_315_598, 128, 40, 90_941, 29_799, 48_603),
    "ogbn_products": GraphSize(2_449_029, 123_718_280, 123_718_280, 100, 47, 196_615, 39_323, 2_213_091),
}

MASKS = ("train_mask", "val_mask", "test_mask")
ARCHIVES = "http://snap.stanford.edu/ogb/data/nodeproppred/"
ARRAYS = ("feat_data", "feat_indices", "feat_indptr", "feat_shape", "labels", "edge_index", *MASKS)
"""Arrays in the file of a citation graph."""
PICKLED = {"numpy.ndarray", "numpy.dtype", "_codecs.encode"}
PICKLED |= {f"numpy._core.multiarray.{name}" for name in ("_reconstruct", "scalar")}
"""Classes and functions needed to unpickle arrays."""
NEW_NODES = {"ogbn_products": (28_371 - 1024) / 1024 / 32}
"""New nodes per sampled neighbour, where known: the released code counts 3,670,697,915 operations for 1024 seeds, which
corresponds to 28,371 nodes before the last layer (inferred; semantics of its get_flops.py)."""


@dataclass
class GraphDatasetOptions(DatasetOptions):
    """Options of all graph datasets."""

    has_validation = True
    takes_all_if_fewer = True

    edges: str = setting(
        "given",
        "given, symmetrised (reverse edges added, duplicates removed), or doubled (reverse edges added, duplicates kept)",
        choices=("given", "symmetrised", "doubled"),
    )
    self_loops: bool = setting(True, "add an edge from each node to itself (Better Schedules: yes; its code: no)")
    features: str = setting(
        "raw",
        "node features: raw, standardised (each feature over all nodes), or row_normalised (sum 1 for each node)",
        choices=("raw", "standardised", "row_normalised"),
    )
    neighbours: Optional[list[int]] = setting(
        None, "sampled neighbours of each layer, from the input on; null: steps use the whole graph", minimum=1
    )
    sampler: str = setting(
        "hashed",
        "hashed: the same neighbours on every machine; dgl: DGL's NeighborSampler, as in the released code",
        choices=tuple(SAMPLERS),
    )

    def full_info(self, data_root: Path) -> DatasetInfo:
        size = GRAPH_SIZES[self.name]
        edges = {"given": size.edges, "symmetrised": size.symmetrised, "doubled": 2 * size.edges}[self.edges]
        edges += size.nodes if self.self_loops else 0
        sampled = None if self.neighbours is None else tuple(self.neighbours)
        new = NEW_NODES.get(self.name, 1.0)  # per sampled neighbour
        degrees = tuple(new * min(count, edges / size.nodes) for count in sampled or ())
        shape = GraphShape(size.features, size.classes, size.nodes, edges, sampled, degrees)
        return DatasetInfo(shape, size.train, size.test)

    def load(self, data_root: Path, seed: int) -> Graph[Edges]:
        raw, size = self.read(data_root), GRAPH_SIZES[self.name]
        nodes, features = raw.features.shape
        sizes = *(nodes, raw.edges.shape[1], features), *map(len, raw[3:]), len(raw.labels)
        expected = size.nodes, size.edges, size.features, size.train, size.validation, size.test, size.nodes
        what = "nodes, edges, features, training, validation and test nodes, and labels"
        check_whole(self.name, f"what is below {data_root}", what, sizes, expected)
        used = raw.labels[torch.cat(raw[3:])]
        if not 0 <= int(used.min()) <= int(used.max()) < size.classes:
            problem = f"{self.name} below {data_root} has classes {int(used.min())} to {int(used.max())}"
            raise DataError(f"{problem} instead of 0 to {size.classes - 1}. Download it again.")
        edges = make_edges(self.treated(raw.edges, nodes), nodes)
        found, counted = len(edges.sources), self.full_info(data_root).shape.edges
        if found != counted:
            logger.warning("the graph has %d edges; costs are counted for %d", found, counted)
        limits = (self.train_samples, self.test_samples, self.test_samples)
        splits = (part[fixed_order(len(part), limit)] for part, limit in zip(raw[3:], limits, strict=True))
        return Graph(scaled(raw.features, self.features), raw.labels, edges, *splits)

    def accuracy(self, predicted: Tensor, labels: Tensor) -> float:
        """Fraction of correctly predicted nodes, both int64 [N]; by the official evaluator if there is one."""
        return int((predicted == labels).sum()) / len(labels)

    def treated(self, edges: Tensor, nodes: int) -> Tensor:
        """Apply `edges` and `self_loops` to edges [2, E]."""
        if self.edges != "given":
            edges = torch.cat([edges, edges.flip(0)], dim=1)
        if self.edges == "symmetrised":
            unique = (edges[1] * nodes + edges[0]).unique()
            edges = torch.stack([unique % nodes, unique // nodes])
        if self.self_loops:
            edges = edges[:, edges[0] != edges[1]]
            edges = torch.cat([edges, torch.arange(nodes).expand(2, -1)], dim=1)
        return edges


def scaled(features: Tensor, how: str) -> Tensor:
    """Features [N, F]: raw, standardised by column (mean 0, population standard deviation 1), or with rows of sum 1."""
    if how == "standardised":
        std, mean = torch.std_mean(features, dim=0, correction=0)
        return (features - mean) / torch.where(std > 0, std, 1)
    if how == "row_normalised":
        sums = features.sum(1, keepdim=True)
        return features / torch.where(sums != 0, sums, 1)
    return features


@dataclass
class Citation(GraphDatasetOptions):
    """Options of the citation graphs. Features of each paper sum to 1, as in Kipf and Welling 2017."""

    features: str = "row_normalised"

    def place(self, data_root: Path) -> Path | None:
        file = data_root / self.name / f"{self.name}.npz"
        return file if file.is_file() else None

    def absent(self, data_root: Path) -> DataError:
        put = f"{self.name}.npz (arrays {', '.join(ARRAYS)}, saved by numpy.savez)"
        more = f" Create it from ind.{self.name}.* of github.com/kimiyoung/planetoid."
        return missing(self.name, data_root / self.name, put, more)

    def read(self, data_root: Path) -> Graph[Tensor]:
        from scipy.sparse import csr_matrix

        file = self.place(data_root)
        if file is None:
            raise self.absent(data_root)
        try:
            with np.load(file, allow_pickle=False) as arrays:
                *parts, shape, labels, edges = (arrays[name] for name in ARRAYS[:6])
                features = torch.from_numpy(csr_matrix(tuple(parts), shape, dtype=np.float32).toarray())
                splits = (torch.from_numpy(arrays[name]).nonzero().flatten() for name in MASKS)
                return Graph(features, torch.from_numpy(labels).long(), torch.from_numpy(edges).long(), *splits)
        except UNREADABLE as error:
            raise DataError(f"cannot read {file}: {type(error).__name__}: {error}") from error


@dataclass
class Ogbn(GraphDatasetOptions):
    """Options of ogbn-arxiv; `conf/dataset/ogbn_products.yaml` has those of ogbn-products."""

    @property
    def archive(self) -> str:
        """Name of the official archive and of the folder in it."""
        return self.name.removeprefix("ogbn_")

    def place(self, data_root: Path) -> Path | None:
        folder = data_root / self.name
        return folder if folder.is_dir() else None

    def absent(self, data_root: Path) -> DataError:
        put = f"the folder {self.archive}/ of {ARCHIVES}{self.archive}.zip, as {self.name}/,"
        return missing(self.name, data_root, put, " dataset=cora is a small graph.")

    def read(self, data_root: Path) -> Graph[Tensor]:
        folder, library = self.place(data_root), _ogb()
        if folder is None:
            url = f"{ARCHIVES}{self.archive}.zip"
            folder = download(url, data_root / self.name, self.archive, self.absent(data_root))
        if not list(folder.glob("RELEASE_v*.txt")):  # without it, ogb asks the user whether to delete the folder
            raise DataError(f"{folder} lacks RELEASE_v1.txt of the official archive. Unpack the whole archive there.")
        logger.info("reading %s", folder)
        try:
            (folder / "processed").mkdir(exist_ok=True)
            with contextlib.redirect_stdout(sys.stderr), _loading_arrays_only():
                official = library.NodePropPredDataset(self.name.replace("_", "-"), str(data_root))
                splits = official.get_idx_split()
            graph, labels = official[0]
            nodes = (torch.tensor(splits[split], dtype=torch.int64) for split in ("train", "valid", "test"))
            # copies, as arrays of pandas are read-only
            edges, classes = (torch.tensor(part, dtype=torch.int64) for part in (graph["edge_index"], labels))
            if self.name == "ogbn_products":  # ogb interleaves reverse edges; here they come last
                edges = torch.cat([edges[:, 0::2], edges[:, 1::2]], dim=1)
            return Graph(torch.tensor(graph["node_feat"], dtype=torch.float32), classes.flatten(), edges, *nodes)
        except UNREADABLE as error:
            problem = f"cannot read {folder}: {type(error).__name__}: {str(error).splitlines()[0]}"
            remedy = "Delete it to download the archive again; ogb must be able to write to its processed/ once."
            raise DataError(f"{problem}. {remedy}") from error

    def accuracy(self, predicted: Tensor, labels: Tensor) -> float:
        evaluator = _ogb().Evaluator(self.name.replace("_", "-"))
        return float(evaluator.eval({"y_pred": predicted[:, None], "y_true": labels[:, None]})["acc"])


def _ogb() -> Any:
    """Import ogb without its check for newer versions on the network."""
    sys.modules.setdefault("outdated", None)  # type: ignore[arg-type]
    return require("ogb.nodeproppred", "graph")


@contextlib.contextmanager
def _loading_arrays_only() -> Iterator[None]:
    """Context in which `torch.load` reads arrays as saved by ogb (weights_only=True cannot) and executes no code."""
    whole = torch.load
    reader = types.SimpleNamespace(__name__=__name__, Unpickler=_ArrayUnpickler, load=pickle.load)
    torch.load = partial(whole, weights_only=False, pickle_module=reader)
    try:
        yield
    finally:
        torch.load = whole


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickles only plain values and arrays of NumPy 1 and 2."""

    def find_class(self, module: str, name: str) -> Any:
        module = module.replace("numpy.core", "numpy._core")
        if f"{module}.{name}" in PICKLED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it contains a {module}.{name}, which is not an array")
