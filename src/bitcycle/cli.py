"""The command `bitcycle`, also `python -m bitcycle` and `python train.py`: a run, a sweep (-m), or one of the sub-commands."""

import runpy
import sys
from pathlib import Path

from bitcycle.door import sub_commands
from bitcycle.errors import EXIT_WRONG_CONFIGURATION
from bitcycle.files import resource_root
from bitcycle.presets import named_folders, search_named_folders
from bitcycle.settings import SettingError, nearest
from bitcycle.signals import stop_at_once
from bitcycle.threads import choose_threads


def main(conf: Path | None = None) -> int:
    """Run the command line in `sys.argv` and return the exit code; `conf` is the folder of the configuration files. Raises
    SystemExit if a sub-command raises it, and for arguments that it does not have."""
    stop_at_once()  # importing PyTorch takes seconds; a cluster may send a signal meanwhile
    choose_threads()
    _, words = named_folders(sys.argv[1:])
    word = words[0] if words else ""
    known = sub_commands()
    if word in known:
        from bitcycle.guard import guarded
        from bitcycle.training.display import set_up_console

        def run() -> None:
            sys.argv[1:] = search_named_folders(sys.argv[1:])[1:]
            runpy.run_module(known[word].module, run_name="__main__", alter_sys=True)

        set_up_console()
        return guarded(run)
    if word.isidentifier():
        error = SettingError("sub-command", word, "there is no such sub-command", nearest(word, known))
        print(f"wrong configuration: {error}", file=sys.stderr)
        return EXIT_WRONG_CONFIGURATION
    from bitcycle import train_command

    return train_command.main(conf or resource_root() / "conf")
