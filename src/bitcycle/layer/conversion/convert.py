"""Conversion of a float model: the rule for which layers are quantized, and their replacement; its state dict after training."""

import fnmatch
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations

from bitcycle.layer.codes import compute_codes
from bitcycle.layer.conversion import roles
from bitcycle.layer.conversion.by_function import added_products, may_redirect, redirect_functions
from bitcycle.layer.conversion.counterpart import counterpart
from bitcycle.layer.conversion.roles import LAYER_ROLES, PRODUCT_LAYERS
from bitcycle.layer.gates.gate import Gates
from bitcycle.layer.gates.gated_block import GatedBlock, gate_blocks
from bitcycle.layer.products.quantized_product import Context, QuantizedProduct
from bitcycle.layer.relu import use_operators
from bitcycle.layer.state import PrecisionState
from bitcycle.layer.twin import replace_modules, twin_of
from bitcycle.precision import FLOAT, Precision
from bitcycle.quantizer import (
    GradientQuantizer,
    NoQuantizer,
    QuantizerOptions,
    TensorQuantizer,
    quantizer_options,
    with_formats,
)
from bitcycle.quantizer.base import layer_precision
from bitcycle.schedule import Dfq, Schedule
from bitcycle.settings import SettingError

logger = logging.getLogger(__name__)

COMPUTE = ("simulate", "codes")
DEFAULT_FLOAT_LAYERS = ("first", "last", "shortcut")
"""Default of float layers if a model defines none: CPT's and FracTrain's rule for ImageNet (released code)."""

DEFAULT_SIGNED_INPUTS = ("first",)
"""Default of layers with signed inputs if a model defines none: the layer that reads the data."""

_LIBRARIES = ("transformers", "dgl")
"""Libraries with their own layers, supported by a module of the same name in `bitcycle.integrations`."""


class LayerRule(NamedTuple):
    """One convertible layer of a model: its name, roles, treatment (quantized, float, fixed bits), the reason, and fixed bits."""

    name: str
    kind: str
    roles: tuple[str, ...]
    treatment: str
    reason: str = ""
    precision: Precision | None = None


def convertible_layers(model: nn.Module) -> dict[str, nn.Module]:
    """All layers that have a quantized counterpart, by name, in the order of registration; shared layers once.

    The two products of attention computed by functions (`by_function`, or of other libraries) are represented by modules, which
    the conversion adds to the model.
    """
    integrations = _integrations(model)  # importing them registers conversions
    layers = {name: module for name, module in model.named_modules() if counterpart(module) is not None}
    layers |= added_products(model)
    for integration in integrations:
        layers |= getattr(integration, "added_products", lambda _: {})(model)
    return layers


def _integrations(model: nn.Module) -> list[ModuleType]:
    found = {type(module).__module__.partition(".")[0] for module in model.modules()}
    return [import_module(f"bitcycle.integrations.{library}") for library in _LIBRARIES if library in found]


def layer_roles(model: nn.Module, sample: Any = None) -> dict[str, tuple[str, ...]]:
    """Roles of the convertible layers; see `layer/roles.py`."""
    layers = convertible_layers(model)
    return roles.layer_roles(layers, roles.find_order(model, layers, sample).calls)


def _match(name: str, found: Sequence[str], entries: Sequence[str]) -> str:
    """The first entry that is a role of the layer, or matches its name or that of an enclosing module; empty: none."""
    names = [name, *(name[:i] for i, letter in enumerate(name) if letter == ".")]
    # Roles are not patterns, so that a block named `first` does not match.
    return next((e for e in entries if (e in found if e in LAYER_ROLES else fnmatch.filter(names, e))), "")


def has_signed_input(model: nn.Module, name: str, found: Sequence[str]) -> bool:
    """Whether the input of layer `name` is not the output of a ReLU.

    A model lists such layers in its attribute `signed_inputs` (roles or name patterns); by default, only the first layer.
    """
    return bool(_match(name, found, getattr(model, "signed_inputs", DEFAULT_SIGNED_INPUTS)))


def gates_of(model: nn.Module, schedule: Schedule | None) -> Dfq | None:
    """The gate options of `model` under `schedule`; None if the schedule determines the bits. Raises SettingError if the
    schedule needs blocks and the model has none, or if it was made for another family of networks."""
    if schedule is None:
        return None
    family, names = getattr(model, "block_family", None), getattr(model, "block_names", ())
    gates, before = schedule.options.configure_for(family, len(names)), schedule.options
    if not (isinstance(gates, Dfq) and isinstance(before, Dfq)):
        return None
    if gates.facts != before.facts:
        problem = f"the network is of the family {family}, and the schedule was made for another"
        raise SettingError("family", None, problem, f"make it with bitcycle.schedule(..., family={family!r})")
    return gates


