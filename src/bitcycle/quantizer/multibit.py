"""multibit: vectors as sums of k scaled sign vectors, with 2^k non-uniform levels.

    w ~ sum_i a_i b_i,   b_i in {-1, +1}^n, the sign of 0 is +1
    r = w;   b_i = sign(r), then all a = least squares of w on b_1 .. b_i, r := w - B a

>>> from bitcycle.quantizer import quantize
>>> quantize(torch.tensor([[-3.0, 0.5, 1.5]]), 2, quantizer="multibit", role="weight").tolist()
[[-3.0, 1.0, 1.0]]

Source: HLHLp, section 4.2, which cites Guo et al. 2017 ("network sketching") for its 4-level networks. A vector is an output
channel of a weight; of an activation it is the last dimension (x_t or h_t of a recurrent network), or a whole sample of a
convolution's input. Straight-through without a mask. No code was released.
"""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from bitcycle.cpp.operators import MULTIBIT, cpp_operators
from bitcycle.device import widest_float
from bitcycle.quantizer.base import QuantizerOptions, TensorQuantizer
from bitcycle.quantizer.layout import computable, rows, unflat

MAXIMUM_BITS = 4
"""Number of sign vectors computed; those beyond the current bits are masked, so that a change of bits needs no recompilation."""
RIDGE = 1e-10
"""Regularisation of the normal equations in units of n: identical sign vectors (as of a constant) share their weight. On a device
without float64 it is ten times the rounding of float32, below which it would vanish."""


def decompose(vectors: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    """Coefficients a [rows, 4] and sign vectors B [rows, n, 4] with vectors [rows, n] ~ B a for `bits` k (int64, 0 to 4);
    columns from k on are zero."""
    rest = vectors
    codes = vectors.new_zeros(*vectors.shape, MAXIMUM_BITS)
    for i in range(MAXIMUM_BITS):
        is_used = (i < bits).to(vectors.dtype)
        codes[:, :, i] = torch.where(rest >= 0, is_used, -is_used)
        coefficients = _least_squares(vectors, codes)
        rest = vectors - (codes * coefficients.unsqueeze(1)).sum(dim=2)
    return coefficients, codes


def reconstruct(vectors: Tensor, bits: Tensor) -> Tensor:
    """Each row as the sum of its sign vectors; 0 bits returns the vectors. Vectors [rows, F], as the result."""
    coefficients, codes = decompose(vectors, bits)
    return torch.where(bits > 0, (codes * coefficients.unsqueeze(1)).sum(dim=2), vectors)


def _least_squares(vectors: Tensor, codes: Tensor) -> Tensor:
    """a that minimises |w - B a|^2 in each row; 0 for columns of zeros."""
    n, wide = vectors.shape[1], widest_float(vectors.device)
    products = (codes.mT @ codes).to(wide) / n  # integers, exact in float32
    values = codes.mT.to(wide) @ vectors.unsqueeze(2).to(wide) / n
    is_used = products.diagonal(dim1=1, dim2=2) > 0
    diagonal = torch.where(is_used, max(RIDGE, 10 * torch.finfo(wide).eps), 1.0)
    # The _ex variant does not synchronise with the device to report singular systems, which cannot occur.
    solution: Tensor = torch.linalg.solve_ex(products + torch.diag_embed(diagonal), values)[0]
    return solution.squeeze(2).to(vectors.dtype)


class MultibitWeight(TensorQuantizer):
    """Each output channel as a sum of sign vectors of the current weights."""

    def rounded(self, x: Tensor, bits: Tensor) -> Tensor:
        # autocast, which the meta device lacks, would round the sums of least squares
        with nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False):
            vectors = self._vectors(x)
            native = cpp_operators(vectors, self.compile_kernel, MULTIBIT)
            found = native.reconstruct_sign_vectors(vectors, bits, RIDGE) if native else reconstruct(vectors, bits)
            return unflat(found, like=x)

    def _vectors(self, x: Tensor) -> Tensor:
        return rows(x)


class MultibitActivation(MultibitWeight):
    """Each vector along the last dimension as a sum of sign vectors; each sample for tensors of four or more dimensions."""

    steps_are_independent = True

    def at_float(self, x: Tensor) -> Tensor:
        return x

    def _vectors(self, x: Tensor) -> Tensor:
        return rows(x) if x.dim() >= 4 else computable(x.reshape(-1, x.shape[-1]))


@dataclass
class Multibit(QuantizerOptions):
    """Options of sums of sign vectors."""

    float_roles = ()

    name: str = "multibit"

    def bits(self, role: str) -> range:
        return range(1, MAXIMUM_BITS + 1) if role != "gradient" else range(0)

    def weight(self, compile: bool) -> MultibitWeight:
        return MultibitWeight(compile)

    def activation(self, compile: bool, signed: bool = False) -> MultibitActivation:
        return MultibitActivation(compile)
