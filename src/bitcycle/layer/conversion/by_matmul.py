"""Attention that a module computes by its own products of two activations, by matmul, bmm, baddbmm, `@` or einsum.

    P = softmax(s q k^T),  y = P v           products with what a softmax gave as `value_product`, others as `score_product`

A class is taken for one that attends if it names softmax, or holds a module for it (nn.Softmax, or one without parameters that
names it), and names a product or has the operator `@`. Of its products, those count whose operands are two activations of three
dimensions or more; weights and their views do not, nor do products with other arguments (`out`, einsum of three). What a softmax
gave is followed in each call through all functions but products.
"""

import dis
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax)
_WEIGHTS = "_is_attention_weights"
"""Attribute of a tensor that a softmax gave, and of those computed from it."""


class Product(NamedTuple):
    """A function of two activations: the same under a name that is not redirected, and the names of its arguments."""

    plain: Any
    parameters: tuple[str, ...]


_MATMUL, _BMM = torch.ops.aten.matmul, torch.ops.aten.bmm
_SUM = Product(torch.ops.aten.baddbmm, ("input", "batch1", "batch2"))
PRODUCTS: dict[Any, Product] = {
    torch.matmul: Product(_MATMUL, ("input", "other")),
    Tensor.matmul: Product(_MATMUL, ("input", "other")),
    Tensor.__matmul__: Product(_MATMUL, ("input", "other")),
    torch.bmm: Product(_BMM, ("input", "mat2")),
    Tensor.bmm: Product(_BMM, ("input", "mat2")),
    torch.baddbmm: _SUM,
    Tensor.baddbmm: _SUM,
    torch.einsum: Product(lambda equation, a, b: torch.ops.aten.einsum(equation, (a, b)), ("equation", "a", "b")),
}
_NAMES = {"matmul", "bmm", "baddbmm", "einsum"}
_FACTORS = {"alpha", "beta"}
"""Keywords of baddbmm: beta input + alpha (batch1 batch2)."""
_REGISTRY = "ALL_ATTENTION_FUNCTIONS"
"""What a class of transformers names that takes its attention from a registry, in which an integration replaces it."""


def _instructions(code: CodeType) -> Iterator[tuple[int, int]]:
    """The operations of a function with their arguments."""
    return zip(code.co_code[::2], code.co_code[1::2])


_OPERATOR = next(pair for pair in _instructions((lambda a, b: a @ b).__code__) if pair[0] == dis.opmap["BINARY_OP"])
"""The operator `@` in compiled code."""


class Operands(NamedTuple):
    """The operands [..., m, k] and [..., k, n] of a product of matrices, what makes the result from it, and the function."""

    a: Tensor
    b: Tensor
    result: Callable[[Tensor], Tensor]
    plain: Callable[[], Tensor]


def has_operator(code: CodeType) -> bool:
    """Whether a function has the operator `@`."""
    return _OPERATOR in _instructions(code)


def attends(names: frozenset[str], has_softmax: bool) -> bool:
    """Whether a module of a class with these names, or one that has a module for the softmax, attends by products of its own."""
    return (has_softmax or "softmax" in names) and bool(names & _NAMES) and _REGISTRY not in names


def is_softmax(module: nn.Module, names: frozenset[str]) -> bool:
    """Whether a module of a class with these names, which attention may contain, is a softmax, as one with a mask."""
    own = "softmax" in names and not names & _NAMES and next(module.parameters(), None) is None
    return isinstance(module, nn.Softmax) or own


def follow_weights(function: Any, arguments: Sequence[Any], y: Any) -> None:
    """Mark the result of a function of attention as weights if it is a softmax, or no product and computed from weights."""
    if function in SOFTMAX or (function not in PRODUCTS and are_weights(arguments)):
        for part in y if isinstance(y, (tuple, list)) else (y,):
            if isinstance(part, Tensor):
                setattr(part, _WEIGHTS, True)


def are_weights(arguments: Sequence[Any]) -> bool:
    """Whether one of the arguments of a function is marked as weights."""
    return any(isinstance(x, Tensor) and hasattr(x, _WEIGHTS) for x in arguments)


def operands_of(function: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Operands | None:
    """The operands of a call of one of `PRODUCTS`; None if they are not two activations, with samples in dimension 0 of both."""
    plain, names = PRODUCTS[function]
    given = {**dict(zip(names, arguments)), **keywords}
    factors = given.keys() & _FACTORS
    if len(arguments) > len(names) or given.keys() - factors != {*names}:
        return None
    *first, a, b = (given[name] for name in names)
    if not (_is_activation(a) and _is_activation(b)):
        return None
    if function is torch.einsum:
        return _of_einsum(first[0], a, b)
    alpha, beta = (given.get(factor, 1) for factor in ("alpha", "beta"))

    def result(y: Tensor) -> Tensor:
        y = y if alpha == 1 else alpha * y
        return y + beta * first[0] if first and beta else y  # which PyTorch ignores at 0, as it may be empty

    def computed() -> Tensor:
        y: Tensor = plain(*first, a, b, **{factor: given[factor] for factor in factors})
        return y

    return Operands(a, b, result, computed)


def _is_activation(x: object) -> bool:
    """Whether it is a tensor of three dimensions or more, and no weight or view of one."""
    if not isinstance(x, Tensor) or x.dim() < 3:
        return False
    return not any(isinstance(tensor, nn.Parameter) for tensor in (x, x._base))


def _of_einsum(equation: object, a: Tensor, b: Tensor) -> Operands | None:
    """The operands of an einsum as those of a product of matrices: "bhid,bhjd->bhij" is q k^T with samples b and heads h. None
    for an equation that is none: with dots, letters that repeat in an operand, are summed over in one alone, or several that only
    one has."""
    inputs, arrow, output = str(equation).replace(" ", "").partition("->")
    left, _, right = inputs.partition(",")
    if not arrow or "." in inputs or any(len({*word}) < len(word) for word in (left, right, output)):
        return None
    if (len(left), len(right)) != (a.dim(), b.dim()) or {*output} - {*left, *right}:
        return None
    both = [letter for letter in left if letter in right]
    batch, inner = ([letter for letter in both if (letter in output) == kept] for kept in (True, False))
    rows, columns = [x for x in left if x not in right], [x for x in right if x not in left]
    # a second letter is often that of samples, which the other operand, as of relative positions, does not have
    if not (batch and inner and len(rows) == len(columns) == 1) or not {*rows, *columns} <= {*output}:
        return None
    sizes = dict(zip(left, a.shape)) | dict(zip(right, b.shape))
    if any(sizes[letter] != size for letter, size in zip(left, a.shape)):  # one of the two is broadcast
        return None

    def arranged(x: Tensor, word: str, *groups: list[str]) -> Tensor:
        moved = x.permute([word.index(letter) for group in (batch, *groups) for letter in group])
        return moved.reshape([*(sizes[letter] for letter in batch), *(_size(sizes, group) for group in groups)])

    def result(y: Tensor) -> Tensor:
        order = [*batch, *rows, *columns]
        return y.reshape([sizes[letter] for letter in order]).permute([order.index(letter) for letter in output])

    plain = PRODUCTS[torch.einsum].plain
    operands = arranged(a, left, rows, inner), arranged(b, right, inner, columns)
    return Operands(*operands, result, lambda: plain(equation, a, b))


def _size(sizes: Mapping[str, int], letters: Sequence[str]) -> int:
    """The product of the sizes of some letters; not by math.prod, which a compiled graph does not take."""
    size = 1
    for letter in letters:
        size *= sizes[letter]
    return size
