"""The precision that layers read at every forward pass, stored in small tensors shared by all layers of a model."""

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from bitcycle.precision import Precision
from bitcycle.quantizer import ROLES, encode_bits
from bitcycle.randomness import int32_key

NO_BITS = "a model converted on the meta device has no bits: materialize the float model, and convert it then"


class HoldsTensors(nn.Module):
    """A module with small tensors that are neither parameters nor buffers.

    They move with the module, but are excluded from state dicts, weight averages and DistributedDataParallel.
    """

    held: tuple[str, ...] = ()

    def register_state(self, name: str, value: Tensor) -> None:
        """Register `value` as the attribute `name`, which moves with the module but is not saved."""
        self.held = tuple(dict.fromkeys((*self.held, name)))
        setattr(self, name, value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "HoldsTensors":
        super()._apply(fn, recurse)
        for name in self.held:
            before, after = getattr(self, name), fn(getattr(self, name))
            if not after.is_meta:
                if before.is_meta:
                    raise RuntimeError(NO_BITS)
                after.copy_(before)  # `to_empty` does not
            setattr(self, name, after)
        return self


class PrecisionState(HoldsTensors):
    """Current bits of weights, activations and gradients (0 = float32) and the key of the current step's noise.

    Bits are tensors, so that changing them neither rebuilds a module nor recompiles a kernel. `fixed` marks bits that no
    schedule changes; `noise_key` distinguishes the noise of several states that a layer uses in the same step, and `part` that of
    parts of a model that were converted separately (`separate_noise`).

    The state dict contains the bits once, under the first layer that reads them: [3] in the order of `Precision`. Loaded bits
    apply until a controller sets others.
    """

    weight_bits: Tensor
    activation_bits: Tensor
    gradient_bits: Tensor
    part = 0
    step_key: Tensor
    step_number: Tensor
    """Number of steps begun, by which compiled graphs recognise a new step."""
    sample_mask: Tensor | None
    """[N], 1 for samples whose gradients pass through the current layers, 0 for others; None: all pass."""

    def __init__(self, precision: Precision = Precision(8, 8, 8), fixed: bool = False, noise_key: int = 0) -> None:
        super().__init__()
        self.fixed, self.noise_key, self.sample_mask = fixed, noise_key, None
        self.is_controlled, self.version, self.readers = False, 0, WeakSet[Any]()
        self.calls: dict[int, int] = {}
        self.has_small_gradients = False
        """Whether some layer has warned that its gradients are too small for their quantizer."""
        for role in ROLES:
            self.register_state(f"{role}_bits", torch.zeros((), dtype=torch.int64))
        self.register_state("step_key", torch.zeros((), dtype=torch.int32))
        self.register_state("step_number", torch.zeros((), dtype=torch.int32))
        self.saved_bits, self.saved_as = torch.zeros(3, dtype=torch.int64), ""
        self.set(precision)

    def set(self, precision: Precision) -> None:
        """Use `precision` from the next forward pass on.

        If weights and activations are float, so are gradients, as in the released code, whose float phase is an ordinary
        convolution. Raises SettingError for bits below 0 or above 32.
        """
        weight, activation, gradient = (encode_bits(bits) for bits in precision)
        self.precision = precision
        self.version += 1
        self.weight_bits.fill_(weight)
        self.activation_bits.fill_(activation)
        self.gradient_bits.fill_(gradient if weight or activation else 0)
        for reader in self.readers:
            reader.look_again()

    def control(self, precision: Precision, is_controlled: bool = True) -> None:
        """Use `precision`, unless the bits are fixed; those that a controller has set are not loaded from a state dict."""
        self.is_controlled = is_controlled
        if precision != self.precision and not self.fixed:
            self.set(precision)

    def begin_step(self, key: int) -> None:
        """Set the noise key of the step, and count the calls of layers from 0."""
        self.version += 1
        self.calls.clear()
        self.step_key.fill_(key ^ self.noise_key ^ (int32_key("part", self.part) if self.part else 0))
        self.step_number.add_(1)

    def next_call(self, layer: int) -> int:
        """Number of previous calls of `layer` with gradients in this step."""
        number = self.calls.get(layer, 0)
        self.calls[layer] = number + 1
        return number

    def last_call(self, layer: int) -> int:
        """The number of the last such call, for its recomputation."""
        return max(self.calls.get(layer, 0) - 1, 0)

    def refuse_changes(self, y: Tensor, look: Callable[[Tensor], None]) -> Tensor:
        """y, whose gradient will be passed to `look`; RuntimeError in the backward pass if bits or noise have changed by then."""
        if y.requires_grad and not torch.compiler.is_compiling():
            version = self.version

            def check(gradient: Tensor) -> None:
                if self.version != version:
                    raise RuntimeError(
                        "the precision changed between the forward and the backward pass: call PrecisionController.step"
                        " (or use) before the forward pass, and backward before the next one"
                    )
                look(gradient)

            y.register_hook(check)
        return y

    @property
    def bits(self) -> Tensor:
        """What the state dict contains; torch.distributed.checkpoint looks for an attribute of this name."""
        return torch.tensor(self.precision)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        earlier = destination.get(self.saved_as)
        if not self.fixed and (earlier is None or earlier is not self.saved_bits):
            self.saved_as, self.saved_bits = f"{prefix}bits", self.bits
            destination[self.saved_as] = self.saved_bits

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        bits = state_dict.get(f"{prefix}bits")
        if bits is not None and not self.fixed and not self.is_controlled:
            self.set(Precision(*bits.tolist()))

    def __getstate__(self) -> dict[str, Any]:
        """Copies omit the readers, which register themselves, and have no controller, so that they load saved bits."""
        return {**self.__dict__, "readers": None, "calls": dict(self.calls), "is_controlled": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.readers = WeakSet()

    def extra_repr(self) -> str:
        return f"{self.precision}{', fixed' if self.fixed else ''}"
