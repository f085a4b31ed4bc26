"""The page of results: contents, links, accessibility, and what a browser shows."""

from __future__ import annotations

import csv
import html
import itertools
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from bitcycle.reproduction.analysis.claims import read_claims
from bitcycle.reproduction.analysis.contrast import Pool
from bitcycle.reproduction.analysis.items import BOARDS, PAPERS, read_published
from bitcycle.reproduction.analysis.verdict import ClaimResult, judge
from bitcycle.reproduction.figure.make import make_all
from bitcycle.reproduction.figure.page import Picture, details, write_pages
from bitcycle.reproduction.figure.table import number, tables_of
from tests.conftest import ROOT
from tests.reproduction.figures_cases import CYCLIC, ITEMS, PUBLISHED, SMALL, claim_result, data_of, made_up

CLAIMS = {claim.id: claim for claim in read_claims(PUBLISHED)}


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


CHROMEDRIVER = shutil.which("chromedriver")


# Everything from no runs


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    """Everything, made without any run: the folder, and the entries of the page."""
    target = tmp_path_factory.mktemp("figures")
    return target, make_all(ROOT, target / "results", target / "none.csv")


def test_all_items_are_listed(empty):
    target, entries = empty
    assert len(ITEMS) == 62
    assert {item.kind for item in ITEMS.values()} == {"figure", "table", "schematic", "listing", "missing-from-text"}
    assert {item.paper for item in ITEMS.values()} == set(PAPERS)
    files = {path.stem.replace("_digitized", "") for path in PUBLISHED.glob("*_*.csv")}
    assert files <= {f"{item.paper}_{item.name}" for item in ITEMS.values()}
    assert [entry.data.item.id for entry in entries if entry.data.item.paper != "board"] == list(ITEMS)
    for entry in entries:
        item = entry.data.item
        assert all(file.stat().st_size > 0 for file in entry.files) and entry.files[-1].name == f"{item.name}.md"
        assert item.kind != "schematic" or entry.picture is not None
        assert not item.sweep or entry.data.commands[0] in (target / "results" / "index.html").read_text()


@pytest.mark.parametrize("name", ["README.md", "figures/cpt/table2.md", "figures/board/four_bit.md"])
def test_headings_and_tables_stand_apart(empty, name):
    """Some readers of Markdown take a table right below a text for a part of it."""
    lines = ["", *(empty[0] / "results" / name).read_text().split("\n")]
    joined = [
        line
        for before, line in itertools.pairwise(lines)
        if before and (line.startswith("#") or (line.startswith("|") and not before.startswith("|")))
    ]
    assert not joined


def test_published_numbers_in_the_files_are_those_of_the_papers(empty):
    target, _ = empty
    for item in ITEMS.values():
        rows = [row for suffix in ("", "_digitized") for row in read_published(item, PUBLISHED, suffix)]
        rows = [row for row in rows if row["metric"] != "none_stated"]
        path = target / "results" / "figures" / item.paper / f"{item.name}.csv"
        shown = list(csv.DictReader(open(path, newline=""))) if path.exists() else []
        assert len(shown) == len(rows), item.id
        for row, cells in zip(rows, shown):
            assert (row["printed"] or number(float(row["value"]))) in cells["published"], (item.id, cells)


# The page


@pytest.fixture(scope="module")
def page(empty, tmp_path_factory):
    """A page with every verdict, in a folder of its own."""
    target, entries = empty
    claims = [
        claim_result("better/fig2-c1", "computed", scope="", holds=True),
        claim_result(
            "cpt/fig1-c1",
            "undecided",
            leaning="supported",
            estimate=0.94,
            low=-0.2,
            high=2.1,
            n=5,
            decided=False,
            section="4.1",
            rule="the interval above 0",
            p_raw=0.03,
        ),
        claim_result(
            *("cpt/fig1-c1", "contradicted"),
            leaning="contradicted",  # as the uncorrected p-value says, too
            scope="proxy: GCN, Cora",
            estimate=-3.0,
            low=-4.0,
            high=-2.0,
            n=3,
        ),
        claim_result(
            "better/fig3-c1", "undecided", decided=False, estimate=0.1, low=-1.0, high=1.0, n=2, seeds_needed=12
        ),
        claim_result("hlhlp/table1-c1", "no test", scope="", reason="The metric is at its ceiling"),
        *(ClaimResult(claim.id, claim.item, claim.item.partition("/")[0], claim.sentence) for claim in CLAIMS.values()),
    ]
    write_pages(target / "results", entries, claims)
    return target / "results"


