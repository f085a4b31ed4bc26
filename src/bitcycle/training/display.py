"""Console output of a run: a progress bar on a terminal, plain lines in log files and elsewhere."""

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

logger = logging.getLogger("bitcycle")
CONSOLE = "bitcycle console"
PLAIN = logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S")


def console(width: int) -> Console:
    """A console on standard output, of this width if it is not a terminal. Brackets in texts are not markup."""
    return Console(width=None if Console().is_terminal else width, markup=False)


def set_up_console() -> None:
    """Show the package's log on standard error, in colour on a terminal and as plain lines elsewhere."""
    if any(handler.get_name() == CONSOLE for handler in logger.handlers):
        return
    handler: logging.Handler
    if sys.stderr.isatty():
        handler = RichHandler(console=Console(stderr=True), show_path=False, markup=False)
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(PLAIN)
    handler.set_name(CONSOLE)
    handler.setLevel(logging.INFO)
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    # without their place in the code
    warnings.showwarning = lambda message, *place, **more: logger.warning("%s", message)


def be_quiet() -> None:
    """Show only errors, as process 0 of the run shows the other messages."""
    for handler in logger.handlers:
        handler.setLevel(logging.ERROR)


class LogFile(logging.FileHandler):
    """A log file that names the first error of writing it, such as a full disk, in one line; the console has all messages."""

    has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (the name in `logging`)
        if not self.has_failed:
            self.has_failed = True
            print(f"{self.baseFilename} lacks messages: {sys.exc_info()[1]}", file=sys.stderr)


@contextmanager
def log_to_file(path: Path) -> Iterator[None]:
    """Also write the package's log to a file."""
    handler = LogFile(path)
    handler.setFormatter(PLAIN)
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()


class ProgressBar:
    """A progress bar with precision, loss and metric; disabled if the output is not a terminal."""

    def __init__(self, total_steps: int, done: int, enabled: bool) -> None:
        screen = Console(stderr=True)
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=screen,
            disable=not (enabled and screen.is_terminal),
        )
        self.task = self.progress.add_task("training", total=total_steps, completed=done, note="")
        self.progress.start()

    def update(self, step: int, note: str | None = None) -> None:
        """Show that `step` steps are done."""
        fields: dict[str, Any] = {} if note is None else {"note": note}
        self.progress.update(self.task, completed=step, **fields)

    def close(self) -> None:
        """Stop updating the bar."""
        self.progress.stop()
