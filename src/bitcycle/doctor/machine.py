"""The machine: devices, CPU, compiler, threads, load, memory, disk and packages. Nothing is changed; C++ operators are compiled
if they are not in the cache."""

import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from bitcycle.cache import cache_folder
from bitcycle.cpp.extension import load
from bitcycle.cpp.operators import AFFINE, BLOCK, MULTIBIT
from bitcycle.device import choose_device, device_name
from bitcycle.doctor.finding import PROBLEM, WARNING, Finding, amount
from bitcycle.errors import RunError
from bitcycle.layer.codes import support
from bitcycle.optional_imports import extras, lacking
from bitcycle.threads import POLICY, THREADS, WAITING, allowed_cores
from bitcycle.training.environment import describe_environment, instruction_set, processor

GIB = 2**30
LEAST_MEMORY, ENOUGH_MEMORY = 1 * GIB, 3 * GIB
"""Bytes of main memory below which a run fails, and below which the larger ones may."""
LEAST_DISK, ENOUGH_DISK = GIB // 4, 5 * GIB
"""The same of a disk: checkpoints of small networks take megabytes, data sets and sweeps gigabytes."""
LESS_MEMORY = "choose a smaller training.batch_size, or training.compute=codes training.recompute=true"
"""What to do if memory is short."""
BUSY = 0.5
"""Processes that wait for a core, per allowed core, from which steps take noticeably longer."""


def machine_findings(device: str, results_root: Path) -> Iterator[Finding]:
    """Yield findings on the machine, for runs on the device with this name (`training.device`) in this folder."""
    yield load_finding()  # before this command itself keeps the cores busy
    yield device_finding(device)
    yield cpu_finding()
    yield compiler_finding()
    yield threads_finding()
    yield memory_finding()
    yield disk_finding("runs", results_root, "results_root= or another disk")
    yield disk_finding("cache", cache_folder(), "XDG_CACHE_HOME")
    yield from package_findings()


def load_finding() -> Finding:
    """The load of the last minute, relative to the cores that may be used."""
    if not hasattr(os, "getloadavg"):
        return Finding("load", "unknown on this system")
    load, cores = os.getloadavg()[0], allowed_cores()
    text, values = f"{load:.1f} processes on {cores} cores in the last minute", {"load": load, "cores": cores}
    if load <= BUSY * cores:
        return Finding("load", text, values=values)
    remedy = f"steps take up to {1 + load / cores:.1f} times as long; wait for or stop other programs, and repeat this command"
    return Finding("load", text, WARNING, remedy, values)


def device_finding(name: str) -> Finding:
    """The accelerators that PyTorch sees, and the device that runs use."""
    seen = list(accelerators())
    listed = ", ".join(_described(each) for each in seen) or "none"
    values: dict[str, Any] = {"accelerators": seen, "torch": torch.__version__, "cuda": torch.version.cuda}
    try:
        chosen = choose_device(name)
    except RunError as error:
        return Finding("device", f"accelerators: {listed}", PROBLEM, str(error), values)
    values["device"] = str(chosen)
    text = f"runs use {chosen}; accelerators: {listed}"
    if seen or not shutil.which("nvidia-smi"):
        return Finding("device", text, values=values)
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    remedy = (
        "reinstall without CPU=1 (make clean setup)" if not torch.version.cuda else "update the driver, see nvidia-smi"
    )
    return Finding("device", f"{text}; but there is an NVIDIA driver, and PyTorch is {built}", WARNING, remedy, values)


def accelerators() -> Iterator[dict[str, Any]]:
    """Yield device, name, and free and total memory in bytes (None: unknown) of each accelerator that PyTorch sees."""
    seen = torch.accelerator.current_accelerator(check_available=True)
    for number in range(torch.accelerator.device_count() if seen else 0):
        device = torch.device(str(seen), number)
        memory: dict[str, Any] = {"free": None, "total": None}
        with suppress(AttributeError, RuntimeError):  # Metal does not say
            memory = dict(zip(memory, torch.accelerator.get_memory_info(number)))
        yield {"device": str(device), "name": device_name(device), **memory}


def _described(accelerator: dict[str, Any]) -> str:
    free, total = accelerator["free"], accelerator["total"]
    memory = f" ({free / GIB:.1f} of {total / GIB:.1f} GiB free)" if total else ""
    return f"{accelerator['device']} {accelerator['name'] or ''}{memory}"


def cpu_finding() -> Finding:
    """The CPU and its widest instructions."""
    name, found = processor(torch.device("cpu")), instruction_set()
    values = {"name": name, "instructions": found}
    if found.endswith("vnni"):
        return Finding("cpu", f"{name}, {found}", values=values)
    text = f"{name}, {found or 'neither AVX2 nor AVX-512'}, without 8-bit products"
    return Finding("cpu", text, remedy="training.compute=codes saves memory here rather than time", values=values)


