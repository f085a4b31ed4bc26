"""The gallery: one page with every item beside its published numbers and the verdicts on its claims; no network, no scripts."""

from __future__ import annotations

import base64
import html
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from bitcycle.analysis.claims import VERDICTS, Finding
from bitcycle.analysis.compare import Line, as_html, table_rows
from bitcycle.analysis.items import PAPERS
from bitcycle.figure.style import ItemData, commands, status_line

OPEN_ROWS = 14
"""Longer tables are folded."""
STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1b1b; margin: 0 auto; max-width: 66rem; padding: 1rem; }
body { overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; }
h2 { border-top: 3px solid #1b1b1b; padding-top: .5rem; margin-top: 3rem; font-size: 1.25rem; }
h3 { font-size: 1.05rem; margin: 0 0 .3rem; }
article { border: 1px solid #d5d5d5; border-radius: .5rem; padding: .9rem; margin: 1.2rem 0; }
img { max-width: 100%; height: auto; display: block; margin: .6rem auto; }
.scroll { overflow-x: auto; }
@media (max-width: 600px) { .scroll img { max-width: none; width: 40rem; } }
table { border-collapse: collapse; font-size: .84rem; overflow-wrap: normal; }
th, td { border-bottom: 1px solid #dedede; padding: .2rem .55rem; text-align: left; vertical-align: top; }
th { background: #f3f3f3; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
code { background: #f1f1f1; padding: .05rem .3rem; border-radius: .2rem; font-size: .85rem; }
.facts { color: #505050; font-size: .88rem; margin: .2rem 0; }
summary { cursor: pointer; padding: .4rem 0; font-size: .9rem; }
nav ul { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .35rem; }
nav a { display: block; border: 1px solid #cfcfcf; border-radius: .3rem; padding: .35rem .6rem; }
nav a { text-decoration: none; color: #14508c; font-size: .9rem; }
.verdict { display: inline-block; border-radius: .3rem; padding: 0 .45rem; font-size: .82rem; border: 1px solid #bdbdbd; }
.verdict { background: #f5f5f5; }
.good { background: #d9efdb; border-color: #7cb982; }
.fair { background: #e4f0fa; border-color: #86b4dc; }
.bad { background: #f9dcd8; border-color: #d98b80; }
.claims li { margin: .45rem 0; }
.claims { padding-left: 1.1rem; font-size: .92rem; }
"""
CLASSES = dict(zip(VERDICTS, ("good", "good", "fair", "fair", "bad", "bad", "", "")))


@dataclass(frozen=True)
class Entry:
    """One item of the gallery: what is known, its lines of numbers, its picture, all its files."""

    data: ItemData
    lines: Sequence[Line]
    picture: Optional[Path]
    files: tuple[Path, ...]


def write_gallery(path: Path, entries: Sequence[Entry], findings: Sequence[Finding]) -> None:
    """Write the page; its pictures are inside it."""
    papers = [paper for paper in PAPERS if any(entry.data.item.paper == paper for entry in entries)]
    parts = [_head(entries, findings, papers)]
    for paper in papers:
        parts.append(f'<h2 id="{paper}">{html.escape(PAPERS[paper])} <small>({paper})</small></h2>')
        parts += [_article(entry, findings, path.parent) for entry in entries if entry.data.item.paper == paper]
    page = "\n".join([*parts, "</body></html>\n"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page)


def _head(entries: Sequence[Entry], findings: Sequence[Finding], papers: Sequence[str]) -> str:
    counts = Counter(found.verdict for found in findings)
    verdicts = "".join(f"<li>{_verdict(name)} {counts[name]}</li>" for name in VERDICTS if counts[name])
    links = "".join(
        f'<li><a href="#{paper}">{paper} ({sum(entry.data.item.paper == paper for entry in entries)})</a></li>'
        for paper in papers
    )
    ran = sum(bool(entry.data.results.done) for entry in entries)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>bitcycle: figures and tables of five papers</title><link rel="icon" href="data:,"><style>{STYLE}</style></head><body>
<h1>bitcycle: every figure and table of five papers on dynamic-precision training</h1>
<p>{len(entries)} items, {ran} with runs of ours. Filled marks and the column "ours" are this repository, hollow marks and the
column "published" are the papers. Each item says at which scale it was run: <em>paper</em> is the setting of the paper,
<em>mini</em> a short training of a small network, often on other data, comparable with published numbers by signs at most, and
<em>smoke</em> shows only that the code runs. Written by <code>make figures</code> from <code>results/summary</code>.</p>
<nav><ul>{links}</ul></nav>
<p>Verdicts on {len(findings)} claims, computed from the runs:</p><ul>{verdicts}</ul>"""


def _verdict(verdict: str) -> str:
    return f'<span class="verdict {CLASSES.get(verdict, "")}">{html.escape(verdict)}</span>'


def _article(entry: Entry, findings: Sequence[Finding], base: Path) -> str:
    item = entry.data.item
    parts = [f'<article id="{html.escape(item.id)}"><h3>{html.escape(item.id)}: {html.escape(item.title)}</h3>']
    parts += [f'<p class="facts">{line}</p>' for line in _facts(entry, base)]
    if entry.picture is not None:
        data = base64.b64encode(entry.picture.read_bytes()).decode()
        alt = html.escape(f"{item.id}: {item.title}; {status_line(entry.data)}", quote=True)
        parts.append(f'<div class="scroll"><img alt="{alt}" src="data:image/png;base64,{data}"></div>')
    if entry.lines:
        parts.append(_table(entry.lines))
    claims = [found for found in findings if found.claim.item == item.id]
    if claims:
        parts.append('<ul class="claims">' + "".join(map(_claim, claims)) + "</ul>")
    return "\n".join([*parts, "</article>"])


def _facts(entry: Entry, base: Path) -> list[str]:
    data, results = entry.data, entry.data.results
    facts = [
        html.escape(f"{data.item.kind.replace('-', ' ')}; {status_line(data) or 'computed from the code, no training'}")
    ]
    if data.command:
        count = f"{data.item.runs} runs at paper scale" if data.item.runs else "no runs of its own"
        facts.append(f"<code>{html.escape(commands(data))}</code> ({count})")
    if data.note:
        facts.append(html.escape(f"Note: {data.note.strip()}"))
    if results.runs:
        rows = [run.row for run in results.runs]
        dates = sorted({row["finished"][:10] for row in rows if row.get("finished")})
        commits = sorted({row["commit"][:10] for row in rows if row.get("commit")})
        machines = sorted({row["processor"] for row in rows if row.get("processor")})
        span = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}" if dates else ""
        shown = ", ".join(commits[:4]) + (f" and {len(commits) - 4} more" if len(commits) > 4 else "")
        facts.append(
            html.escape(
                f"{len(rows)} runs, finished {span}, commit {shown or 'not recorded'}, on {', '.join(machines)}"
            )
        )
    files = ", ".join(
        f'<a href="{html.escape(_relative(file, base))}">{file.suffix[1:].upper()}</a>' for file in entry.files
    )
    return [*facts, f"files: {files}"] if files else facts


def _relative(file: Path, base: Path) -> str:
    return file.relative_to(base).as_posix() if file.is_relative_to(base) else file.as_posix()


def _table(lines: Sequence[Line]) -> str:
    headings, rows = table_rows(lines)
    table = f'<div class="scroll">{as_html(headings, rows)}</div>'
    if len(rows) <= OPEN_ROWS:
        return table
    return f"<details><summary>{len(rows)} numbers: published and ours</summary>{table}</details>"


def _claim(found: Finding) -> str:
    claim = found.claim
    measured = f" Measured ({found.scale}): {html.escape(found.measured)}." if found.measured else ""
    reason = f" {html.escape(found.reason)}" if found.reason else ""
    return (
        f"<li>{_verdict(found.verdict)} {html.escape(claim.text)}. "
        f'<span class="facts">Check: {html.escape(claim.check)}. Published: {html.escape(claim.effect)}.'
        f"{measured}{reason}</span></li>"
    )