def test_the_verdict_of_a_board_stands_below_the_claim_that_it_restates(empty, tmp_path):
    """A reader of better/fig3 saw the verdict of 640 images only, where a board had decided the same with all images."""
    entries = [
        replace(
            entry,
            files=tuple(tmp_path / file.relative_to(empty[0] / "results") for file in entry.files[-1:]),
            picture=None,
        )
        for entry in empty[1]
    ]
    board = next(entry for entry in entries if entry.data.item.id == "board/all_images")
    own = claim_result("better/fig3-c2", "undecided", decided=False, estimate=0.2, low=-0.5, high=1.0, n=5)
    other = claim_result("board/all_images-c4", estimate=-1.5, low=-1.9, high=-1.2, n=4)
    write_pages(tmp_path, entries, [own], restated={"better/fig3-c2": [(other, board.files[-1])]})
    lines = (tmp_path / "README.md").read_text().split("\n")
    row = next(number for number, line in enumerate(lines) if "better/fig3-c2" in line)
    assert "(figures/board/all_images.md)" in lines[row + 1] and "| supported | -1.50 [-1.90, -1.20]" in lines[row + 1]
    assert "0 of them are decided or computed, 1 more in the regime of a board." in lines[2]
    assert "(../board/all_images.md)" in (tmp_path / "figures" / "better" / "fig3.md").read_text()


def test_published_numbers_with_ours_at_the_same_setting_stand_together(empty, tmp_path):
    target, entries = empty
    headline = "Ours at the papers' length (data as labelled)"
    assert headline not in (target / "results" / "README.md").read_text()
    data = data_of("cpt/table2", made_up(72.0, 73.0, 74.0, **CYCLIC, **SMALL))
    changed = [
        replace(entry, data=data, tables=tables_of(data)) if entry.data.item.id == "cpt/table2" else entry
        for entry in entries
    ]
    write_pages(tmp_path, [replace(one, files=(tmp_path / one.files[-1].name,)) for one in changed], [])
    text = (tmp_path / "README.md").read_text().partition(headline)[2].partition("\n## ")[0]
    [line] = [line for line in text.splitlines() if "test_accuracy" in line]
    assert [cell.strip() for cell in line.strip("|").split("|")][-4:] == ["72.35", "73.00", "+0.650", "3"]
    assert headline in html.unescape((tmp_path / "index.html").read_text())


def test_the_item_with_most_trainings_at_paper_scale_is_shown(empty, tmp_path):
    """Eighteen settings of partial/fig1 at paper scale stood nowhere on the first page."""

    def shown(paper: int) -> str:
        """The headlines of the page if an item has so many runs at paper scale beside one at mini scale."""
        beside = made_up(*range(50, 50 + paper), **CYCLIC, **SMALL)
        found = data_of("partial/fig1", made_up(40.0, scale="mini", **CYCLIC, **SMALL), scale="mini")
        results = replace(found.results, others=(replace(found.results, scale="paper", cells=(beside,), others=()),))
        drawn = tmp_path / "figures" / "partial" / "fig1.png"
        changed = [
            replace(
                entry,
                data=replace(found, results=results) if entry.data.item.id == "partial/fig1" else entry.data,
                picture=Picture([drawn], "", "") if entry.data.item.id == "partial/fig1" else None,
                files=(drawn.with_suffix(".md"),),
            )
            for entry in empty[1]
        ]
        drawn.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(drawn)
        write_pages(tmp_path, changed, [])
        return (tmp_path / "README.md").read_text()

    assert "## Accuracy against the number of iterations" in shown(2)
    assert "## Accuracy against the number of iterations" not in shown(0)


def test_claims_of_boards_restate_claims_that_exist():
    restated = [
        name for folder in (ROOT / BOARDS).iterdir() for claim in read_claims(folder) for name in claim.restates
    ]
    assert restated and set(restated) <= set(CLAIMS)


def test_page_needs_nothing_from_outside_and_is_small(page):
    text = (page / "index.html").read_text()
    assert len(text) <= 1_500_000
    assert (
        len(text) + sum((page / name).stat().st_size for name in re.findall(r'<img src="([^"]+)"', text)) <= 1_500_000
    )
    loaded = re.findall(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="([^"]+)"', text)
    assert all(name.startswith("data:,") or (page / name).exists() for name in loaded)
    assert "fetch(" not in text and "XMLHttpRequest" not in text and "@import" not in text


def test_page_links_lead_somewhere(page):
    text = (page / "index.html").read_text()
    names = re.findall(r'id="([^"]+)"', text)
    assert len(names) == len(set(names)), "no name twice"
    links = re.findall(r'href="#([^"]+)"', text)
    assert set(links) <= set(names) and {*ITEMS, *CLAIMS} <= set(links)
    for link in re.findall(r'href="(?!#|https?:|data:)([^"]+)"', text):
        assert (page / link).exists() or (ROOT / "results" / link).exists(), link
        assert (page / link).exists() or not link.endswith(".yaml"), "a page that lies elsewhere links sweep files, too"


def test_page_is_built_for_screen_readers(page):
    text = (page / "index.html").read_text()
    assert text.count("<table") == text.count("<caption>") > 40
    assert not re.search(r"<th(?![^>]* scope=)[ >]", text)
    assert not re.search(r"<img(?![^>]* alt=\"[^\"])", text)
    assert re.search(r'<a class="skip" href="#claims">', text) and '<html lang="en">' in text
    assert "prefers-color-scheme: dark" in text and '<meta name="viewport"' in text


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        ("final", ""),
        ("best", "Compared: best evaluation. "),
        ("evaluation: validation_accuracy", "Compared: validation accuracy. "),
    ],
)
def test_a_claim_names_a_metric_other_than_the_final_one(metric, words):
    """Differences in validation accuracy stood above a table of test accuracies, in which they have the other sign."""
    row = claim_result("better/fig5-c1", metric=metric, rule="a minus b is above 0", estimate=0.1, n=5)
    assert f"above 0. {words}n = 5" in details(row)


