"""The five papers: which runs fill their figures and tables, measurements on finished runs, claims, verdicts and pictures.

It builds on the library, which never imports it: what trains, sweeps, counts and quantizes works without this package.
"""

from bitcycle.door import SubCommand

SUB_COMMANDS = {
    "collect": SubCommand(
        "bitcycle.reproduction.analysis.collect",
        "gather finished runs and their curves into results/summary",
        ("FOLDER", "?", "folder of the run folders; default: results/runs"),
    ),
    "figures": SubCommand(
        "bitcycle.reproduction.figure.make", "draw the figures and tables of the papers, results/index.html", ()
    ),
    "manifest": SubCommand(
        "bitcycle.reproduction.manifest",
        "which run fills which cell of every figure and table",
        ("SCALE", "*", "paper, mini or smoke; default: all"),
    ),
    "reproduce": SubCommand(
        "bitcycle.reproduction.reproduce", "train, analyse and draw every item of the papers at one scale"
    ),
    "gpu-day": SubCommand(
        "bitcycle.reproduction.gpu_day", "train sweeps in the order of claims per hour, within some hours"
    ),
    "campaign": SubCommand(
        "bitcycle.reproduction.campaign", "train a plan of sweeps in the background, in the order of the plan"
    ),
    "freeze": SubCommand(
        "bitcycle.reproduction.analysis.frozen", "freeze the tests of claims before the first run that decides them"
    ),
    "advise": SubCommand(
        "bitcycle.reproduction.advise", "the schedules within a cost budget, with their recorded accuracy"
    ),
    "analyse": SubCommand(
        "bitcycle.reproduction.measurement.after_sweep", "the analyses of finished runs that a sweep file lists"
    ),
    "surface": SubCommand(
        "bitcycle.reproduction.measurement.surface", "loss along random directions around a finished network"
    ),
    "plane": SubCommand("bitcycle.reproduction.measurement.plane", "loss on the plane through three finished networks"),
    "sharpness": SubCommand(
        "bitcycle.reproduction.measurement.sharpness", "epsilon-sharpness of the loss at a finished network"
    ),
    "corruption": SubCommand(
        "bitcycle.reproduction.measurement.corruption", "accuracy of a finished network on corrupted images"
    ),
    "noise": SubCommand(
        "bitcycle.reproduction.measurement.noise", "error rates of a finished speech recognizer on noisy recordings"
    ),
}
"""Sub-command on the command line -> its module. This file imports nothing else, as every call of the command reads it."""
