"""The tables of an item: the published numbers, next to ours if network, data and scale are the paper's; and all of our runs.

A row of published numbers never shows runs of another network, dataset or scale. The table of our runs states these in every row
and lists each run once.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from rich.table import Table as Shown

from bitcycle.files import markdown_table, resource_root
from bitcycle.reproduction.analysis import labels
from bitcycle.reproduction.analysis.cells import Cell, read_runs
from bitcycle.reproduction.analysis.collect import SUMMARY, summary_row
from bitcycle.reproduction.analysis.contrast import Pool
from bitcycle.reproduction.analysis.facts import fact
from bitcycle.reproduction.analysis.items import PUBLISHED, Published, read_items
from bitcycle.reproduction.analysis.metrics import PHASE, estimate_of
from bitcycle.reproduction.analysis.statistics import Estimate
from bitcycle.reproduction.figure.data import (
    ItemData,
    Panel,
    Spec,
    by_length,
    cost_against,
    difference,
    gather,
    our_network,
    panels_of,
)
from bitcycle.sweep.table import Finished
from bitcycle.training.display import console

MACS_PER_GBITOP = 1e9 / 32**2
"""Effective MACs per GBitOp in FracTrain: a float MAC has 32 x 32 bit operations."""
LABELS = ("group", "model", "dataset", "method", "schedule", "fw_bits", "bw_bits", "setting", "metric", "unit")
WORDS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("table.yaml").read_text(encoding="utf-8"))
"""What published metrics, relations and settings of schedules are in our tables."""


class Table(NamedTuple):
    """A table of text: its caption, and its rows as heading -> cell."""

    caption: str
    records: Sequence[Mapping[str, str]]

    @property
    def headings(self) -> list[str]:
        """Headings of the columns."""
        return list(self.records[0]) if self.records else []

    @property
    def rows(self) -> list[list[str]]:
        """Cells of the rows."""
        return [list(record.values()) for record in self.records]

    @classmethod
    def without_empty(cls, caption: str, records: Sequence[Mapping[str, str]], always: Collection[str]) -> "Table":
        """A table without empty columns, except for those in `always`."""
        kept = [name for name in records[0] if name in always or any(one[name] for one in records)] if records else []
        return cls(caption, [{name: record[name] for name in kept} for record in records])


def tables_of(data: ItemData) -> list[Table]:
    """The non-empty tables of an item: published numbers and our runs."""
    return [table for table in (published_table(data), our_table(data)) if table.records]


# Published numbers


def published_table(data: ItemData) -> Table:
    """The published numbers with their deviations, next to ours if network, data and scale are the paper's."""
    rows = [row for row in [*data.published, *data.digitized] if row["metric"] != "none_stated"]
    cells = [our_cell(row, data) for row in rows]
    ours = [None if cell is None else measure(row, cell, data) for row, cell in zip(rows, cells)]
    matched = any(one is not None for one in ours)
    records = [
        {
            **{name.replace("_", " "): row[name] for name in LABELS},
            "published": as_printed(row),
            "published deviation": row["std"],
            **comparison(row, one),
            "our data": "" if cell is None or one is None else cell.remark,
        }
        for row, cell, one in zip(rows, cells, ours)
    ]
    caption = "Published numbers" + (" and ours at the paper's setting" if matched else "")
    return Table.without_empty(caption, records, {"metric", "unit", "published", *(COMPARED if matched else ())})


def our_cell(row: Published, data: ItemData) -> Cell | None:
    """Our cell of a published number; None unless network, data and scale are the paper's and it refers to a single cell.

    The column `settings` of the number selects it by settings of the sweep (an empty value: not set by it).
    """
    wanted = wanted_settings(row)
    wanted.pop("phase", None)
    at_paper_scale = data.results.at("paper")
    if at_paper_scale is None or not wanted:
        return None
    alike = [
        cell for cell in at_paper_scale.done if all(cell.paper.get(key, "") == text for key, text in wanted.items())
    ]
    if len({tuple(run.training for run in cell.runs) for cell in alike}) != 1 or alike[0].stand_ins:
        return None
    return alike[0]


def wanted_settings(row: Published) -> dict[str, str]:
    """The column `settings` of a published number; `phase`, from 1, selects the end of a phase."""
    return dict(word.split("=", 1) for word in row.get("settings", "").split())


def as_printed(row: Published) -> str:
    """A published number as printed, with its correction if the paper contradicts itself."""
    text = row["printed"] or (number(float(row["value"])) if row["value"] else "")
    meant = row["corrected_value"]
    return f"{WORDS['relations'].get(row['relation'], '')} {text}".strip() + (f" (meant: {meant})" if meant else "")


