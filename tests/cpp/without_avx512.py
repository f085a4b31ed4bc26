"""A plugin of pytest: C++ operators are compiled as on a CPU that has AVX2 and not AVX-512, and only such are used."""

import pytest

from bitcycle.cpp import extension


def pytest_configure(config: pytest.Config) -> None:
    """Not done by the import, since pytest imports every file of tests in search of doctests."""
    here = extension._cpu_instructions()
    extension._FLAGS = tuple(flag.replace("native", "x86-64-v3") for flag in extension._FLAGS)
    extension._cpu_instructions = lambda: frozenset(name for name in here if not name.startswith("avx512"))
