"""What differs between devices: data types, seeds, and copies that do not make the host wait."""

from functools import cache

import torch
from torch import Tensor


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
    if device.type == x.device.type or x.device.type != "cpu":
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
