"""ogbn-arxiv (169,343 papers, split by year) and ogbn-products (2,449,029 products, split by sales rank), class of each node.

Read from `data_root/ogbn_arxiv` and `data_root/ogbn_products` as the `ogb` package lays them out: `processed/data_processed` if
it is there, else `raw/*.csv.gz`, and `split/*/*.csv.gz`. If neither is there, the official archive is downloaded. The package
itself is not needed (1.3.6 asks the network for updates when imported, questions the user, and fails on its own files with torch
2.6 or newer).

Source: Hu et al. 2020; Better Schedules, section 4.3. The number of symmetrised edges of ogbn-arxiv is OGB's own.
"""

from __future__ import annotations

import io
import pickle
import shutil
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import numpy as np
import torch
from torch import Tensor

from bitcycle.dataset.base import logger
from bitcycle.dataset.graph import GraphDatasetOptions, GraphSize, RawGraph
from bitcycle.errors import DataError

SIZES = {
    "ogbn_arxiv": GraphSize(169_343, 1_166_243, 2_315_598, 128, 40, 90_941, 29_799, 48_603),
    "ogbn_products": GraphSize(2_449_029, 123_718_280, 123_718_280, 100, 47, 196_615, 39_323, 2_213_091),
}
SPLIT_FOLDERS = {"ogbn_arxiv": "time", "ogbn_products": "sales_ranking"}
_UNREADABLE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    RuntimeError,
    StopIteration,
    zipfile.BadZipFile,
    pickle.PickleError,
)
ARCHIVES = "http://snap.stanford.edu/ogb/data/nodeproppred/"
NEW_NODES = (28_371 - 1024) / 1024 / 32
"""New nodes for each sampled neighbour in ogbn-products: the released code counts 3,670,697,915 operations for 1024 seeds, which
are those of 28,371 nodes before the last layer (inferred; semantics of its get_flops.py)."""


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
        folder = data_root / self.name
        if not (folder / "raw" / "edge.csv.gz").is_file() and not (folder / "processed" / "data_processed").is_file():
            self._download(folder)
        logger.info("reading %s", folder)
        try:
            features, labels, edges = self._read_processed(folder) or self._read_raw(folder)
            splits = folder / "split" / SPLIT_FOLDERS[self.name]
            nodes = (
                _read_table(splits / f"{split}.csv.gz", np.int64).flatten() for split in ("train", "valid", "test")
            )
            return RawGraph(features, labels, edges, *nodes)
        except _UNREADABLE as error:
            problem = f"cannot read {folder}: {type(error).__name__}: {str(error).splitlines()[0]}"
            raise DataError(f"{problem}. Delete that folder to fetch the archive again.") from error

    def _read_processed(self, folder: Path) -> tuple[Tensor, Tensor, Tensor] | None:
        """What the `ogb` package saved; None if it did not."""
        file = folder / "processed" / "data_processed"
        if not file.is_file():
            return None
        with zipfile.ZipFile(
            file
        ) as archive:  # what torch.save writes; torch.load cannot read this protocol without running code
            name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
            content: Any = _ArrayUnpickler(io.BytesIO(archive.read(name))).load()
        graph = content["graph"]
        labels = torch.from_numpy(content["labels"]).flatten().long()
        return torch.from_numpy(graph["node_feat"]).float(), labels, torch.from_numpy(graph["edge_index"]).long()

    def _read_raw(self, folder: Path) -> tuple[Tensor, Tensor, Tensor]:
        raw = folder / "raw"
        edges = _read_table(raw / "edge.csv.gz", np.int64).T
        if self.name == "ogbn_products":  # which lists each edge once and is undirected
            edges = torch.cat([edges, edges.flip(0)], dim=1)
        labels = _read_table(raw / "node-label.csv.gz", np.float32).flatten().long()
        return _read_table(raw / "node-feat.csv.gz", np.float32), labels, edges.contiguous()

    def _download(self, folder: Path) -> None:
        archive = self.name.removeprefix("ogbn_")
        url = f"{ARCHIVES}{archive}.zip"
        logger.info("%s is not in %s; downloading it from %s", self.name, folder, url)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
                file = Path(temporary) / "archive.zip"
                with urlopen(url, timeout=20) as source, open(file, "wb") as target:
                    shutil.copyfileobj(source, target)
                zipfile.ZipFile(file).extractall(temporary)
                shutil.move(str(Path(temporary) / archive), str(folder))
        except (URLError, OSError, zipfile.BadZipFile, shutil.Error) as error:
            raise DataError(
                f"{self.name} is not in {folder} and cannot be downloaded ({error}). Unpack {url} there, so that "
                f"{folder}/raw/edge.csv.gz exists, or copy the folder that the ogb package made; or point data_root= (or "
                "BITCYCLE_DATA) at the folder that holds it. dataset=cora is a small graph."
            ) from error


def _read_table(file: Path, dtype: Any) -> Tensor:
    """A table of numbers without header, [rows, columns]."""
    from pyarrow import csv

    table = csv.read_csv(file, read_options=csv.ReadOptions(autogenerate_column_names=True))
    return torch.from_numpy(np.stack([column.to_numpy().astype(dtype) for column in table.columns], axis=1))


class _ArrayUnpickler(pickle.Unpickler):
    """Reads plain values and arrays of numpy, by the names of its versions 1 and 2, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in {("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")}:
            return super().find_class(module, name)
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name in ("_reconstruct", "scalar"):
            return super().find_class("numpy._core.multiarray", name)
        raise pickle.UnpicklingError(f"it holds a {module}.{name}, which is no array")
