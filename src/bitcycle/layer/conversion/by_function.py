"""Products that a module computes by functions: scaled_dot_product_attention, and linear with the weight of a converted layer.

    P = softmax(s q k^T + mask),  y = P v           both products as quantized `MatrixProduct`; also those of other functions
                                                    (`by_matmul`)
    F.linear(x, layer.weight, bias)                 as the quantized layer computes it, with the given bias
    F.conv2d(x, self.weight, bias), F.linear        in a layer with a forward of its own: its quantized product, also with a
                                                    weight that it computes from its own

Modules whose methods, or callables held or called by these, name scaled_dot_product_attention get the modules `score_product` and
`value_product`. A converted module of such a class, or of one that reads the weight of a layer it contains, becomes an instance
of a subclass of its own class, which redirects these functions in its methods. Its own parameters stay float. A class derived
from nn.Linear or a convolution that calls the function with its weight (`counterpart`) has such a subclass as its quantized
layer. Zeros with which it pads its input are not quantized, as those of PyTorch's convolutions.

All methods redirect, not only forward, as checkpointing calls one of them again in the backward pass. Functions within a method
cannot, and their checkpointing is refused.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial, wraps
from itertools import takewhile
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode

from bitcycle.layer.conversion import by_matmul
from bitcycle.layer.memory_format import operands_of
from bitcycle.layer.products.quantized import CONVERSIONS, QuantizedLayer, QuantizedLinear
from bitcycle.module.layers import MatrixProduct
from bitcycle.settings import SettingError

ATTENTION_PRODUCTS = ("score_product", "value_product")
"""Names of the two products of attention in the module that computes it."""
ATTENTION = "scaled_dot_product_attention"
_NOT_OWN = ("torch", "bitcycle", "builtins")
PRODUCTS: dict[Any, Any] = {
    getattr(F, name): getattr(torch.ops.aten, name) for name in ("linear", "conv1d", "conv2d", "conv3d")
}
"""Functions that a layer with a forward of its own may call with its weight, and the same under names that are not redirected."""
_ATTENDS = "_attends_by_own_products"
"""Attribute of a module whose products of activations are redirected."""
_READING = {"linear", "weight"}
"""What a class names that reads the weight of a layer it contains."""


def added_products(model: nn.Module) -> dict[str, nn.Module]:
    """Products to add to modules that compute attention by functions, by their future names."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if not hasattr(module, ATTENTION_PRODUCTS[0]) and _names_attention(module):
            found |= {f"{name}.{product}".lstrip("."): MatrixProduct() for product in ATTENTION_PRODUCTS}
    return found


def may_redirect(module: nn.Module) -> bool:
    """Whether `module` names functions that a conversion redirects."""
    return _names_attention(module) or _names(module) >= _READING


def redirect_functions(model: nn.Module) -> None:
    """Let the modules of a converted model that call these functions use their quantized products; changes classes in place.
    Float attention within such a module is redirected to itself, as it would otherwise use the products of that module."""
    own = {module for module in model.modules() if _reads(module) or (_names_attention(module) and _attends(module))}
    for module in own:
        for layer in _linear_layers(module) if _reads(module) else ():
            layer.is_read = True
    for part in {part for module in own for part in module.modules()}:
        if part in own or _names_attention(part):
            vars(part)[_ATTENDS] = _multiplies(part)
            part.__class__ = _redirecting(type(part))  # type: ignore[arg-type]


def _reads(module: nn.Module) -> bool:
    """Whether a module may read the weight of a converted layer that it contains."""
    return _names(module) >= _READING and bool(_linear_layers(module))


def _names_attention(module: nn.Module) -> bool:
    return ATTENTION in _names(module) or _multiplies(module)


def _multiplies(module: nn.Module) -> bool:
    """Whether a module computes attention by products of its own."""
    has_softmax = any(by_matmul.is_softmax(child, _names(child)) for child in module.children())
    return by_matmul.attends(_names(module), has_softmax)


