"""The five papers: which runs fill their figures and tables, measurements on finished runs, claims, verdicts and pictures.

It builds on the library, which never imports it: what trains, sweeps, counts and quantizes works without this package.
"""

from bitcycle.door import SubCommand

_MODULES = {
    "collect": ("analysis.collect", "gather finished runs and their curves into results/summary"),
    "figures": ("figure.make", "draw the figures and tables of the papers, results/index.html"),
    "manifest": ("manifest", "which run fills which cell of every figure and table"),
    "reproduce": ("reproduce", "train, analyse and draw every item of the papers at one scale"),
    "gpu-day": ("gpu_day", "train sweeps in the order of claims per hour, within some hours"),
    "campaign": ("campaign", "train a plan of sweeps in the background, in the order of the plan"),
    "freeze": ("freeze", "freeze the tests of claims before the first run that decides them"),
    "advise": ("advise", "the schedules within a cost budget, with their recorded accuracy"),
    "analyse": ("measurement.after_sweep", "the analyses of finished runs that a sweep file lists"),
    "surface": ("measurement.surface", "loss along random directions around a finished network"),
    "plane": ("measurement.plane", "loss on the plane through three finished networks"),
    "sharpness": ("measurement.sharpness", "epsilon-sharpness of the loss at a finished network"),
    "corruption": ("measurement.corruption", "accuracy of a finished network on corrupted images"),
    "noise": ("measurement.noise", "error rates of a finished speech recognizer on noisy recordings"),
}
SUB_COMMANDS = {name: SubCommand(f"{__name__}.{module}", words) for name, (module, words) in _MODULES.items()}
"""Sub-command on the command line -> its module. This file imports nothing else, as every call of the command reads it."""