MODELLED = ("energy", "latency", "energy_saving", "latency_saving")
"""Published metrics that come from a model of an accelerator."""
TIMED = ("seconds", "steps_per_second")
"""Columns that say nothing about the published machine if ours did something else, too."""
COMPARED = ("ours", "deviation", "n", "difference")
PAIRS = "n of the difference"
"""The column with the number of seeds that a method shares with its baseline, which may be fewer than it has."""


def comparison(row: Published, ours: Estimate | None) -> dict[str, str]:
    """The columns COMPARED: our value, its deviation, number of seeds, and its difference to the published number."""
    if ours is None:
        return dict.fromkeys(COMPARED, "")
    text = row["corrected_value"] or row["value"]
    gap = ours.mean - float(text) if text and row["relation"] in ("=", "~") else None
    return dict(zip(COMPARED, (number(ours.mean), number(ours.deviation), str(ours.n), signed(gap))))


def measure(row: Published, cell: Cell, data: ItemData) -> Estimate | None:
    """The value of a published metric in a cell, at the end of a phase or of the run; None for the speed of runs that shared
    their machine."""
    spec = data.spec
    metric, cost, phase = row["metric"], spec.cost, wanted_settings(row).get("phase")
    if metric in WORDS["main"]:
        share = not row["unit"] and phase is None
        return estimate_of(cell, spec.column if phase is None else f"{PHASE}{phase}", 0.01 if share else 1.0)
    if metric in ("energy", "latency") and cell.runs[0].row.get("hardware") not in ("bitfusion", "zc706", "all"):
        return None
    seconds = {"min": 60, "hour": 3600}.get(row["unit"], 1)
    costs = {"gbitops": (cost, 1.0), "effective_macs": (cost, MACS_PER_GBITOP), "latency": ("latency_s", 1 / seconds)}
    column, factor = {**WORDS["metrics"], **costs}.get(metric, ("", 1.0))
    if column in TIMED and any(map(data.pool.shared_machine, cell.runs)):
        return None
    return estimate_of(cell, column, factor)


# Our runs


def our_table(data: ItemData) -> Table:
    """Our runs, one row per setting: network, data, scale, steps, the metric over seeds, and its difference to the baseline."""
    shown = panels_of(data)
    parts = [part for panel in shown for part in by_length(panel)]
    modelled = any(row["metric"].endswith(MODELLED) for row in data.published)
    records = [record for part in parts for record in told_apart(part, our_records(part, data.spec, modelled))]
    proxies = sorted({name for panel in shown for name in panel.proxy_for})
    words = f", proxies for {'; '.join(proxies)}" if proxies else ""
    return Table.without_empty(f"Our runs{words}; each training once", records, data.spec.measures)


def setting_words(cell: Cell) -> str:
    """The settings that distinguish a cell from others with its schedule; missing ones are shown as dashes."""
    known = defaultdict(lambda: "-", cell.runs[0].settings.get("schedule", {}))
    words = [WORDS["settings"].get(labels.schedule_of(cell), "").format_map(known)]
    special = {"quantizer": "sbm", "dataset.part": "all", "model.aggregation": None}
    found = {key: cell.setting(key, usual) for key, usual in special.items()}
    words += [str(value).replace("_", " ") for key, value in found.items() if value != special[key]]
    return ", ".join(filter(None, words))


NAMES = ("network", "data", "steps", "method", "schedule", "forward bits", "gradient bits", "setting")
"""The columns of our runs that name a setting."""


def told_apart(panel: Panel, records: Iterable[dict[str, str]]) -> Iterator[dict[str, str]]:
    """The rows of a panel; those of equal names with the settings in which they differ, such as a learning rate."""
    rows, alike = list(zip(panel.cells, records, strict=True)), defaultdict[tuple[str, ...], list[Cell]](list)
    for cell, record in rows:
        alike[tuple(record[name] for name in NAMES)].append(cell)
    for cell, record in rows:
        several = [one.ours for one in alike[tuple(record[name] for name in NAMES)]]
        differing = sorted(key for key in cell.ours if len({ours.get(key) for ours in several}) > 1)
        words = [record["setting"], *(f"{key}={cell.ours[key]}" for key in differing)]
        yield {**record, "setting": ", ".join(filter(None, words))}


