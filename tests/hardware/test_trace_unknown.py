"""What a trace does with operations and models that it does not know."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from bitcycle.hardware import FLOAT_PRECISION, BitFusion, BitOps, trace
from bitcycle.layer import quantize_model
from bitcycle.precision import Precision
from bitcycle.quantizer.compile_utils import Kernel
from tests.hardware_trace_cases import Function

B, T = 2, 3


def grouped(rows, matrices):
    """The first three rows times the first matrix, the rest times the second, as a mixture of experts computes them."""
    return torch.ops.aten._grouped_mm(rows, matrices, torch.tensor([3, len(rows)], dtype=torch.int32))


def image(*shape):
    return torch.zeros(*shape)


UNKNOWN = {
    "distances": (lambda x: torch.cdist(x, x), image(B, 30, 5), B * 30 * 30 * 5, "euclidean_dist"),
    "few distances": (lambda x: torch.cdist(x, x), image(B, 4, 5), B * 4 * 4 * 5, "_cdist_forward"),
    "real Fourier transform": (torch.fft.rfft, image(B, 8), B * 8 * 3, "_fft_r2c"),
    "complex Fourier transform": (
        torch.fft.fft2,
        torch.zeros(B, 4, 8, dtype=torch.complex64),
        2 * B * 32 * 5,
        "_fft_c2c",
    ),
    "back to real": (lambda x: torch.fft.irfft(torch.fft.rfft(x)), image(B, 8), 2 * B * 8 * 3, "_fft_c2r"),
    "linear equations": (lambda x: torch.linalg.solve(x, x), torch.eye(6).expand(B, 6, 6), B * (72 + 216), "solve"),
    "experts": (
        lambda x: grouped(x.flatten(0, 1), torch.zeros(2, 8, 16).to(x)),
        image(B, 4, 8),
        B * 4 * 8 * 16,
        "grouped_mm",
    ),
    "inverse": (torch.linalg.inv, torch.eye(6).expand(B, 6, 6), B * 216, "inv"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_arithmetic_is_named_and_counts_as_float(name):
    function, x, macs, word = UNKNOWN[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        workload = trace(Function(function), x)
    assert any(word in str(warning.message) for warning in caught)
    assert workload.macs == macs
    assert {operation.kind for operation in workload.operations} == {"unknown"}
    assert all(operation.is_float for operation in workload.operations)
    for convention in ("actual", "better"):
        cost = BitOps(convention=convention).cost(workload, {Precision(2, 2, 2): B}, FLOAT_PRECISION)
        assert sum(layer.forward for layer in cost.layers) == macs * 1024


def test_unknown_arithmetic_is_warned_of_once():
    model = nn.Sequential(*[Function(torch.fft.fft) for _ in range(3)])
    with pytest.warns(UserWarning, match="arithmetic unknown to the cost models") as caught:
        workload = trace(model, torch.zeros(B, 8, dtype=torch.complex64))
    assert len(caught) == 1
    assert "aten._fft_c2c in '0'" in str(caught[0].message)
    assert "counted as 96 float32 products" in str(caught[0].message)
    assert [operation.name for operation in workload.operations] == ["0", "1", "2"]


def test_what_cannot_be_counted_is_listed_and_said():
    with pytest.warns(UserWarning, match="linalg_svd.* not counted in the cost.*register_flop_formula"):
        workload = trace(Function(torch.linalg.svd), torch.eye(4)[None])
    assert [(operation.kind, operation.macs) for operation in workload.operations] == [("unknown", 0)]
    assert BitFusion().cost(workload, {FLOAT_PRECISION: 1}, FLOAT_PRECISION).energy_j == 0


@torch.library.custom_op("bitcycle_test::rotate", mutates_args=())
def rotate(x: torch.Tensor) -> torch.Tensor:
    return x @ torch.eye(x.shape[-1])


def test_operations_of_other_libraries_are_unknown_until_given_a_formula():
    with pytest.warns(UserWarning, match="bitcycle_test.rotate in 'Function' .*not counted"):
        assert trace(Function(lambda x: rotate(x)), image(B, 6)).macs == 0
    register_flop_formula(torch.ops.bitcycle_test.rotate)(
        lambda shape, out_shape=None, **_: 2 * shape[0] * shape[1] ** 2
    )
    with pytest.warns(UserWarning, match="counted as 72 float32 products"):
        assert trace(Function(lambda x: rotate(x)), image(B, 6)).macs == B * 36


@pytest.mark.filterwarnings("error")
def test_ordinary_operations_are_not_warned_of():
    def forward(x):
        x = F.layer_norm(F.gelu(x), x.shape[-1:]).cumsum(-1).softmax(-1)
        x = torch.cat([x.flip(-1), F.normalize(x, dim=-1)], -1).sort(-1).values.log_softmax(-1)
        x = F.interpolate(x[:, None], scale_factor=2, mode="bilinear")[:, 0] + x.std() * torch.rand_like(x).sum()
        return x.topk(2, -1).indices, x.argmax(-1), torch.linalg.vector_norm(x), x.var(), x.unfold(-1, 2, 1)

    assert trace(Function(forward), image(B, 4, 4)).operations == ()


def test_whole_models_of_torchvision_are_traced():
    import torchvision

    macs = {"resnet18": 1_814_073_344, "resnet34": 3_663_761_408, "resnet50": 4_089_184_256}
    with_batch_norm = {"resnet18": 2_483_712, "resnet34": 3_738_112, "resnet50": 11_113_984}
    for name, expected in macs.items():
        network = trace(getattr(torchvision.models, name)(weights=None, num_classes=1000), image(1, 3, 224, 224))
        assert network.macs == expected
        assert network.batch_norm_elements == with_batch_norm[name]
    assert trace(torchvision.models.vit_b_16(weights=None), image(1, 3, 224, 224)).macs == pytest.approx(
        17.56e9, rel=1e-3
    )


def test_a_quantized_model_knows_what_follows_the_schedule():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2))
    conv, linear = trace(quantize_model(model, float_layers=["last"]), image(B, 3, 3, 3)).operations
    assert conv.fixed_precision is None
    assert conv.precision(Precision(3, 4, 5)) == Precision(3, 4, 5)
    assert linear.is_float


@pytest.mark.filterwarnings("error::UserWarning")
def test_compiled_quantizers_are_traced_without_compiling_them():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), nn.Flatten(), nn.Linear(4, 2))
    expected = trace(quantize_model(copy.deepcopy(model)), image(B, 3, 3, 3))
    kernels = torch._dynamo.utils.counters["stats"]["unique_graphs"] + Kernel.compilations
    assert trace(quantize_model(model, compile=True), image(B, 3, 3, 3)) == expected
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] + Kernel.compilations == kernels


def test_tracing_does_not_load_the_compiler():
    code = (
        "import sys, torch; from torch import nn; from bitcycle.hardware import trace; "
        "trace(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LSTM(4, 4)), torch.zeros(2, 3, 3, 3)); "
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_arithmetic_of_quantizers_is_no_product_of_the_network():
    def layers():
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 9, 5))

    model = quantize_model(layers(), "multibit", float_layers=[])  # solves normal equations
    assert trace(model, image(B, 3, 5, 5)).macs == trace(layers(), image(B, 3, 5, 5)).macs
