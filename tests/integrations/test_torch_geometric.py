"""Networks of PyTorch Geometric."""

import copy

import pytest
import torch
from torch import nn

import bitcycle
from bitcycle.layer import QuantizedProduct
from bitcycle.settings import SettingError

geometric = pytest.importorskip("torch_geometric")

EDGES = torch.tensor([[0, 1, 2, 3, 0], [1, 2, 3, 0, 2]])


class Network(nn.Module):
    """Three graph convolutions; its input is a Data object, or nodes and edges."""

    def __init__(self, kind, first=5):
        super().__init__()
        self.layers = nn.ModuleList([kind(first, 8), kind(8, 8), kind(8, 3)])

    def forward(self, x, edges=None):
        x, edges = (x.x, x.edge_index) if edges is None else (x, edges)
        for layer in self.layers[:-1]:
            x = layer(x, edges).relu()
        return self.layers[-1](x, edges)


def quantized(model: nn.Module) -> list[bool]:
    return [any(isinstance(part, QuantizedProduct) for part in layer.modules()) for layer in model.layers]


@pytest.mark.parametrize("kind", ["GCNConv", "SAGEConv", "GATConv", "TransformerConv"])
def test_graph_convolutions_are_quantized(kind, caplog):
    """None of their layers was: their linear layers are the library's own. No warning advises nn.Linear for their sums."""
    torch.manual_seed(0)
    network, x = Network(getattr(geometric.nn, kind)), torch.randn(4, 5)
    before = network(x, EDGES)
    model = bitcycle.quantize_model(copy.deepcopy(network), sample=(x, EDGES))
    assert quantized(model) == [kind == "SAGEConv", True, kind == "SAGEConv"]  # SAGEConv has two linear layers
    control = bitcycle.PrecisionController(model, bitcycle.schedule("CR", q_min=3, q_max=8, cycles=1, total_steps=2))
    control.step(0)
    y = model(x, EDGES)
    y.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert not torch.equal(y, before) and control.cost().saving_percent > 0 and not caplog.text
    torch.testing.assert_close(bitcycle.float_state_dict(model), network.state_dict(), rtol=0, atol=0)
    twin = copy.deepcopy(model)
    assert quantized(twin) == quantized(model)
    twin.load_state_dict(model.state_dict())


def test_the_quantized_layer_computes_as_one_of_torch():
    torch.manual_seed(0)
    theirs, plain, x = geometric.nn.Linear(6, 5), nn.Linear(6, 5), torch.randn(3, 6)
    plain.load_state_dict(theirs.state_dict())
    models = [bitcycle.quantize_model(nn.Sequential(layer), float_layers=[]) for layer in (theirs, plain)]
    assert models[0].state_dict().keys() == models[1].state_dict().keys()
    assert torch.equal(models[0](x), models[1](x))


def test_a_sample_may_be_a_data_object():
    data = geometric.data.Data(x=torch.randn(4, 5), edge_index=EDGES)
    assert quantized(bitcycle.quantize_model(Network(geometric.nn.GCNConv), sample=(data,))) == [False, True, False]


def test_a_layer_without_a_weight_is_refused():
    model = Network(geometric.nn.GCNConv, first=-1)
    with pytest.raises(SettingError, match=r"layer 'layers.0.lin' has no weight before its first input"):
        bitcycle.quantize_model(model, float_layers=[])
    model(torch.randn(4, 5), EDGES)
    assert quantized(bitcycle.quantize_model(model, float_layers=[])) == [True] * 3
