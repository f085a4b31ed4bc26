"""Time of each quantizer relative to reading and writing its tensor once."""

from typing import Any

import torch

from bitcycle.benchmark.measure import copy_bandwidth, interleaved, summarise
from bitcycle.quantizer import QUANTIZERS, NoQuantizer, compiler_works, encode_bits
from bitcycle.quantizer.base import INITIAL_BITS, QuantizerOptions

ACTIVATION = (128, 16, 32, 32)
WEIGHT = (512, 512, 3, 3)


def measure_quantizers(repetitions: int, device: torch.device) -> dict[str, Any]:
    """For each quantizer and role: ms per tensor, and this time as a multiple of the limit (a copy)."""
    bandwidth, compile = copy_bandwidth(device), compiler_works(device.type)
    found: dict[str, Any] = {"copy_gb_per_s": round(bandwidth / 1e9, 2), "roles": {}}
    for role, shape in (("weight", WEIGHT), ("activation", ACTIVATION), ("gradient", ACTIVATION)):
        x = torch.randn(shape, device=device).contiguous(memory_format=torch.channels_last)
        actions = {"copy": lambda x=x: x.clone(memory_format=torch.preserve_format)}
        for name, quantizer in QUANTIZERS.items():
            bits = [number for number in quantizer().bits(role) if number <= INITIAL_BITS]
            if quantizer.kind is not NoQuantizer and bits:
                actions[name] = _action(quantizer(), role, x, max(bits), compile, device)
        with torch.no_grad():
            times = summarise(interleaved(actions, repetitions, device), "copy")
        limit = 1e3 * 2 * x.numel() * x.element_size() / bandwidth
        found["roles"][role] = {
            "shape": list(shape),
            "limit_ms": round(limit, 4),
            "quantizers": {name: {**time, "of_limit": round(time["ms"] / limit, 2)} for name, time in times.items()},
        }
    return found


def _action(
    options: QuantizerOptions, role: str, x: torch.Tensor, number: int, compile: bool, device: torch.device
) -> Any:
    """A function that quantizes x once."""
    bits = torch.tensor(encode_bits(number), device=device)
    if role == "gradient":
        key = torch.tensor(5, dtype=torch.int32, device=device)
        gradient = options.gradient(compile).to(device)
        return lambda: gradient.quantize(x, bits, key, key)
    module = getattr(options, role)(compile)
    if role == "weight":
        module.initialise(x)
    module = module.to(device).train()
    module.prepare(x, encode_bits(number))
    return lambda: module(x, bits)
