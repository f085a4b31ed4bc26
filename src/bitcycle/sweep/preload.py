"""Imported by the fork server of a sweep alone: what a process needs beyond imports before runs are forked from it."""

import contextlib
import importlib
import os
import warnings

with contextlib.suppress(PermissionError):  # it leads a session already
    os.setsid()  # a signal to the sweep and all its descendants is the sweep's to pass on
# a library of ours keeps a thread of its own, which its own handler stops around a fork
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
importlib.import_module("bitcycle.configuration").register_schemas()
with contextlib.suppress(ImportError):
    importlib.import_module("hydra.core.plugins").Plugins.instance()  # Hydra looks for plugins once in each process
