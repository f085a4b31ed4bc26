"""Drop-in recurrent layers whose products are quantized at each time step.

    G_t = gq( Q_a(x_t) Q_w(W)^T + c ) + gq( Q_a(h) Q_w(U)^T + d )           [N, gates], gq quantizes the gradient
    LSTM   i, f, g, o = G_t;   c_t = s(f) c + s(i) tanh(g);   h_t = s(o) tanh(c_t)
    GRU    r = s(W_r x + U_r h), z = s(W_z x + U_z h), n = tanh(W_n x + r (U_n h)), each with both biases;
           h_t = (1 - z) n + z h

W and U have separate quantizers, so that the gradients of the two summands are quantized separately. Ranges are those of a time
step; running ranges are updated at each. Weights are quantized once per forward pass. Nonlinearities, cell state and sums are
float32. Source: released code of Better Schedules, cpt_ptb (LSTM); HLHLp section 4.2, without details, for the GRU.

W x is computed for the whole sequence before the loop over time, as x_t does not depend on h; each time step still has its own
range and noise, and the running ranges are computed in closed form, equal up to rounding.

Weights and biases of the two products remain in the recurrent layer, whose state dict thus equals that of the PyTorch layer.
Differs from the authors' code in that the second bias of PyTorch's layers is kept (their layer has one, on W; a network can
freeze the other at zero), and in the noise.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from bitcycle.layer.compilation import refuse_tracing
from bitcycle.layer.products.block_product import block_product, copies_of
from bitcycle.layer.products.quantized import CONVERSIONS, QuantizedLayer
from bitcycle.layer.products.quantized_product import Context, Quantized
from bitcycle.quantizer import encode_bits
from bitcycle.randomness import hash_bits
from bitcycle.settings import SettingError

State = tuple[Tensor, ...]
"""(h, c) of an LSTM, (h,) of a GRU; each [N, H]."""


class RecurrentProduct(QuantizedLayer):
    """A product for all gates of one layer and direction. Owner, side (ih or hh) and place (such as l0_reverse) name the
    weight and the bias."""

    def __init__(self, owner: nn.RNNBase, side: str, place: str) -> None:
        nn.Module.__init__(self)
        self._owner = (owner,)  # in a tuple so that it is not registered as a submodule
        self.weight_name = f"weight_{side}_{place}"
        self.bias_name = f"bias_{side}_{place}" if owner.bias else None

    @property
    def weight(self) -> Tensor:
        """[gates, features]."""
        return getattr(self._owner[0], self.weight_name)

    @property
    def bias(self) -> Tensor | None:
        """[gates], if the owner has biases."""
        return None if self.bias_name is None else getattr(self._owner[0], self.bias_name)

    def quantized_weight(self) -> Tensor:
        """The weight at the current bits; with block quantizers, the product quantizes it."""
        return self.weight if self.weight_quantizer.has_blocks else super().quantized_weight()

    def adapt(self, x: Tensor) -> None:
        super().adapt(x.flatten(0, 1))

    def product_of(self, x: Tensor, weight: Tensor, bias: Tensor | None, keys: Tensor) -> Tensor:
        """x weight^T + bias of quantized operands, [T, N, features] -> [T, N, gates], with quantized gradients."""
        if self.weight_quantizer.has_blocks:
            return block_product(F.linear, x, weight, bias, copies_of(self, keys[0]))
        return self.quantize_gradient_of(F.linear(x, weight, bias), keys)

    def quantize_gradient_of(self, y: Tensor, key: Tensor) -> Tensor:
        state = self.precision
        return self.gradient_quantizer.quantize_sequence(y, state.gradient_bits, state.step_key, key)

    def quantized_inputs(self, x: Tensor, keys: Tensor) -> Tensor:
        """x [T, N, features] quantized separately per time step; with block quantizers, the product quantizes it."""
        state = self.precision
        if self.activation_quantizer.has_blocks:
            return x
        if self.input_gradient_quantizer is not None:
            x = self.input_gradient_quantizer.quantize_sequence(x, state.gradient_bits, state.step_key, keys)
        return self.activation_quantizer.quantize_sequence(x, state.activation_bits)


def step_keys(call: Tensor, steps: int) -> Tensor:
    """The keys [T] of the time steps of a call."""
    return hash_bits(torch.arange(steps, dtype=torch.int32, device=call.device), call)


class InputProduct(RecurrentProduct):
    """W x_t + b_W for all time steps at once, as x does not depend on the outputs."""

    def forward(self, x: Tensor) -> Tensor:
        """[T, N, features] -> [T, N, gates]."""
        if not self.adapted:
            self.adapt(x)
        keys, weight, bias = step_keys(self.call_key(), len(x)), self.quantized_weight(), self.quantized_bias()
        y = self.product_of(self.quantized_inputs(x, keys), weight, bias, keys)
        return self.precision.refuse_changes(y, self.look_at_gradient)


class HiddenProduct(RecurrentProduct):
    """U h + b_U of one time step."""

    def adapt_to(self, states: Callable[[], list[State]]) -> None:
        """Let the quantizers adapt to changed bits or mode, before the first time step.

        The first hidden state is zero and not representative. Quantizers that adapt to activations see the hidden states of
        a float32 computation, `states`.
        """
        if self.adapted:
            return
        looks = self.activation_quantizer.adapts
        if looks and encode_bits(self.precision.precision.activation) and not self.weight.is_meta:
            with torch.no_grad():
                self.adapt(torch.stack([h for h, *_ in states()]))
        else:
            self.adapt(self.weight.new_zeros(1, 1, self.weight.shape[1]))

    def forward(self, h: Tensor, weight: Tensor, bias: Tensor | None, keys: Tensor) -> Tensor:
        """h [N, H] -> [N, gates]; weight and bias are quantized, once for all time steps."""
        h = self.quantized_inputs(h.unsqueeze(0), keys)
        return self.product_of(h, weight, bias, keys).squeeze(0)


class QuantizedRecurrent(Quantized, nn.RNNBase):
    """The quantizing half of a recurrent layer; the other half is torch.nn.LSTM or torch.nn.GRU."""

    state_parts = 1
    """Tensors of a state."""

    def attach(self, context: Context) -> None:
        """Attach quantizers to the products of each layer and direction; inputs are treated as signed. Raises SettingError
        for an LSTM with proj_size."""
        if self.proj_size:
            remedy = "list such layers in float_layers, or project with a Linear layer"
            raise SettingError("proj_size", self.proj_size, "quantized LSTMs have no projection", remedy)
        self.precision = context.precision
        for place in self.places():
            for kind, name, side in ((InputProduct, f"input_{place}", "ih"), (HiddenProduct, f"hidden_{place}", "hh")):
                product = kind(self, side, place)
                product.attach(context.part(name))
                setattr(self, name, product)

    def places(self) -> list[str]:
        """Layers and directions, in the order of execution: l0, l0_reverse, l1, ..."""
        directions = ("", "_reverse") if self.bidirectional else ("",)
        return [f"l{layer}{direction}" for layer in range(self.num_layers) for direction in directions]

    def flatten_parameters(self) -> None:
        """Does nothing, as PyTorch's fused kernel is not used."""

    def step(self, of_input: Tensor, of_hidden: Tensor, state: State) -> State:
        """The next state from W x [N, gates], U h [N, gates] and the state."""
        raise NotImplementedError

    def run(self, x: Any, states: list[Tensor] | None) -> tuple[Tensor, list[Tensor]]:
        """Outputs and last states of all layers, shaped as PyTorch's. Raises TypeError for a PackedSequence; RuntimeError for
        inputs or states of a wrong shape."""
        refuse_tracing()
        if isinstance(x, PackedSequence):
            raise TypeError(
                "quantized recurrent layers take padded tensors, not a PackedSequence: call pad_packed_sequence on it, "
                "and exclude positions beyond each sequence's length from the loss; last states, and the reverse direction, "
                "differ from those of a packed sequence: where these matter, list the layer in float_layers"
            )
        if unbatched := x.dim() == 2:
            x = x.unsqueeze(0 if self.batch_first else 1)
            states = None if states is None else [part.unsqueeze(1) for part in states]
        self.check_input(x, None)
        for part in states or ():
            self.check_hidden_size(part, self.get_expected_hidden_size(x, None))
        x = x.transpose(0, 1) if self.batch_first else x
        x, last = self._run_layers(x, states)
        x = x.transpose(0, 1) if self.batch_first else x
        if unbatched:
            return x.squeeze(0 if self.batch_first else 1), [part.squeeze(1) for part in last]
        return x, last

    def _run_layers(self, x: Tensor, states: list[Tensor] | None) -> tuple[Tensor, list[Tensor]]:
        """x [T, N, features] -> [T, N, H times directions], and the last states [places, N, H]."""
        places, last = self.places(), []
        directions = 2 if self.bidirectional else 1
        for first in range(0, len(places), directions):
            if first and self.dropout:
                x = F.dropout(x, self.dropout, self.training)
            outputs = []
            for index in range(first, first + directions):
                zeros = (x.new_zeros(x.shape[1], self.hidden_size),) * self.state_parts
                state = zeros if states is None else tuple(part[index] for part in states)
                output, state = self._run_place(places[index], x, state)
                outputs.append(output)
                last.append(state)
            x = torch.cat(outputs, dim=2) if directions == 2 else outputs[0]
        return x, [torch.stack(parts) for parts in zip(*last)]

    def _run_place(self, place: str, x: Tensor, state: State) -> tuple[Tensor, State]:
        """One layer in one direction: x [T, N, features] -> [T, N, H]."""
        inputs: InputProduct = getattr(self, f"input_{place}")
        hidden: HiddenProduct = getattr(self, f"hidden_{place}")
        if not x.numel():  # without samples there are no ranges
            states = self._in_float(F.linear(x, inputs.weight, inputs.bias), hidden, state)
            return torch.stack([h for h, *_ in states[1:]]), states[-1]
        reverse = place.endswith("_reverse")
        of_input = inputs(x.flip(0) if reverse else x)
        hidden.adapt_to(lambda: self._in_float(of_input, hidden, state)[:-1])
        keys, weight, bias = step_keys(hidden.call_key(), len(x)), hidden.quantized_weight(), hidden.quantized_bias()
        outputs = []
        for t, gates in enumerate(of_input.unbind(0)):
            of_hidden = hidden(state[0], weight, bias, keys[t : t + 1])
            state = self.step(gates, of_hidden, state)
            outputs.append(state[0])
        return torch.stack(outputs[::-1] if reverse else outputs), state

    def _in_float(self, of_input: Tensor, hidden: HiddenProduct, state: State) -> list[State]:
        """The given state and those after each time step, with U h computed in float32."""
        states = [state]
        for gates in of_input.unbind(0):
            of_hidden = F.linear(states[-1][0], hidden.weight, hidden.bias)
            states.append(self.step(gates, of_hidden, states[-1]))
        return states


