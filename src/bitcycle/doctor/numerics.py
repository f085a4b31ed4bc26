"""A numerical self-check of each quantizer, forward and backward: this device against PyTorch's operators on the CPU; on a CPU
the C++ operators against them.

Sums of float32 differ in their last bits between devices, and where such a sum is a range, all its levels do. An element near
the middle between two levels may then be rounded to the other one. Hence elements count as equal up to TOLERANCE of the
tensor's largest magnitude, and a share of TOLERATED may differ.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from bitcycle.cpp.extension import operators
from bitcycle.doctor.finding import PROBLEM, WARNING, Finding
from bitcycle.quantizer import QUANTIZERS, ROLES, NoQuantizer, QuantizerOptions, encode_bits
from bitcycle.randomness import int32_key
from bitcycle.training.compilation import operators_of

TOLERANCE = 1e-5
TOLERATED = 1e-3
SHAPES = {"weight": (32, 16, 3, 3), "activation": (16, 32, 8, 8), "gradient": (16, 32, 8, 8)}
"""Role -> shape of the tensor that is quantized."""


def numerics_findings(device: torch.device) -> Iterator[Finding]:
    """Yield a finding on all quantizers that compute on the device as expected, and one for each that does not."""
    on_cpu = device.type == "cpu"
    way = "C++ operators against PyTorch's" if on_cpu else f"{device} against the CPU"
    shares: dict[str, float] = {}
    alone, wrong = [], []
    for name, preset in QUANTIZERS.items():
        options = preset()
        if isinstance(options, NoQuantizer):
            continue
        source = operators_of(options)
        if on_cpu and (source is None or operators(source) is None):
            alone.append(name)  # PyTorch's operators are all that there is
            continue
        try:
            shares[name], where = compare(options, device)
        except (RuntimeError, TypeError) as error:  # the latter for float64 on Metal
            text = f"cannot run on {device}: {str(error).splitlines()[0]}"
            wrong.append(Finding(f"quantizer {name}", text, WARNING, f"use another quantizer or {ELSEWHERE}"))
            continue
        if shares[name] > TOLERATED:
            text = f"{shares[name]:.1%} of the elements of {where} differ; {way}"
            remedy = f"results from here would be wrong: set {WITHOUT_OPERATORS if on_cpu else ELSEWHERE}; report this"
            wrong.append(Finding(f"quantizer {name}", text, PROBLEM, remedy))
    right = [name for name, share in shares.items() if share <= TOLERATED]
    rest = f"; PyTorch's operators only: {', '.join(alone)}" if alone else ""
    text = f"{way}, forward and backward: equal for {', '.join(right) or 'none'}{rest}"
    yield Finding("quantizers", text, values={"shares": shares, "not_compared": alone})
    yield from wrong


WITHOUT_OPERATORS = "training.compile=false"
ELSEWHERE = "training.device=cpu, or update PyTorch and the driver"


def compare(options: QuantizerOptions, device: torch.device) -> tuple[float, str]:
    """The largest share of elements that differ from those of PyTorch's operators on the CPU, and where: over all roles of a
    quantizer, at its fewest, middle and most bits up to 8."""
    largest = (0.0, "")
    for role in ROLES:
        offered = [bits for bits in options.bits(role) if bits <= 8]
        for bits in sorted({offered[0], offered[len(offered) // 2], offered[-1]} if offered else ()):
            expected = results(options, role, bits, torch.device("cpu"), compile=False)
            computed = results(options, role, bits, device, compile=device.type == "cpu")
            for what, values in expected.items():
                terms = math.prod(SHAPES[role]) // values.numel()
                share = differing(computed[what], values, terms)
                largest = max(largest, (share, f"the {role}'s {what} at {bits} bits"))
    return largest


def results(options: QuantizerOptions, role: str, bits: int, device: torch.device, compile: bool) -> dict[str, Tensor]:
    """On the CPU: a quantized tensor (`value`), and the gradients of the tensor and of the quantizer's parameters; of a quantizer
    of gradients the gradient alone."""
    generator = torch.Generator().manual_seed(0)
    x, given = (torch.randn(SHAPES[role], generator=generator) for _ in range(2))
    x = (x.relu() if role == "activation" else x).to(device).requires_grad_()
    encoded = torch.tensor(encode_bits(bits), device=device)
    given = given.to(device)
    if role == "gradient":
        keys = (torch.tensor(int32_key(part), dtype=torch.int32, device=device) for part in ("step", "layer"))
        quantizer = options.gradient(compile).to(device)
        (gradient,) = torch.autograd.grad(quantizer(x, encoded, *keys), x, given)
        return {"gradient": gradient.cpu()}
    module = options.weight(compile) if role == "weight" else options.activation(compile)
    module.to(device).prepare(x.detach(), encode_bits(bits))
    y = module(x, encoded)
    trained = dict(module.named_parameters())
    gradients = torch.autograd.grad(y, [x, *trained.values()], given, allow_unused=True)
    named = zip(("gradient", *(f"gradient of {name}" for name in trained)), gradients, strict=True)
    return {"value": y.detach().cpu(), **{name: part.cpu() for name, part in named if part is not None}}


def differing(found: Tensor, expected: Tensor, terms: int = 1) -> float:
    """The share of elements that differ by more than TOLERANCE of the largest expected magnitude, or are not finite. Of sums of
    `terms` numbers, whose gradients are standard normal, that magnitude is at least sqrt(terms): they may cancel, their rounding
    does not."""
    scale = max(float(expected.abs().amax()), math.sqrt(terms) if terms > 1 else 0.0) or 1.0
    same = (found - expected).abs() <= TOLERANCE * scale  # false for NaN
    return 1 - float(same.double().mean())
