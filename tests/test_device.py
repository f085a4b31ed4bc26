"""Settings of devices: TF32 is off unless asked for and part of the name, and compiled kernels change no bit."""

from __future__ import annotations

import pytest
import torch

from bitcycle.device import allow_tf32, device_name, tf32, tf32_allowed, to_device
from bitcycle.files import read_object
from bitcycle.quantizer import compile_utils
from bitcycle.training.environment import set_up_torch
from bitcycle.training.run import execute


@pytest.fixture
def tf32_as_before():
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before = False, True  # PyTorch's defaults
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def test_tf32_is_off_unless_asked_for_and_recorded(digits, tf32_as_before):
    run = digits("quantizer=none", "training.steps=2", "dataset.train_samples=16", "dataset.test_samples=8")
    execute(run)
    assert not tf32_allowed()
    assert read_object(run.folder.environment)["tf32"] is False
    set_up_torch(digits("training.tf32=true").config.training)
    assert tf32_allowed()


def test_other_code_can_read_whether_tf32_is_allowed(tf32_as_before):
    for allowed in (True, False):
        allow_tf32(allowed)
        assert torch.backends.cuda.matmul.allow_tf32 is torch.backends.cudnn.allow_tf32 is tf32_allowed() is allowed


@pytest.mark.parametrize("before", [(False, False), (False, True), (True, True)])
def test_products_of_codes_use_tf32_and_restore_what_was_set(before, tf32_as_before, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    matmul.allow_tf32, cudnn.allow_tf32 = before
    with tf32():
        assert matmul.allow_tf32 and cudnn.allow_tf32, "the older interface can be read, too"
    assert (matmul.allow_tf32, cudnn.allow_tf32) == before


def test_products_of_codes_in_a_program_with_the_newer_interface(tf32_as_before, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    kinds = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    for precision in ("ieee", "tf32"):
        for kind in kinds:
            kind.fp32_precision = precision
        with tf32():
            assert all(kind.fp32_precision == "tf32" for kind in kinds)
        assert all((kind.fp32_precision == "tf32") is (precision == "tf32") for kind in kinds)


def test_a_run_with_tf32_has_another_name(digits):
    assert "training.tf32" not in digits().config.result_settings(str)
    assert digits("training.tf32=true").config.result_settings(str)["training.tf32"] is True


def test_values_for_no_device_are_not_pinned():
    assert to_device(torch.ones(2), torch.device("meta")).is_meta


def test_a_cpu_has_no_driver():
    assert device_name(torch.device("cpu")) is None


def test_quantizers_run_eagerly_where_the_compiler_rounds_differently(monkeypatch, caplog):
    def approximately(function):
        return lambda *tensors: tuple(x * (1 + 2**-23) for x in function(*tensors))

    monkeypatch.setattr(compile_utils, "exactly_compiled", approximately)
    compile_utils.compiler_works.cache_clear()
    assert not compile_utils.compiler_works("cpu")
    assert "rounds differently" in caplog.text
    compile_utils.compiler_works.cache_clear()


def test_the_compiler_is_asked_for_exact_divisions_and_no_fused_sums(monkeypatch):
    asked = {}
    monkeypatch.setattr(torch, "compile", lambda function, **options: asked.update(options))
    compile_utils.exactly_compiled(torch.add)
    known = torch._inductor.list_options()
    assert asked["options"] == {name: True for name in compile_utils.EXACT if name in known}
    assert asked["options"], "this version has at least one of them"
