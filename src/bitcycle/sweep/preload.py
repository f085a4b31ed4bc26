"""Imported by the fork server of a sweep alone: makes it a process that has imported everything that runs need.

The server computes nothing, as the threads of a computation do not survive a fork; nor does CUDA, hence runs on a GPU are started
without it.
"""

import contextlib
import importlib
import os
import warnings

MODULES = (
    *("bitcycle.command", "bitcycle.sweep.priority"),
    *("hydra_plugins.bitcycle_plugins.grid_sweeper", "hydra_plugins.bitcycle_plugins.local_launcher"),
    *("torch._meta_registrations", "torch._dynamo", "torch.utils.flop_counter"),
    *(
        "datasets",
        "sklearn.datasets",
        "pandas",
        "torchvision",
        "torchmetrics",
        "transformers.models.bert.modeling_bert",
    ),
)
"""What runs import, some of it only on the way; one that is not installed is left out."""

with contextlib.suppress(PermissionError):  # it leads a session already
    os.setsid()  # a signal to the sweep and all its descendants is the sweep's to pass on
# a library of ours keeps a thread of its own, which its own handler stops around a fork
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
for name in MODULES:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
importlib.import_module("bitcycle.configuration").register_schemas()
with contextlib.suppress(ImportError):
    importlib.import_module("hydra.core.plugins").Plugins.instance()  # Hydra looks for plugins once in each process
