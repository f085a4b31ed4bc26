"""Costs of whole runs: what the dry run predicts, what the meter counts while training, and what is shown."""

import json
import time

import pytest

from bitcycle.hardware import HARDWARE, CostMeter, cost_table, saving
from bitcycle.precision import Precision
from bitcycle.training.plan import Plan
from bitcycle.training.report import plan_report, print_report, summary_report
from bitcycle.training.run import execute
from tests.conftest import plan as planned

CONTRACT = {"gbitops", "effective_macs", "relative_to_static", "energy_j", "latency_s"}


def smoke(tmp_path, *overrides: str) -> Plan:
    small = ("dataset=digits", "model=resnet8", "scale=smoke", "training.steps=24", "training.evaluation_steps=8")
    return planned(*small, f"results_root={tmp_path}/runs", *overrides)


@pytest.mark.parametrize(
    ("hardware", "convention"), [("bitops", "actual"), ("bitfusion", "fractrain"), ("zc706", "cpt"), ("all", "actual")]
)
def test_training_costs_what_the_dry_run_predicts_to_the_last_digit(tmp_path, hardware, convention):
    """Also with a last batch that is smaller, and under published image counts, up to the best evaluation."""
    choice = (f"hardware={hardware}", f"hardware.convention={convention}", "schedule=RTH", "schedule.cycles=4")
    plan = smoke(tmp_path, *choice, "training.batch_size=20")
    predicted = plan.cost().summary()
    summary = execute(plan)
    assert summary["cost"]["total"] == predicted
    lines = [json.loads(line) for line in plan.folder.metrics.read_text().splitlines()]
    costs = [line["cost"] for line in lines if line["kind"] == "evaluation"]
    assert costs[-1] == predicted
    assert summary["cost"]["to_best"] in costs
    gbitops = [cost["gbitops"] for cost in costs]
    assert gbitops == sorted(gbitops)
    assert gbitops[0] < predicted["gbitops"] / 2  # a third of the run is not charged as a whole one


def test_the_planned_samples_are_those_of_the_histogram(tmp_path):
    for overrides in (("training.batch_size=20",), ("training.batch_size=256",), ("training.steps=1",)):
        plan = smoke(tmp_path, *overrides)
        assert plan.config.hardware.run_samples == sum(plan.histogram(plan.schedule.run_lengths).values())
    assert smoke(tmp_path, "hardware.run_samples=77").config.hardware.run_samples == 77


@pytest.mark.parametrize("hardware", HARDWARE)
def test_dry_run_json_holds_energy_and_latency(tmp_path, hardware):
    described = json.loads(json.dumps(smoke(tmp_path, f"hardware={hardware}", "schedule=CR").describe()))
    cost = described["cost"]
    assert set(cost) >= CONTRACT
    if hardware == "all":
        assert {name for name in HARDWARE if name != "all"} <= set(cost)
        assert all(set(cost[name]) >= CONTRACT for name in HARDWARE if name != "all")
        cost = cost["bitfusion"]
    assert (cost["energy_j"] is not None) == (hardware in ("bitfusion", "all"))
    assert (cost["latency_s"] is not None) == (hardware != "bitops")
    assert 0 < cost["relative_to_static"] < 1
    if hardware in ("bitfusion", "all"):
        parts = [cost[f"energy_{part}_j"] for part in ("array", "buffer", "dram")]
        assert sum(parts) == pytest.approx(cost["energy_j"], rel=1e-12)
        times = cost["latency_compute_s"] + cost["latency_memory_s"]
        assert times == pytest.approx(cost["latency_s"], rel=1e-12)
        assert 0 < cost["energy_relative_to_static"] < 1


def shown(capsys, *overrides: str) -> str:
    print_report(plan_report(planned(*overrides)))
    return capsys.readouterr().out


def test_dry_run_shows_groups_total_and_saving(capsys):
    out = shown(capsys, "schedule=RTH", "model=resnet20", "hardware=bitfusion")
    for word in ("conv1", "group1", "group2", "group3", "fc", "total", "static 8/8/8", "saved", "weight gradient"):
        assert word in out
    assert "GBitOps = " in out
    assert out.count("% less than static 8/8/8 bits") == 3  # in bit operations, joules and seconds
    assert "average power" in out
    assert "counted as actual: count=conv_linear, images=actual" in out


def test_dry_run_shows_all_side_by_side(capsys):
    out = shown(capsys, "schedule=RTH", "model=resnet20", "hardware=all")
    for word in ("GBitOps", "bitfusion J", "bitfusion s", "zc706 s", "bitfusion: energy", "zc706: latency"):
        assert word in " ".join(out.split())


@pytest.mark.parametrize("hardware", HARDWARE)
def test_the_table_adds_up(tmp_path, hardware):
    plan = smoke(tmp_path, f"hardware={hardware}", "model=mobilenet_v2", "quantizer.depthwise_bits=[8,16]")
    cost = plan.cost()
    table = cost_table(plan.workload, plan.config.hardware, cost, plan.schedule.reference)
    groups, passes, (total, static, saved) = table.sections
    assert {row[0] for row in groups} == {"conv1", "blocks", "conv2", "fc"}
    assert {row[2] for row in groups} == {"schedule", "8/8/16", "32"}
    assert sum(int(row[1]) for row in groups) == int(total[1]) == len(plan.workload.operations)
    for column in range(4, len(table.columns)):
        for section in (groups, passes):
            sums = sum(float(row[column].split()[0]) for row in section)
            assert sums == pytest.approx(float(total[column]), rel=2e-3)
        relative = float(total[column]) / float(static[column])
        assert float(saved[column].rstrip(" %")) == pytest.approx(100 * (1 - relative), abs=0.1)


def test_a_run_without_samples_has_a_table_too(tmp_path):
    plan = smoke(tmp_path, "hardware=all")
    cost = plan.config.hardware.cost(plan.workload, {}, plan.schedule.reference)
    table = cost_table(plan.workload, plan.config.hardware, cost, plan.schedule.reference)
    assert table.sections[2][0][4] == "0"


def test_the_result_of_a_run_names_energy_and_latency():
    cost = {"gbitops": 2.0, "relative_to_static": 0.5, "energy_j": 3.0, "energy_relative_to_static": 0.75}
    cost |= {"latency_s": None, "latency_relative_to_static": None}
    summary = {"metric": "accuracy", "final": 1, "best": 1, "best_step": 1, "at_q_max": {"final": 1}, "scale": "smoke"}
    lines = summary_report({**summary, "cost": {"total": cost, "to_best": cost}}, Precision(8, 8, 8))
    assert lines[1:] == [
        "cost: 2 GBitOps, 50.0 % less than static 8/8/8 bits; up to the best 2 GBitOps",
        "energy: 3 J, 25.0 % less than static 8/8/8 bits; up to the best 3 J",
    ]
    assert saving(1.25, "6/6/8") == "1.25 times static 6/6/8 bits"


def test_a_long_schedule_is_costed_at_once():
    """64,000 steps: the first time with all tilings to be found, then from memory."""
    plan = planned("schedule=RTH", "model=resnet152", "hardware=all")
    histogram = plan.histogram(plan.schedule.run_lengths)
    started = time.process_time()
    plan.config.hardware.cost(plan.workload, histogram, plan.schedule.reference)
    first = time.process_time() - started
    meter = CostMeter(plan.workload, plan.config.hardware, plan.schedule.reference)
    meter.histogram.update(histogram)
    started = time.process_time()
    meter.cost()
    assert time.process_time() - started < 1
    assert first < 10
