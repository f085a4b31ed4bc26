"""A pretended accelerator: tensors of a device `pretended` whose values lie in tensors on the CPU.

It refuses what a real accelerator refuses (operands on two devices; with `refuse_float64` also float64, as Metal does), and
counts what makes a real one slow: waits of the host for results, and copies from host memory that are not pinned, or block.
`start` changes this process for good, so it belongs into a process of its own.
"""

from __future__ import annotations

import collections
import functools
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

aten = torch.ops.aten
NAME = "pretended"
CPU, DEVICE_0 = torch.device("cpu"), functools.cache(lambda: torch.device(NAME, 0))

WAITS = {
    aten._local_scalar_dense.default: "a value is read",
    aten.nonzero.default: "nonzero",
    aten.masked_select.default: "masked_select",
    aten.bincount.default: "bincount",
    aten.equal.default: "torch.equal",
    aten.is_nonzero.default: "a truth value is read",
    aten._unique2.default: "unique",
    aten.unique_consecutive.default: "unique_consecutive",
    aten.unique_dim.default: "unique",
}
"""Operators whose result the host has to know: its value, or the size of its tensor."""
INDEXED = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
}
NOTED = {*WAITS, *INDEXED, aten.repeat_interleave.Tensor}
COPIES = {aten.copy_.default, aten._to_copy.default, aten._copy_from.default}


class Pretended(Tensor):
    """A tensor of the pretended device with its values in `raw`, a tensor on the CPU."""

    raw: Tensor
    __slots__ = ("raw",)
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw: Tensor) -> Pretended:
        shape = {"strides": raw.stride(), "storage_offset": raw.storage_offset()}
        return Tensor._make_wrapper_subclass(cls, raw.shape, dtype=raw.dtype, device=DEVICE_0(), **shape)

    def __init__(self, raw: Tensor) -> None:
        assert raw.device.type == "cpu" and type(raw) is Tensor, (type(raw), raw.device)
        self.raw = raw

    def __repr__(self) -> str:  # type: ignore[override]
        return f"pretended {tuple(self.shape)} {self.dtype}"

    def tolist(self) -> Any:
        DEVICE.note("values are read")
        return self.raw.tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:  # saved as a tensor of the CPU: no loader knows the device
        return self.raw.detach().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copied = self.detach().clone().requires_grad_(self.requires_grad)
            copied.__dict__.update(self.__dict__)
            copied.__dict__.pop("raw", None)
            memo[id(self)] = copied
        return memo[id(self)]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return DEVICE.run(function, args, kwargs or {})


