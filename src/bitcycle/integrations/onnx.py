"""ONNX export: quantized layers become integers between QuantizeLinear and DequantizeLinear nodes.

    activation  x_q = s n + z:   Clip(x - z, 0, s (2^b - 1)), QuantizeLinear(s), DequantizeLinear(s), + z
    weight      W = s_o n + z_o: int8 integers, DequantizeLinear(s_o) per output channel o, + z_o

Zero points are float32, as in training, and are therefore added separately: the zero points of the nodes are 0.
"""

import copy
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bitcycle.layer.products.quantized import QuantizedLayer
from bitcycle.layer.twin import modules_of
from bitcycle.optional_imports import require
from bitcycle.precision import Precision
from bitcycle.quantizer import SbmActivation, SbmWeight, TensorQuantizer
from bitcycle.quantizer.codes import MOST_BITS
from bitcycle.quantizer.dorefa import DorefaActivation
from bitcycle.settings import SettingError


class LinearActivation(TensorQuantizer):
    """An activation quantized to its range in evaluation mode, as ONNX nodes."""

    scale: Tensor
    zero_point: Tensor
    origin: Tensor

    def __init__(self, quantizer: SbmActivation, bits: int) -> None:
        super().__init__()
        zero_point, value_range = quantizer.evaluation_range()
        self.top = (1 << bits) - 1
        self.register_buffer("scale", (value_range / self.top).clamp_min(1e-8).clone())
        self.register_buffer("zero_point", zero_point.clone())
        self.register_buffer("origin", torch.zeros((), dtype=torch.uint8))

    def forward(self, x: Tensor, bits: Tensor) -> Tensor:
        shifted = torch.minimum((x - self.zero_point).clamp_min(0), self.scale * self.top)
        codes = _node("QuantizeLinear", (shifted, self.scale, self.origin), torch.uint8, x.shape)
        return _node("DequantizeLinear", (codes, self.scale, self.origin), x.dtype, x.shape) + self.zero_point


class LinearWeight(TensorQuantizer):
    """A weight as integers with a scale and a zero point per output channel, as ONNX nodes."""

    integers: Tensor
    scale: Tensor
    zero_point: Tensor
    origin: Tensor

    def __init__(self, quantizer: SbmWeight, weight: Tensor, bits: int) -> None:
        super().__init__()
        codes = quantizer.encode_weight(weight, torch.tensor(bits))
        self.register_buffer("integers", codes.integers.contiguous())
        self.register_buffer("scale", codes.scale)
        self.register_buffer("zero_point", codes.zero_point.view(-1, *[1] * (weight.dim() - 1)))
        self.register_buffer("origin", torch.zeros(len(weight), dtype=torch.int8))

    def forward(self, x: Tensor, bits: Tensor) -> Tensor:
        operands, shape = (self.integers, self.scale, self.origin), x.shape
        return _node("DequantizeLinear", operands, x.dtype, shape, {"axis": 0}) + self.zero_point


class ConstantWeight(TensorQuantizer):
    """A weight as constant quantized values."""

    values: Tensor

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.register_buffer("values", values.clone())

    def forward(self, x: Tensor, bits: Tensor) -> Tensor:
        return self.values


def _node(kind: str, inputs: tuple[Any, ...], dtype: torch.dtype, shape: Any, attributes: Any = None) -> Tensor:
    return torch.onnx.ops.symbolic(kind, inputs, attributes or {}, dtype=dtype, shape=shape, version=None)


def export_onnx(model: nn.Module, path: str | Path, *inputs: Tensor, **options: Any) -> float:
    """Export a converted model in evaluation mode at its current bits to ONNX, and compare it with onnxruntime.

    Weights and activations of the quantizer sbm with up to 8 bits become integer nodes. Other weights are exported as
    quantized constants, other activations as simulated quantization.

    Args:
        model: a trained model converted by `quantize_model`; it is not changed.
        path: path of the file.
        inputs: arguments of the forward pass, by position.
        options: further arguments of torch.onnx.export. By default every dimension of the inputs may change that the network
            does not fix (batch, sequence length, image size); recurrent layers fix the number of time steps, as they are
            unrolled. dynamic_shapes=None fixes all of them.

    Returns the maximum absolute difference between the outputs of onnxruntime and of the simulated network. Raises RunError
    if onnx, onnxscript or onnxruntime is not installed; SettingError (a ValueError) if ONNX has no operators for the network
    or its quantizer (mx, nvfp4, fp8), the model or an input is of other floating-point numbers than float32, or for kwargs.
    """
    require("onnxscript", "export")
    runtime = require("onnxruntime", "export")
    if options.get("kwargs"):
        remedy = "export a module whose forward passes its positional arguments on by name"
        raise SettingError("kwargs", list(options["kwargs"]), "only positional arguments are exported", remedy)
    _check_types(model, inputs)
    sample, model = inputs, copy.deepcopy(model).eval()
    with torch.no_grad(), _quietly():
        expected = model(*inputs)
        layers = modules_of(model, QuantizedLayer)
        for layer in layers:
            layer.computation, layer.adapted = None, True
            _use_nodes(layer, layer.precision.precision)
        try:
            program = _program(model, inputs, options)
        except torch.onnx.OnnxExporterError as error:
            name = ", ".join({layer.quantizer_options.name: "" for layer in layers})
            problem = f"cannot be exported to ONNX ({str(error.__cause__).splitlines()[0]})"
            raise SettingError("quantizer", name, problem, "use sbm, or torch.export for the simulation") from error
    assert program is not None, "the exporter returns the program if it is given no path"
    program.save(str(path))
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    feeds = {declared.name: x.numpy(force=True) for declared, x in zip(session.get_inputs(), sample)}
    found = [torch.from_numpy(output) for output in session.run(None, feeds)]
    return difference(found, [leaf for leaf in tree_leaves(expected) if isinstance(leaf, Tensor)])


def difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest absolute difference of all outputs, booleans as 0 and 1; NaN if there is one in any of them. Equal infinities
    do not differ."""
    parts = [torch.zeros(1, dtype=torch.float64)]
    for ours, theirs in zip(found, expected, strict=True):
        distance = (ours.double() - theirs.cpu().double()).abs()
        parts.append(distance.masked_fill(ours == theirs.cpu(), 0).flatten())
    return float(torch.cat(parts).max())


def _program(model: nn.Module, inputs: tuple[Tensor, ...], options: dict[str, Any]) -> Any:
    """The program of the exporter, in which every dimension may change that the network does not fix; if there is none, those of
    size 1 may not, as one that is broadcast cannot."""
    if "dynamic_shapes" in options:
        return torch.onnx.export(model, inputs, dynamo=True, verbose=False, **options)
    inputs = _of_several(inputs)
    free = _free_sizes(model, inputs)
    sizes = torch.export.Dim
    fewer = tuple(
        {dim: sizes.STATIC if x.shape[dim] == 1 else kind for dim, kind in its.items()} for x, its in zip(inputs, free)
    )
    try:
        return torch.onnx.export(model, inputs, dynamo=True, verbose=False, dynamic_shapes=free, **options)
    except torch.onnx.OnnxExporterError:
        if fewer == free:
            raise
        return torch.onnx.export(model, inputs, dynamo=True, verbose=False, dynamic_shapes=fewer, **options)


def _check_types(model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Raise SettingError for floating-point tensors other than float32, that of the nodes' scales and zero points."""
    for x in (*model.parameters(), *model.buffers(), *inputs):
        if x.is_floating_point() and x.dtype != torch.float32:
            remedy = "export a float32 copy: export_onnx(copy.deepcopy(model).float(), path, x.float())"
            raise SettingError("model", x.dtype, "only float32 is exported, of the model and of its inputs", remedy)


def _of_several(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The inputs, with two samples instead of one: the exporter fixes sizes of 1."""
    single = all(x.dim() and len(x) == 1 for x in inputs)
    return tuple(torch.cat([x, x]) for x in inputs) if single else inputs


def _free_sizes(model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[dict[int, Any], ...]:
    """The dimensions of each input that may change. The exporter to ONNX also declares the number of time steps free that
    recurrent layers fix, as they are unrolled: a file would ignore further ones."""
    from torch.fx.experimental.symbolic_shapes import is_concrete_int  # imports sympy, which takes a second

    sizes = torch.export.Dim
    free = tuple(dict.fromkeys(range(x.dim()), sizes.AUTO) for x in inputs)
    if not modules_of(model, nn.RNNBase):
        return free
    graph = torch.export.export(model, inputs, dynamic_shapes=free)
    shapes = [node.meta["val"].shape for node in graph.graph.nodes if node.name in graph.graph_signature.user_inputs]
    return tuple(
        {dim: sizes.STATIC if is_concrete_int(size) else sizes.AUTO for dim, size in enumerate(shape)}
        for shape in shapes
    )


@contextmanager
def _quietly() -> Iterator[None]:
    """Context without the exporter's warnings about what is meant: bits are no part of the file."""
    log = logging.getLogger("torch.onnx._internal.exporter._core")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        log.setLevel(level)


def _use_nodes(layer: QuantizedLayer, bits: Precision) -> None:
    activation = layer.activation_quantizer
    if isinstance(activation, DorefaActivation) and not activation.non_negative:
        activation = activation.signed_form
    if isinstance(activation, SbmActivation) and 1 <= bits.activation <= MOST_BITS:
        layer.activation_quantizer = LinearActivation(activation, bits.activation)
    if layer.weight_quantizer.has_blocks:
        return
    weight: Tensor = layer.rows_of(layer.weight.detach())
    if isinstance(layer.weight_quantizer, SbmWeight) and 1 <= bits.weight <= MOST_BITS:
        layer.weight_quantizer = LinearWeight(layer.weight_quantizer, weight, bits.weight)
    else:
        layer.weight_quantizer = ConstantWeight(layer.weight_quantizer(weight, layer.precision.weight_bits))
