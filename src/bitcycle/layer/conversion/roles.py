"""Roles of layers in a network: first, last, shortcut, depthwise, matmul.

First and last refer to the order of execution, which is determined with a sample input (without arithmetic), or else by torch.fx;
if neither is possible, the order of registration is used. Layers that read the same tensor share these roles, so that query, key
and value are treated alike. An embedding that precedes them is the first layer; embeddings stay float. Layers that cannot be
converted count, too: if such a layer is the last one, no convertible layer is.
"""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._subclasses import fake_tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from bitcycle.hardware.calls import followed
from bitcycle.layer.conversion.untouched import untouched
from bitcycle.module.layers import MatrixProduct

LAYER_ROLES = ("first", "last", "shortcut", "depthwise", "matmul")

PRODUCT_LAYERS = (nn.modules.conv._ConvNd, nn.Linear, nn.Bilinear, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase, nn.GroupNorm)
_SHORTCUT_NAMES = {"shortcut", "skip"}
_SIBLINGS = (
    *({"q", "k", "v"}, {"query", "key", "value"}, {"q_proj", "k_proj", "v_proj"}, {"q_lin", "k_lin", "v_lin"}),
    *({"to_q", "to_k", "to_v"}, {"query_proj", "key_proj", "value_proj"}),
)


class Call(NamedTuple):
    """A call of a layer, with an identifier of its input; `kind` is product, embedding, or other (a module with a weight of its
    own)."""

    name: str
    reads: object
    kind: str = "product"


class Order(NamedTuple):
    """The calls of a network, and whether they are only the order of registration, because no other could be found."""

    calls: tuple[Call, ...]
    is_guessed: bool = False


def find_order(model: nn.Module, layers: Mapping[str, nn.Module], sample: Any = None) -> Order:
    """The order in which the layers with weights of `model`, convertible or not, and its embeddings run on `sample`: a tensor, a
    tuple of arguments, a dictionary of keywords, or None for the `dummy_inputs` of transformers models."""
    watched = {**layers, **{name: m for name, m in model.named_modules() if _kind(m) and name not in layers}}
    registered = tuple(Call(name, name, _kind(m)) for name, m in model.named_modules() if name in watched)
    if sample is None and hasattr(model, "float_layers"):  # its rule refers to layers, not embeddings
        return Order(tuple(call for call in registered if call.name in layers))
    try:
        # of a forward pass without values, unless it needs them, as detectors of two stages and experts' grouped products do
        with warnings.catch_warnings(action="ignore"):
            if sample is not None:
                with suppress(Exception), untouched(model):
                    if not _reads_addresses(model, sample):
                        return Order(_run(model, watched, sample))
                with untouched(model, parameters=True):
                    return Order(_run(model, watched, sample, with_values=True))
            with untouched(model):
                if hasattr(model, "dummy_inputs"):
                    return Order(_run(model, watched, model.dummy_inputs))
                return Order(_symbolic(model, watched))
    except Exception:  # untraceable control flow can raise any exception
        if sample is not None:
            raise
        return Order(registered, is_guessed=True)


def _reads_addresses(model: nn.Module, sample: Any) -> bool:
    """Whether a library takes part whose own code reads the memory of tensors, and would end the process for one without."""
    parts = [part for module in model.modules() for part in (module, *vars(module).values())]
    return any(type(part).__module__.partition(".")[0] == "dgl" for part in (*parts, *tree_leaves(sample)))


def _kind(module: nn.Module) -> str:
    """Whether the module is a layer (product), an embedding, or another module without parts that has a weight (other); a
    scripted module, which takes no hooks, is none."""
    if isinstance(module, torch.jit.ScriptModule):
        return ""
    if isinstance(module, _EMBEDDINGS):
        return "embedding"
    if isinstance(module, PRODUCT_LAYERS):
        return "product"
    is_leaf = not module._modules and not isinstance(module, _NORMS)
    return "other" if is_leaf and any(_is_matrix(parameter) for parameter in module._parameters.values()) else ""


def _is_matrix(parameter: Tensor | None) -> bool:
    return parameter is not None and sum(size > 1 for size in parameter.shape) > 1


