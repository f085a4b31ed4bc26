"""Made-up graphs in the layouts of the official ones: random numbers, for tests of reading and training only."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np

from bitcycle.dataset.graph import GRAPH_SIZES, MASKS, GraphSize

TINY = GraphSize(nodes=90, edges=300, symmetrised=300, features=16, classes=4, train=40, validation=20, test=30)
"""A graph so small that a step takes milliseconds."""


def write_citation(data_root: Path, name: str = "cora") -> None:
    """A graph of the size in GRAPH_SIZES at data_root/NAME/NAME.npz; classes are among the features, edges mostly within them."""
    size, generator = GRAPH_SIZES[name], np.random.default_rng(0)
    labels = generator.integers(size.classes, size=size.nodes)
    words = np.sort(generator.permuted(np.tile(np.arange(size.classes, size.features), (size.nodes, 1)), axis=1)[:, :3])
    indices = np.concatenate([labels[:, None], words], axis=1).astype(np.int32)
    half = size.edges // 2
    pairs = np.stack(np.triu_indices(size.nodes, 1))
    alike = labels[pairs[0]] == labels[pairs[1]]
    edges = pairs[:, np.argsort(generator.random(len(alike)) - 0.5 * alike)[:half]]
    masks = np.zeros((3, size.nodes), dtype=bool)
    start = 0
    for mask, count in zip(masks, (size.train, size.validation, size.test)):
        mask[start : start + count] = True
        start += count
    (data_root / name).mkdir(parents=True)
    np.savez(
        data_root / name / f"{name}.npz",
        feat_data=np.ones(indices.size, dtype=np.float32),
        feat_indices=indices.ravel(),
        feat_indptr=np.arange(0, indices.size + 1, 4, dtype=np.int32),
        feat_shape=np.array([size.nodes, size.features]),
        labels=labels,
        edge_index=np.concatenate([edges, edges[::-1]], axis=1),
        **dict(zip(MASKS, masks)),
    )


def write_ogbn(folder: Path, split: str, size: GraphSize) -> dict[str, np.ndarray]:
    """A graph in the layout of the official archives of `ogb`; returns what is in it."""
    generator = np.random.default_rng(1)
    content = {
        "edge": generator.integers(size.nodes, size=(size.edges, 2)),
        "node-feat": generator.normal(size=(size.nodes, size.features)).round(6).astype(np.float32),
        "node-label": generator.integers(size.classes, size=(size.nodes, 1)),
    }
    order = generator.permutation(size.nodes)
    ends = np.cumsum([size.train, size.validation, size.test])
    splits = dict(zip(("train", "valid", "test"), np.split(order[: ends[-1]], ends[:-1])))
    counts = {"num-node-list": np.array([size.nodes]), "num-edge-list": np.array([size.edges])}
    year = {"node_year": np.zeros(size.nodes, dtype=np.int64)}
    for subfolder, tables in (("raw", {**content, **counts, **year}), (f"split/{split}", splits)):
        (folder / subfolder).mkdir(parents=True)
        for name, table in tables.items():
            rows = table.reshape(len(table), -1).tolist()
            with gzip.open(folder / subfolder / f"{name}.csv.gz", "wt") as stream:
                stream.writelines(",".join(map(repr, row)) + "\n" for row in rows)
    (folder / "RELEASE_v1.txt").touch()
    return {**content, **splits}
