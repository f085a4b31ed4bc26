"""Llama decoders: the network of `transformers` with random weights, as a language model.

    x = E[w];   x += A(norm(x)), x += W_d (SiLU(W_g norm(x)) * W_u norm(x)) in each layer;   logits = W norm(x)

with causal attention A, rotary positions, root-mean-square norms and no biases. As the recipes of 4-bit training have it, the
linear layers of the decoder are quantized; embedding, output layer and the products of attention stay float.

Source: Touvron et al. 2023, "LLaMA"; float layers: NVIDIA 2025, "Pretraining large language models with NVFP4", section 4.1, and
Tseng et al. 2025, "Training LLMs with MXFP4", section 4. The small sizes are ours.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bitcycle.model.base import ModelOptions
from bitcycle.optional_imports import require
from bitcycle.settings import SettingError, setting
from bitcycle.shapes import TokenShape


class LlamaLanguageModel(nn.Module):
    """Tokens [T, N] -> logits [T, N, V] and an empty state."""

    float_layers = ("last", "matmul")
    signed_inputs = ("*",)
    """No layer reads the output of a ReLU."""

    def __init__(self, llama: Any) -> None:
        super().__init__()
        self.llama = llama

    def forward(self, tokens: Tensor, state: tuple[Tensor, ...] | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
        # a prepared mask, as the mask functions of transformers read values, which a trace does not have
        length, lowest = len(tokens), torch.finfo(self.llama.dtype).min
        later = torch.full((length, length), lowest, dtype=self.llama.dtype, device=tokens.device).triu(1)
        mask = later.expand(tokens.shape[1], 1, length, length)
        return self.llama(input_ids=tokens.T, attention_mask=mask, use_cache=False).logits.transpose(0, 1), ()


@dataclass
class Llama(ModelOptions):
    """Options of Llama decoders."""

    takes: ClassVar[type] = TokenShape

    layers: int = setting(4, "layers", minimum=1)
    width: int = setting(256, "width of the hidden vectors", minimum=2)
    heads: int = setting(4, "attention heads", minimum=1)
    feedforward: int = setting(688, "width of the feed-forward sublayer (about 8/3 of `width`)", minimum=1)
    positions: int = setting(1024, "longest sequence", minimum=1)

    def validate(self) -> None:
        if self.width % (2 * self.heads):
            remedy = f"use a multiple of {2 * self.heads}"
            problem = f"is not divisible by {self.heads} heads of even width"
            raise SettingError("width", self.width, problem, remedy)

    def build(self, shape: TokenShape) -> LlamaLanguageModel:
        transformers = require("transformers", "transformers")
        config = transformers.LlamaConfig(
            vocab_size=shape.vocabulary,
            hidden_size=self.width,
            intermediate_size=self.feedforward,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            max_position_embeddings=self.positions,
            bos_token_id=None,
            eos_token_id=None,
        )
        return LlamaLanguageModel(transformers.LlamaForCausalLM(config))
