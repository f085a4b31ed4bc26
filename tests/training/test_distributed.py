"""One run in two processes: the numbers of one process up to rounding, exact resume, one writer, and an end for all of them."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import bitcycle.dataset.images as images_module
from bitcycle import distributed
from bitcycle.files import read_json, read_records, write_json
from bitcycle.layer import share_batch_norm
from bitcycle.quantizer import QUANTIZERS
from bitcycle.settings import SettingError
from bitcycle.training.run import execute
from tests.conftest import plan
from tests.dataset.test_dataset import write_folders
from tests.made_data import MAKERS, PAIRS, TEXT, VOC
from tests.pair import exit_codes, fork_training, run_pair
from tests.settings import BLOCKS, DETECTION, ENTAILMENT, SMALL_TEXT
from tests.training.test_resume import Crash, assert_equal, crash_at, result

SMALL = ("dataset=digits", "model=resnet8", "scale=smoke", "training.steps=8", "training.evaluation_steps=4")
SMALL += ("training.compile=false",)
RAGGED = (
    "dataset.train_samples=53",
    "dataset.test_samples=41",
    "task.evaluation_batch_size=20",
    "training.log_steps=1",
)
"""The last of four batches has 5 samples, and the last evaluated one has a single one."""

SAME: dict[str, list[str]] = {
    "none": ["quantizer=none", "dataset.crop_padding=1"],
    "RTH": ["schedule=RTH"],
    "partial": ["schedule=partial_pretrain", "quantizer=pact_binary", "model=resnet8_extra_skip"],
    "pfq": ["schedule=pfq", "schedule.epoch_steps=2", "schedule.epsilon=0.5", "schedule.alpha=1"],
    "fp8": ["quantizer=fp8", "schedule=static"],
}
"""Case -> settings of a run that gives the same in one process and in two."""

RTH = ("schedule=RTH", "schedule.cycles=2")
EXACT = ("schedule=static",)
"""8 bits: on few levels some values come to lie exactly midway between two (a key along a block), where any digit decides."""
FEW = (
    "training.compile=false",
    "training.steps=6",
    "training.log_steps=1",
    "training.evaluation_steps=3",
)
STREAMS = [*SMALL_TEXT, "model.hidden=8", "model.dropout=0", "training.batch_size=5", "task.evaluation_batch_size=3"]
UNDROPPED = [*BLOCKS, "model.dropout=0", "task.evaluation_batch_size=3", "training.batch_size=8"]
BOXES = [
    *[x for x in DETECTION if "cycles" not in x],
    *EXACT,
    "training.batch_size=3",
    "dataset.test_samples=3",
    "task.evaluation_batch_size=2",
]
TASKS: dict[str, list[str]] = {
    "lstm": [*STREAMS, "model=lstm2", *RTH, *FEW],
    # with seed 0, a value lies halfway between two levels, where the last digit of a sum decides: one thread or two differ
    "transformer": [*UNDROPPED, "quantizer=dorefa", "seed=1", *FEW],
    "entailment": [*ENTAILMENT, *EXACT, "model.dropout=0", "training.batch_size=7", "dataset.test_samples=9", *FEW],
    "detection": [*BOXES, *FEW, "training.steps=3"],
}
"""The same for the other tasks, without dropout, whose noise each process draws for its share."""
SAME_SLOWLY: dict[str, list[str]] = {
    "static": ["schedule=static"],
    "gru": [*STREAMS, "model=gru_hlhlp", "model.dropout_embedding=0", "quantizer=dorefa", *EXACT, *FEW],
    "transformer": [*UNDROPPED, *EXACT, *FEW],
}
"""The same for `make test-all`."""

RESUMED = {
    "images": ["schedule=RTH", "training.steps=12", "training.evaluation_steps=5"],
    "lstm": [*TASKS["lstm"], "training.steps=12", "training.evaluation_steps=5"],
}
"""Runs that are cut off; what an LSTM carries on from batch to batch lies in both processes."""
RESUMED_SLOWLY = {
    case: [*TASKS[case], "training.steps=12", "training.evaluation_steps=5"]
    for case in ("transformer", "entailment", "detection")
}
"""The same for `make test-all`."""


LONG = (*SMALL, "schedule=RTH", "training.steps=100000", "training.evaluation_steps=50000")
LONG += ("training.checkpoint_seconds=0.1",)
"""A run that somebody has to stop."""


def planned(folder: Path, case: str, settings: list[str]):
    """The run of a case below `folder`; made-up data lie beside it."""
    made = [
        re.sub(rf"\b({'|'.join(MAKERS)})\b", lambda word: str(folder.parent / "data" / MAKERS[word[0]][0]), x)
        for x in settings
    ]
    base = ("scale=smoke",) if any(setting.startswith("dataset=") for setting in settings) else (*SMALL, *RAGGED)
    return plan(*base, *made, f"results_root={folder}/{case}")


def in_double(run):
    """Train in float64, where differences of rounding are too small to move a value to another level."""
    torch.set_default_dtype(torch.float64)
    try:
        return execute(run)
    finally:
        torch.set_default_dtype(torch.float32)


# What is done in other processes; see tests/pair.py.


def lose_and_stop(folder: Path) -> None:
    """Start a run that another process trains, kill the second process of one, go on, and ask the second one to stop."""
    overrides = [*LONG, f"results_root={folder}/signals"]
    run = plan(*overrides).folder
    with run.lock():
        write_json(folder / "locked.json", exit_codes(fork_training(folder / "locked", *overrides)))
    for name, number in (("killed", signal.SIGKILL), ("stopped", signal.SIGTERM)):
        before = run.read_status().get("step", 0)
        children = fork_training(folder / name, *overrides)
        while run.read_status().get("step", 0) < before + 3:
            time.sleep(0.01)
        os.kill(children[1], number)
        write_json(folder / f"{name}.json", exit_codes(children))
        if number == signal.SIGKILL:
            status = run.read_status()
            assert status["state"] == "failed" and "another process" in status["reason"], status


def train_the_same_slowly(folder: Path) -> None:
    train_the_same(folder, SAME_SLOWLY)


def train_the_same(folder: Path, cases: dict[str, list[str]] = SAME | TASKS) -> None:
    for case, settings in cases.items():
        place = folder / ("pair" if distributed.rank() == 0 or case == "partial" else "nowhere")
        in_double(planned(place, case, settings))
    assert not (folder / "nowhere").exists()


def nothing(folder: Path) -> None:
    """What one process does before the pair begins."""


def crash_and_resume_slowly(folder: Path) -> None:
    crash_and_resume(folder, RESUMED_SLOWLY)


def crash_and_resume(folder: Path, cases: dict[str, list[str]] = RESUMED) -> None:
    for name, case in itertools.product(("undisturbed", "disturbed"), cases):
        run = planned(folder / name, case, [*cases[case], "training.checkpoint_seconds=0"])
        for checkpoint_step, crash_step in ((3, 5), (8, 9)) if name == "disturbed" else ():  # all save one step later
            with pytest.MonkeyPatch.context() as patch:
                crash_at(patch, crash_step, checkpoint_step)
                with pytest.raises(Crash):
                    execute(run)
            distributed.barrier()
        execute(run)


def normalise_a_batch(folder: Path) -> None:
    """Batch norm of two unequal shares is that of the whole: output, running statistics, all gradients."""
    torch.manual_seed(0)
    x, upstream = torch.randn(7, 3, 4, 5, dtype=torch.float64) * 3 + 1, torch.randn(7, 3, 4, 5, dtype=torch.float64)
    for affine, momentum in ((True, 0.1), (False, None)):
        one = nn.Sequential(nn.BatchNorm2d(3, affine=affine, momentum=momentum), nn.Conv2d(3, 3, 1)).double()
        if affine:
            nn.init.normal_(one[0].weight)
        other = nn.Sequential(nn.BatchNorm2d(3, affine=affine, momentum=momentum), nn.Conv2d(3, 3, 1)).double()
        other.load_state_dict(one.state_dict())
        other = share_batch_norm(other)
        whole = x.clone().requires_grad_()
        expected = one(whole)
        (expected * upstream).sum().backward()
        part = distributed.local_shard(x).clone().requires_grad_()
        with distributed.sharded(len(x)):
            y = other(part)
            (y * distributed.local_shard(upstream)).sum().backward()
        torch.testing.assert_close(y, distributed.local_shard(expected))
        torch.testing.assert_close(part.grad, distributed.local_shard(whole.grad))
        for name, buffer in one[0].named_buffers():
            torch.testing.assert_close(dict(other[0].named_buffers())[name], buffer)
        for mine, expected in zip(other.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(distributed.all_sum(mine.grad), expected.grad)


def calibrate_on_a_batch(folder: Path) -> None:
    """The step of uniform_l2 is found from the same elements of the whole batch; runs with it part, as the search for the
    best step hangs on the last digit of a value, in one process too."""
    x = torch.rand(7, 3, 40, 50, generator=torch.Generator().manual_seed(0))
    whole, part = (QUANTIZERS["uniform_l2"]().activation(compile=False) for _ in range(2))
    whole.prepare(x, 3)
    with distributed.sharded(len(x)):
        part.prepare(distributed.local_shard(x), 3)
    assert torch.equal(part.step, whole.step) and whole.step != 1
    steps, whole = (
        x.view(-1, 7, 30),
        QUANTIZERS["uniform_l2"]().activation(compile=False),
    )  # sequences, time steps first
    whole.prepare(steps.flatten(0, 1), 4)
    with distributed.sharded(7):
        part.prepare(distributed.local_shard(steps, dim=1).flatten(0, 1), 4)
    assert torch.equal(part.step, whole.step) and whole.step != 1


def refuse_different_runs(folder: Path) -> None:
    """One srun of several runs, as with seed=$SLURM_PROCID: it trained the run of process 0 on gradients of all, and no other."""
    run = plan(*SMALL, f"seed={distributed.rank()}", f"results_root={folder}/different")
    with pytest.raises(
        SettingError, match=r"^run=.*/seed=1: is that of process 1, but process 0 has .*/seed=0; .*--ntasks=1"
    ):
        execute(run)
    assert not (folder / "different").exists()


def stream_images(folder: Path) -> None:
    """Each process decodes its share of each batch and nothing else."""
    decoded: list[int] = []
    decode = images_module.decode
    images_module.decode = lambda image, *rest: (decoded.append(1), decode(image, *rest))[1]
    execute(plan(*streamed(folder / "images"), f"results_root={folder}/streamed"))
    images_module.decode = decode
    assert len(decoded) == (3 * 20 + 3 * 8) / 2  # three epochs, three evaluations, at the only precision of the run


def streamed(images: Path) -> list[str]:
    return [
        *("dataset=image_folder", f"dataset.path={images}", "dataset.memory_gib=0", "dataset.random_crop=true"),
        *("dataset.train_samples=20", "dataset.test_samples=8", "dataset.workers=0", "model=resnet8", "scale=smoke"),
        *("training.batch_size=10", "training.steps=6", "training.evaluation_steps=2", "training.log_steps=1"),
        "quantizer=none",
    ]


# What it should have done.


def make_data(folder: Path) -> None:
    (folder / "data").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        for word in (TEXT, PAIRS, VOC):
            name, make = MAKERS[word]
            make(folder / "data" / name, patch)
    os.environ["BITCYCLE_CACHE"] = str(folder / "cache")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    write_folders(folder / "images" / "train", {"cat": 10, "dog": 10}, size=(9, 9))
    write_folders(folder / "images" / "test", {"cat": 4, "dog": 4}, size=(9, 9))
    make_data(folder)
    done = run_pair(
        folder,
        "lose_and_stop",
        "train_the_same",
        "crash_and_resume",
        "normalise_a_batch",
        "calibrate_on_a_batch",
        "stream_images",
        "refuse_different_runs",
    )
    assert done.returncode == 0, done.stderr
    return folder


def assert_alike(found, expected, **tolerance) -> None:
    """Records with the same words and bits, and the same numbers up to rounding."""
    assert [record.keys() for record in found] == [record.keys() for record in expected]
    for mine, theirs in zip(found, expected, strict=True):
        for key, value in theirs.items():
            # few levels make equal logits, and any order of them; an activation of one image halfway between two levels,
            # where the last digit of a sum decides, moves its boxes by a tenth of a pixel
            one_image = {"abs": 100 / 41} if "top5" in key else {"abs": 0.02} if "map" in key else {}
            expected = pytest.approx(value, **tolerance, **one_image) if isinstance(value, float) else value
            assert mine[key] == expected, (key, mine)


@pytest.mark.parametrize("case", [*SAME, *TASKS])
def test_two_processes_give_what_one_gives(pair, case):
    assert_the_same(pair, case, (SAME | TASKS)[case])


def assert_the_same(folder: Path, case: str, settings: list[str]) -> None:
    one, two = planned(folder / "one", case, settings), planned(folder / "pair", case, settings).folder
    in_double(one)
    assert_alike(read_records(two.metrics), read_records(one.folder.metrics), rel=1e-5)  # metrics are float32
    losses = [[r["loss"] for r in read_records(run.metrics) if r["kind"] == "train"] for run in (two, one.folder)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12 if case in TASKS else 1e-9)
    states = [run.checkpoint.load() for run in (two, one.folder)]
    close = 1e-6 if case == "detection" else 1e-9  # its training has such activations, too, on some processors
    torch.testing.assert_close(states[0]["model"], states[1]["model"], rtol=1e-8, atol=close)
    assert states[0]["cost"] == states[1]["cost"]
    assert two.read_summary()["cost"] == one.folder.read_summary()["cost"]
    assert two.read_summary()["processes"] == 2


def assert_resumed(folder: Path, case: str, settings: list[str]) -> None:
    undisturbed, disturbed = (planned(folder / name, case, settings).folder for name in ("undisturbed", "disturbed"))
    assert "resuming after step 9" in disturbed.log.read_text()
    assert_equal(result(disturbed), result(undisturbed))


@pytest.mark.parametrize("case", RESUMED)
def test_two_processes_that_crash_go_on_exactly(pair, case):
    assert_resumed(pair, case, RESUMED[case])


@pytest.mark.slow
def test_two_processes_in_other_cases(tmp_path):
    make_data(tmp_path)
    done = run_pair(tmp_path, "nothing", "crash_and_resume_slowly", "train_the_same_slowly")
    assert done.returncode == 0, done.stderr
    for case, settings in SAME_SLOWLY.items():
        assert_the_same(tmp_path, case, settings)
    for case, settings in RESUMED_SLOWLY.items():
        assert_resumed(tmp_path, case, settings)


def test_streamed_images_are_those_of_one_process(pair, tmp_path):
    one = plan(*streamed(pair / "images"), f"results_root={tmp_path}")
    execute(one)
    two = plan(*streamed(pair / "images"), f"results_root={pair}/streamed").folder
    assert_alike(read_records(two.metrics)[:4], read_records(one.folder.metrics)[:4], rel=1e-3)  # float32, few steps


def test_a_run_that_another_process_trains_is_refused_by_both(pair):
    """The second process called it a bug, with a traceback."""
    assert read_json(pair / "locked.json") == [1, 1]
    told = [(pair / f"locked.{rank}").read_text() for rank in (0, 1)]
    assert "run failed: another process is training this run" in told[0]
    assert "run failed: another process of this run has ended" in told[1] and "Traceback" not in told[1]


def test_a_killed_process_ends_the_other(pair):
    assert read_json(pair / "killed.json") == [1, -signal.SIGKILL]
    told = (pair / "killed.0").read_text()
    assert "run failed: another process of this run has ended" in told and "Traceback" not in told


def test_a_signal_to_one_process_stops_both(pair):
    assert read_json(pair / "stopped.json") == [75, 75]
    assert "interrupted: received a signal in another process" in (pair / "stopped.0").read_text()
    assert "INFO" not in (pair / "stopped.1").read_text()  # process 0 speaks for all
    folder = plan(*LONG, f"results_root={pair}/signals").folder
    assert folder.state() == "resumable" and not folder.is_in_use()
    log = folder.log.read_text()
    assert log.count("2 processes share each batch") == 2 and "resuming after step" in log
