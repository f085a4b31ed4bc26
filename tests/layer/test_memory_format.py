"""The weight gradient of strided 1x1 convolutions of few channels, which corrupts memory in PyTorch on a CPU without AVX-512.

Each case runs in a process of its own with the instructions of such a CPU, as it may crash or hang.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest
import torch
from torch import nn

from bitcycle.layer.memory_format import channels_last, contiguous, needs_contiguous

AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
GRADIENTS = """
import sys
import torch
import bitcycle
from bitcycle.layer.memory_format import channels_last
from torch import nn

kind, quantizer, compute = sys.argv[1:4]
sizes = ((1, 16, 2), (3, 16, 2), (2, 12, 3), (3, 32, 4), (7, 16, 2))
for channels, size, stride in sizes:
    torch.manual_seed(0)
    if kind == "transposed":
        layer = nn.ConvTranspose2d(16, channels, 1, stride=stride, output_padding=stride - 1, bias=False)
        x = torch.randn(8, 16, size // stride, size // stride)
    else:
        layer = nn.Conv2d(channels, 16, 1, stride=stride, bias=False)
        x = torch.randn(8, channels, size, size)
    weight = layer.weight
    model = nn.Sequential(layer, nn.Flatten())
    if quantizer != "none":
        model = bitcycle.quantize_model(model, quantizer, float_layers=[], compute=compute)
        for module in model.modules():
            if isinstance(module, bitcycle.layer.PrecisionState):
                module.set(bitcycle.Precision(32, 32, 32))  # the guard is for the product, which float values check
    model = channels_last(model, torch.device("cpu"))
    weight = next(model.parameters())
    exact = layer.double()(x.double())
    upstream = torch.randn_like(exact)
    expected, = torch.autograd.grad(exact, layer.weight, upstream)
    layer.float()
    for _ in range(30):
        y = model(x.contiguous(memory_format=torch.channels_last))
        found, = torch.autograd.grad(y, weight, upstream.float().flatten(1))
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-3)
"""


WAYS = [("none", "simulate"), ("sbm", "simulate"), ("sbm", "codes"), ("mx", "simulate")]
CASES = [(*way, kind, threads) for way in WAYS for kind in ("convolution", "transposed") for threads in ("1", "2")]
FAST = [("sbm", "simulate", "convolution", "1"), ("none", "simulate", "transposed", "2")]


@pytest.mark.parametrize(
    ("quantizer", "compute", "kind", "threads"),
    [pytest.param(*case, marks=() if case in FAST else pytest.mark.slow) for case in CASES],
)
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="a kernel of x86 processors")
def test_the_weight_gradient_is_right_without_avx512(quantizer, compute, kind, threads):
    command = [sys.executable, "-c", GRADIENTS, kind, quantizer, compute]
    environment = {**os.environ, **AVX2, "OMP_NUM_THREADS": threads}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (nn.Conv2d(3, 16, 1, stride=2), True),
        (nn.Conv2d(3, 16, 1, stride=(1, 2)), True),
        (nn.Conv2d(16, 32, 1, stride=2, groups=8), True),
        (nn.ConvTranspose2d(16, 3, 1, stride=2), True),
        (nn.Conv1d(3, 16, 1, stride=2), True),
        (nn.Conv2d(8, 16, 1, stride=2), False),
        (nn.Conv2d(3, 16, 3, stride=2), False),
        (nn.Conv2d(3, 16, 1), False),
        (nn.ConvTranspose2d(3, 16, 1, stride=2), False),
        (nn.Linear(3, 16), False),
    ],
    ids=str,
)
def test_only_these_layers_get_contiguous_operands(layer, expected):
    assert needs_contiguous(layer) == expected


def test_strides_are_those_of_a_new_tensor():
    for shape in ((16, 3, 1, 1), (8, 1, 4, 4), (8, 3, 4, 4)):
        x = torch.randn(shape).contiguous(memory_format=torch.channels_last)
        assert contiguous(x).stride() == torch.empty(shape).stride()
        assert torch.equal(contiguous(x), x)


def test_other_layers_keep_channels_last():
    model = channels_last(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1, stride=2)), torch.device("cpu"))
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
