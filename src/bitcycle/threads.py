"""Number of compute threads, and how they wait for each other; chosen before PyTorch is imported, as OpenMP reads it then.

PyTorch starts a thread per core, and a thread that waits spins: GNU OpenMP tries 300,000 times before it sleeps. On a core that
another program needs, too, spinning costs its whole share of time, so that a step on a busy machine took up to thirty times as
long as on an idle one. A thread that sleeps too soon, in turn, needs so long to wake up (on a virtual machine above all) that the
others gain nothing. A number of tries between the two keeps the speed alone; and as threads of several runs on the same cores
mostly wait for each other whatever the number, a run that starts beside others takes its share of the cores only
(`bitcycle bench` measures it; docs/speed.md).

Only commands choose: `import bitcycle` in another program leaves the environment alone. A variable that is set already wins,
unless another command of bitcycle has set it: a job may start on another machine than the command that submits it.
"""

import getpass
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from bitcycle.errors import RunError
from bitcycle.files import try_lock

THREADS = "OMP_NUM_THREADS"
WAITING = {"GOMP_SPINCOUNT": "30000", "KMP_BLOCKTIME": "1"}
"""Bounded waiting of GNU OpenMP (number of tries) and of LLVM's and Intel's (milliseconds)."""
POLICY = "OMP_WAIT_POLICY"
"""The standard's variable; if it is set, waiting is left to it."""
SCHEDULERS = ("SLURM_CPUS_PER_TASK", "PBS_NUM_PPN", "NSLOTS", "LSB_DJOB_NUMPROC")
"""Variables in which SLURM, PBS, Grid Engine and LSF give the cores of a job."""


CHOSEN = "BITCYCLE_CHOSEN_THREADS"
"""Variable with the number of threads that a command chose; other values of `OMP_NUM_THREADS` are the user's."""
GROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
"""Where Linux has the limits of control groups, and the names of those of this process."""
SHARE = "BITCYCLE_SHARE_OF_THREADS"
"""Variable with the number of threads that a sweep gives each of its runs."""


def choose_threads() -> None:
    """Set the waiting policy, and the number of threads if a scheduler or a container allows fewer than PyTorch would start. Must
    run before PyTorch is imported."""
    if POLICY not in os.environ:
        for variable, value in WAITING.items():
            os.environ.setdefault(variable, value)
    if users_threads() is not None:
        return
    for variable in (THREADS, CHOSEN):
        os.environ.pop(variable, None)
    if (allowed := allowed_cores()) < visible_cores():
        os.environ |= {THREADS: str(allowed), CHOSEN: str(allowed)}


def users_threads() -> str | None:
    """The value of `OMP_NUM_THREADS` if the user, not a command of bitcycle, has set it."""
    threads = os.environ.get(THREADS)
    return None if threads == os.environ.get(CHOSEN) else threads


def runs_a_module() -> bool:
    """Whether this process is `python -m bitcycle.MODULE` and about to run it: `sys.argv` begins with -m while Python locates the
    module, for which it imports the packages around it."""
    return sys.argv[:1] == ["-m"] and any(re.fullmatch(r"(-\w*m)?bitcycle(\.\w+)*", word) for word in sys.orig_argv[1:])


def share_of(runs: int) -> dict[str, str]:
    """Environment of one of `runs` processes that start together: each gets its share of the allowed cores, unless the user has
    chosen a number of threads."""
    if runs < 2 or users_threads() is not None:
        return {}
    return dict.fromkeys((THREADS, SHARE), str(fair_share(runs)))


def has_share() -> bool:
    """Whether the value of `OMP_NUM_THREADS` is the share that a sweep has given to this run."""
    return SHARE in os.environ and os.environ[SHARE] == os.environ.get(THREADS)


def fair_share(runs: int) -> int:
    """Threads of each of several runs on the allowed cores, at least one."""
    return max(1, allowed_cores() // runs)


@contextmanager
def announced() -> Iterator[None]:
    """Let runs that start meanwhile on this machine count this process (`runs_beside`); a killed process is not counted."""
    file = _announcements() / str(os.getpid())
    with ExitStack() as stack:
        with suppress(OSError, RunError):  # not to be counted only costs time
            file.parent.mkdir(exist_ok=True)
            try_lock(stack.enter_context(open(file, "w")))
            stack.callback(file.unlink, missing_ok=True)
        yield


def runs_beside() -> int:
    """Other announced processes of this user that may compute on cores of this one and do not have a lower priority, with which
    they would give way; 0 in a scheduler's job, which has cores of its own, and where affinities are unknown (macOS, Windows)."""
    if scheduled_cores() is not None or not hasattr(os, "sched_getaffinity"):
        return 0
    own, niceness, found = os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0), 0
    for file in _announcements().glob("[0-9]*"):
        if file.name == str(os.getpid()):
            continue
        with suppress(OSError, RunError), open(file) as stream:  # it may end meanwhile
            if try_lock(stream, shared=True):  # it was killed
                file.unlink()
            elif os.getpriority(os.PRIO_PROCESS, int(file.name)) <= niceness:
                found += bool(own & os.sched_getaffinity(int(file.name)))
    return found


def _announcements() -> Path:
    return Path(tempfile.gettempdir()) / f"bitcycle-runs-{os.getuid() if hasattr(os, 'getuid') else getpass.getuser()}"


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


def quota_cores(root: Path = GROUPS, own: Path = OWN_GROUPS) -> int | None:
    """Cores' worth of time that the control groups of this process may use (containers), rounded up; None without a limit."""
    quotas: list[float | None] = []
    for controllers, group in _groups(own):
        if not controllers:
            quotas += [_quota(folder, "cpu.max") for folder in _and_parents(root, group)]
        elif "cpu" in controllers.split(","):
            files = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            quotas += [_quota(folder, *files) for folder in _and_parents(root / "cpu", group)]
    return min((math.ceil(quota) for quota in quotas if quota), default=None)


def memory_limit(root: Path = GROUPS, own: Path = OWN_GROUPS) -> int | None:
    """Bytes of main memory that the control groups of this process may use (containers, jobs of SLURM); None without a limit."""
    files: list[Path] = []
    for controllers, group in _groups(own):
        if not controllers:
            files += [folder / "memory.max" for folder in _and_parents(root, group)]
        elif "memory" in controllers.split(","):
            files += [folder / "memory.limit_in_bytes" for folder in _and_parents(root / "memory", group)]
    limits: list[int] = []
    for file in files:
        with suppress(OSError, ValueError):  # there is no such group or file, or it says max
            limits.append(int(file.read_text()))
    return min(limits, default=None)


def _groups(own: Path) -> list[tuple[str, str]]:
    """Controllers and name of each control group of this process; the group of version 2 lists no controllers."""
    if sys.platform != "linux":
        return []
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    parts = (line.split(":", 2) for line in lines if line.count(":") >= 2)
    return [(controllers, group) for _, controllers, group in parts]


def _and_parents(root: Path, group: str) -> list[Path]:
    """Folders of a control group and of those that contain it, which limit it, too; a container may see the root's only."""
    folder = root / group.strip("/")
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(root))]


def _quota(group: Path, *files: str) -> float | None:
    """Microseconds of CPU time per microsecond, from a file of control groups, `150000 100000`, or their two files of version 1;
    max and -1 mean no limit."""
    try:
        quota, period = " ".join((group / file).read_text() for file in files).split()
        return None if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # no such group or file, or another format
        return None
