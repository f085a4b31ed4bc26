"""What is freed stays with the process."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

STEPS = """
import resource, statistics, sys, torch
from bitcycle.training.environment import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def step():
    held = [torch.empty(10 * 2**20).fill_(1) for _ in range(2)]
for _ in range(3):
    step()
faults = [resource.getrusage(resource.RUSAGE_SELF).ru_minflt]
for _ in range(5):
    step()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(int(statistics.median(after - before for before, after in zip(faults, faults[1:]))))
"""


def page_faults(what: str) -> int:
    """Page faults of a step that needs 80 MiB, in blocks that are always mapped by default, after three others.

    The median of five: a small allocation between the blocks can make the heap grow once more (10,240 faults in one step).
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "LD_PRELOAD"))}
    command = [sys.executable, "-c", STEPS, what]
    return int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="not the GNU C library")
def test_steps_use_the_memory_of_earlier_steps_again():
    assert page_faults("keep") < 40
    assert page_faults("leave") > 10_000