class Device:
    """What the device refuses, and what it has counted since `watch` began."""

    def __init__(self) -> None:
        self.refuse_float64 = True
        self.seen: collections.Counter[str] | None = None
        self.seeds = 0

    @contextmanager
    def watch(self) -> Iterator[collections.Counter[str]]:
        """Context that counts waits and blocking copies by the lines of this package that cause them."""
        outer, self.seen = self.seen, collections.Counter()
        try:
            yield self.seen
        finally:
            self.seen = outer

    def note(self, what: str) -> None:
        if self.seen is not None:
            self.seen[f"{what} at {origin()}"] += 1

    def refuse(self, dtype: torch.dtype | None) -> None:
        if self.refuse_float64 and dtype in (torch.float64, torch.complex128):
            raise TypeError(f"float64 on a device that has none, at {origin()}")

    def run(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The operator on the values, after checks of its operands."""
        if function in COPIES:
            return self._copy(function, args, kwargs)
        flat: list[Any] = []
        raw_args = [_unwrapped(value, flat) for value in args]
        raw_kwargs = {name: _unwrapped(value, flat) for name, value in kwargs.items()}
        mine = {id(x.raw): x for x in flat if type(x) is Pretended}
        if function in NOTED or len(mine) < len(flat):
            self._check(function, flat, args, kwargs)
        wanted = raw_kwargs.get("device")
        stays = wanted is None or torch.device(wanted).type != "cpu"
        if wanted is not None:
            raw_kwargs["device"] = CPU
        raw_kwargs.pop("pin_memory", None)
        self.refuse(raw_kwargs.get("dtype"))
        with torch._C._DisableTorchDispatch():
            found = function(*raw_args, **raw_kwargs)
        if _changes(function) and any(x.raw.shape != x.shape for x in mine.values()):
            raise NotImplementedError(f"{function} resizes a tensor of the pretended device")
        return self._wrapped(found, mine, stays)

    def _wrapped(self, x: Any, mine: dict[int, Pretended], stays: bool) -> Any:
        if isinstance(x, (tuple, list)):
            return type(x)(self._wrapped(part, mine, stays) for part in x)
        if not isinstance(x, Tensor):
            return x
        if id(x) in mine:
            return mine[id(x)]
        if not stays:
            return x
        self.refuse(x.dtype)
        return Pretended(x)

    def _check(self, function: Any, flat: list[Any], args: Any, kwargs: dict[str, Any]) -> None:
        if function in WAITS:
            self.note(WAITS[function])
        if function is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
            self.note("repeat_interleave without output_size")
        others = [x for x in flat if isinstance(x, Tensor) and not isinstance(x, Pretended) and x.device.type == "cpu"]
        if function in INDEXED:
            indices = [x for x in args[1] if isinstance(x, Tensor)]
            if any(x.dtype in (torch.bool, torch.uint8) for x in indices):
                self.note("an index by a mask")
            if any(any(x is index for index in indices) for x in others):
                self.note("an index from the host")
                others = [x for x in others if not any(x is index for index in indices)]
        several = [x for x in others if x.dim()]
        if several:
            raise RuntimeError(f"{function} got tensors of two devices, one of shape {tuple(several[0].shape)}")

    def copy_from(self, source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
        """What `torch.tensor(values, device=...)` calls."""
        return self._copy(aten.copy_.default, (target, source, non_blocking), {})

    def _copy(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        """Copies to, from and on the device."""
        if function is aten._to_copy.default:
            [source] = args
            wanted = torch.device(kwargs.pop("device", None) or NAME)
            kwargs.pop("pin_memory", None)
            kwargs.pop("non_blocking", None)
            if wanted.type == "cpu":
                self.note("a copy to the host")
            else:
                self.refuse(kwargs.get("dtype"))
            with torch._C._DisableTorchDispatch():
                copied = function(source.raw, **kwargs)
            return copied if wanted.type == "cpu" else Pretended(copied)
        target, source = args[:2]
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        if not isinstance(source, Pretended):
            if not non_blocking:
                self.note("a blocking copy from the host")
            elif not is_pinned(source):
                self.note("a copy from memory that is not pinned")
        elif not isinstance(target, Pretended):
            self.note("a copy to the host")
        with torch._C._DisableTorchDispatch():
            _raw(target).copy_(_raw(source))
        return target


DEVICE = Device()


def _raw(x: Any) -> Any:
    return x.raw if isinstance(x, Pretended) else x


def _unwrapped(x: Any, flat: list[Any]) -> Any:
    """x with the values of tensors, which are added to `flat`."""
    if type(x) is Pretended:
        flat.append(x)
        return x.raw
    if isinstance(x, (tuple, list)):
        return [_unwrapped(part, flat) for part in x]
    if isinstance(x, Tensor):
        flat.append(x)
    return x


@functools.cache
def _changes(function: Any) -> bool:
    """Whether an operator changes an operand."""
    return bool(function._schema.is_mutable)


def origin() -> str:
    """The innermost function of the package that leads here."""
    frame = sys._getframe(1)
    while frame is not None:
        if "/bitcycle/" in frame.f_code.co_filename:
            return f"{frame.f_code.co_filename.rpartition('/bitcycle/')[2]}:{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "a library"


PINNED = "_pinned_for_the_pretended_device"


def is_pinned(x: Tensor) -> bool:
    """Whether `pin_memory` made x."""
    return hasattr(x, PINNED)


def _pin_memory(x: Tensor, device: Any = None) -> Tensor:
    copied = x.clone()
    setattr(copied, PINNED, True)
    return copied


def _empty(
    size: Any,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> Tensor:
    DEVICE.refuse(dtype or torch.get_default_dtype())
    with torch._C._DisableTorchDispatch():
        return Pretended(
            torch.empty(size, dtype=dtype, device="cpu", memory_format=memory_format or torch.contiguous_format)
        )


def _empty_strided(
    size: Any, stride: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Tensor:
    DEVICE.refuse(dtype or torch.get_default_dtype())
    return Pretended(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


SIZED_BY_VALUES = ("arange", "arange.start", "arange.start_step", "linspace", "randperm", "eye", "eye.m")
"""Factories that make an empty tensor first and resize it, which no tensor of this class can."""


def _factory(function: Any) -> Callable[..., Tensor]:
    def make(*arguments: Any, **options: Any) -> Tensor:
        made = function(*arguments, **{**options, "device": "cpu", "pin_memory": False})
        DEVICE.refuse(made.dtype)
        return Pretended(made)

    return make


def _lstm_cell(by_input: Tensor, by_state: Tensor, cell: Tensor, bias: Any = None, state_bias: Any = None) -> Any:
    """The fused cell in its parts, as the device has no such kernel."""
    gates = by_input + by_state
    for part in (bias, state_bias):
        gates = gates if part is None else gates + part
    into, forget, new, out = gates.chunk(4, 1)
    cell = forget.sigmoid() * cell + into.sigmoid() * new.tanh()
    return out.sigmoid() * cell.tanh(), cell, gates


class _Module:
    """What PyTorch asks of the module `torch.pretended`."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def get_device_name(self, device: Any = None) -> str:
        return "a pretended accelerator"

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed(self, seed: int) -> None:
        DEVICE.seeds += 1
        torch.default_generator.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        pass


LIBRARY = torch.library.Library("aten", "IMPL")


@functools.cache
def start() -> torch.device:
    """Register the device in this process once, and return it. It stays, and `device=auto` takes it: tests start processes."""
    assert "PYTEST_CURRENT_TEST" not in os.environ or multiprocessing.parent_process(), "other tests would run on it"
    _setup_privateuseone_for_python_backend(rename=NAME, backend_module=_Module())
    LIBRARY.impl("empty.memory_format", _empty, "PrivateUse1")
    LIBRARY.impl("empty_strided", _empty_strided, "PrivateUse1")
    for name in SIZED_BY_VALUES:
        LIBRARY.impl(name, _factory(getattr(aten, name.partition(".")[0])), "PrivateUse1")
    LIBRARY.impl("_copy_from", lambda *arguments: DEVICE.copy_from(*arguments), "PrivateUse1")
    LIBRARY.impl("_thnn_fused_lstm_cell", _lstm_cell, "AutogradPrivateUse1")
    changed: Any = torch.Tensor
    changed.pin_memory = _pin_memory
    clipping: Any = torch.nn.utils.clip_grad
    clipping._has_foreach_support = lambda tensors, device: True  # PyTorch asks for its own class of tensors
    return torch.device(NAME, 0)
