"""Conversion of a float model by a plan (`plan.py`): its layers are replaced; its state dict after training."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import is_parametrized

from bitcycle.layer.codes import compute_codes
from bitcycle.layer.conversion.by_function import may_redirect, redirect_functions
from bitcycle.layer.conversion.counterpart import counterpart, is_complex, is_empty
from bitcycle.layer.conversion.plan import (
    LayerRule,
    conversion_plan,
    convertible_layers,
    gates_of,
    has_signed_input,
    integrations_of,
)
from bitcycle.layer.conversion.roles import PRODUCT_LAYERS
from bitcycle.layer.gates.gate import Gates
from bitcycle.layer.gates.gated_block import GatedBlock, gate_blocks
from bitcycle.layer.products.quantized_product import Context, QuantizedProduct
from bitcycle.layer.relu import use_operators
from bitcycle.layer.state import PrecisionState
from bitcycle.layer.twin import replace_modules, twin_of
from bitcycle.precision import Precision
from bitcycle.quantizer import (
    GradientQuantizer,
    NoQuantizer,
    QuantizerOptions,
    TensorQuantizer,
    quantizer_options,
    with_formats,
)
from bitcycle.schedule import Schedule
from bitcycle.settings import SettingError

logger = logging.getLogger(__name__)

COMPUTE = ("simulate", "codes")


@torch.inference_mode(False)  # whose tensors could not be trained, nor their bits changed, outside of it
def quantize_model(
    model: nn.Module,
    quantizer: str | QuantizerOptions = "sbm",
    *,
    float_layers: Sequence[str] | None = None,
    layer_bits: Mapping[str, int | str | Sequence[int]] | None = None,
    compile: bool = False,
    compute: str = "simulate",
    recompute: bool = False,
    schedule: Schedule | None = None,
    seed: int = 0,
    sample: Any = None,
) -> nn.Module:
    """Replace convolutions, linear and recurrent layers and attention of a float model by quantized ones.

    Args:
        model: any torch.nn.Module; changed in place, keeping its parameters (a model that is a single layer is replaced).
        quantizer: name or options.
        float_layers: roles or name patterns of layers to leave float; None means options.float_layers, and if that is None,
            the quantizer's rule or the model's attribute `float_layers`, else first, last and shortcut layers (the papers'
            rule for ImageNet).
        layer_bits: bits of layers apart from the schedule, by role or name pattern: {"first": 8, "*.mlp.*": [4, 8]}. A value is
            one number for all, [forward, gradient], [weight, activation, gradient], 32 for float, or "schedule" for a layer
            that would otherwise be float; the most specific entry applies. None means options.layer_bits.
        compile: fuse each quantizer into one kernel by torch.compile; results are identical.
        compute: simulate: multiply quantized float32 tensors; codes: multiply their integer codes at up to 8 bits
            (convolutions and linear layers, quantizer sbm) and save one byte per element for the backward pass, also in
            torch.nn.ReLU modules. The two differ only in rounding (docs/speed.md), and codes give channels-last images.
        recompute: with compute=codes, recompute the output of a convolution in the backward pass of the subsequent
            torch.nn.BatchNorm2d instead of saving it: identical results with half of the memory, but slower.
        schedule: required if the network chooses its bits (dfq, fractrain): the blocks in the model's attribute `block_names`
            get gates; and for a schedule over formats, which become those of the quantizer. Others have no effect here.
        seed: of the initial weights of gates.
        sample: input of the forward pass (a tensor, a tuple, a dictionary of keywords) for determining the execution order,
            which defines the roles first and last; None: see `roles.py`.

    Layers without a quantized counterpart (LSTMCell, ...) stay float; they are logged and listed by `conversion_report`.

    Returns:
        the converted model; its precision is 8 bits, or the quantizer's highest precision below that, until a
        `PrecisionController` changes it.

    Raises:
        SettingError (a ValueError), leaving the model unchanged: if nothing would be quantized, an entry of `float_layers`
            or `layer_bits` matches no layer, the schedule needs blocks and the model has none, `compute` is neither of the two,
            `recompute` is set without codes, or a layer recomputes its weight (weight_norm), has none yet (LazyLinear), is
            compiled, or has a forward of its own (hooks of accelerate).
    """
    if compute not in COMPUTE:
        raise SettingError("compute", compute, "is not one of the options", f"use {' or '.join(COMPUTE)}")
    if recompute and compute != "codes":
        raise SettingError(
            "recompute", recompute, "has no codes to compute from", "use compute=codes, or recompute=false"
        )
    options = _with_layers(quantizer_options(quantizer), float_layers, layer_bits)
    if schedule is not None:
        options = with_formats(options, schedule)
    if isinstance(options, NoQuantizer):
        return model
    _check_model(model)
    gates = gates_of(model, schedule)
    whole_plan = conversion_plan(model, options, schedule, sample)
    plan = [rule for rule in whole_plan if rule.treatment != "float"]
    if not plan:
        raise _nothing_to_quantize(model, whole_plan, options)
    model = _convert(model, plan, options, compile)
    vars(model)["conversion_rules"] = tuple(whole_plan)
    if compute == "codes":
        model = compute_codes(model, compile, recompute)
    elif compile:
        model = use_operators(model)
    conversion = {**_recorded(options, whole_plan), "compute": compute, "recompute": recompute}
    for integration in integrations_of(model):
        if hasattr(integration, "finish_conversion"):
            integration.finish_conversion(model, conversion)
    return model if gates is None else gate_blocks(model, gates, seed)


def _recorded(options: QuantizerOptions, plan: list[LayerRule]) -> dict[str, Any]:
    """The quantizer and the float layers of a plan, from which an integration repeats the conversion without the sample."""
    left = [rule.name for rule in plan if rule.treatment == "float"]
    saved = {**vars(options), "float_share": 0.0}  # whose layers are in `left`
    if options.layer_bits:  # by name, as roles may depend on the sample
        converted = [rule for rule in plan if rule.treatment != "float"]
        saved["layer_bits"] = {rule.name: list(rule.precision) if rule.precision else "schedule" for rule in converted}
    return {"quantizer": saved, "float_layers": left}


def _with_layers(
    options: QuantizerOptions,
    float_layers: Sequence[str] | None,
    layer_bits: Mapping[str, int | str | Sequence[int]] | None,
) -> QuantizerOptions:
    """The options with the layers that `quantize_model` was given."""
    if isinstance(float_layers, str):  # whose letters would be patterns
        raise SettingError("float_layers", float_layers, "is not a list", f"use [{float_layers!r}]")
    given: dict[str, Any] = {}
    if float_layers is not None:
        given["float_layers"] = list(float_layers)
    if layer_bits is not None:
        given["layer_bits"] = dict(layer_bits) if isinstance(layer_bits, Mapping) else layer_bits
    return replace(options, **given)


def _nothing_to_quantize(model: nn.Module, plan: list[LayerRule], options: QuantizerOptions) -> SettingError:
    """The error for a model none of whose layers would be quantized."""
    problem = "no layer of the model would be quantized"
    remedy = 'leave fewer layers float, as float_layers=["last"] or, on the command line, quantizer.float_layers=[last]'
    if any(isinstance(module, QuantizedProduct) for module in model.modules()):
        problem, remedy = "is already converted", "convert a float model, once; PrecisionController changes its bits"
    elif plan:
        others = f", and {left} have no quantized counterpart" if (left := _untouched(model)) else ""
        return SettingError("float_layers", options.float_layers, f"{problem}: all of them stay float{others}", remedy)
    else:
        problem, remedy = f"{problem}, as none can be", "use modules such as nn.Linear, nn.Conv2d and nn.LSTM"
    return SettingError("model", type(model).__name__, problem, remedy)


def _check_model(model: object) -> None:
    """Check that `model` is a network none of whose layers waits for its first input to create its weight, as these would stay
    float."""
    if not isinstance(model, nn.Module):
        raise SettingError("model", type(model).__name__, "is not a torch.nn.Module", "give a float network")
    for name, module in model.named_modules():
        if any(isinstance(parameter, UninitializedParameter) for parameter in module.parameters(recurse=False)):
            problem, kind = f"layer {name!r} has no weight before its first input", type(module).__name__
            raise SettingError("model", kind, problem, "run the float model on a sample first")


def _convert(model: nn.Module, plan: list[LayerRule], options: QuantizerOptions, compile: bool) -> nn.Module:
    """The model with the layers of `plan` quantized."""
    options = options.configure_for(model)
    apart = list(dict.fromkeys(rule.precision for rule in plan if rule.precision is not None))
    options.check(apart)
    states: dict[Precision | None, PrecisionState] = {bits: PrecisionState(bits, fixed=True) for bits in apart}
    states[None] = PrecisionState(options.initial_precision)
    layers = convertible_layers(model)
    _check_calls(model, plan, layers)
    signed = {rule.name for rule in plan if has_signed_input(model, rule.name, rule.roles)}
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    converted: dict[str, nn.Module] = {}
    for rule in plan:  # create all of them before changing the model
        context = Context(options, states[rule.precision], rule.name, compile, rule.name in signed)
        converted[rule.name] = _quantized(rule, layers[rule.name], context, device)
    present = set(model.modules())
    for name, new in converted.items():
        if layers[name] not in present:  # a product computed by a function so far
            parent, _, attribute = name.rpartition(".")
            model.get_submodule(parent).add_module(attribute, new)
    twins = {layers[name]: new for name, new in converted.items()}
    model = replace_modules(model, lambda module: twins.get(module, module))
    redirect_functions(model)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # disables the fast path of evaluation, which bypasses the layers
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # the input of that path
    if left := _untouched(model):
        logger.warning(
            "these layers have no quantized counterpart and stay float: %s; to quantize them, use PyTorch's own nn.Linear,"
            " convolutions, nn.LSTM, nn.GRU or nn.MultiheadAttention",
            left,
        )
    return model


def _check_calls(model: nn.Module, plan: list[LayerRule], layers: Mapping[str, nn.Module]) -> None:
    """Check that no layer of `plan` is called by other means than its class, which would bypass its quantized counterpart. Raises
    SettingError naming the layer."""
    # torch.compile keeps the layer itself
    compiled = [getattr(module, "_orig_mod", None) for module in model.modules()]
    for rule in plan:
        layer, caller = layers[rule.name], model.get_submodule(rule.name.rpartition(".")[0])
        if "forward" in vars(layer) or (may_redirect(caller) and "forward" in vars(caller)):
            problem = "is called by a forward that was assigned to it or its module (as by hooks of accelerate)"
        elif layer._compiled_call_impl is not None or any(layer is module for module in compiled):
            problem = "is compiled already"
        else:
            continue
        remedy = "convert the float model before adding hooks or compiling, or name the layer in float_layers"
        raise SettingError("model", rule.kind, f"layer {rule.name!r} {problem}, which would keep it float", remedy)


def _quantized(rule: LayerRule, layer: nn.Module, context: Context, device: torch.device) -> nn.Module:
    """The quantized counterpart of one layer. Raises SettingError naming the layer, if it has none."""
    recomputes = isinstance(getattr(layer, "weight", None), Tensor) and "weight" not in layer._parameters
    if recomputes or any(is_parametrized(part) for part in layer.modules()):
        problem = (
            f"layer {rule.name!r} ({rule.kind}) recomputes its weight at each call (weight_norm, spectral_norm, prune)"
        )
        remedy = "apply that to the converted model instead, or name the layer in float_layers"
        raise SettingError("model", rule.kind, problem, remedy)
    try:
        kind = counterpart(layer)
        assert kind is not None, "the plan lists convertible layers"
        converted = twin_of(layer, kind)
        converted.attach(context)
    except SettingError as error:
        raise SettingError(error.field, error.value, f"layer {rule.name!r}: {error.problem}", error.remedy) from error
    converted.to(next((parameter.device for parameter in layer.parameters()), device))
    quantized: nn.Module = converted.train(layer.training)
    return quantized


def _untouched(model: nn.Module) -> str:
    """Number and kind of the layers without a quantized counterpart, such as subclasses of PyTorch's layers."""
    found = Counter(
        f"{'complex ' if is_complex(module) else ''}{type(module).__name__}"
        for module in model.modules()
        if isinstance(module, PRODUCT_LAYERS)
        and not is_empty(module)
        and counterpart(module) is None
        and not hasattr(module, "precision")
        and not isinstance(module, NonDynamicallyQuantizableLinear)  # a part of nn.MultiheadAttention
        and not getattr(module, "stays_float", False)  # a module.FloatLinear
    )
    return ", ".join(f"{count} {kind}" for kind, count in found.items())


def float_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a converted model, with the keys of the float model only.

    Ranges and trained values of quantizers, bits, and gates are omitted. Conversely, `load_state_dict` of a converted model
    accepts the state dict of a float model with strict=True.
    """
    named = dict(model.named_modules(remove_duplicate=False))
    kinds = TensorQuantizer | GradientQuantizer | PrecisionState | Gates
    added = [f"{name}." for name, module in named.items() if isinstance(module, kinds)]
    blocks = [f"{name}." for name, module in named.items() if isinstance(module, GatedBlock)]
    found: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if not name.startswith(tuple(added)):
            for block in blocks:
                if name.startswith(f"{block}block."):
                    name = block + name.removeprefix(f"{block}block.")
            found[name] = value
    return found