def test_a_claim_shows_its_note():
    """That an estimate is the mean of a network far above float and one at float stood in the list of claims alone."""
    claim = CLAIMS["hlhlp/table4-c1"]
    (row,) = judge([claim], {}, Pool(()))
    assert claim.note and details(row).endswith(f" Note: {claim.note}.")
    assert "Note" not in details(replace(row, note=""))


def test_decided_claims_come_first_and_are_not_said_to_lean(page):
    """The first claim that was decided was shown as leaning."""
    badges = re.findall(r'<td><span class="verdict [^"]*">([^<]*)</span></td>', (page / "index.html").read_text())
    first = [
        "contradicted",
        "computed: holds",
        "leaning: supported",
        "undecided",
        "no test",
        "not tested at this scale",
    ]
    assert list(dict.fromkeys(badges)) == first and "| contradicted |" in (page / "README.md").read_text()


def test_claims_stand_at_the_top_and_in_the_readme_with_their_rule(page):
    text, readme = html.unescape((page / "index.html").read_text()), (page / "README.md").read_text()
    for claim in CLAIMS.values():
        assert claim.sentence in text and claim.sentence.replace("|", "\\|") in readme
    for shown in (text, readme):
        assert "leaning: supported" in shown and "+0.940 [-0.200, +2.10] pp" in shown and "computed: holds" in shown
    assert (
        text.index("the table of claims")
        if "the table of claims" in text
        else text.index('id="claims"') < text.index('id="contents-title"')
    )
    assert "the interval above 0" in text and "p = 0.03" in text and "12 seeds would decide" in text
    item = (page / "figures" / "cpt" / "fig1.md").read_text()
    assert "the interval above 0" in item and "proxy: GCN, Cora" in item


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium."""
    selenium = pytest.importorskip("selenium", reason="no selenium here: pip install selenium")
    if not CHROMIUM or not CHROMEDRIVER:
        pytest.skip("no Chromium with its driver here: make browser")
    from selenium.webdriver.chrome.service import Service

    options = selenium.webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    driver = selenium.webdriver.Chrome(options=options, service=Service(CHROMEDRIVER))
    yield driver
    driver.quit()


def visit(browser, page: Path, width: int, theme: str = "light") -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    )
    browser.get((page / "index.html").as_uri())


CONTRAST = """
const lum = c => c.match(/[0-9.]+/g).slice(0, 3).map(v => v / 255)
  .map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
const ground = e => {
  for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor; if (!c.endsWith(", 0)")) return c; }
  return "rgb(255, 255, 255)"; };
return Math.min(...[...document.querySelectorAll("p, th, td, a, .verdict, figcaption, .facts, pre, label")].map(e => {
  const [a, b] = [lum(getComputedStyle(e).color), lum(ground(e))].sort((x, y) => y - x);
  return (a + .05) / (b + .05); }));"""


@pytest.mark.parametrize(("width", "theme"), [(400, "dark"), (1400, "light")])
def test_browser_shows_every_picture_at_every_width_and_theme(browser, page, width, theme):
    visit(browser, page, width, theme)
    browser.execute_script("document.querySelectorAll('img').forEach(i => i.loading = 'eager')")
    # asked again and again, as the promise of decode() may never be kept for an image whose loading has just become eager
    loaded = "all.every(i => i.complete && i.naturalWidth) ? done(all.length) : setTimeout(check, 50)"
    wait = f"const done = arguments[0], all = [...document.images], check = () => {loaded}; check()"
    assert browser.execute_async_script(wait) == (page / "index.html").read_text().count("<img ")
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    assert browser.execute_script(CONTRAST) >= 4.5
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_claims_are_sorted_and_filtered_by_keyboard(browser, page):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    visit(browser, page, 1400)
    active = browser.switch_to.active_element
    active.send_keys(Keys.TAB)
    assert browser.switch_to.active_element.get_attribute("class") == "skip"
    head = browser.find_element(By.CSS_SELECTOR, "#claims th:nth-child(3)")
    values = "return [...document.querySelectorAll('#claims tbody tr')].filter(r => !r.hidden).map(r => r.cells[2].dataset.sort)"
    for direction, first in (("ascending", "-3.0"), ("descending", "0.94")):
        head.find_element(By.TAG_NAME, "button").send_keys(Keys.ENTER)
        assert head.get_attribute("aria-sort") == direction
        assert browser.execute_script(values)[0] == first
    browser.find_element(By.NAME, "verdict").send_keys("contradicted")
    assert browser.execute_script(values) == ["-3.0"]
    assert browser.find_element(By.ID, "count").text.startswith("1 of ")
    browser.find_element(By.CSS_SELECTOR, "#filter button").send_keys(Keys.ENTER)
    browser.find_element(By.NAME, "text").send_keys("graphsage nothing-has-this")
    assert browser.execute_script(values) == []
