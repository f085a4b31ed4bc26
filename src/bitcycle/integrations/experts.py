"""Mixtures of experts of transformers: the two products of all experts, each a quantized layer.

    h = gate(x_e W_up,e^T),  y_e = h W_down,e^T          x_e [tokens of expert e, in], W [experts, out, in]

The input of each product has one quantizer for all experts; weights have the ranges that linear layers of the single experts
would have, one per output channel with SBM; the gradient of each product is quantized once. In blocks, the
gradient of a weight has its own blocks, rotations and scales for each expert. Routers stay float. The products become the modules
`up_product` and `down_product`; their weights remain in the experts' module.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitcycle.layer.products.block_product import Axes
from bitcycle.layer.products.quantized import CONVERSIONS, QuantizedLayer
from bitcycle.settings import SettingError

try:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
except ImportError:  # before transformers 5, experts are modules with linear layers
    ALL_EXPERTS_FUNCTIONS = None  # type: ignore[assignment]

EXPERTS = "bitcycle"
EXPERT_PRODUCTS = ("up_product", "down_product")


class ExpertProduct(nn.Module):
    """One product of all experts of `owner`, whose parameters it reads: rows [S, in], sorted by expert -> [S, out].

    Args:
        owner: the experts' module.
        weight_name: its parameter, [experts, out, in], or [experts, in, out] if it is transposed.
    """

    def __init__(self, owner: nn.Module, weight_name: str) -> None:
        super().__init__()
        self._owner, self.weight_name = (owner,), weight_name  # in a tuple so that it is not registered as a submodule

    def weights(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias [experts, out], if any."""
        owner = self._owner[0]
        return getattr(owner, self.weight_name), getattr(owner, f"{self.weight_name}_bias", None)

    def forward(self, x: Tensor, counts: list[int]) -> Tensor:
        """The product of each row with the weight of its expert; `counts`: rows of each expert."""
        return self.grouped(x, *self.weights(), counts)

    def grouped(self, x: Tensor, weight: Tensor, bias: Tensor | None, counts: list[int]) -> Tensor:
        """The product with any weight."""
        weight = weight.transpose(1, 2) if self._owner[0].is_transposed else weight
        biases = [None] * len(counts) if bias is None else bias.unbind(0)
        parts = zip(x.split(counts), weight.unbind(0), biases)
        products = [F.linear(*part) for part in parts if len(part[0])]
        return torch.cat(products) if products else F.linear(x, weight[0], biases[0])


class QuantizedExpertProduct(QuantizedLayer, ExpertProduct):
    """A quantized product of all experts."""

    @property
    def weight(self) -> Tensor:
        """The weights of all experts."""
        return self.weights()[0]

    @property
    def bias(self) -> Tensor | None:
        """The biases of all experts."""
        return self.weights()[1]

    @property
    def axes(self) -> Axes:  # type: ignore[override]
        """Of the weight as it is stored."""
        return Axes(-1, 1, 2) if self._owner[0].is_transposed else Axes(-1, 2, 1)

    def rows_of(self, weight: Tensor) -> Tensor:
        """[experts, out, in], or as it is stored <-> [experts * out, in]."""
        is_transposed = self._owner[0].is_transposed
        if weight.dim() == 3:
            return (weight.transpose(1, 2) if is_transposed else weight).flatten(0, 1)
        stored = weight.unflatten(0, (len(self.weight), -1))
        return stored.transpose(1, 2) if is_transposed else stored

    def forward(self, x: Tensor, counts: list[int]) -> Tensor:
        def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return self.grouped(x, weight, bias, counts)

        return self.quantized_product(x, product, parts=counts)


CONVERSIONS[ExpertProduct] = QuantizedExpertProduct


def has_experts(module: nn.Module) -> bool:
    """Whether the module takes the function of its experts from the library's registry."""
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and "experts_interface" in code.co_freevars


def added_products(model: nn.Module) -> dict[str, nn.Module]:
    """Products to add to the experts of a model, by their future names."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if has_experts(module) and not any(hasattr(module, product) for product in EXPERT_PRODUCTS):
            for product, weight in zip(EXPERT_PRODUCTS, _weight_names(module)):
                found[f"{name}.{product}".lstrip(".")] = ExpertProduct(module, weight)
    return found


def _weight_names(module: Any) -> tuple[str, str]:
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"


def experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts' output [tokens, F] for tokens [tokens, F], and the chosen experts and their weights [tokens, k]. Raises
    SettingError for experts that are spread over processes."""
    ids, chosen = top_k_index.reshape(-1), top_k_index.shape[-1]
    counts = ids.bincount(minlength=module.num_experts).tolist()
    # versions of transformers without the attribute give experts of other processes the next number
    if getattr(module, "_is_expert_parallel", False) or len(counts) > module.num_experts:
        remedy = "use data parallelism, or add *.experts to float_layers and set_experts_implementation"
        raise SettingError("model", type(module).__name__, "has experts in other processes", remedy)
    order = ids.argsort(stable=True)
    products = [
        getattr(module, name, None) or ExpertProduct(module, weight)
        for name, weight in zip(EXPERT_PRODUCTS, _weight_names(module))
    ]
    h = products[0](hidden_states[order // chosen], counts)
    y = products[1](module._apply_gate(h) if module.has_gate else module.act_fn(h), counts)
    if module.has_post_expert_norm:
        y = module.post_expert_norm(y)
    y = y * top_k_weights.reshape(-1)[order].unsqueeze(-1)
    return y[order.argsort()].unflatten(0, (-1, chosen)).sum(1).to(hidden_states.dtype)


if ALL_EXPERTS_FUNCTIONS is not None:
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS, experts)


def use_experts(model: nn.Module) -> None:
    """Select the quantized experts' function where there are quantized products."""
    for module in model.modules():
        if has_experts(module) and any(hasattr(module, product) for product in EXPERT_PRODUCTS):
            module.config._experts_implementation = EXPERTS  # type: ignore[union-attr]