def _attends(module: nn.Module) -> bool:
    """Whether the attention of a module has a quantized product."""
    return any(hasattr(module, product) for product in ATTENTION_PRODUCTS)


def _linear_layers(module: nn.Module) -> list[QuantizedLinear]:
    return [child for child in module.children() if isinstance(child, QuantizedLinear)]


def _names(module: nn.Module) -> frozenset[str]:
    """The names that the methods of a module, the callables that it holds, and the functions that these call refer to."""
    names: frozenset[str] = _class_names(type(module))  # type: ignore[arg-type]
    return names.union(*(_names_of(value, set()) for value in vars(module).values() if callable(value)))


@cache
def _class_names(kind: type[nn.Module]) -> frozenset[str]:
    """Those of the methods of a class; empty for PyTorch's own classes."""
    own = (value for base in _own_bases(kind) for value in vars(base).values())
    return frozenset(name for method in own for name in _names_of(method, set()))


def _own_bases(kind: type[nn.Module]) -> Iterator[type]:
    """The class and its bases, up to PyTorch's own."""
    return takewhile(lambda base: base.__module__.partition(".")[0] not in _NOT_OWN, kind.__mro__)


def _names_of(value: object, seen: set[FunctionType]) -> set[str]:
    """The names to which a callable and the functions that it calls refer: a function, a method, a `partial`, or an object with
    `__call__` such as the processor of an attention module. Modules and classes have none, as their own methods are searched."""
    while isinstance(value, (partial, staticmethod, classmethod, MethodType)):
        value = value.func if isinstance(value, partial) else value.__func__
    if found := {name for name, target in _REDIRECTED_TO_PRODUCTS.items() if value is target}:
        return found
    if isinstance(value, (type, nn.Module)):
        return set()
    function = value if isinstance(value, FunctionType) else getattr(type(value), "__call__", None)  # noqa: B004
    if (
        not isinstance(function, FunctionType)
        or _is_torchs(function)
        or function in seen
        or len(seen) >= _MOST_FUNCTIONS
    ):
        return set()
    seen.add(function)
    names = set(_code_names(function.__code__))
    return names.union(*(_names_of(called, seen) for called in _called(function, names)))


def _is_torchs(function: FunctionType) -> bool:
    return str(function.__module__).partition(".")[0] == "torch"


def _called(function: FunctionType, names: set[str]) -> Iterator[object]:
    """What a function may call: globals, variables of the functions around it, defaults, and the function that it wraps."""
    yield from (function.__globals__.get(name) for name in names)
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # an empty cell
            yield cell.cell_contents
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield getattr(function, "__wrapped__", None)


_MOST_FUNCTIONS = 20
_REDIRECTED_TO_PRODUCTS = {ATTENTION: F.scaled_dot_product_attention, "linear": F.linear}
"""Functions that may be imported under other names, by their own."""


def _code_names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    if by_matmul.has_operator(code):
        yield "matmul"
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code_names(constant)


