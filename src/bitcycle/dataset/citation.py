"""Cora and Citeseer: citation graphs of a few thousand papers with the Planetoid split, 20 training nodes for each class.

Read from `data_root/NAME/NAME.npz` with the arrays feat_data, feat_indices, feat_indptr, feat_shape (the bag-of-words matrix in
compressed rows), labels, edge_index [2, E] with both directions, train_mask, val_mask, test_mask. Far smaller than the graphs of
the papers: for tests and first results only.

Source: Sen et al. 2008; split of Yang, Cohen, Salakhutdinov 2016 (github.com/kimiyoung/planetoid).
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bitcycle.dataset.graph import GraphDatasetOptions, GraphSize, RawGraph
from bitcycle.errors import DataError
from bitcycle.settings import setting

SIZES = {
    "cora": GraphSize(2708, 10_556, 10_556, 1433, 7, 140, 500, 1000),
    "citeseer": GraphSize(3327, 9104, 9104, 3703, 6, 120, 500, 1000),
}
SPLITS = ("train_mask", "val_mask", "test_mask")


@dataclass
class Citation(GraphDatasetOptions):
    """Options of the citation graphs. Features: each paper's sum is 1, as Kipf and Welling 2017."""

    features: str = setting(
        "row_normalised",
        "features of nodes: raw, standardised (each column over all nodes), or row_normalised (each node's sum is 1)",
        choices=("raw", "standardised", "row_normalised"),
    )

    @property
    def size(self) -> GraphSize:
        return SIZES[self.name]

    def read(self, data_root: Path) -> RawGraph:
        file = data_root / self.name / f"{self.name}.npz"
        try:
            with np.load(file, allow_pickle=False) as arrays:
                return _graph(arrays)
        except FileNotFoundError as error:
            raise DataError(
                f"{file} is missing. Put the graph there as arrays feat_data, feat_indices, feat_indptr, feat_shape, labels, "
                f"edge_index, {', '.join(SPLITS)} (numpy.savez), made from ind.{self.name}.* of github.com/kimiyoung/planetoid, "
                "or point data_root= (or BITCYCLE_DATA) at the folder that holds it."
            ) from error
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise DataError(f"cannot read {file}: {type(error).__name__}: {error}") from error


def _graph(arrays: Any) -> RawGraph:
    from scipy.sparse import csr_matrix

    parts = arrays["feat_data"], arrays["feat_indices"], arrays["feat_indptr"]
    features = torch.from_numpy(csr_matrix(parts, arrays["feat_shape"], dtype=np.float32).toarray())
    splits = (torch.from_numpy(arrays[name]).nonzero().flatten() for name in SPLITS)
    labels, edges = (torch.from_numpy(arrays[name]).long() for name in ("labels", "edge_index"))
    return RawGraph(features, labels, edges, *splits)
