"""Public networks at tiny sizes with random weights, and a sample for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torchvision import models
from torchvision.models import swin_transformer
from transformers import PretrainedConfig

Network = tuple[nn.Module, Any]
VOCABULARY = 50
BODY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
WORDS = {**BODY, "vocab_size": VOCABULARY}
QUIET = dict.fromkeys(("attention_dropout", "hidden_dropout"), 0.0)
"""No dropout, so that the reference computes the same in training mode."""


def images(size: int = 64, samples: int = 2) -> Tensor:
    """A batch of images [N, 3, size, size]."""
    return torch.randn(samples, 3, size, size)


def tokens() -> Tensor:
    """A batch of 2 texts of 7 words."""
    return torch.randint(0, VOCABULARY, (2, 7))


def _vision(build: Callable[..., nn.Module], size: int = 64, **options: Any) -> Callable[[], Network]:
    return lambda: (build(**options), images(size))


def _swin(block: Any) -> Callable[[], Network]:
    sizes: dict[str, Any] = {"patch_size": [4, 4], "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2]}
    return _vision(models.SwinTransformer, 32, **sizes, window_size=[4, 4], num_classes=5, block=block)


def _maxvit() -> Network:
    sizes: dict[str, Any] = {"stem_channels": 8, "partition_size": 4, "block_channels": [8, 16], "block_layers": [1, 1]}
    return models.MaxVit((64, 64), head_dim=4, stochastic_depth_prob=0.0, num_classes=5, **sizes), images(64)


def _words(kind: str, config: str, **options: Any) -> Callable[[], Network]:
    def make() -> Network:
        settings: PretrainedConfig = getattr(transformers, config)(**{**WORDS, **QUIET, **options})
        settings._attn_implementation = "eager" if kind.startswith(_WITHOUT_SDPA) else "sdpa"
        return getattr(transformers, kind)(settings), {"input_ids": tokens()}

    return make


_WITHOUT_SDPA = ("Bloom", "Gemma2", "Mamba")


def _t5() -> Network:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": VOCABULARY}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, dropout_rate=0.0))
    return model, {"input_ids": tokens(), "decoder_input_ids": tokens()}


def _whisper() -> Network:
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_mel_bins": 8, "max_source_positions": 10}
    ends = {
        "vocab_size": VOCABULARY,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
    }
    config = transformers.WhisperConfig(**sizes, **heads, **ends, dropout=0.0)
    model = transformers.WhisperForConditionalGeneration(config)
    return model, {"input_features": torch.randn(2, 8, 20), "decoder_input_ids": tokens()}


def _pixels(kind: str, config: str, size: int = 16, **options: Any) -> Callable[[], Network]:
    def make() -> Network:
        settings = getattr(transformers, config)(**{**QUIET, **options})
        settings._attn_implementation = "sdpa"
        return getattr(transformers, kind)(settings), {"pixel_values": images(size)}

    return make


def _mask_decoder() -> Network:
    """Like SAM: an image encoder with attention in windows and relative positions, prompts and a decoder of masks."""
    vision = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_dim": 32, "image_size": 32}
    patches = {"patch_size": 4, "output_channels": 8, "window_size": 4, "global_attn_indexes": [1], "num_pos_feats": 4}
    decoder = {
        "hidden_size": 8,
        "mlp_dim": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "iou_head_hidden_dim": 8,
    }
    prompt = {"hidden_size": 8, "image_size": 32, "patch_size": 4, "image_embedding_size": 8, "mask_input_channels": 4}
    parts: dict[str, Any] = {"vision_config": {**vision, **patches}, "prompt_encoder_config": prompt}
    config = transformers.SamConfig(**parts, mask_decoder_config=decoder)
    return transformers.SamModel(config), {"pixel_values": images(32), "input_points": torch.rand(2, 1, 1, 2) * 32}


class Heads(nn.Module):
    """A detector without the choice of boxes, which depends on the last bit: the outputs of its heads."""

    def __init__(self) -> None:
        super().__init__()
        detector = models.detection.ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=3)
        self.backbone, self.head = detector.backbone, detector.head

    def forward(self, x: Tensor) -> Any:
        return self.head(list(self.backbone(x).values()))


class UNet(nn.Module):
    """Two levels with a skip connection and a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.down = _convolutions(3, 8), _convolutions(8, 16)
        self.up, self.leave = nn.ConvTranspose2d(16, 8, 2, stride=2), _convolutions(16, 8)
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.enter(x)
        second: Tensor = self.up(self.down(nn.functional.max_pool2d(first, 2)))
        y: Tensor = self.head(self.leave(torch.cat([first, second], 1)))
        return y