def _run(
    model: nn.Module, watched: Mapping[str, nn.Module], sample: Any, with_values: bool = False
) -> tuple[Call, ...]:
    """The calls of a forward pass on tensors without values, or with them."""
    calls: list[Call] = []
    kept: list[Tensor] = []  # keeps tensors alive, so that ids are unique

    def record(name: str, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        tensors = [leaf for leaf in tree_leaves((arguments, keywords)) if isinstance(leaf, Tensor)]
        kept.extend(tensors[:1])
        calls.append(Call(name, id(tensors[0]) if tensors else name, _kind(module)))

    mode, log = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True), fake_tensor.log
    sample = (sample,) if isinstance(sample, Tensor) else sample
    with ExitStack() as stack:
        for name, module in watched.items():
            stack.enter_context(followed(module, partial(record, name, module)))
        stack.callback(setattr, log, "disabled", log.disabled)
        log.disabled = True  # it would print a traceback for an operation that needs values
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)  # which calls no layer
        stack.enter_context(torch.no_grad())
        stack.enter_context(nullcontext() if with_values else mode)
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        sample = tree_map_only(
            Tensor, lambda x: x.to(device) if with_values else mode.from_tensor(x.to(device)), sample
        )
        model.eval()
        model(**sample) if isinstance(sample, Mapping) else model(*sample)
    return tuple(calls)


def _symbolic(model: nn.Module, watched: Mapping[str, nn.Module]) -> tuple[Call, ...]:
    class Tracer(fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return module_qualified_name in watched or super().is_leaf_module(m, module_qualified_name)

    names = {id(module): name for name, module in watched.items()}
    graph = Tracer().trace(model)
    nodes = [node for node in graph.nodes if node.op == "call_module"]
    found = [(names.get(id(model.get_submodule(str(node.target)))), node) for node in nodes]
    return tuple(
        Call(name, str(_data_of(node) or name), _kind(watched[name])) for name, node in found if name is not None
    )


def _data_of(node: fx.Node) -> fx.Node | None:
    """What a layer reads: its first argument that is computed, as an input of the network, such as a graph, may go to every one;
    otherwise its first argument."""
    inputs = node.all_input_nodes
    return next((one for one in inputs if one.op != "placeholder"), next(iter(inputs), None))


def layer_roles(layers: Mapping[str, nn.Module], order: Sequence[Call]) -> dict[str, tuple[str, ...]]:
    """Roles of the convertible layers.

    first, last: see above; shortcut: its name contains the word shortcut or skip, or downsample if it is a 1x1 convolution (as
    in layer2.0.downsample.0 or conv_shortcut); depthwise: a convolution with one input channel per group; matmul: a product of
    two activations, as in attention.
    """
    touched = [call for call in order if not isinstance(layers.get(call.name), MatrixProduct)]  # without a weight
    weighted = [call for call in touched if call.name in layers or call.kind != "embedding"]
    called = {call.name for call in order}
    # others may be learned positions
    readers = [call for call in touched if call.name in layers or call.kind != "other"]
    first = _group(readers[0], readers) & called if readers else set()
    last = _group(weighted[-1], weighted) & called - first if len(weighted) > 1 else set()
    roles: dict[str, tuple[str, ...]] = {}
    for name, layer in layers.items():
        found = {
            "first": name in first,
            "last": name in last,
            "shortcut": _is_shortcut(name, layer),
            "matmul": isinstance(layer, MatrixProduct),
            "depthwise": isinstance(layer, nn.modules.conv._ConvNd) and 1 < layer.groups == layer.in_channels,
        }
        roles[name] = tuple(role for role in LAYER_ROLES if found[role])
    return roles


def _group(call: Call, calls: Sequence[Call]) -> set[str]:
    """The layers that read the same input as `call`, and its siblings by name."""
    group = {other.name for other in calls if other.reads == call.reads}
    parent, _, own = call.name.rpartition(".")
    siblings = next((names for names in _SIBLINGS if own in names), set())
    return group | {f"{parent}.{name}".lstrip(".") for name in siblings}


def _is_shortcut(name: str, layer: nn.Module) -> bool:
    words = name.lower().replace(".", "_").split("_")
    projects = isinstance(layer, nn.modules.conv._ConvNd) and set(layer.kernel_size) == {1}
    return not _SHORTCUT_NAMES.isdisjoint(words) or ("downsample" in words and projects)
