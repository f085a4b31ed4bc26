"""Number of compute threads, and how they wait for each other; chosen before PyTorch is imported, as OpenMP reads it then.

PyTorch starts a thread per core, and a thread that waits spins: GNU OpenMP tries 300,000 times before it sleeps. On a core that
another program needs, too, spinning costs its whole share of time, so that a step on a busy machine took up to thirty times as
long as on an idle one. A bounded number of tries keeps the speed alone (`bitcycle bench` measures both; docs/speed.md).

Only commands choose: `import bitcycle` in another program leaves the environment alone. A variable that is set already wins.
"""

import math
import os
import sys
from pathlib import Path

THREADS = "OMP_NUM_THREADS"
WAITING = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}
"""Bounded waiting of GNU OpenMP (number of tries) and of LLVM's and Intel's (milliseconds)."""
POLICY = "OMP_WAIT_POLICY"
"""The standard's variable; if it is set, waiting is left to it."""
SCHEDULERS = ("SLURM_CPUS_PER_TASK", "PBS_NUM_PPN", "NSLOTS", "LSB_DJOB_NUMPROC")
"""Variables in which SLURM, PBS, Grid Engine and LSF give the cores of a job."""


def choose_threads() -> None:
    """Set the waiting policy, and the number of threads if a scheduler or a container allows fewer than PyTorch would start. Must
    run before PyTorch is imported."""
    if POLICY not in os.environ:
        for variable, value in WAITING.items():
            os.environ.setdefault(variable, value)
    if THREADS not in os.environ and (allowed := allowed_cores()) < visible_cores():
        os.environ[THREADS] = str(allowed)
        _chosen.append(THREADS)


_chosen: list[str] = []
"""The number of threads if it was chosen here, not by the user."""


def share_of(runs: int) -> dict[str, str]:
    """Environment of one of `runs` processes that start together: each gets its share of the allowed cores, unless the user has
    chosen a number of threads."""
    if runs < 2 or (THREADS in os.environ and not _chosen):
        return {}
    return {THREADS: str(max(1, allowed_cores() // runs))}


def allowed_cores() -> int:
    """Cores that this process may use: the fewest of its affinity, its scheduler's allocation and its container's quota."""
    limits = [visible_cores(), *filter(None, (scheduled_cores(), quota_cores()))]
    return max(1, min(limits))


def visible_cores() -> int:
    """Cores of the affinity mask; on macOS and Windows, of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def scheduled_cores() -> int | None:
    """Cores of the job of a cluster's scheduler; None outside of a job."""
    given = (os.environ.get(variable, "") for variable in SCHEDULERS)
    return next((int(cores) for cores in given if cores.isdecimal() and int(cores)), None)


def quota_cores(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int | None:
    """Cores' worth of time that the control groups of this process may use (containers), rounded up; None without a limit."""
    if sys.platform != "linux":
        return None
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return None
    folder = next((line.partition("::")[2].strip("/") for line in lines if line.startswith("0::")), "")
    quotas = [_quota(root / folder)]
    while folder:
        folder = folder.rpartition("/")[0]
        quotas.append(_quota(root / folder))
    quotas.append(_quota_of_version_1(root / "cpu"))
    return min((math.ceil(quota) for quota in quotas if quota), default=None)


def _quota(group: Path) -> float | None:
    """Microseconds of CPU time per microsecond in cgroup version 2: `max 100000` or `150000 100000`."""
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # no such group or file, or another format
        return None


def _quota_of_version_1(group: Path) -> float | None:
    """The same in cgroup version 1, where -1 means no limit."""
    try:
        quota, period = (int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        return quota / period if quota > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
