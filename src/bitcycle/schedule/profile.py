"""Growth profiles: functions g from [0, 1] to [0, 1] along which precision rises within one cycle.

Source: Better Schedules, section 3.2, step one. The paper gives no constants; the defaults are those of the authors' code.
"""

import math
from collections.abc import Callable

PROFILES = ("linear", "cosine", "exponential", "rex")


def linear(z: float) -> float:
    """g(z) = z.

    >>> linear(0.25)
    0.25
    """
    return z


def cosine(z: float) -> float:
    """g(z) = (1 - cos(pi z)) / 2 (CPT, equation 1).

    >>> round(cosine(0.5), 6)
    0.5
    """
    return (1 - math.cos(math.pi * z)) / 2


def exponential(z: float, k: float = 4.0, renormalise: bool = False) -> float:
    """g(z) = 1 - exp(-k z), rises early and saturates; `renormalise` divides by g(1) = 1 - exp(-k).

    The paper gives no k. The authors' code has k = 4 without renormalisation, which ends at 0.982.

    >>> round(exponential(1.0), 3), exponential(1.0, renormalise=True)
    (0.982, 1.0)
    """
    scale = 1 - math.exp(-k) if renormalise else 1.0
    return (1 - math.exp(-k * z)) / scale


def rex(z: float, d: float = 0.9) -> float:
    """g(z) = (1-d) z / (1 - d z), low for long and rising late: 1 - rex decay of the REX paper with constant d.

    The paper cites REX, whose own constant is d = 1/2; the authors' code and all costs in the paper's text have d = 0.9.

    >>> round(rex(0.5), 4), round(rex(0.5, d=0.5), 4)
    (0.0909, 0.3333)
    """
    return (1 - d) * z / (1 - d * z)


def growth_profile(name: str, rex_d: float, exp_k: float, renormalise: bool) -> Callable[[float], float]:
    """The profile called `name` with its constants bound."""
    return {
        "linear": linear,
        "cosine": cosine,
        "exponential": lambda z: exponential(z, exp_k, renormalise),
        "rex": lambda z: rex(z, rex_d),
    }[name]
