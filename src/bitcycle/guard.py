"""Every error of a command as one readable line and an exit code; those of Hydra and OmegaConf with setting, value and remedy."""

import logging
import re
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from bitcycle.configuration import all_keys, unknown_setting
from bitcycle.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, DataError, RunError
from bitcycle.optional_imports import explain_missing
from bitcycle.settings import SettingError, nearest
from bitcycle.signals import Interrupted

SWEEPS = "sweeps"
"""The group of the sweep files, which need -m."""
_REFUSALS = (
    (r"is not Optional", "cannot be null", "give a value, or omit {key}"),
    (r"could not be converted to (\w+)", "has the wrong type", "give a value of type {0}"),
    (r"is not a valid bool", "is neither true nor false", "write {key}=true or {key}=false"),
    (r"is not a ListConfig", "is not a list", "write {key}=[{value}]"),
    (
        r"is not a subclass of [A-Z]",
        "is a group of several settings",
        "write {key}.SETTING={value} with one of {settings}",
    ),
    (r"is not a subclass of (\w+)", "has an entry of the wrong type", "give only values of type {0}"),
)
"""Pattern of OmegaConf's message about a wrong type -> problem and remedy of our message."""


def explain_hydra(error: BaseException) -> str:
    """The message of a Hydra or OmegaConf error, with a remedy instead of the advice to append unknown keys."""
    causes = [error]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    text = "\n".join(str(cause) for cause in causes)
    if explained := _explain_sweep(text) or _explain_composition(text):
        return explained
    if bare := re.search(r"Error parsing override '([^'=]*)'", text):
        return f"'{bare[1]}' is not a setting with a value. Remedy: write SETTING=VALUE, such as schedule=RTH"
    for cause in causes:
        if isinstance(cause, MissingConfigException) and cause.options:
            group, _, name = str(cause.missing_cfg_file).rpartition("/")
            return str(SettingError(group, name, "does not exist", nearest(name, cause.options)))
        if isinstance(cause, OverrideParseException):
            key, _, value = cause.override.partition("=")
            text_of = value.strip("'").replace("'", "\\'")
            remedy = (
                f"""check its brackets and commas; a text with special characters is written "{key}='{text_of}'\""""
            )
            return str(SettingError(key, value, "cannot be parsed", remedy))
    if several := re.search(r"Ambiguous value for argument '([^=]+)=([^']*)'", text):
        key, values = several.groups()
        remedy = f"add -m for one run for each value, or write {key}=[{values}] if the setting is a list"
        return str(SettingError(key, values, "is several values", remedy))
    if (unknown := re.search(r"Could not override '([^']+)'", text)) and "not in" in text:
        return str(unknown_setting(unknown[1]))
    if refused := re.search(r"Error merging override \+*([^=]+)=([^\n]*)", text):
        key, value = refused.groups()
        settings = ", ".join(name.removeprefix(f"{key}.") for name in all_keys() if name.startswith(f"{key}."))
        for words, problem, remedy in _REFUSALS:
            if found := re.search(words, text):
                remedy = remedy.format(*found.groups(), key=key, value=value, settings=settings)
                return str(SettingError(key, value, problem, remedy))
    lines = dict.fromkeys(line for line in text.splitlines() if line.strip() and not line.startswith("  "))
    return f"{'; '.join(lines)}. Remedy: `python train.py --help` lists all groups, options and settings."


def _explain_composition(text: str) -> str | None:
    """The message if a setting is to be removed, or refers to something that does not exist; None for other errors."""
    if removed := re.search(r"override ~([^=\s]+)\s.*does not support deletion", text, re.DOTALL):
        return f"~{removed[1]}: a setting cannot be removed. Remedy: leave it out, or write {removed[1]}=null."
    if lacking := re.search(r"resolving interpolation: \W*(.+?)\W*$", text):
        return f"{lacking[1]}, to which a setting refers. Remedy: define it, or write the value itself."
    return None


def _explain_sweep(text: str) -> str | None:
    """The message if the choice of a sweep file is wrong; None for other errors."""
    if missing := re.search(rf"Could not find '{SWEEPS}/([^']*)'", text):
        folder = re.search(r"provider=bitcycle, path=file://(.*)", text)
        files = Path(folder[1], SWEEPS).glob("*/*.yaml") if folder else ()
        known = sorted(f"{file.parent.name}/{file.stem}" for file in files)
        return str(SettingError(f"+{SWEEPS}", missing[1], "does not exist", nearest(missing[1], known)))
    if plain := re.search(rf"'{SWEEPS}'. No match in the defaults list.*?\+{SWEEPS}=(\S+)", text, re.DOTALL):
        name = plain[1].rstrip(".")
        return str(SettingError(SWEEPS, name, "is not in the defaults list", f"write a + before it: +{SWEEPS}={name}"))
    return None


logger = logging.getLogger("bitcycle")


class JobFailed(Exception):
    """A run has failed; the reason has already been printed."""

    def __init__(self, code: int) -> None:
        super().__init__(f"exit code {code}")
        self.code = code


def check_counts(given: Namespace, *names: str) -> None:
    """Refuse numbers below 1 of options, such as jobs for --jobs; None is a default. Raises SettingError."""
    for name in names:
        number = getattr(given, name)
        if number is not None and number < 1:
            raise SettingError("--" + name.replace("_", "-"), number, "is too small", "use 1 or more")


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
        if isinstance(error, ModuleNotFoundError) and (sentence := explain_missing(error)):
            return _complain(RunError.kind, sentence, RunError.exit_code)
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
