"""What differs between devices: data types, TF32, seeds, names, and copies that do not make the host wait."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from bitcycle.errors import RunError


def choose_device(name: str) -> torch.device:
    """The device with a given name: cpu, cuda, cuda:1, xpu, mps, or auto (the accelerator that PyTorch sees, else the CPU).

    Raises RunError if the device does not exist.
    """
    kind, _, number = name.partition(":")
    seen = torch.accelerator.current_accelerator(check_available=True)
    there = "cpu" if seen is None else seen.type
    if kind == "auto":
        return torch.device(there)
    if kind != "cpu":
        count = torch.accelerator.device_count() if kind == there else 0
        if int(number or 0) >= count:
            found = f"{count} devices of this kind, numbered from 0" if count else f"no {kind.upper()} device"
            raise RunError(f"training.device={name}, but PyTorch sees {found}; use training.device=cpu or auto")
        if number:
            torch.accelerator.set_device_index(int(number))  # default for tensors created on "cuda"
    return torch.device(kind)


def widest_float(device: torch.device) -> torch.dtype:
    """The data type for long sums on a device: float64, or float32 where that does not exist (Metal, some Intel GPUs)."""
    return _widest_float(device.type)


@cache
def _widest_float(device_type: str) -> torch.dtype:
    if device_type in ("cpu", "cuda", "meta"):
        return torch.float64
    try:
        torch.zeros((), dtype=torch.float64, device=device_type)
    except (TypeError, RuntimeError):  # which of them depends on the device
        return torch.float32
    return torch.float64


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """x on a device. The host does not wait for the copy, which therefore starts from pinned memory (Metal has none)."""
    if device.type in (x.device.type, "meta") or x.device.type != "cpu":
        return x.to(device)
    pinned = x if device.type == "mps" else x.pin_memory()
    return pinned.to(device, non_blocking=True)


def synchronize(device: torch.device) -> None:
    """Wait until an accelerator has computed everything that was asked of it."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


def scalar(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number as a tensor without dimensions, which the device writes itself, so that the host does not wait for a copy."""
    return torch.full((), value, dtype=dtype, device=device)


def seed_step(device: torch.device, seed: int) -> None:
    """Seed the generators of a device and of the CPU; `torch.manual_seed` asks all kinds of them, which takes a millisecond."""
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def allow_tf32(allowed: bool) -> None:
    """Let CUDA round operands of float32 products to 11 bits (TF32), or forbid it; PyTorch's default allows it for convolutions
    only. A quantized value s n + z is not exact in 11 bits. Other devices have no TF32."""
    # the older switches, as the newer ones make reading these an error in other people's code
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed


@contextmanager
def tf32() -> Iterator[None]:
    """Context in which CUDA rounds operands of float32 products to 11 bits (TF32), which represent codes of 8 bits exactly."""
    if not torch.cuda.is_available():
        yield
        return
    products: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    # reading the older switches is an error where a program has set the newer ones
    before = products.fp32_precision == "tf32", cudnn.conv.fp32_precision == "tf32"
    allow_tf32(True)
    try:
        yield
    finally:
        products.allow_tf32, cudnn.allow_tf32 = before


def tf32_allowed() -> bool:
    """Whether any float32 product may use TF32 on CUDA."""
    cudnn: Any = torch.backends.cudnn
    kinds = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)
    return any(products.fp32_precision == "tf32" for products in kinds)


def device_name(device: torch.device) -> str | None:
    """The name of an accelerator as its driver reports it; None for a CPU, and where the driver reports none (Metal)."""
    if device.type == "cpu":
        return None
    module: Any = torch.get_device_module(device)
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else None
