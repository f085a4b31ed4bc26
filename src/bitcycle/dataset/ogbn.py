"""ogbn-arxiv (169,343 papers, split by year) and ogbn-products (2,449,029 products, split by sales rank), class of each node.

The package `ogb` reads `data_root/ogbn_arxiv` and `data_root/ogbn_products` in its own layout and keeps what it has read in
`processed/` there; its `Evaluator` scores predictions. If a folder is not there, the official archive is downloaded.

Source: Hu et al. 2020; Better Schedules, section 4.3. The number of symmetrised edges of ogbn-arxiv is OGB's own.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
import types
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitcycle.dataset.base import logger, missing
from bitcycle.dataset.fetch import fetch, unpack
from bitcycle.dataset.graph import GraphDatasetOptions, GraphSize, RawGraph
from bitcycle.errors import DataError
from bitcycle.optional_imports import require

SIZES = {
    "ogbn_arxiv": GraphSize(169_343, 1_166_243, 2_315_598, 128, 40, 90_941, 29_799, 48_603),
    "ogbn_products": GraphSize(2_449_029, 123_718_280, 123_718_280, 100, 47, 196_615, 39_323, 2_213_091),
}
ARCHIVES = "http://snap.stanford.edu/ogb/data/nodeproppred/"
NEW_NODES = (28_371 - 1024) / 1024 / 32
"""New nodes for each sampled neighbour in ogbn-products: the released code counts 3,670,697,915 operations for 1024 seeds, which
are those of 28,371 nodes before the last layer (inferred; semantics of its get_flops.py)."""
_UNREADABLE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    RuntimeError,
    EOFError,
    zipfile.BadZipFile,
    pickle.PickleError,
)


@dataclass
class Ogbn(GraphDatasetOptions):
    """Options of ogbn-arxiv; those of ogbn-products differ in `conf/dataset/ogbn_products.yaml`."""

    @property
    def size(self) -> GraphSize:
        return SIZES[self.name]

    def sampled_degree(self, neighbours: int, degree: float) -> float:
        share = NEW_NODES if self.name == "ogbn_products" else 1.0
        return share * super().sampled_degree(neighbours, degree)

    def read(self, data_root: Path) -> RawGraph:
        folder, library = data_root / self.name, _ogb()
        if not folder.is_dir():
            self._download(folder)
        if not list(folder.glob("RELEASE_v*.txt")):  # without which ogb asks the user whether to delete the folder
            raise DataError(
                f"{folder} lacks RELEASE_v1.txt, which the official archive holds. Unpack the whole archive there."
            )
        logger.info("reading %s", folder)
        try:
            (folder / "processed").mkdir(exist_ok=True)
            with contextlib.redirect_stdout(sys.stderr), _loading_arrays_only():
                official = library.NodePropPredDataset(self._official_name, str(data_root))
                splits = official.get_idx_split()
            graph, labels = official[0]
            nodes = (torch.tensor(splits[split], dtype=torch.int64) for split in ("train", "valid", "test"))
            edges = torch.tensor(
                graph["edge_index"], dtype=torch.int64
            )  # a copy, as pandas lends its arrays for reading only
            if (
                self.name == "ogbn_products"
            ):  # ogb puts the reverse behind each edge; here all of them come after all edges
                edges = torch.cat([edges[:, 0::2], edges[:, 1::2]], dim=1)
            features = torch.tensor(graph["node_feat"], dtype=torch.float32)
            return RawGraph(features, torch.tensor(labels, dtype=torch.int64).flatten(), edges, *nodes)
        except _UNREADABLE as error:
            problem = f"cannot read {folder}: {type(error).__name__}: {str(error).splitlines()[0]}"
            remedy = (
                "Delete that folder to fetch the archive again; ogb has to be able to write into its processed/ once."
            )
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
