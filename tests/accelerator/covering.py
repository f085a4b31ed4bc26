"""Small runs on the pretended accelerator that cover the pairs of quantizer with schedule kind, network and way of computing."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch import nn

from bitcycle.files import read_csv
from bitcycle.model import ncf
from bitcycle.quantizer import QUANTIZERS, compile_utils
from bitcycle.quantizer.mx import BLOCK_FORMATS
from bitcycle.settings import SettingError
from bitcycle.training.plan import Plan
from bitcycle.training.run import execute
from tests.accelerator.case import Watch, Watched
from tests.accelerator.pretended import DEVICE, start
from tests.conftest import ROOT, digits_plan
from tests.made_data import IMAGES, with_made_data
from tests.settings import (
    BLOCKS,
    ENTAILMENT,
    GRAPH,
    QUANTIZER_SCHEDULES,
    QUICK_STAGES,
    RECOMMENDATION,
    RESUME,
    SMALL_TEXT,
    SPEECH_RUN,
)

FEW = [
    *("training.epochs=null", "training.steps=3", "training.evaluation_steps=3", "training.checkpoint_seconds=1e9"),
    "training.learning_rate.initial=0.001",
]
DIGITS = ["dataset.train_samples=12", "dataset.test_samples=2", "training.batch_size=4"]
LARGER_IMAGES = [
    *DIGITS,
    "dataset=image_folder",
    f"dataset.path={IMAGES}",
    "dataset.image_size=32",
    "dataset.workers=0",
]
SHORT_TEXT = ["task.evaluation_batch_size=20", "task.sequence_length=3"]
WORDS = [*SMALL_TEXT, *SHORT_TEXT, "model.hidden=4"]

NETWORKS = {
    "resnet8": ["model=resnet8", *DIGITS],
    "lstm2": [*WORDS, "model=lstm2"],
    "transformer": [*BLOCKS, *SHORT_TEXT],
    "gcn_small": [*GRAPH, "model=gcn_small"],
    "ncf": [*RECOMMENDATION, "dataset.test_samples=4"],
}
"""A network for each kind of product: convolution, recurrence, attention, graph, and embedding."""
OTHER_NETWORKS = {
    "resnet8_extra_skip": ["model=resnet8_extra_skip", *DIGITS],
    "resnet18": ["model=resnet18", *LARGER_IMAGES],
    "mobilenet_v2": ["model=mobilenet_v2", *DIGITS],
    "vgg16": ["model=vgg16", *LARGER_IMAGES],
    "custom": ["model=custom", "model.target=tests.accelerator.covering:small", *DIGITS],
    "timm": ["model=timm", "model.architecture=test_resnet", *DIGITS],
    "timm attention": ["model=timm", "model.architecture=test_vit", *LARGER_IMAGES],
    "gru_hlhlp": [*WORDS, "model=gru_hlhlp"],
    "lstm_awd": [*WORDS, "model=lstm_awd", "model.embedding=6"],
    "llama": [*BLOCKS, *SHORT_TEXT, "model=llama"],
    "graphsage": [*GRAPH, "model=graphsage", "dataset.neighbours=[3,2]", "dataset.self_loops=false"],
    "bert_tiny": ENTAILMENT,
    "speech_lstm": SPEECH_RUN,
}
"""Detection takes seconds a step: its run in the table of settings is left to `make test-all`."""
COMPUTING = {
    "simulate": [],
    "codes": ["training.compute=codes"],
    "codes and recompute": ["training.compute=codes", "training.recompute=true"],
    "compile": ["training.compile=true"],
}
SMALL_NCF = {"FACTORS": 8, "EMBEDDING": 8, "WIDTHS": (16, 8)}
"""Sizes of the embeddings and layers of `ncf`, which are constants."""
CYCLES = ["schedule.cycles=2", "training.steps=4"]
FEW_CHOICES = ["schedule.candidates=2", "schedule.alpha=0.1", "schedule.later_length=1", "training.steps=8"]
SCHEDULE_KINDS = {
    "CR": CYCLES,
    "RTH": [*CYCLES, "schedule.q_min=4"],
    "delayed": CYCLES,
    "hlhlp": FEW_CHOICES,
    "pfq": QUICK_STAGES,
    "fractrain": QUICK_STAGES,
    "range_test": ["schedule.level_steps=1", "schedule.window=1", "schedule.stop=false", "training.steps=8"],
    **{name: [] for name in ("static", "deficit", "dfq", "late_switch", "partial_pretrain", "pfq_manual")},
}
"""A schedule of each kind, and what makes it short."""


def small(channels: int, classes: int) -> nn.Module:
    """Somebody's own network."""
    layers = [
        nn.Conv2d(channels, 4, 3),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    ]
    return nn.Sequential(*layers, nn.Linear(4, classes))


