"""A process that has imported everything that runs need, and forks a child for each run of a sweep.

Importing PyTorch and what training loads later takes longer than a small run; here it is paid once for all runs of a sweep. A
run is a process of its own all the same: it has its own session, output and exit code, and its crash stops no other. The
template computes nothing, as the threads of a computation do not survive a fork; nor does CUDA, hence runs on a GPU are started
without it.

The two sides talk in lines of JSON over a socket. When the sweep has gone, even killed, its end of the socket closes, and the
template asks all runs to save a checkpoint and to stop.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

PRELOADED = (
    *(
        "bitcycle.command",
        "hydra_plugins.bitcycle_plugins.grid_sweeper",
        "hydra_plugins.bitcycle_plugins.local_launcher",
    ),
    *("torch._meta_registrations", "torch._dynamo", "torch.utils.flop_counter"),
    *("sklearn.datasets", "pandas", "torchvision", "torchmetrics", "transformers.models.bert.modeling_bert"),
)
"""What runs import, some of it only on the way; one that is not installed is left out."""

POLL_SECONDS = 0.05
LOST = -signal.SIGKILL
"""Exit code of a run whose template was killed, which alone could have told."""


class Request(NamedTuple):
    """A run to start: script and arguments as on the command line, the file for its output, changes of the environment."""

    command: list[str]
    output: str
    environment: dict[str, str]


class Template:
    """The side of the sweep: starts the process, asks it for runs, and hears of their ends.

    Args:
        preloaded: modules that it imports.
    """

    def __init__(self, preloaded: Sequence[str] = PRELOADED) -> None:
        self._started: list[int] = []
        self._ended: dict[int, int] = {}
        self._unread = b""
        self._connection, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno()), *preloaded],
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a signal to the sweep and all its descendants is the sweep's to pass on
            )

    def start(self, command: Sequence[str], output: Path, environment: Mapping[str, str]) -> Forked:
        """Start a run; the process that it returns lives or has lived.

        Raises:
            ConnectionError: if the template has been killed.
        """
        request = Request(list(command), str(output), dict(environment))
        self._connection.sendall(json.dumps(request).encode() + b"\n")
        while not self._started:
            if not self._hear():
                raise ConnectionError("the process that starts runs has been killed")
        return Forked(self, self._started.pop())

    def ended(self, pid: int) -> int | None:
        """The exit code of a run as subprocess has it, negative for a signal; None while it goes on."""
        while pid not in self._ended and select.select([self._connection], [], [], 0)[0]:
            if not self._hear():
                return None if _is_alive(pid) else LOST
        return self._ended.get(pid)

    def close(self) -> None:
        """Let the process go; runs that still go on are asked to stop."""
        self._connection.close()
        self.process.wait()

    def _hear(self) -> bool:
        """Wait for messages and heed all that have come; false if no more will come."""
        try:
            received = self._connection.recv(65536)
        except ConnectionError:
            received = b""
        *lines, self._unread = (self._unread + received).split(b"\n")
        for message in map(json.loads, lines):
            if "ended" in message:
                self._ended[message["ended"]] = message["code"]
            else:
                self._started.append(message["started"])
        return bool(received)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class Forked:
    """A run in progress, used as a subprocess.Popen is."""

    def __init__(self, template: Template, pid: int) -> None:
        self._template, self.pid = template, pid

    def poll(self) -> int | None:
        """Its exit code; None while it goes on."""
        return self._template.ended(self.pid)

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def serve(connection: socket.socket) -> Request | None:
    """Fork a child for each request, and tell of their ends, until the other side has gone.

    Returns:
        In a child its request; in the template itself None.
    """
    children: set[int] = set()
    unread = b""
    while True:
        for pid, code in _ends(children):
            children.remove(pid)
            _tell(connection, ended=pid, code=code)
        if not select.select([connection], [], [], POLL_SECONDS)[0]:
            continue
        try:
            received = connection.recv(65536)
        except ConnectionError:
            received = b""
        if not received:
            break
        *lines, unread = (unread + received).split(b"\n")
        for line in lines:
            pid = os.fork()
            if pid == 0:
                connection.close()
                return Request(*json.loads(line))
            children.add(pid)
            _tell(connection, started=pid)
    for pid in children:
        os.kill(pid, signal.SIGTERM)
    return None


def _tell(connection: socket.socket, **message: int) -> None:
    with contextlib.suppress(ConnectionError):  # the loop learns that nobody listens when it reads
        connection.sendall(json.dumps(message).encode() + b"\n")


def _ends(children: set[int]) -> list[tuple[int, int]]:
    """(process, exit code) of the children that have ended."""
    found = [(pid, *os.waitpid(pid, os.WNOHANG)) for pid in children]
    return [(pid, os.waitstatus_to_exitcode(status)) for pid, ended, status in found if ended]


def become(request: Request) -> None:
    """Be the run: what the new interpreter of a subprocess would do from here on.

    Raises:
        SystemExit: as the script does.
    """
    os.setsid()
    with open(os.devnull, "rb") as nothing, open(request.output, "ab") as output:
        sys.stdout.flush()
        for stream, descriptor in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(stream.fileno(), descriptor)
    os.environ.update(request.environment)
    if priority := os.environ.get("BITCYCLE_PRIORITY"):
        importlib.import_module("bitcycle.sweep.priority").lower(priority)
    if "torch" in sys.modules and (threads := request.environment.get("OMP_NUM_THREADS")):
        sys.modules["torch"].set_num_threads(int(threads))  # the variable was read when PyTorch was imported
    script, *arguments = request.command
    if script == "-m":
        module, *sys.argv[1:] = arguments
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    sys.argv[:] = request.command
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


def preload(names: Sequence[str]) -> None:
    """Import what runs need."""
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if plugins := sys.modules.get("hydra.core.plugins"):
        plugins.Plugins.instance()  # Hydra looks for plugins once in each process


def main() -> None:
    """Serve until the sweep has gone, or be a run."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    # a library of ours keeps a thread of its own, which its own handler stops around a fork
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    preload(sys.argv[2:])
    request = serve(connection)
    if request is not None:
        become(request)


if __name__ == "__main__":
    main()