def our_records(panel: Panel, spec: Spec, on_accelerator: bool = False) -> Iterator[dict[str, str]]:
    """The rows of a panel in the table of our runs, with the energy and latency of an accelerator if these are of interest."""
    for cell in panel.cells:
        base = panel.first(spec.base, {spec.apart: fact(cell, spec.apart)} if spec.apart else None)
        gap = difference(cell, base, spec.column, panel.pool)
        row, (network, _, rest) = cell.runs[0].row, our_network(cell).partition(", ")
        ours, cost = estimate_of(cell, spec.column), cost_against(cell, base)
        yield {
            "network": network,
            "data": rest,
            "scale": f"{panel.scale}, proxy" if panel.proxy_for else panel.scale,
            "steps": row["total_steps"],
            "method": fact(cell, spec.named),
            "schedule": labels.schedule_of(cell),
            "forward bits": labels.forward_bits(cell),
            "gradient bits": labels.backward_bits(cell),
            "setting": setting_words(cell),
            "metric": ("best " if spec.column == "best" else "") + row["metric"],
            "ours": number(ours.mean if ours else None),
            "deviation": number(ours.deviation if ours else None),
            "n": str(ours.n) if ours else "",
            "difference to baseline": "baseline" if cell is base else signed(gap.mean if gap else None),
            "95 % interval": interval(gap, signed),
            PAIRS: str(gap.n) if gap else "",
            "cost relative to baseline": number(cost) if base else "",
            "cost relative to static at its highest bits": "" if base else number(cost),
            **(accelerator_costs(cell) if on_accelerator else {}),
            **{name: fact(cell, name) for name in spec.measures},
        }


def accelerator_costs(cell: Cell) -> dict[str, str]:
    """Energy and latency of a training by the cost model of an accelerator; empty without one, or if runs have different ones."""
    models = {run.row["hardware"] for run in cell.runs if run.row.get("energy_j")}
    costs = {"energy, J": "energy_j", "latency, s": "latency_s"}
    means = {name: estimate_of(cell, column) if len(models) == 1 else None for name, column in costs.items()}
    words = {name: number(mean.mean if mean else None) for name, mean in means.items()}
    return {**words, "accelerator": "".join(models) if any(words.values()) else ""}


# Formats

ROUNDING = 1e-9
"""Smaller numbers are rounding errors of zero."""


def number(value: float | None) -> str:
    """Format a number with about three significant digits.

    >>> number(92.2345), number(0.0012), number(2.67e8), number(None), number(-2.4e-15)
    ('92.23', '0.0012', '2.67e+08', '', '0.00')
    """
    if value is None:
        return ""
    value = 0.0 if abs(value) < ROUNDING else value
    size = abs(value)
    if size >= 1e5 or 0 < size < 0.01:
        return f"{value:.3g}"
    return f"{value + 0.0:.3f}" if 0 < size < 1 else f"{value + 0.0:.2f}"


def signed(value: float | None) -> str:
    """Format a difference with its sign.

    >>> signed(1.5), signed(-0.25), signed(None)
    ('+1.50', '-0.250', '')
    """
    return ("+" if (value or 0) > ROUNDING else "") + number(value)


def interval(value: Estimate | None, written: Callable[[float | None], str] = number) -> str:
    """Format the confidence interval of an estimate; empty if it has none."""
    ends = None if value is None else value.interval()
    return "" if ends is None else f"{written(ends[0])} to {written(ends[1])}"


def as_markdown(table: Table) -> str:
    """Format a table as Markdown."""
    return markdown_table(table.headings, table.rows) + "\n"


def as_records(tables: Sequence[Table]) -> list[dict[str, str]]:
    """The rows of several tables with a column that names their source, for the CSV file of an item."""
    names = ["published" if table.caption.startswith("Published") else "ours" for table in tables]
    return [{"source": name, **record} for name, table in zip(names, tables) for record in table.records]


# At the end of a sweep


def show_sweep(name: str, finished: Iterable[Finished]) -> bool:
    """Print the tables of the sweep PAPER/ITEM with these runs; returns whether it has any."""
    screen, tables = console(180), sweep_tables(name, finished)
    for table in tables:
        shown = Shown(*table.headings, title=table.caption, title_justify="left")
        for row in table.rows:
            shown.add_row(*row)
        screen.print(shown)
    return bool(tables)


def sweep_tables(name: str, finished: Iterable[Finished]) -> list[Table]:
    """The tables of the items of a sweep with only these runs; none if no paper has such a sweep or there are no runs."""
    root = resource_root()
    items = [item for item in read_items(root / PUBLISHED) if item.sweep == name]
    rows = [summary_row(folder, summary) for folder, summary in finished]
    if not items or not rows:
        return []
    runs = read_runs(rows, SUMMARY)
    known = [gather(item, Pool(runs), root) for item in items]
    return [table for data in known if data.results.done for table in tables_of(data)]