def compiler_finding() -> Finding:
    """Whether the C++ operators can be compiled, if necessary, all at a time, and loaded."""
    with ThreadPoolExecutor() as pool:
        reasons = dict(zip(SOURCES, pool.map(why_not_loaded, SOURCES.items())))
    failures = {source.name: reason for source, reason in reasons.items() if reason}
    loaded = [source.name for source, reason in reasons.items() if not reason]
    values = {"loaded": loaded, "failed": failures}
    if AFFINE.name in loaded:
        text = f"C++ operators work: {', '.join(loaded)}"
        text += "".join(f"; not used here: {name} ({reason})" for name, reason in failures.items())
        return Finding("compiler", text, values=values)
    remedy = "install g++ (on Debian: apt install g++); without it, results are the same, but quantizers are slower"
    return Finding("compiler", f"no C++ operators: {failures[AFFINE.name]}", WARNING, remedy, values)


SOURCES: dict[Path, tuple[str, ...]] = {support.SOURCE: support.INSTRUCTIONS, AFFINE: (), BLOCK: (), MULTIBIT: ()}
"""C++ file -> the instructions that it needs; the one that takes longest to compile comes first."""


def why_not_loaded(operators: tuple[Path, tuple[str, ...]]) -> str:
    """Why the operators of a file that needs these instructions cannot be loaded; empty if they are."""
    try:
        load(*operators)
    except OSError as error:
        return str(error)
    return ""


def threads_finding() -> Finding:
    """The threads of PyTorch, the cores that may be used, and how threads wait for each other."""
    threads, cores = torch.get_num_threads(), allowed_cores()
    waiting = {name: os.environ.get(name, "") for name in (POLICY, *WAITING)}
    set_here = ", ".join(f"{name}={value}" for name, value in waiting.items() if value) or "spinning, the default"
    text = f"{threads} threads on {cores} allowed cores (of {os.cpu_count()}); waiting: {set_here}"
    values = {"threads": threads, "allowed": cores, "waiting": waiting}
    if threads <= cores:
        return Finding("threads", text, values=values)
    remedy = f"set {THREADS}={cores}, or unset it: more threads than cores wait for each other at every operation"
    return Finding("threads", text, WARNING, remedy, values)


def available_memory() -> int | None:
    """Bytes of main memory that can be used without swapping; None if unknown, as on other systems than Linux."""
    try:
        found = re.search(r"^MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return 1024 * int(found[1]) if found else None


def memory_finding() -> Finding:
    """Main memory that is available."""
    available = available_memory()
    if available is None:
        return Finding("memory", "unknown on this system")
    text = f"{available / GIB:.1f} GiB of main memory available"
    return amount("memory", text, available, LEAST_MEMORY, ENOUGH_MEMORY, f"close other programs; {LESS_MEMORY}")


def disk_finding(what: str, folder: Path, choice: str) -> Finding:
    """Free space on the disk of a folder, and whether it can be written; `what` says what the folder is for, `choice` how to
    choose another one."""
    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free, topic = shutil.disk_usage(place).free, f"disk ({what})"
    text = f"{free / GIB:.1f} GiB free for {what} ({_shown(folder)})"
    if not os.access(place, os.W_OK):
        return Finding(topic, f"{text}, which cannot be written", PROBLEM, f"choose a folder of yours: {choice}")
    remedy = f"delete what is not needed there, or choose {choice}"
    return amount(topic, text, free, LEAST_DISK, ENOUGH_DISK, remedy, folder=str(folder))


def _shown(folder: Path) -> str:
    """A path as in a shell, with ~ for the home folder."""
    home = Path.home()
    return f"~/{folder.relative_to(home)}" if folder.is_relative_to(home) else str(folder)


def package_findings() -> Iterator[Finding]:
    """Yield the versions of the main packages, and the optional ones by the extra that needs them."""
    found = describe_environment(torch.device("cpu"))
    versions = {"python": found["python"], **found["packages"], "commit": found["commit"]}
    text = ", ".join(f"{name} {number}" for name, number in versions.items() if number and name != "commit")
    yield Finding("versions", text, values=versions)
    installed, absent = optional_packages()
    missing = "; ".join(f"{extra} ({', '.join(names)})" for extra, names in absent.items())
    text = f"installed for: {', '.join(installed) or 'nothing'}" + (f"; missing for: {missing}" if missing else "")
    remedy = "pip install the packages of those that you need" if absent else ""
    yield Finding("optional", text, remedy=remedy, values={"installed": installed, "missing": absent})


NOT_FOR_RUNS = ("all", "dev", "docs")
"""Extras that are for development, or only collect others."""


def optional_packages() -> tuple[list[str], dict[str, list[str]]]:
    """The extras of bitcycle whose packages are all installed, and extra -> missing packages of the others."""
    missing = {
        extra: [name for requirement in needed for name in lacking(requirement)]
        for extra, needed in extras().items()
        if extra not in NOT_FOR_RUNS
    }
    complete = [extra for extra, names in missing.items() if not names]
    return complete, {extra: names for extra, names in missing.items() if names}
