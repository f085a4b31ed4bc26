"""Arithmetic other than the products of a network: found by name, counted as float32 if its multiplications are known."""

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
    r"|.*(flash|efficient)_attention|_transformer_encoder_layer|_native_multi_head_attention|.*rnn"
)
"""Names of PyTorch's own operations, beside the products, whose work grows faster than their operands."""

KNOWN_LIBRARIES = ("aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "bitcycle")
"""Namespaces whose other operations move, compare or add; nothing is known of those of other libraries, whatever their name."""


class Unknown(NamedTuple):
    """An unknown operation: its name, and its multiply-accumulates if they can be counted."""

    name: str
    macs: int | None


def unknown_arithmetic(operation: Any, args: Any, keywords: Any, output: Any) -> Unknown | None:
    """What an operation that is not in `PRODUCTS` computes; None if it is a view, elementwise, a reduction or the like.

    Its multiply-accumulates come from the formulas below, else from PyTorch's own table of formulas
    (`torch.utils.flop_counter`), to which users can add theirs.
    """
    packet = operation.overloadpacket
    if not _is_suspicious(packet):
        return None
    if packet in _FORMULAS:
        return Unknown(str(packet), _FORMULAS[packet](args, output))
    from torch.utils.flop_counter import flop_registry  # takes a moment, and is hardly ever needed

    formula = flop_registry.get(packet)
    macs = None if formula is None else formula(*args, **keywords, out_val=output) // 2
    return Unknown(str(packet), macs)


@cache
def _is_suspicious(packet: Any) -> bool:
    library, _, name = str(packet).rpartition(".")
    if library in KNOWN_LIBRARIES:
        return ARITHMETIC.match(name) is not None
    return str(packet) != "torchvision.nms"  # comparisons only, at the end of every detector


def _distances(args: Any, output: Tensor) -> int:
    return int(output.numel() * args[0].shape[-1])


def _fourier(args: Any, output: Tensor) -> int:
    """2 N log2 N real multiply-accumulates for a complex transform of N points, half of that for a real one."""
    signal, dimensions = args[0], args[1]
    whole = output if signal.is_complex() and not output.is_complex() else signal
    points = math.prod(whole.shape[dimension] for dimension in dimensions)
    return round((2 if whole.is_complex() else 1) * whole.numel() * math.log2(points)) if points else 0


def _elimination(args: Any, output: Any) -> int:
    """n^3 / 3 for the factors of an n x n matrix, n^2 for each right side."""
    matrix = args[0]
    n = matrix.shape[-1]
    right = args[1].numel() // n if len(args) > 1 and isinstance(args[1], Tensor) else 0
    return int(matrix.numel() * n // 3 + right * n * n)


def _groups(args: Any, output: Tensor) -> int:
    """Products of groups of rows with a matrix each, as mixtures of experts compute them."""
    left, right = args[:2]
    return int(left.numel() * output.shape[-1] // (len(left) if (left.dim(), right.dim()) == (3, 2) else 1))


def _inverse(args: Any, output: Any) -> int:
    return int(args[0].numel() * args[0].shape[-1])


_FORMULAS: dict[Any, Callable[[Any, Any], int]] = {
    **dict.fromkeys((aten._cdist_forward, aten._euclidean_dist, aten._pdist_forward), _distances),
    **dict.fromkeys((aten._fft_r2c, aten._fft_c2c, aten._fft_c2r), _fourier),
    **dict.fromkeys((aten._linalg_solve_ex, aten._linalg_det, aten.linalg_lu_factor_ex), _elimination),
    aten.linalg_inv_ex: _inverse,
    aten._grouped_mm: _groups,
}
