"""What depends on the instructions of a CPU, as on one without AVX-512. With it, the same tests also run outside of this one."""

from __future__ import annotations

import importlib
import os
import platform
import subprocess
import sys

import pytest

from bitcycle.cpp import extension
from tests.conftest import ROOT

AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "1"}
FAST = ["layer/test_exact_batch_norm.py", "layer/test_relu.py", "layer/test_convolution.py", "quantizer/test_golden.py"]
LONG = [*FAST, "cpp/test_operators.py", "layer/test_codes.py", "layer/test_layer.py", "quantizer/test_properties.py"]


@pytest.mark.parametrize(
    ("files", "options"),
    [
        pytest.param(FAST, [], id="kernels of PyTorch"),
        pytest.param(LONG, ["-p", "tests.cpp.without_avx512"], id="operators, too", marks=pytest.mark.slow),
    ],
)
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="instructions of x86 processors")
def test_without_avx512(files, options, tmp_path):
    """PyTorch's kernels round otherwise there, which the operators must do, too, or not be used. PyTorch keeps compiled kernels
    without noting that instructions were forced: these have a folder of their own."""
    environment = os.environ | AVX2 | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *options]
    names = [f"tests/{file}" for file in files]
    done = subprocess.run([*command, *names], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]


def test_the_other_tests_run_with_the_instructions_of_this_cpu():
    importlib.import_module("tests.cpp.without_avx512")  # as pytest's search for doctests does
    assert "-march=native" in extension._FLAGS
    assert extension._cpu_instructions() == set(extension.cpu_entry("flags", "Features").split())
