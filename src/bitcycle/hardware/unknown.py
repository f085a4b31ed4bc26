"""Arithmetic that is no product: ATen operations whose work grows faster than the size of their operands, and operations of
other libraries, with their multiply-accumulates if they are known."""

import math
import re
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten

ARITHMETIC = re.compile(
    r"_?linalg_(?!check_errors|vector_norm|cross|vander)|cholesky|triangular_solve|geqrf|orgqr|ormqr"
    r"|_cdist|_euclidean_dist|_pdist|_fft_|conv_tbc|_int_mm|_scaled_|_grouped_mm|_weight_int"
    r"|.*(flash|efficient)_attention|_transformer_encoder_layer|_native_multi_head_attention|.*rnn|_lstm_mps"
)
"""ATen operations, other than products, whose work grows faster than the size of their operands."""

KNOWN_LIBRARIES = ("aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "bitcycle")
"""Namespaces whose remaining operations only move, compare or add; operations of other libraries are unknown."""


class Unknown(NamedTuple):
    """An unknown operation: its name, and its multiply-accumulates if they are known."""

    name: str
    macs: int | None


def unknown_arithmetic(operation: Any, args: Any, keywords: Any, output: Any) -> Unknown | None:
    """Describe an operation that is not in `PRODUCTS`; None for a view, elementwise operation, reduction or the like.

    Multiply-accumulates come from the formulas below, else from PyTorch's table of formulas
    (`torch.utils.flop_counter`), which users can extend.
    """
    packet = operation.overloadpacket
    if not _is_suspicious(packet):
        return None
    if packet in _FORMULAS:
        return Unknown(str(packet), _FORMULAS[packet](args, output))
    from torch.utils.flop_counter import flop_registry  # slow to import and rarely needed

    formula = flop_registry.get(packet)
    return Unknown(str(packet), formula and formula(*args, **keywords, out_val=output) // 2)


@cache
def _is_suspicious(packet: Any) -> bool:
    library, _, name = str(packet).rpartition(".")
    if library in KNOWN_LIBRARIES:
        return ARITHMETIC.match(name) is not None
    return str(packet) != "torchvision.nms"  # comparisons only


def _fourier(args: Any, output: Tensor) -> int:
    """2 N log2 N real multiply-accumulates for a complex transform of N points, half of that for a real transform."""
    signal, dimensions = args[0], args[1]
    whole = output if signal.is_complex() and not output.is_complex() else signal
    points = math.prod(whole.shape[dimension] for dimension in dimensions)
    return round((2 if whole.is_complex() else 1) * whole.numel() * math.log2(points)) if points else 0


def _elimination(args: Any, output: Any) -> int:
    """n^3 / 3 to factorise an n x n matrix, plus n^2 per right-hand side."""
    matrix = args[0]
    n = matrix.shape[-1]
    right = args[1].numel() // n if len(args) > 1 and isinstance(args[1], Tensor) else 0
    return int(matrix.numel() * n // 3 + right * n * n)


def _groups(args: Any, output: Tensor) -> int:
    """Groups of rows, each times a matrix of its own, as in mixtures of experts."""
    left, right = args[:2]
    return int(left.numel() * output.shape[-1] // (len(left) if (left.dim(), right.dim()) == (3, 2) else 1))


_FORMULAS: dict[Any, Callable[[Any, Any], int]] = {
    **dict.fromkeys(
        (aten._cdist_forward, aten._euclidean_dist, aten._pdist_forward),
        lambda args, output: output.numel() * args[0].shape[-1],
    ),
    **dict.fromkeys((aten._fft_r2c, aten._fft_c2c, aten._fft_c2r), _fourier),
    **dict.fromkeys((aten._linalg_solve_ex, aten._linalg_det, aten.linalg_lu_factor_ex), _elimination),
    aten.linalg_inv_ex: lambda args, _: args[0].numel() * args[0].shape[-1],
    aten._grouped_mm: _groups,
}