class _Redirecting(nn.Module):
    """Mixin of a module whose functions are redirected to quantized products in its methods."""

    _redirected: type[nn.Module]
    """Its class without the mixin."""
    _restores: tuple[bool, ...] = ()
    """Whether it is a layer that pads its input, and whether it computes its weight; empty: it is no layer."""

    def __init_subclass__(cls, **_: Any) -> None:
        """Keep the hook of a user's base class, such as a registry by name, from the classes that are made here."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _restored, (self._redirected, self._restores), self.__getstate__()


@cache
def _redirecting(plain: type[nn.Module]) -> type[nn.Module]:
    return _subclass(plain, (_Redirecting, plain), {})


@cache
def quantized_with_own_forward(plain: type[nn.Module], pads: bool, computes_weight: bool = False) -> type[nn.Module]:
    """The quantized counterpart of a class derived from nn.Linear or a convolution, whose methods stay as they are: their call of
    PyTorch's function with the layer's weight, or one that they compute from it, computes the quantized product. A layer that
    pads is not compiled, as the compiler hides F.pad."""
    quantized = next(CONVERSIONS[base] for base in plain.__mro__ if base in CONVERSIONS)
    own: dict[str, Any] = {"_restores": (pads, computes_weight), "computes_weight": computes_weight}
    if hasattr(plain, "_conv_forward"):  # which the quantized convolution replaces
        own["_conv_forward"] = plain._conv_forward
    return _subclass(plain, (_Redirecting, quantized, plain), own, compiled=not pads)


def _subclass(
    plain: type[nn.Module], bases: tuple[type, ...], own: dict[str, Any], compiled: bool = True
) -> type[nn.Module]:
    named = {"_redirected": plain, "__module__": plain.__module__, "__qualname__": plain.__qualname__}
    methods = {name: _redirected(method) for name, method in _methods(plain).items()}
    if not compiled:
        methods["forward"] = torch.compiler.disable(methods["forward"])
    return type(plain.__name__, bases, own | named | methods)


def _methods(kind: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """The methods by which a class computes: its forward, and those of its own that PyTorch's modules do not have."""
    own = {name for base in _own_bases(kind) for name in vars(base) if not hasattr(nn.Module, name)}
    found = {name: inspect.getattr_static(kind, name) for name in sorted(own)}
    functions = {name: method for name, method in found.items() if isinstance(method, FunctionType)}
    others = {name: method for name, method in functions.items() if not inspect.isgeneratorfunction(method)}
    return {"forward": kind.forward, **others}