def conversion_plan(
    model: nn.Module, options: QuantizerOptions, schedule: Schedule | None = None, sample: Any = None
) -> list[LayerRule]:
    """The treatment of each convertible layer of `model` by `quantize_model`. Raises SettingError if an entry of
    options.float_layers or options.layer_bits is neither a role nor matches a layer's name.

    A layer listed in options.float_layers stays float. Otherwise an entry of options.layer_bits applies, the most specific one: a
    name before a pattern, a longer pattern before a shorter one, a role last. Then the rule of the model or quantizer for float
    layers, then fixed bits of depthwise convolutions.
    """
    gates, rule = gates_of(model, schedule), getattr(model, "float_layers", DEFAULT_FLOAT_LAYERS)
    float_layers = options.float_rule(rule if gates is None else ("first", *rule))
    layers = convertible_layers(model)
    order = roles.find_order(model, layers, sample)
    found = roles.layer_roles(layers, order.calls)
    own_bits = options.layer_bits or {}
    for field, entries in (("float_layers", float_layers), ("layer_bits", own_bits)):
        for entry in entries:
            if entry not in LAYER_ROLES and not any(_match(name, (), [entry]) for name in layers):
                names = ", ".join(layers) or "none"
                remedy = f"use the roles {', '.join(LAYER_ROLES)} or patterns of these names: {names}"
                raise SettingError(field, entry, "is neither a role nor matches a layer of the model", remedy)
    blocks = tuple(f"{name}." for name in getattr(model, "block_names", ())) if gates is not None else ()
    depthwise = _depthwise_precision(options, gates)
    plan = []
    for name, layer in layers.items():
        entry, own = _match(name, found[name], float_layers), _most_specific(name, found[name], own_bits)
        treatment, reason, fixed = "by gate" if name.startswith(blocks) else "quantized", "", None
        if own and (not entry or options.float_layers is None):
            entry, fixed = "", layer_precision(own, own_bits[own])
            reason = f"layer_bits: {own}"
        elif not entry and "depthwise" in found[name]:
            fixed = depthwise
        if entry or isinstance(options, NoQuantizer):
            treatment, reason, fixed = "float", f"float_layers: {entry}" if entry else "quantizer=none", None
        elif fixed is not None and min(fixed[:2]) == FLOAT:
            treatment, fixed = "float", None
        elif fixed is not None:
            numbers = fixed[1:] if fixed.weight == fixed.activation else fixed
            treatment = f"fixed {'/'.join(map(str, numbers))}"
        kind = type_before_parametrizations(layer).__name__
        plan.append(LayerRule(name, kind, found[name], treatment, reason, fixed))
    if order.is_guessed:
        _warn_of_guess(plan)
    return _with_float_share(plan, options.float_share)


def _warn_of_guess(plan: list[LayerRule]) -> None:
    """Name the layers that are treated as first and last by the order of registration, if any are."""
    chosen = [
        f"{rule.name} ({role})" for rule in plan for role in ("first", "last") if rule.reason.endswith(f": {role}")
    ]
    if chosen:
        logger.warning(
            "the order in which the layers run could not be traced, so that these are taken for the first and last by the order"
            " of registration: %s; pass sample to quantize_model, or name layers in float_layers",
            ", ".join(chosen),
        )


def _with_float_share(plan: list[LayerRule], share: float) -> list[LayerRule]:
    """The plan with the last `share` of the quantized layers float; products without a weight are not counted."""
    counted = [rule.name for rule in plan if rule.treatment == "quantized" and "matmul" not in rule.roles]
    kept = set(counted[len(counted) - round(share * len(counted)) :])
    reason = f"float_share: {share:g}"
    return [rule._replace(treatment="float", reason=reason) if rule.name in kept else rule for rule in plan]


def _most_specific(name: str, found: Sequence[str], entries: Iterable[str]) -> str:
    """The entry of `layer_bits` that applies to a layer; empty: none. The order of the entries has no effect."""
    matching = (entry for entry in entries if _match(name, found, [entry]))
    return max(matching, key=lambda entry: (entry not in LAYER_ROLES, entry == name, len(entry), entry), default="")


def _depthwise_precision(options: QuantizerOptions, gates: Dfq | None) -> Precision | None:
    """Fixed bits of depthwise convolutions, from the quantizer or else the schedule; None: as all other layers."""
    if options.depthwise_bits is not None:
        forward, gradient = options.depthwise_bits
        return Precision(forward, forward, gradient)
    if gates is None or gates.depthwise_bits is None:
        return None
    return Precision(gates.bits_of_weights, *gates.depthwise_bits)


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
            which defines the roles first and last; None: see `layer/roles.py`.

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
    left = [rule.name for rule in whole_plan if rule.treatment == "float"]
    saved = {**vars(options), "float_share": 0.0}  # whose layers are in `left`
    conversion = {"quantizer": saved, "float_layers": left, "compute": compute, "recompute": recompute}
    if options.layer_bits:  # by name, as roles may depend on the sample
        own = {rule.name: list(rule.precision) if rule.precision else "schedule" for rule in plan}
        saved["layer_bits"] = own
    for integration in _integrations(model):
        if hasattr(integration, "finish_conversion"):
            integration.finish_conversion(model, conversion)
    return model if gates is None else gate_blocks(model, gates, seed)


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
        given["layer_bits"] = dict(layer_bits)
    return type(options)(**{**vars(options), **given}) if given else options


def _nothing_to_quantize(model: nn.Module, plan: list[LayerRule], options: QuantizerOptions) -> SettingError:
    """The error for a model none of whose layers would be quantized."""
    problem, remedy = "no layer of the model would be quantized", "leave fewer layers float, e.g. float_layers=[last]"
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
            "these layers have no quantized counterpart and stay float: %s; to quantize them, use PyTorch's own classes",
            left,
        )
    return model


def _check_calls(model: nn.Module, plan: list[LayerRule], layers: Mapping[str, nn.Module]) -> None:
    """Check that no layer of `plan` is called by other means than its class, which would bypass its quantized counterpart. Raises
    SettingError naming the layer."""
    compiled = [module._modules.get("_orig_mod") for module in model.modules()]  # torch.compile keeps the layer itself
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
        type(module).__name__
        for module in model.modules()
        if isinstance(module, PRODUCT_LAYERS)
        and counterpart(module) is None
        and not hasattr(module, "precision")
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
