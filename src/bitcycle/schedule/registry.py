"""Registry of schedules by name, and the function that constructs one."""

from typing import Any

from bitcycle.schedule.base import Schedule, ScheduleOptions
from bitcycle.schedule.cyclic import Cyclic, Delayed
from bitcycle.schedule.gated import Dfq, FracTrain
from bitcycle.schedule.phased import Hlhlp, PartialPretrain
from bitcycle.schedule.range_test import RangeTest
from bitcycle.schedule.staged import Pfq, Staged
from bitcycle.schedule.static import Deficit, Static
from bitcycle.settings import Preset, chosen, registry

SUITE = {
    "CR": ("cosine", "repeated", "cosine, repeated: the schedule of CPT (group Medium)"),
    "CT": ("cosine", "horizontal", "cosine, triangular (group Medium)"),
    "LR": ("linear", "repeated", "linear, repeated (group Medium)"),
    "LT": ("linear", "horizontal", "linear, triangular (group Medium)"),
    "RR": ("rex", "repeated", "REX, repeated: low for long, saves most (group Large)"),
    "RTV": ("rex", "vertical", "REX, triangular, mirrored in value (group Medium)"),
    "RTH": ("rex", "horizontal", "REX, triangular, mirrored in time: low for long, saves most (group Large)"),
    "ER": ("exponential", "repeated", "exponential, repeated: high for long, saves least (group Small)"),
    "ETV": ("exponential", "vertical", "exponential, triangular, mirrored in value (group Medium)"),
    "ETH": ("exponential", "horizontal", "exponential, triangular, mirrored in time: saves least (group Small)"),
}
"""The ten schedules of Better Schedules, section 3.2: profile, form and description of each."""

HLHLP = "HLHLp, section 3.2; recipes: training=hlhlp quantizer=uniform_l2"

SCHEDULES: dict[str, Preset[ScheduleOptions]] = registry(
    {
        "static": Preset(Static, "the same precision at every step, q_max: the baseline", "all papers"),
        **{
            name: Preset(Cyclic, summary, "Better Schedules, section 3.2", profile=profile, form=form)
            for name, (profile, form, summary) in SUITE.items()
        },
        "cosine_anneal": Preset(
            Cyclic,
            "cosine from high to low in each cycle; ends low",
            "CPT, table 6",
            profile="cosine",
            form="annealing",
            cycles=32,
        ),
        "triangular": Preset(
            Cyclic,
            "linear, up and down within each cycle; ends low",
            "CPT, table 6 (its alternating reading is schedule=LT)",
            profile="linear",
            form="within",
            cycles=32,
        ),
        "gradient_cycle": Preset(
            Cyclic,
            "static forward precision, cyclic gradient precision",
            "CPT, appendix C and table 8",
            profile="cosine",
            cycles=32,
            q_min=6,
            q_max=6,
            gradient_min=6,
            gradient_max=8,
        ),
        "delayed": Preset(
            Delayed,
            "q_min until `start`, then the cosine cycles of CPT",
            "CPT, appendix B and table 7",
            profile="cosine",
            cycles=32,
        ),
        "deficit": Preset(Deficit, "q_min inside a window of the run, q_max outside", "Better Schedules, section 5"),
        "pfq_manual": Preset(
            Staged,
            "stages of rising precision, of equal length unless schedule.boundaries is set",
            "FracTrain, appendix A; CPT, figure 1 and table 1",
        ),
        "pfq": Preset(
            Pfq,
            "stages of rising precision; the next stage begins when the loss becomes flat",
            "FracTrain, section 3.1 and algorithm 1",
        ),
        "dfq": Preset(
            Dfq,
            "gates choose the bits per block and sample, for a target cost",
            "FracTrain, section 3.2 and appendix F",
        ),
        "fractrain": Preset(
            FracTrain,
            "DFQ with a target cost that rises in stages, whenever the loss becomes flat",
            "FracTrain, section 3.3, algorithm 2 and appendix G",
        ),
        "hlhlp": Preset(
            Hlhlp, "phases of float, 2, 8 and 2 bits, starting from weights selected by validation and flatness", HLHLP
        ),
        "hlhlhlp": Preset(
            Hlhlp,
            "hlhlp with its second and third phase repeated: six phases",
            f"{HLHLP} training.epochs=700, 175 of float training and 105 for each later phase",
            bits=[32, 2, 8, 2, 8, 2],
            rates=["initial", "coarse", "fine", "coarse", "fine", "fine"],
            start_from=["previous", "best", "flattest", "best", "flattest", "best"],
        ),
        "fine_tuning": Preset(
            Hlhlp,
            "float, then 2 bits at a low learning rate from the best weights: the baseline of hlhlp",
            "HLHLp, section 4.1 (the last phase of hlhlp right after its first); with training.epochs=280: 175 and 105",
            bits=[32, 2],
            rates=["initial", "fine"],
            start_from=["previous", "best"],
        ),
        "partial_pretrain": Preset(
            PartialPretrain,
            "float training, then low precision, each with a complete learning rate schedule",
            "partial pre-training, section 3 and algorithm 1; with quantizer=pact_binary and training=partial",
        ),
        "range_test": Preset(
            RangeTest,
            "precision range test: raises precision until training accuracy rises, to find q_min, then ends the run",
            "CPT, section 3.3; with schedule.q_min=auto a cyclic schedule does this first",
        ),
    }
)
"""Schedule name -> its options. The ablations of HLHLp's table 6 are other values of hlhlp:

    (A) lengths=[50,30,30,30]
    (B) lengths=[50,30,30,30] bits=[32,32,32,2]    float at the rates of (A), then 2 bits
    (C) lengths=[50,30,30,30] bits=[32,2,2,2]      2 bits at the rates of (A)
    (D) lengths=[110,30] bits=[32,2] rates=[initial,fine] start_from=[previous,best]    float with a single descent, then 2 bits
"""


def schedule(name: str, *, total_steps: int, steps_per_epoch: int | None = None, **options: Any) -> Schedule:
    """Construct the schedule `name` for a run of `total_steps` optimizer steps.

    Args:
        name: one of `SCHEDULES`.
        total_steps: length of the run in optimizer steps.
        steps_per_epoch: length of an epoch, only needed with unit="epoch".
        options: fields of the schedule's class, such as q_min, q_max and cycles.

    Raises:
        SettingError (a ValueError): for an unknown name or option, or invalid values.

    >>> rth = schedule("RTH", q_min=3, q_max=8, cycles=8, total_steps=64_000)
    >>> rth(0), rth(4_000)
    (Precision(weight=8, activation=8, gradient=8), Precision(weight=3, activation=3, gradient=8))
    """
    return chosen("schedule", SCHEDULES, name)(**options).bind(total_steps, steps_per_epoch)
