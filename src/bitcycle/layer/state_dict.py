"""The state dict of a converted model in the form of the original float model."""

from torch import Tensor, nn

from bitcycle.layer.gate import Gates
from bitcycle.layer.gated_block import GatedBlock
from bitcycle.layer.state import PrecisionState
from bitcycle.quantizer import GradientQuantizer, TensorQuantizer


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
                name = name.replace(f"{block}block.", block)
            found[name] = value
    return found
