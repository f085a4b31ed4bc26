"""Graphs by name: Cora and Citeseer with the Planetoid split, ogbn-arxiv and ogbn-products.

Cora and Citeseer, citation graphs of a few thousand papers, are read from `data_root/NAME/NAME.npz` with the arrays feat_data,
feat_indices, feat_indptr, feat_shape (the bag-of-words matrix in compressed rows), labels, edge_index [2, E] in both
directions, train_mask, val_mask, test_mask. Far smaller than the graphs of the papers: for tests and first results only.
Source: Sen et al. 2008; split of Yang, Cohen, Salakhutdinov 2016 (github.com/kimiyoung/planetoid).

ogbn-arxiv (169,343 papers, split by year) and ogbn-products (2,449,029 products, split by sales rank): the package `ogb` reads
`data_root/ogbn_arxiv` and `data_root/ogbn_products` in its own layout and keeps what it has read in `processed/` there; its
`Evaluator` scores predictions. If a folder is not there, the official archive is downloaded. Source: Hu et al. 2020; Better
Schedules, section 4.3. The number of symmetrised edges of ogbn-arxiv is OGB's own.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitcycle.dataset.base import UNREADABLE, logger, missing
from bitcycle.dataset.fetch import fetch, unpack
from bitcycle.dataset.graph import Graph, GraphDatasetOptions
from bitcycle.errors import DataError
from bitcycle.optional_imports import require

SPLITS = ("train_mask", "val_mask", "test_mask")
ARCHIVES = "http://snap.stanford.edu/ogb/data/nodeproppred/"
NEW_NODES = (28_371 - 1024) / 1024 / 32
"""New nodes for each sampled neighbour in ogbn-products: the released code counts 3,670,697,915 operations for 1024 seeds, which
are those of 28,371 nodes before the last layer (inferred; semantics of its get_flops.py)."""


@dataclass
class Citation(GraphDatasetOptions):
    """Options of the citation graphs. Features: each paper's sum is 1, as Kipf and Welling 2017."""

    features: str = "row_normalised"

    def read(self, data_root: Path) -> Graph[Tensor]:
        from scipy.sparse import csr_matrix

        file = data_root / self.name / f"{self.name}.npz"
        try:
            with np.load(file, allow_pickle=False) as arrays:
                parts = arrays["feat_data"], arrays["feat_indices"], arrays["feat_indptr"]
                features = torch.from_numpy(csr_matrix(parts, arrays["feat_shape"], dtype=np.float32).toarray())
                labels, edges = (torch.from_numpy(arrays[name]).long() for name in ("labels", "edge_index"))
                return Graph(
                    features, labels, edges, *(torch.from_numpy(arrays[name]).nonzero().flatten() for name in SPLITS)
                )
        except FileNotFoundError as error:
            raise DataError(
                f"{file} is missing. Put the graph there as arrays feat_data, feat_indices, feat_indptr, feat_shape, labels, "
                f"edge_index, {', '.join(SPLITS)} (numpy.savez), made from ind.{self.name}.* of github.com/kimiyoung/planetoid, "
                "or point data_root= (or BITCYCLE_DATA) at the folder that holds it."
            ) from error
        except UNREADABLE as error:
            raise DataError(f"cannot read {file}: {type(error).__name__}: {error}") from error


@dataclass
class Ogbn(GraphDatasetOptions):
    """Options of ogbn-arxiv; those of ogbn-products differ in `conf/dataset/ogbn_products.yaml`."""

    def sampled_degree(self, neighbours: int, degree: float) -> float:
        share = NEW_NODES if self.name == "ogbn_products" else 1.0
        return share * super().sampled_degree(neighbours, degree)

    def read(self, data_root: Path) -> Graph[Tensor]:
        folder, library = data_root / self.name, _ogb()
        if not folder.is_dir():
            self._download(folder)
        if not list(folder.glob("RELEASE_v*.txt")):  # without which ogb asks the user whether to delete the folder
            raise DataError(f"{folder} lacks RELEASE_v1.txt of the official archive. Unpack the whole archive there.")
        logger.info("reading %s", folder)
        try:
            (folder / "processed").mkdir(exist_ok=True)
            with contextlib.redirect_stdout(sys.stderr), _loading_arrays_only():
                official = library.NodePropPredDataset(self._official_name, str(data_root))
                splits = official.get_idx_split()
            graph, labels = official[0]
            nodes = (torch.tensor(splits[split], dtype=torch.int64) for split in ("train", "valid", "test"))
            # copies, as pandas lends its arrays for reading only
            edges, classes = (torch.tensor(part, dtype=torch.int64) for part in (graph["edge_index"], labels))
            if self.name == "ogbn_products":  # ogb puts the reverse behind each edge; here they come after all edges
                edges = torch.cat([edges[:, 0::2], edges[:, 1::2]], dim=1)
            return Graph(torch.tensor(graph["node_feat"], dtype=torch.float32), classes.flatten(), edges, *nodes)
        except UNREADABLE as error:
            problem = f"cannot read {folder}: {type(error).__name__}: {str(error).splitlines()[0]}"
            remedy = "Delete it to fetch the archive again; ogb has to be able to write into its processed/ once."
            raise DataError(f"{problem}. {remedy}") from error

    def accuracy(self, predicted: Tensor, labels: Tensor) -> float:
        evaluator = _ogb().Evaluator(self._official_name)
        return float(evaluator.eval({"y_pred": predicted[:, None], "y_true": labels[:, None]})["acc"])

    @property
    def _official_name(self) -> str:
        return self.name.replace("_", "-")

    def _download(self, folder: Path) -> None:
        archive = self.name.removeprefix("ogbn_")
        url = f"{ARCHIVES}{archive}.zip"
        put = f"the folder {archive}/ of {url}, as {self.name}/,"
        remedy = str(missing(self.name, folder.parent, put, " dataset=cora is a small graph."))
        unpack(fetch(url, folder.with_name(f"{archive}.zip"), remedy), folder, archive)


def _ogb() -> Any:
    """The package, kept from asking the network for its newest version when it is imported."""
    sys.modules.setdefault("outdated", None)  # type: ignore[arg-type]
    return require("ogb.nodeproppred", "graph")


@contextlib.contextmanager
def _loading_arrays_only() -> Iterator[None]:
    """`torch.load` reads arrays of numpy, which ogb saves in a way that weights_only=True cannot read, and runs no code."""
    whole = torch.load
    reader = types.SimpleNamespace(__name__=__name__, Unpickler=_ArrayUnpickler, load=pickle.load)
    torch.load = partial(whole, weights_only=False, pickle_module=reader)
    try:
        yield
    finally:
        torch.load = whole


class _ArrayUnpickler(pickle.Unpickler):
    """Reads plain values and arrays of numpy, by the names of its versions 1 and 2, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in {("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")}:
            return super().find_class(module, name)
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name in ("_reconstruct", "scalar"):
            return super().find_class("numpy._core.multiarray", name)
        raise pickle.UnpicklingError(f"it holds a {module}.{name}, which is no array")
