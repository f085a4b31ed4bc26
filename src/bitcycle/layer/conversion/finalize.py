"""Export of a trained converted model with integer weights.

    affine      W = s (n + 2^(b-1)) + m for each output channel: int8 integers n, scale s, minimum m      (sbm)
    levels      W = table[n] for each output channel: uint8 integers and a table of values     (others)

Everything else, including biases and ranges of activations, stays float32. Files are safetensors with bits and form in their
metadata, so that `load_finalized` only needs a model that was converted in the same way.
"""

import copy
import json
import math
from collections import defaultdict
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from bitcycle.layer.products.quantized import QuantizedLayer
from bitcycle.layer.state import PrecisionState
from bitcycle.layer.twin import modules_of
from bitcycle.precision import FLOAT, Precision, read_precision
from bitcycle.quantizer import TensorQuantizer, encode_bits
from bitcycle.quantizer.codes import MOST_BITS, WeightCodes
from bitcycle.settings import SettingError

SEPARATOR = ":"
"""Separator between the name of a layer and a part of its weight; does not occur in names of a model."""
MOST_LEVELS = 256


class FinalWeight(TensorQuantizer):
    """The quantizer of a weight that is already quantized to `bits` bits: the identity.

    Raises SettingError (a ValueError) where the weight would have to be quantized again: at other bits, in training, and after
    other values have been loaded into it.
    """

    def __init__(self, weight: Tensor, bits: int, name: str) -> None:
        super().__init__()
        self.bits, self.name, self.norm, self.dtype = bits, name, _norm(weight), weight.dtype

    def prepare(self, x: Tensor, bits: int) -> None:
        if bits != self.bits:
            remedy = "load a file of finalize(model, bits), or use the model that was trained"
            raise self._refused("bits", bits or FLOAT, f"is final at {self.bits} bits", remedy)
        if x.dtype == self.dtype and not math.isclose(_norm(x), self.norm, rel_tol=1e-5):
            problem = "has changed since load_finalized and would not be quantized"
            raise self._refused("weight", self.name, problem, "load such weights into a newly converted model")

    def forward(self, x: Tensor, bits: Tensor) -> Tensor:
        if self.training and x.requires_grad and torch.is_grad_enabled():
            problem = "is final (load_finalized): after an update it would not be quantized"
            remedy = "train the model that was finalized, or freeze this weight (requires_grad_(False))"
            raise self._refused("training", True, problem, remedy)
        return x

    def _refused(self, field: str, value: object, problem: str, remedy: str) -> SettingError:
        return SettingError(field, value, f"the weight of layer {self.name!r} {problem}", remedy)


def _norm(weight: Tensor) -> float:
    """The norm of a weight, by which changes show."""
    return float(torch.linalg.vector_norm(weight.detach().float()))


def finalize(
    model: nn.Module,
    bits: int | Precision | tuple[int, int, int] | None = None,
    path: str | Path | None = None,
) -> dict[str, Tensor]:
    """The tensors of a converted model with integer weights; the model itself is unchanged.

    Args:
        model: converted by `quantize_model`.
        bits: of weights and activations, or a precision; None: the current ones.
        path: safetensors file to write.

    Raises:
        SettingError (a ValueError): for a model without quantized layers, and for weights that are recomputed at each call, in
            blocks, with more than 256 values in an output channel, or from a file of other bits.
    """
    layers = _layers(model)
    if not layers:
        raise SettingError("model", type(model).__name__, "has no quantized layer", "convert it with quantize_model")
    states = modules_of(model, PrecisionState)
    given = min(states, key=lambda state: state.fixed).precision if bits is None else bits
    precision = read_precision((given, given, FLOAT) if isinstance(given, Integral) else given)
    tensors: dict[str, Tensor] = {}
    taken = set()
    with torch.no_grad():
        for name, layer in layers.items():
            own = layer.precision.precision if layer.precision.fixed else precision
            if encode_bits(own.weight):
                layer.quantizer_options.check_bits("weight", own.weight)
                tensors |= {
                    f"{name}{SEPARATOR}{part}": value for part, value in _encoded(name, layer, own.weight).items()
                }
                taken.add(_weight_key(name, layer))
    tensors |= {key: value.detach().clone().contiguous() for key, value in _others(model).items() if key not in taken}
    if path is not None:
        save_file(tensors, path, {"bitcycle": json.dumps({"precision": list(precision)})})
    return tensors


