"""Every error of a command as one readable line and an exit code."""

import logging
import sys
import traceback
from collections.abc import Callable

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from bitcycle.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, DataError, RunError
from bitcycle.hydra_errors import explain_hydra
from bitcycle.settings import SettingError
from bitcycle.signals import Interrupted

logger = logging.getLogger("bitcycle")


class JobFailed(Exception):
    """A run has failed; the reason has already been printed."""

    def __init__(self, code: int) -> None:
        super().__init__(f"exit code {code}")
        self.code = code


def guarded(action: Callable[[], object]) -> int:
    """Run an action and return its exit code; known errors are printed as one line, unknown ones with a traceback."""
    try:
        code = action()
        return code if isinstance(code, int) else EXIT_DONE
    except (SettingError, DataError, RunError) as error:
        return _complain(error.kind, error, error.exit_code)
    except (HydraException, OmegaConfBaseException) as error:
        return _complain(SettingError.kind, explain_hydra(error), SettingError.exit_code)
    except JobFailed as error:
        return error.code
    except Interrupted:
        return EXIT_INTERRUPTED
    except KeyboardInterrupt:
        return _complain("interrupted", "what was saved is kept; run the same command again", EXIT_INTERRUPTED)
    except Exception as error:
        if isinstance(error, ValueError) and "Config group override" in str(error):  # a check of Hydra
            words = "a group is set to null; choose one of its options"
            return _complain(SettingError.kind, words, SettingError.exit_code)
        if plugin := _plugin_of(error):
            return _complain("sweep failed", f"{plugin}: {type(error).__name__}: {error}", EXIT_FAILED)
        logger.exception("unexpected error; this is a bug of bitcycle or of a library")
        return EXIT_FAILED


def _plugin_of(error: BaseException) -> str | None:
    """The third-party Hydra plugin in which an error was raised; None if there is none."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    plugins = [name.split(".")[1] for name in modules if name.startswith("hydra_plugins.")]
    return plugins[-1] if plugins and plugins[-1] != "bitcycle_plugins" else None


def _complain(kind: str, message: object, code: int) -> int:
    print(f"{kind}: {message}", file=sys.stderr)
    return code