def _redirected(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def redirected(self: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        with _Redirection(self):
            return method(self, *arguments, **keywords)

    return redirected


_REDIRECTED = next(code for code in _redirected.__code__.co_consts if isinstance(code, CodeType))
"""The code of a redirected method, which is that of all of them."""


_MODULE_CALL = nn.Module._call_impl.__code__


def _restored(plain: Any, layer: tuple[bool, ...] = ()) -> nn.Module:
    kind: Any = quantized_with_own_forward(plain, *layer) if layer else _redirecting(plain)
    module: nn.Module = kind.__new__(kind)
    return module


class _Redirection(TorchFunctionMode):
    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        self.owner, self.is_differentiated = owner, torch.is_grad_enabled()
        # those with parametrizations recompute their weights at each access
        found = [owner] if isinstance(owner, QuantizedLayer) else _linear_layers(owner)
        layers = [layer for layer in found if not is_parametrized(layer)]
        self.weights = [
            layer.weight for layer in layers
        ]  # kept, as a pruned layer replaces it, and others would get its id
        self.layers = {id(weight): layer for weight, layer in zip(self.weights, layers)}
        self.padded: list[tuple[Tensor, Tensor, Sequence[int]]] = []
        self.multiplies = getattr(owner, _ATTENDS, False)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        if func is F.scaled_dot_product_attention:
            if not _attends(self.owner):  # under a name that is not redirected, for the fused kernel
                return torch.ops.aten.scaled_dot_product_attention(*args, **keywords)
            self._refuse_checkpoint()
            return _attention(self.owner, *args, **keywords)
        if func in PRODUCTS:
            return self._product(func, *args, **keywords)
        if func is F.pad and isinstance(self.owner, QuantizedLayer):
            return self._pad(*args, **keywords)
        if self.multiplies and func in by_matmul.PRODUCTS and self._is_own():
            return self._matrix_product(func, args, keywords)
        y = func(*args, **keywords)
        if self.multiplies:
            by_matmul.follow_weights(func, (*args, *keywords.values()), y)
        return y

    def _is_own(self) -> bool:
        """Whether a method of the owner calls the function that is handled, and no module within it."""
        frame: FrameType | None = None if torch.compiler.is_compiling() else sys._getframe(2)
        while frame is not None:
            if frame.f_code is _REDIRECTED:
                return frame.f_locals["self"] is self.owner
            if frame.f_code is _MODULE_CALL:
                return False
            frame = frame.f_back
        return True

    def _matrix_product(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """A product of attention by the quantized one of the owner: that of scores, or that with their softmax."""
        found = by_matmul.operands_of(function, arguments, keywords)
        if found is None:
            return function(*arguments, **keywords)
        is_weighted = by_matmul.are_weights((*arguments, *keywords.values()))
        product = getattr(self.owner, ATTENTION_PRODUCTS[is_weighted], None)
        if product is None:  # left float; under a name that is not redirected by a module around it
            return found.plain()
        self._refuse_checkpoint()
        return found.result(product(found.a, found.b))

    def _pad(self, input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
        y = F.pad(input, pad, mode, value)
        if mode == "constant" and not value:
            self.padded.append((y, input, pad))
        return y

    def _product(
        self, function: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None, *geometry: Any, **named: Any
    ) -> Any:
        owner, layer = cast("Any", self.owner), cast("Any", self.layers.get(id(weight)))
        if isinstance(owner, QuantizedLayer) and weight.shape == owner.weight.shape:
            layer = owner  # whose only call this is, also with a weight that it computes, or casts to the input's type
        if layer is None:
            return function(input, weight, bias, *geometry, **named)
        self._refuse_checkpoint()
        if layer is not owner:
            return layer(input, bias)
        plain: Any = PRODUCTS[function]
        given = dict(zip(("stride", "padding", "dilation", "groups"), geometry)) | named
        # which the operator, in contrast to the function, does not take as single numbers
        options = {key: [size] if isinstance(size, int) and key != "groups" else size for key, size in given.items()}
        whole = input, input, None
        _, unpadded, pads = next((entry for entry in self.padded if entry[0] is input), whole)

        def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
            padded = x if pads is None else F.pad(x, pads)
            return plain(*operands_of(layer, padded, weight), bias, **options)

        with _in_place_of_its_weight(owner, weight):
            y: Tensor = owner.computed_by(product, unpadded, bias)
        return y

    def _refuse_checkpoint(self) -> None:
        """Refuse checkpointing that began within the method: it will call the function again without redirection. Raises
        SettingError."""
        if torch.compiler.is_compiling() or not self.is_differentiated:
            return
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not _REDIRECTED:
            if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
                problem = "checkpoints a function that is no method of it, whose recomputation would be float"
                remedy = "checkpoint a method, or name the layers that it computes in float_layers"
                raise SettingError("model", type(self.owner).__name__, problem, remedy)
            frame = frame.f_back


# Called from a part of a model that torch.compile skips, as one with a generator, this method would be compiled by itself, with
# wrong results (PyTorch 2.13). It is still compiled as a part of what calls it. This is torch._dynamo.eval_frame.skip_code, whose
# module takes a second to import.
_dynamo = torch._C._dynamo.eval_frame
_dynamo.set_code_exec_strategy(
    _Redirection.__torch_function__.__code__,
    _dynamo._FrameExecStrategy(_dynamo._FrameAction.SKIP, _dynamo._FrameAction.DEFAULT),
)


@contextmanager
def _in_place_of_its_weight(layer: QuantizedLayer, weight: Tensor) -> Iterator[None]:
    """Context in which the weight of a layer is one that its forward has computed from the parameter."""
    if weight is layer.weight:
        yield
        return
    vars(layer)["weight"] = weight  # found before the parameter
    try:
        yield
    finally:
        del vars(layer)["weight"]


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """scaled_dot_product_attention with the quantized products of `module`; arguments as in PyTorch."""
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], dim=-3) for x in (key, value))
    products = [getattr(module, name, torch.matmul) for name in ATTENTION_PRODUCTS]
    scores = products[0](query, key.transpose(-2, -1)) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~causal, -torch.inf)
    if attn_mask is not None:
        is_choice = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -torch.inf) if is_choice else scores + attn_mask
        hidden = (scores == -torch.inf).all(-1, keepdim=True)  # queries without any key: 0, as in PyTorch
        weights = scores.masked_fill(hidden, 0).softmax(-1).masked_fill(hidden, 0)
    else:
        weights = scores.softmax(-1)
    mixture: Tensor = products[1](F.dropout(weights.to(value.dtype), dropout_p), value)
    return mixture
