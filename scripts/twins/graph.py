"""The graph convolutional network of Better Schedules on Cora: cpt_gnn/models.py, with dgl."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import nll_loss, relu

import bitcycle
from bitcycle.dataset.graph import Citation
from bitcycle.model.graph_network import Gcn
from bitcycle.module.sparse import make_edges
from bitcycle.quantizer.registry import quantizer_options
from bitcycle.shapes import GraphShape
from twin_run import Twin, pairs_of, released, to_nearest

HIDDEN, LAYERS = 64, 3


def build(checkout: Path, variant: str) -> Twin:
    """The variant is the aggregation, float or quantized; without dropout, whose random numbers differ."""
    import dgl

    dgl.function.copy_src = dgl.function.copy_u  # its name since dgl 1.0
    released(checkout, "cpt_gnn")
    to_nearest(import_module("modules.quantize"))
    torch.set_default_dtype(torch.float32)  # type of the files
    graph = Citation(name="cora").read(Path(os.environ["BITCYCLE_DATA"]))
    torch.set_default_dtype(torch.float64)
    nodes, width = graph.features.shape
    pairs_of_nodes = torch.cat([graph.edges, torch.arange(nodes).expand(2, nodes)], dim=1)  # self-loops
    features, labels, chosen = graph.features.double(), graph.labels, graph.train
    network = dgl.graph(tuple(pairs_of_nodes), num_nodes=nodes)
    arguments = (width, HIDDEN, 7, LAYERS - 1, relu, 0.0)
    theirs = import_module("models").QGCN(network, *arguments, quant_agg=variant == "quantized")
    shape = GraphShape(width, 7, nodes, pairs_of_nodes.shape[1])
    ours = Gcn(name="gcn", layers=LAYERS, hidden=HIDDEN, dropout=0, aggregation=variant).build(shape)
    ours = bitcycle.quantize_model(ours, replace(quantizer_options("sbm"), stochastic=False))
    pairs = pairs_of(theirs, ours)
    control = bitcycle.PrecisionController(ours, bitcycle.schedule("RR", q_min=3, q_max=8, cycles=2, total_steps=64))
    edges = [make_edges(pairs_of_nodes, nodes)]
    theirs.train(), ours.train()

    def losses(step: int) -> tuple[Tensor, Tensor]:
        bits = control.step(step)
        outputs = theirs(features, bits.weight, bits.gradient), ours(features, edges)
        return tuple(nll_loss(output.log_softmax(1)[chosen], labels[chosen]) for output in outputs)  # type: ignore[return-value]

    return Twin(losses, pairs, lambda weights: torch.optim.Adam(weights, 0.01, weight_decay=5e-4))