def _convolutions(inputs: int, outputs: int) -> nn.Sequential:
    layers = [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


def _encoder() -> Network:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(5, 2, 16)


_FEW = {"num_key_value_heads": 1}
_PATCHES = {**BODY, "image_size": 16, "patch_size": 8}
NETWORKS: dict[str, dict[str, Callable[[], Network]]] = {
    "torchvision": {
        "resnet18": _vision(models.resnet18, num_classes=5),
        "regnet_y_400mf": _vision(models.regnet_y_400mf, num_classes=5),
        "shufflenet_v2": _vision(models.shufflenet_v2_x0_5, num_classes=5),
        "densenet": _vision(models.DenseNet, growth_rate=4, block_config=(2, 2, 2), num_init_features=8, num_classes=5),
        "mobilenet_v3": _vision(models.mobilenet_v3_small, num_classes=5, dropout=0.0),
        "efficientnet_b0": _vision(models.efficientnet_b0, num_classes=5, dropout=0.0, stochastic_depth_prob=0.0),
        "squeezenet": _vision(models.squeezenet1_1, num_classes=5, dropout=0.0),
        "convnext_tiny": _vision(models.convnext_tiny, num_classes=5, stochastic_depth_prob=0.0),
        "vit": _vision(
            *(models.VisionTransformer, 32),
            image_size=32,
            patch_size=8,
            num_layers=2,
            num_heads=2,
            hidden_dim=16,
            mlp_dim=32,
            num_classes=5,
        ),
        "swin": _swin(swin_transformer.SwinTransformerBlock),
        "swin_v2": _swin(swin_transformer.SwinTransformerBlockV2),
        "maxvit": _maxvit,
        "deeplabv3": _vision(
            models.segmentation.deeplabv3_mobilenet_v3_large, weights=None, weights_backbone=None, num_classes=3
        ),
        "lraspp": _vision(
            models.segmentation.lraspp_mobilenet_v3_large, weights=None, weights_backbone=None, num_classes=3
        ),
        "ssdlite": lambda: (Heads(), images(160)),
    },
    "transformers": {
        "bert": _words("BertForMaskedLM", "BertConfig", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
        "gpt2": _words(
            "GPT2LMHeadModel",
            "GPT2Config",
            n_embd=16,
            n_layer=2,
            n_head=2,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        ),
        "opt": _words("OPTForCausalLM", "OPTConfig", ffn_dim=32, word_embed_proj_dim=16, dropout=0.0),
        "bloom": _words("BloomForCausalLM", "BloomConfig"),
        "llama": _words("LlamaForCausalLM", "LlamaConfig", **_FEW),
        "qwen2": _words("Qwen2ForCausalLM", "Qwen2Config", **_FEW),
        "gemma2": _words("Gemma2ForCausalLM", "Gemma2Config", **_FEW, head_dim=8),
        "phi": _words("PhiForCausalLM", "PhiConfig"),
        "falcon": _words("FalconForCausalLM", "FalconConfig"),
        "mixtral": _words("MixtralForCausalLM", "MixtralConfig", **_FEW, num_local_experts=4),
        "qwen2_moe": _words(
            *("Qwen2MoeForCausalLM", "Qwen2MoeConfig"),
            **{**_FEW, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 16, "num_experts": 4},
        ),
        "mamba": _words("MambaForCausalLM", "MambaConfig", state_size=4, intermediate_size=32),
        "t5": _t5,
        "whisper": _whisper,
        "vit": _pixels("ViTForImageClassification", "ViTConfig", **_PATCHES),
        "clip": _pixels("CLIPVisionModelWithProjection", "CLIPVisionConfig", **_PATCHES, projection_dim=8),
        "segformer": _pixels(
            *("SegformerForSemanticSegmentation", "SegformerConfig", 32),
            hidden_sizes=[8, 8, 16, 16],
            decoder_hidden_size=16,
            depths=[1, 1, 1, 1],
            num_labels=3,
            **dict.fromkeys(
                ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout_prob", "drop_path_rate"),
                0.0,
            ),
        ),
        "sam": _mask_decoder,
    },
    "torch": {
        "unet": lambda: (UNet(), images(16)),
        "transformer_encoder": _encoder,
    },
}
