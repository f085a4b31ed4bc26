"""What this CPU offers to compute=codes: exact products of 8-bit integers, and operators that use them.

AVX-512 VNNI has both. The 8-bit sums of AVX2 saturate: there a layer multiplies floats as in compute=simulate, since codes
that are decoded to floats for each product take longer.
"""

import functools
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bitcycle.cpp.extension import operators
from bitcycle.cpp.operators import CODES
from bitcycle.settings import SettingError

SOURCE = CODES
INSTRUCTIONS = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni")
SWITCH = "BITCYCLE_INTEGER_PRODUCTS"
"""Environment variable that switches integer products on a CPU off: there compute=codes multiplies floats, as a CPU without 8-bit
instructions does."""


@functools.cache
def switched_off() -> bool:
    """Whether the user has switched integer products off. Raises SettingError for a value that the variable does not have."""
    value = os.environ.get(SWITCH, "auto")
    if value not in ("auto", "off"):
        raise SettingError(SWITCH, value, "is not auto or off", "use auto, or off for float products")
    return value == "off"


@functools.cache
def library() -> Any | None:
    """The operators of compute=codes; None without a compiler or such a CPU, or where codes are not multiplied as integers."""
    return None if why_floats() else operators(SOURCE, INSTRUCTIONS)


def integer_products_work() -> bool:
    """Whether PyTorch multiplies 8-bit integers exactly on this CPU."""
    return why_floats() == ""


@functools.cache
def why_floats() -> str:
    """Why this CPU does not multiply codes as integers; empty if it does. Tested on the largest codes: AVX2 has only sums that
    saturate."""
    if switched_off():
        return f"{SWITCH}=off"
    x, weight = torch.full((1, 64, 4, 4), 255, dtype=torch.uint8), torch.full((16, 64, 3, 3), 127, dtype=torch.int8)
    try:
        found = convolve_8_bits(x, weight, torch.ones(16), ([1, 1], [1, 1], [1, 1], 1))
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        return str(error).split("\n")[0]
    exact = torch.equal(found, F.conv2d(x.double(), weight.double(), padding=1).float())
    return "" if exact else "its 8-bit sums saturate"


def products_on_cpu() -> str:
    """What layers of compute=codes do on this CPU, for the log."""
    if reason := why_floats():
        return f"float products, as compute=simulate, with its memory ({reason})"
    by = "oneDNN" if library() is None else "AVX-512 VNNI operators where a layer has one, else oneDNN"
    return f"8-bit integer products ({by}); float products in layers that by their shape would take longer on codes"


def convolve_8_bits(
    integers: Tensor, weight: Tensor, scales: Tensor, shape: tuple[list[int], list[int], list[int], int]
) -> Tensor:
    """The convolution of uint8 codes with int8 weights times scales, by oneDNN; `shape`: stride, padding, dilation, groups."""
    packed = torch.ops.onednn.qconv_prepack(weight, scales, 1.0, 0, *shape, list(integers.shape))
    return torch.ops.onednn.qconv2d_pointwise(
        *(integers, 1.0, 0, packed, scales, no_zero_points(weight), None, *shape),
        *(1.0, 0, torch.float32, "none", [], ""),
    )


def no_zero_points(weight: Tensor) -> Tensor:
    """The zero points of a weight with symmetric codes."""
    return torch.zeros(len(weight), dtype=torch.int64)
