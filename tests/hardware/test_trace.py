"""The trace of a model's products, by hand."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.nn import functional as F

from bitcycle.hardware import FLOAT_PRECISION, BitFusion, BitOps, Zc706, trace
from bitcycle.precision import Precision
from bitcycle.settings import SettingError
from tests.hardware_trace_cases import Function

B, T = 2, 3


def edges():
    """Five edges among four nodes."""
    return torch.tensor([[0, 1, 2, 3, 3], [1, 2, 3, 0, 1]])


def sparse(layout="coo"):
    with warnings.catch_warnings():
        # compressed rows are "in beta state", and PyTorch 2.11 names its invariant checks
        warnings.simplefilter("ignore")
        matrix = torch.sparse_coo_tensor(edges(), torch.ones(5), (4, 4), check_invariants=True).coalesce()
        return matrix if layout == "coo" else matrix.to_sparse_csr()


def image(*shape):
    return torch.zeros(*shape)


KINDS = {
    # name: (module, inputs, {kind: multiply-accumulates by hand})
    "conv1d": (nn.Conv1d(3, 4, 5), [image(B, 3, 9)], {"conv": B * 5 * 4 * 3 * 5}),
    "conv2d, strided": (nn.Conv2d(3, 4, 3, stride=2), [image(B, 3, 9, 9)], {"conv": B * 16 * 4 * 3 * 9}),
    "conv3d": (nn.Conv3d(2, 4, 3), [image(B, 2, 5, 5, 5)], {"conv": B * 27 * 4 * 2 * 27}),
    "conv2d, grouped": (nn.Conv2d(4, 6, 3, groups=2), [image(B, 4, 5, 5)], {"conv": B * 9 * 6 * 2 * 9}),
    "conv2d, depthwise": (nn.Conv2d(4, 4, 3, groups=4), [image(B, 4, 5, 5)], {"conv": B * 9 * 4 * 9}),
    "conv2d, dilated": (nn.Conv2d(2, 4, 3, dilation=2), [image(B, 2, 9, 9)], {"conv": B * 25 * 4 * 2 * 9}),
    "transposed conv": (nn.ConvTranspose2d(3, 4, 3, stride=2), [image(B, 3, 5, 5)], {"conv": B * 25 * 4 * 3 * 9}),
    "linear": (nn.Linear(5, 7), [image(B, 5)], {"linear": B * 35}),
    "linear over a sequence": (nn.Linear(5, 7), [image(B, T, 5)], {"linear": B * T * 35}),
    "complex linear": (nn.Linear(5, 7, dtype=torch.cfloat), [image(B, 5).to(torch.cfloat)], {"linear": 4 * B * 35}),
    "bilinear": (nn.Bilinear(3, 4, 5), [image(B, 3), image(B, 4)], {"linear": B * 60}),
    "LSTM": (nn.LSTM(5, 7, batch_first=True), [image(B, T, 5)], {"linear": B * T * 28 * (5 + 7)}),
    "LSTM, two layers, both ways": (
        nn.LSTM(5, 7, num_layers=2, bidirectional=True),
        [image(T, B, 5)],
        {"linear": 2 * B * T * 28 * ((5 + 7) + (14 + 7))},
    ),
    "GRU": (nn.GRU(5, 7), [image(T, B, 5)], {"linear": B * T * 21 * (5 + 7)}),
    "RNN": (nn.RNN(5, 7), [image(T, B, 5)], {"linear": B * T * 7 * (5 + 7)}),
    "LSTM cell": (nn.LSTMCell(5, 7), [image(B, 5)], {"linear": B * 28 * (5 + 7)}),
    "GRU cell": (nn.GRUCell(5, 7), [image(B, 5)], {"linear": B * 21 * (5 + 7)}),
    "multi-head attention": (
        Function(lambda attention, x: attention(x, x, x)[0], nn.MultiheadAttention(8, 2, batch_first=True)),
        [image(B, T, 8)],
        {"linear": B * T * 8 * (24 + 8), "matmul": 2 * B * T * T * 8},
    ),
    "attention of one head and one sample": (
        Function(lambda attention, x: attention(x, x, x)[0], nn.MultiheadAttention(8, 1, batch_first=True)),
        [image(1, T, 8)],
        {"linear": T * 8 * (24 + 8), "matmul": 2 * T * T * 8},
    ),
    "scaled dot product, causal": (
        Function(lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True)),
        [image(B, 4, T, 8), image(B, 4, T, 8)],
        {"matmul": 2 * B * 4 * T * T * 8},
    ),
    "transformer layer": (
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        [image(B, T, 8)],
        {"linear": B * T * (8 * 32 + 2 * 8 * 16), "matmul": 2 * B * T * T * 8},
    ),
    "einsum with a weight": (
        Function(lambda layer, x: torch.einsum("btf,of->bto", x, layer.weight), nn.Linear(5, 7)),
        [image(B, T, 5)],
        {"linear": B * T * 35},
    ),
    "einsum of activations": (
        Function(lambda x: torch.einsum("bif,bjf->bij", x, x)),
        [image(B, T, 5)],
        {"matmul": B * T * T * 5},
    ),
    "Gram matrix": (Function(lambda x: x @ x.T), [image(B, 5)], {"matmul": B * B * 5}),
    "weight from the left": (
        Function(lambda layer, x: layer.weight @ x, nn.Linear(5, 7)),
        [image(5, B)],
        {"linear": B * 35},
    ),
    "matrix times vector": (Function(lambda layer, x: layer.weight @ x, nn.Linear(5, 7)), [image(5)], {"linear": 35}),
    "dot product": (Function(lambda x, y: x @ y), [image(5), image(5)], {"matmul": 5}),
    "experts": (
        Function(lambda x: torch.bmm(x.expand(3, B, 5), torch.ones(3, 5, 7, requires_grad=True))),
        [image(B, 5)],
        {"linear": 3 * B * 35},
    ),
    "embedding": (nn.Embedding(10, 4), [torch.zeros(B, T, dtype=torch.long)], {"embedding": 0}),
    "embedding bag": (nn.EmbeddingBag(10, 4), [torch.zeros(B, T, dtype=torch.long)], {"embedding": 0}),
    "sparse aggregation": (
        Function(lambda layer, x: torch.sparse.mm(sparse(), layer(x)), nn.Linear(6, 2)),
        [image(4, 6)],
        {"linear": 4 * 12, "aggregation": 5 * 2},
    ),
    "sparse aggregation, compressed rows": (
        Function(lambda layer, x: sparse("csr") @ layer(x), nn.Linear(6, 2)),
        [image(4, 6)],
        {"linear": 4 * 12, "aggregation": 5 * 2},
    ),
    "index_add aggregation": (
        Function(lambda layer, x: torch.zeros(4, 2).index_add(0, edges()[1], layer(x)[edges()[0]]), nn.Linear(6, 2)),
        [image(4, 6)],
        {"linear": 4 * 12, "aggregation": 5 * 2},
    ),
    "scatter aggregation": (
        Function(
            lambda layer, x: torch.zeros(4, 2).scatter_reduce(
                0, edges()[1][:, None].expand(5, 2), layer(x)[edges()[0]], "mean"
            ),
            nn.Linear(6, 2),
        ),
        [image(4, 6)],
        {"linear": 4 * 12, "aggregation": 5 * 2},
    ),
    "neighbours' maximum": (
        Function(
            lambda x: torch.zeros(4, 6).scatter_reduce(0, edges()[1][:, None].expand(5, 6), x[edges()[0]], "amax")
        ),
        [image(4, 6)],
        {},
    ),
    "values decide the shape": (
        Function(lambda layer, x: layer(x[x.sum(1) > 0]), nn.Linear(6, 2)),
        [torch.tensor([[1.0] * 6, [-1.0] * 6, [2.0] * 6])],
        {"linear": 2 * 12},
    ),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", KINDS)
def test_products_by_hand(name):
    module, inputs, expected = KINDS[name]
    found: dict[str, int] = {}
    for operation in trace(module, *inputs).operations:
        found[operation.kind] = found.get(operation.kind, 0) + operation.macs
        assert operation.fixed_precision == FLOAT_PRECISION
        m, n, c, t = operation.product
        assert operation.macs == m * n * c * t * operation.groups
    assert found == expected


META = [name for name in KINDS if "sparse" not in name and name not in ("values decide the shape", "experts")]


@pytest.mark.parametrize("name", [name for name in META if "aggregation" not in name and "maximum" not in name])
def test_the_meta_device_counts_the_same(name):
    module, inputs, expected = KINDS[name]
    workload = trace(module.to("meta"), *(tensor.to("meta") for tensor in inputs))
    module.to_empty(device="cpu")
    found = {kind: sum(o.macs for o in workload.operations if o.kind == kind) for kind in expected}
    assert found == expected


@pytest.mark.parametrize("name", KINDS)
def test_every_cost_model_costs_every_kind(name):
    module, inputs, expected = KINDS[name]
    workload = trace(module, *inputs, samples=1)
    p4, p8 = Precision(4, 4, 8), Precision(8, 8, 8)
    for kind in (BitOps, BitFusion, Zc706):
        low, high = (kind(convention="cpt").cost(workload, {p: 1}, p8) for p in (p4, p8))
        assert (low.gbitops < high.gbitops) == (sum(expected.values()) > 0)
        if low.latency_s is not None:
            assert low.latency_s <= high.latency_s * 1.6  # padded rows may take longer in such small products
            assert (high.latency_s > 0) == (sum(expected.values()) > 0)


def test_which_products_training_needs():
    """A frozen layer has no weight gradient; nothing before the first weight that learns has an input gradient."""
    layers = [nn.Linear(4, 4) for _ in range(4)]
    layers[1].requires_grad_(False)
    operations = trace(nn.Sequential(*layers), image(B, 4)).operations
    assert [o.input_gradients for o in operations] == [0, 1, 1, 1]
    assert [o.needs_weight_gradient for o in operations] == [True, False, True, True]
    cost = BitOps().cost(trace(nn.Sequential(*layers), image(1, 4)), {FLOAT_PRECISION: 1}, FLOAT_PRECISION)
    assert [(x.error > 0, x.weight_gradient > 0) for x in cost.layers] == list(
        zip([False, True, True, True], [True, False, True, True])
    )


def test_frozen_features_need_no_gradients():
    def forward(features, head, x):
        with torch.no_grad():
            x = features(x)
        return head(x)

    features = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    operations = trace(Function(forward, features, nn.Linear(4, 4)), image(B, 4)).operations
    assert [(o.input_gradients, o.needs_weight_gradient) for o in operations] == [
        (0, False),
        (0, False),
        (0, True),
    ]


def test_gradients_of_attention_and_aggregation():
    def forward(layer, x):
        y = layer(x)
        return sparse() @ (y @ x.T @ y)

    linear, scores, mixed, aggregation = trace(Function(forward, nn.Linear(6, 6)), image(4, 6)).operations
    assert (linear.kind, scores.kind, mixed.kind, aggregation.kind) == ("linear", "matmul", "matmul", "aggregation")
    assert (scores.input_gradients, scores.needs_weight_gradient) == (1, False)  # x itself needs none
    assert (mixed.input_gradients, mixed.needs_weight_gradient) == (1, True)
    assert (aggregation.input_gradients, aggregation.needs_weight_gradient) == (1, False)


@pytest.mark.parametrize(("learned", "errors"), [((), 0), ((0,), 1), ((1,), 1), ((0, 1), 2)])
def test_a_bilinear_layer_has_an_error_product_for_each_input(learned, errors):
    """The gradient of the second input was once never counted."""
    inputs = [image(1, 3), image(1, 4)]
    for index in learned:
        inputs[index].requires_grad_()
    workload = trace(nn.Bilinear(3, 4, 5), *inputs)
    assert workload.operations[0].input_gradients == errors
    cost = BitOps().cost(workload, {FLOAT_PRECISION: 2}, FLOAT_PRECISION)
    assert cost.gbitops == 2 * 60 * (2 + errors) * 1024 / 1e9
    times = [
        layer.error / layer.forward
        for kind in (BitFusion, Zc706)
        for layer in kind().cost(workload, {FLOAT_PRECISION: 2}, FLOAT_PRECISION).latency_layers
    ]
    assert times[1] == errors
    assert bool(times[0]) == bool(errors)


def test_attention_of_a_quantized_model_is_charged_for_activations():
    network = trace(Function(lambda x: x @ x.T), image(B, 5))
    cost = BitOps(convention="better", count="conv_linear").cost(network, {Precision(2, 4, 8): B}, FLOAT_PRECISION)
    assert cost.layers[0].forward == B * B * 5 * 4 * 4
    assert cost.layers[0].error == B * B * 5 * 4 * 8


def test_a_transposed_convolution_runs_over_its_output():
    """Forward it is the error product of a convolution: 11 x 11 positions on the array, though 25 count as MACs."""
    (operation,) = trace(nn.ConvTranspose2d(3, 4, 3, stride=2), image(1, 3, 5, 5)).operations
    assert (operation.product.m, operation.input_positions, operation.output_positions) == (25, 25, 121)
    products = BitFusion().products(operation)
    assert [tuple(p) for p in products.values()] == [(121, 4, 3, 9), (25, 3, 4, 9), (9, 4, 3, 25)]


def test_names_tell_the_module_and_repeat():
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.ReLU(), shared, nn.Sequential(nn.Linear(4, 4)))
    assert [operation.name for operation in trace(model, image(B, 4)).operations] == ["0", "0#2", "3.0"]
    assert [operation.module for operation in trace(model, image(B, 4)).operations] == ["0", "0", "3.0"]
    assert trace(nn.Linear(4, 4), image(B, 4)).operations[0].name == "Linear"


def test_samples_are_the_first_dimension_unless_told():
    assert trace(nn.Linear(4, 4), image(6, 4)).samples == 6
    assert trace(nn.Linear(4, 4), image(6, 4), samples=2).samples == 2
    assert trace(Function(lambda layer, batch: layer(batch["x"]), nn.Linear(4, 4)), {"x": image(6, 4)}).samples == 6
    assert trace(nn.Linear(4, 4), image(6, 4)).macs_per_sample == {"Linear": 16}
    with pytest.raises(SettingError, match="samples=0"):
        trace(nn.Linear(4, 4), image(0, 4))


def test_inference_mode_changes_nothing():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    expected = trace(model, image(B, 4))
    with torch.inference_mode():
        assert trace(model, image(B, 4)) == expected
    with torch.no_grad():
        assert trace(model, image(B, 4)) == expected


class WholeLinear(nn.Linear):
    """Reaches the dispatcher as one operation, as every linear layer does on a device with an operator for it (Metal)."""

    def forward(self, x):
        with torch.inference_mode():
            return super().forward(x)


def test_a_linear_layer_that_is_not_taken_apart_is_counted():
    whole, parts = (trace(kind(6, 5), torch.ones(2, 3, 6)).operations[0] for kind in (WholeLinear, nn.Linear))
    assert (whole.kind, whole.macs, whole.product) == ("linear", 2 * 3 * 6 * 5, parts.product)
    assert (whole.input_elements, whole.output_elements) == (parts.input_elements, parts.output_elements)


def test_tracing_leaves_everything_as_it_was():
    model = nn.Sequential(nn.LSTM(4, 4), Function(lambda out: F.dropout(out[0], 0.5)), nn.BatchNorm1d(3)).train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    backends = torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled, torch.get_num_threads()
    x = torch.randn(5, 3, 4, requires_grad=True)
    trace(model, x)
    assert model.training
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert backends == (torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled, torch.get_num_threads())
    assert torch.backends.mha.get_fastpath_enabled()
    assert x.grad is None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_the_models_own_errors_come_through():
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        trace(nn.Linear(4, 4), image(B, 5))
    assert torch.backends.mkldnn.enabled
    with pytest.raises(RuntimeError):
        trace(nn.Linear(4, 4, device="meta"), torch.zeros(B, 5, device="meta"))


def test_values_on_the_meta_device_are_asked_for_in_words():
    model = Function(lambda layer, x: layer(x[x.sum(1) > 0]), nn.Linear(6, 2)).to("meta")
    with pytest.raises(SettingError, match="trace it on the CPU with a real sample"):
        trace(model, torch.zeros(B, 6, device="meta"))


def test_a_model_that_cannot_be_copied_is_refused_in_words():
    """As those of FSDP, whose assertion did not tell what to do."""
    model = nn.Linear(2, 2)
    model.lock = threading.Lock()
    with pytest.raises(SettingError, match=r"cannot be copied for the trace.*Remedy: trace it before it is wrapped"):
        trace(model, torch.zeros(1, 2))


def test_results_that_a_model_keeps_in_a_list_are_copied():
    """As the correlations of torchvision's RAFT, whose report after a training step ended with PyTorch's error."""

    class Keeping(nn.Linear):
        def forward(self, x):
            self.kept = {"levels": [super().forward(x)]}
            return self.kept["levels"][0]

    model, x = Keeping(4, 3), torch.zeros(B, 4)
    model(x)
    assert trace(model, x).operations
    assert model.kept["levels"][0].grad_fn is not None