RECORD = ROOT / "results" / "summary" / "accelerator.csv"
PARTS = 3
OWN = "its own"
"""The schedule of a quantizer in the table of settings, within the bits that it offers."""


class Row(NamedTuple):
    """A run: quantizer, schedule, network, way of computing and, of MX, the format."""

    quantizer: str
    schedule: str = OWN
    network: str = "resnet8"
    computing: str = "simulate"
    format: str = ""

    @property
    def name(self) -> str:
        """What the record calls it."""
        return ", ".join(filter(None, self))

    @property
    def settings(self) -> list[str]:
        """Its overrides, of which later ones count."""
        own = QUANTIZER_SCHEDULES.get(self.quantizer, ["schedule=CR", *CYCLES])
        scheduled = (
            [*own, "training.steps=4"]
            if self.schedule == OWN
            else [f"schedule={self.schedule}", *SCHEDULE_KINDS[self.schedule]]
        )
        found = [*(NETWORKS | OTHER_NETWORKS)[self.network], *FEW, f"quantizer={self.quantizer}", *scheduled]
        if self.format:
            bits = BLOCK_FORMATS[self.format].bits
            found += [f"quantizer.{role}_formats=[{self.format}]" for role in ("forward", "gradient")]
            found += [f"schedule.q_max={bits}", f"schedule.gradient={bits}"]
        return [*found, *COMPUTING[self.computing]]


def rows_of(quantizer: str, every: bool = False) -> Iterator[Row]:
    """Each schedule kind that goes with a quantizer once, where networks and ways of computing take turns so that quantizers meet
    all of them; then each network that it has not met, with `every` also the others."""
    turn, met = [*QUANTIZERS].index(quantizer), set()
    for number, schedule in enumerate(SCHEDULE_KINDS, turn):
        alone = Row(quantizer, schedule)
        if possible(alone):
            row = Row(quantizer, schedule, nth(NETWORKS, number), nth(COMPUTING, number + turn))
            row = row if possible(row) else alone
            met.add(row.network)
            yield row
    rest = (Row(quantizer, OWN, network) for network in [*NETWORKS, *(OTHER_NETWORKS if every else ())])
    yield from (row for row in rest if row.network not in met and possible(row))


def rows(part: int) -> Iterator[Row]:
    """The rows of the default tests in parts: every second quantizer with what it goes with, the others, and last each other
    network and each format."""
    for quantizer in [*QUANTIZERS][part::2] if part < 2 else ():
        yield from rows_of(quantizer)
    for number, network in enumerate(OTHER_NETWORKS if part == 2 else ()):
        yield Row("sbm", nth(("CR", "static", "deficit"), number), network)
    for number, name in enumerate(BLOCK_FORMATS if part == 2 else ()):
        yield Row("mx", "static", nth(NETWORKS, number), format=name)


def nth(names: Collection[str], number: int) -> str:
    """A name, counted in a circle."""
    return [*names][number % len(names)]


def possible(row: Row) -> bool:
    """Whether the settings go together; where they do not, a sentence says so before anything is computed."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        try:
            planned(row, Path(folder), patch)
        except SettingError:
            return False
    return True


def planned(row: Row, folder: Path, patch: pytest.MonkeyPatch) -> Plan:
    """The run of a row on made data. Raises SettingError for settings that do not go together."""
    return digits_plan(folder / "runs", *with_made_data(row.settings, folder, patch))


def recorded_rows() -> list[Row]:
    """The rows of all parts as the record has them: to find out what goes together takes as long as a sixth of the runs."""
    cases = (row["case"] for row in read_csv(RECORD))
    return [Row(*case.split(", ")) for case in cases if case not in RESUME]


def outcomes(part: int) -> dict[str, Any]:
    """What every third row did on the device: waits in steady steps, or the error."""
    start()
    return {row.name: trained(row) for row in recorded_rows()[part::PARTS]}


def trained(row: Row, watch: Watch = DEVICE.watch, compiler: bool = False) -> Any:
    """The waits in the steady steps of a run, or its error; without a compiler, as on the pretended device."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if not compiler:
            patch.setattr(compile_utils, "exactly_compiled", no_compiler)
        for name, small_size in SMALL_NCF.items():
            patch.setattr(ncf, name, small_size)
        try:
            plan = planned(row, Path(folder), patch)
            watched = Watched(patch, watch)
            execute(plan)
        except Exception as error:
            return f"{type(error).__name__}: {str(error)[:300]}"
        return dict(watched.found)


def no_compiler(function: Any) -> Any:
    """The device has none, so that training.compile has to do without."""
    raise RuntimeError("no compiler for this device")
