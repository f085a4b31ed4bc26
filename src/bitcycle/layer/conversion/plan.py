"""The plan of a conversion: which layers have a quantized counterpart, which stay float, and which have bits of their own."""

import fnmatch
import logging
from collections.abc import Iterable, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from bitcycle.layer.conversion import roles
from bitcycle.layer.conversion.by_function import added_products
from bitcycle.layer.conversion.counterpart import counterpart
from bitcycle.layer.conversion.roles import LAYER_ROLES
from bitcycle.precision import FLOAT, Precision
from bitcycle.quantizer import (
    NoQuantizer,
    QuantizerOptions,
)
from bitcycle.quantizer.base import layer_precision
from bitcycle.schedule import Dfq, Schedule
from bitcycle.settings import SettingError

logger = logging.getLogger(__name__)

DEFAULT_FLOAT_LAYERS = ("first", "last", "shortcut")
"""Default of float layers if a model defines none: CPT's and FracTrain's rule for ImageNet (released code)."""

DEFAULT_SIGNED_INPUTS = ("first",)
"""Default of layers with signed inputs if a model defines none: the layer that reads the data."""

_LIBRARIES = ("transformers", "dgl", "timm", "torch_geometric")
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
    integrations = integrations_of(model)  # importing them registers conversions
    layers = {name: module for name, module in model.named_modules() if counterpart(module) is not None}
    layers |= added_products(model)
    for integration in integrations:
        layers |= getattr(integration, "added_products", lambda _: {})(model)
    return layers


def integrations_of(model: nn.Module) -> list[ModuleType]:
    """The modules of `bitcycle.integrations` for the libraries whose layers a model has."""
    found = {type(module).__module__.partition(".")[0] for module in model.modules()}
    return [import_module(f"bitcycle.integrations.{library}") for library in _LIBRARIES if library in found]


def layer_roles(model: nn.Module, sample: Any = None) -> dict[str, tuple[str, ...]]:
    """Roles of the convertible layers; see `roles.py`."""
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