def load_finalized(model: nn.Module, path: str | Path) -> nn.Module:
    """Load a file of `finalize` into a model that was converted in the same way; returns it in evaluation mode.

    Its weights are the quantized ones and are not quantized again; it computes the same as the finalized model. Other bits of
    weights and training are refused in the forward pass, except of layers whose weights are frozen.

    Raises:
        SettingError (a ValueError): if the file was not written by `finalize`, or belongs to another model.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = (file.metadata() or {}).get("bitcycle")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise SettingError("path", path, f"cannot be read ({error})", "give a file of bitcycle.finalize") from error
    if metadata is None:
        raise SettingError("path", path, "was not written by bitcycle.finalize", "give such a file")
    # quantizers that found signed inputs have more state
    model.load_state_dict({key: value for key, value in tensors.items() if key.endswith("signed_inputs")}, strict=False)
    layers, others = _layers(model), _others(model)
    parts: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for key in [key for key in tensors if SEPARATOR in key]:
        name, _, part = key.rpartition(SEPARATOR)
        parts[name][part] = tensors.pop(key)
    taken = {_weight_key(name, layers[name]) for name in parts if name in layers}
    if strangers := sorted((set(tensors) ^ (set(others) - taken)) | (set(parts) - set(layers))):
        problem = f"is not of a model like this one: only one of the two has {', '.join(strangers[:5])}"
        raise SettingError("path", str(path), problem, "convert the same network with the same quantizer")
    precision = Precision(*json.loads(metadata)["precision"])
    for state in modules_of(model, PrecisionState):
        if not state.fixed:
            state.set(precision)
    model.load_state_dict(tensors, strict=False)
    for name, layer in layers.items():
        if name in parts:
            _put(name, layer, _decoded(layer, parts[name]))
        elif isinstance(layer.weight_quantizer, FinalWeight):  # of an earlier file
            layer.weight_quantizer = _new_quantizer(layer)
    return model.eval()


def _layers(model: nn.Module) -> dict[str, QuantizedLayer]:
    """Layers with a weight. Raises SettingError if the weights have blocks, whose copies along different dimensions differ, or
    are recomputed at each call."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLayer)}
    saved = model.state_dict()
    for name, layer in layers.items():
        if _weight_key(name, layer) not in saved:
            problem = f"layer {name!r} recomputes its weight at each call (weight_norm, spectral_norm, prune)"
            remedy = "make it permanent first (remove_parametrizations, prune.remove)"
            raise SettingError("model", type(model).__name__, problem, remedy)
        if layer.computes_weight:
            problem = (
                f"layer {name!r} computes the weight that it quantizes from its own at each call (standardized weights)"
            )
            remedy = "save model.state_dict(), which holds the weights and the bits"
            raise SettingError("model", type(model).__name__, problem, remedy)
        if layer.weight_quantizer.has_blocks:
            problem = "uses blocks with scales, which this file format does not support"
            remedy = "save model.state_dict(), which holds the weights and the bits"
            raise SettingError("quantizer", layer.quantizer_options.name, problem, remedy)
    return layers


def _others(model: nn.Module) -> dict[str, Tensor]:
    """The state dict without the bits, which are stored in the metadata."""
    return {key: value for key, value in model.state_dict().items() if not key.endswith("precision.bits")}


def _weight_key(name: str, layer: QuantizedLayer) -> str:
    """Key of a layer's weight in the state dict; in recurrent layers and attention, it belongs to the parent."""
    owner = name if "weight" in layer._parameters else name.rpartition(".")[0]
    return f"{owner}.{layer.weight_name}".lstrip(".")


def _put(name: str, layer: QuantizedLayer, rows: Tensor) -> None:
    """Set the final weight of the layer, output channels first; a float layer that shares the parameter keeps the original."""
    rows = rows.to(layer.weight)  # its device and type
    layer.weight_quantizer = FinalWeight(rows, layer.precision.precision.weight, name)
    layer.computation = None  # which would encode the weight again
    weight = layer.rows_of(rows).contiguous()
    if "weight" in layer._parameters:
        layer.weight = nn.Parameter(weight, requires_grad=bool(layer.weight.requires_grad))
    else:
        layer.weight.data.copy_(weight)


def _encoded(name: str, layer: QuantizedLayer, bits: int) -> dict[str, Tensor]:
    quantizer = copy.deepcopy(layer.weight_quantizer).eval()
    weight: Tensor = layer.rows_of(layer.weight.detach())
    quantizer.prepare(weight, bits)
    number = torch.tensor(bits, device=weight.device)
    if quantizer.has_codes and bits <= MOST_BITS:
        codes = quantizer.encode_weight(weight, number)
        return {key: value.contiguous() for key, value in codes._asdict().items()} | {"bits": number.cpu()}
    rows = quantizer(weight, number)
    table = rows.reshape(len(rows), -1)
    levels = [row.unique() for row in table]
    if (width := max(map(len, levels))) > MOST_LEVELS:
        raise SettingError("bits", bits, f"layer {name!r} has more than {MOST_LEVELS} values", "use 8 bits or fewer")
    padded = torch.stack([torch.cat([row, row[-1:].expand(width - len(row))]) for row in levels])
    integers = torch.stack([torch.searchsorted(row, values) for row, values in zip(levels, table)])
    return {"integers": integers.to(torch.uint8).view(rows.shape), "table": padded}


def _decoded(layer: QuantizedLayer, parts: dict[str, Tensor]) -> Tensor:
    """The quantized weight, output channels first."""
    integers = parts["integers"]
    if "table" in parts:
        rows = parts["table"].gather(1, integers.long().view(len(integers), -1))
        return rows.view(integers.shape)
    codes: Any = WeightCodes(*(parts[name] for name in WeightCodes._fields))
    return _new_quantizer(layer).decode_weight(codes, parts["bits"])


def _new_quantizer(layer: QuantizedLayer) -> TensorQuantizer:
    """A quantizer of the layer's weight, whose own may be that of an earlier file."""
    return layer.quantizer_options.weight(compile=layer.activation_quantizer.compile_kernel)
