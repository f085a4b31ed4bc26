"""Report of a conversion: the treatment of each layer, and the quantized share of the arithmetic."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import ParametrizationList

from bitcycle.hardware import trace
from bitcycle.layer.conversion.plan import LayerRule, convertible_layers
from bitcycle.layer.gates.gate import Gates
from bitcycle.layer.gates.gated_block import GatedBlock
from bitcycle.layer.products.quantized_product import QuantizedProduct
from bitcycle.module.layers import MatrixProduct

NOT_CONVERTED = "not converted yet"
OF_GATES = "a part of the gates"
_PARTS_OF_LAYERS = NonDynamicallyQuantizableLinear, ParametrizationList
NOT_MULTIPLIED = "not called with this input; products of tensors of fewer than three dimensions stay float"
NOT_CALLED = "not called with this input; a function that reads its weights computes in float"


@dataclass(frozen=True)
class Row:
    """One layer: name, kind, roles, bits or float, why it stays float, and share of the multiply-accumulates (None: unknown)."""

    name: str
    kind: str
    roles: tuple[str, ...]
    bits: str
    reason: str
    share: float | None


@dataclass(frozen=True, repr=False)
class ConversionReport:
    """A table of layers: print it, or read its rows; `is_converted`: whether the model has any quantized product."""

    rows: tuple[Row, ...]
    is_converted: bool = True

    @property
    def quantized_share(self) -> float | None:
        """Share of the multiply-accumulates that are quantized; None without a sample."""
        if any(row.share is None for row in self.rows):
            return None
        return sum(row.share or 0.0 for row in self.rows if row.bits != "float")

    def __str__(self) -> str:
        head = ("layer", "kind", "role", "bits (weight/activation/gradient)", "share of MACs")
        lines = [
            head,
            *((r.name or "(the model)", r.kind, ", ".join(r.roles), _bits(r), _percent(r.share)) for r in self.rows),
        ]
        lines.append(("quantized", "", "", "", _percent(self.quantized_share)))
        widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]
        title = [] if self.is_converted else ["This model is not converted: bitcycle.quantize_model quantizes it."]
        return "\n".join([*title, *table])

    __repr__ = __str__


def _bits(row: Row) -> str:
    return f"{row.bits}{': ' if row.bits == 'float' else ', '}{row.reason}" if row.reason else row.bits


def _percent(share: float | None) -> str:
    return "?" if share is None else f"{100 * share:.1f} %"


def conversion_report(model: nn.Module, *inputs: Any, **keywords: Any) -> ConversionReport:
    """The treatment of each layer of a converted model: `print(conversion_report(model, x))`.

    Args:
        model: converted by `quantize_model`, or a float model, which the report says.
        inputs, keywords: of the forward pass, for the shares of the multiply-accumulates; without them shares are unknown. A
            single tuple (arguments) or dictionary (keywords) is a sample as in `quantize_model`.
    """
    if len(inputs) == 1 and not keywords and isinstance(inputs[0], tuple | Mapping):
        inputs, keywords = ((), dict(inputs[0])) if isinstance(inputs[0], Mapping) else (inputs[0], {})
    rules = _rules(model)
    macs, kinds = _macs(model, inputs, keywords), dict(model.named_modules())
    quantized = {name: m for name, m in kinds.items() if isinstance(m, QuantizedProduct)}
    convertible, gates = convertible_layers(model), _inside(kinds, Gates)
    names = dict.fromkeys(
        [*rules, *(name for name in convertible if name in kinds), *quantized, *_others(model), *(macs or {})]
    )
    rows, total = [], sum((macs or {}).values())
    for name in names:
        has_products = any(part.startswith(f"{name}.") for part in quantized)
        if has_products and (name in rules or (macs is not None and not macs.get(name))):
            continue  # its products are listed
        rule, module = rules.get(name), kinds.get(name)
        found = quantized.get(name)
        unused = found is not None and macs is not None and not macs.get(name)
        bits = "float" if found is None or unused else "/".join(map(str, found.precision.precision))
        reason = "" if rule is None else rule.reason
        if name.startswith(gates):
            reason = OF_GATES
        elif found is None and (rule is None or rule.treatment != "float"):
            reason = NOT_CONVERTED if name in convertible else reason or "no quantized counterpart"
        if unused:
            reason = NOT_MULTIPLIED if isinstance(found, MatrixProduct) else NOT_CALLED
        kind = rule.kind if rule is not None else type(module).__name__
        share = None if macs is None else macs.get(name, 0) / max(total, 1)
        rows.append(Row(name, kind, rule.roles if rule is not None else (), bits, reason, share))
    return ConversionReport(tuple(rows), bool(quantized))


def added_layers(model: nn.Module) -> list[str]:
    """Layers of a converted model, or of its converted parts, that could be quantized and were not among those of the
    conversion."""
    kinds, rules = dict(model.named_modules()), _rules(model)
    converted = tuple(f"{name}.".lstrip(".") for name, part in kinds.items() if "conversion_rules" in vars(part))
    gates, known = _inside(kinds, Gates), {name for name, rule in rules.items() if rule.treatment == "float"}
    return [
        name
        for name in convertible_layers(model)
        if name in kinds and name not in known and name.startswith(converted) and not name.startswith(gates)
    ]


def _inside(kinds: Mapping[str, nn.Module], kind: type[nn.Module]) -> tuple[str, ...]:
    """Prefixes of the names of what is inside modules of a kind."""
    return tuple(f"{name}." for name, module in kinds.items() if isinstance(module, kind))


def _rules(model: nn.Module) -> dict[str, LayerRule]:
    """The rules of the converted parts of a model, which may be wrapped, by the names of the layers in the model."""
    kinds = dict(model.named_modules())
    parts = {name: vars(part).get("conversion_rules", ()) for name, part in kinds.items()}
    found = {f"{part}.{rule.name}".strip("."): rule for part, rules in parts.items() for rule in rules}
    for block in _inside(kinds, GatedBlock):
        names = [name for name in found if name.startswith(block)]
        found |= {f"{block}block.{name.removeprefix(block)}": found.pop(name) for name in names}
    return found


def _macs(model: nn.Module, inputs: tuple[Any, ...], keywords: Mapping[str, Any]) -> dict[str, int] | None:
    if not inputs and not keywords:
        return None
    found: Counter[str] = Counter()
    names = dict(model.named_modules())
    for operation in trace(model, *inputs, **keywords).operations:
        if operation.macs:  # operations of the model itself are named after its class
            found[operation.module if operation.module in names else ""] += operation.macs
    return dict(found)


def _others(model: nn.Module) -> list[str]:
    """Modules that have a weight matrix but are neither quantized nor convertible; the attention that reads the weight of its
    output layer itself stands for that, and a layer for the parametrization of its weight."""
    return [
        name
        for name, module in model.named_modules()
        if not isinstance(module, (QuantizedProduct, nn.Embedding, nn.EmbeddingBag, *_PARTS_OF_LAYERS))
        and not hasattr(module, "precision")
        and any(isinstance(p, Tensor) and p.dim() > 1 for p in module._parameters.values())
    ]