class QuantizedLSTM(QuantizedRecurrent, nn.LSTM):
    """A quantized torch.nn.LSTM: same arguments (without proj_size), parameters, state dict, inputs and outputs. Raises
    SettingError for proj_size; TypeError in the forward pass, for a PackedSequence."""

    state_parts = 2

    def forward(  # type: ignore[override]
        self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        output, (h, c) = self.run(input, None if hx is None else list(hx))
        return output, (h, c)

    def step(self, of_input: Tensor, of_hidden: Tensor, state: State) -> State:
        i, f, g, o = (of_input + of_hidden).chunk(4, dim=1)
        c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c


class QuantizedGRU(QuantizedRecurrent, nn.GRU):
    """A quantized torch.nn.GRU: same arguments, parameters, state dict, inputs and outputs. Raises TypeError in the forward
    pass, for a PackedSequence."""

    def forward(self, input: Tensor, hx: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        output, (h,) = self.run(input, None if hx is None else [hx])
        return output, h

    def step(self, of_input: Tensor, of_hidden: Tensor, state: State) -> State:
        r, z, n = of_input.chunk(3, dim=1)
        from_r, from_z, from_n = of_hidden.chunk(3, dim=1)
        z = (z + from_z).sigmoid()
        n = (n + (r + from_r).sigmoid() * from_n).tanh()
        return ((1 - z) * n + z * state[0],)


CONVERSIONS |= {nn.LSTM: QuantizedLSTM, nn.GRU: QuantizedGRU}
