"""Tests of the report's page in headless Chromium.

The page draws all its charts without an error or a request, on a desktop and on a phone, light and
dark. R² has no per cent. Each metric has a panel. The time of a worker is a bar of its parts. The
legend switches lines. A pointer shows values. A run's details are drawn when they are opened.

Skipped without Chromium, which users do not need. In `make slow` this is a failure.
"""

from __future__ import annotations

import itertools
import os
import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from dlion_api.protocol.progress import EvaluationRecord, LinkRecord
from dlion_api.status_names import R_SQUARED
from dlion_results.report.page import write_report
from dlion_results.run_folder.folder import ResultFolder
from dlion_results.summary.summary import Ending
from headless_browser import BrowserPage, browser_page, chromium
from synthetic_run import Story, description, records

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
HOSTILE = (
    "</script><script>document.title='taken'</script><img src=x onerror=document.title='taken'>"
)
PHASES = (0.2, 0.1, 0.05, 0.15, 0.1)
METRICS = ("auc", "mae", HOSTILE)
LINES = "document.querySelector('.plot').querySelectorAll('g[aria-label=line] path').length"

METRIC_LINES = "document.querySelectorAll('[data-chart=metrics] g[aria-label=line] path').length"


def make(path: Path, story: Story) -> Path:
    with ResultFolder.create(path, description(story), now=NOW) as folder:
        for record in records(story):
            folder.append(record)
        folder.finish(Ending("maxSeconds", message=HOSTILE))
    return path


def make_r_squared(path: Path, best: float) -> Path:
    """A run whose R² rises from -3, and does not reach its target of 0.9."""
    story = Story(workers=2, seconds=20, killed=None)
    with ResultFolder.create(path, description(story, target=0.9), now=NOW) as folder:
        for record in records(story):
            if isinstance(record, EvaluationRecord):
                value = best if record.time_s > 10 else -3.0
                record = replace(record, accuracy=value, accuracy_name=R_SQUARED, class_accuracy=())
            folder.append(record)
        folder.finish(Ending("maxSeconds"))
    return path


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One run, two of unequal length, one of 96 workers, and two of targets (R²)."""
    root = tmp_path_factory.mktemp("pages")
    six = make(
        root / "six", Story(seconds=90, killed=(4, 40.0, 10.0), metric_names=METRICS, phases=PHASES)
    )
    none = make(root / "none", Story(seconds=40, exchange=False, killed=None))
    wide = make(root / "wide", Story(workers=96, seconds=9, step_s=3.0, killed=None))
    targets = [make_r_squared(root / str(best), best) for best in (0.5, 0.45)]
    return {
        "one": write_report([six], root / "one.html", title=HOSTILE),
        "two": write_report([six, none], root / "two.html", labels=["six", HOSTILE]),
        "wide": write_report([wide], root / "wide.html"),
        "targets": write_report(targets, root / "targets.html"),
    }


def require_chromium() -> str:
    """The browser's path. Skips the test without one, or fails it where $DLION_REQUIRE_TESTBED is
    set."""
    if (path := chromium()) is not None:
        return path
    missing = "no chromium on the PATH (Debian: `tools/testbed-setup chromium`, as root)"
    if os.environ.get("DLION_REQUIRE_TESTBED"):
        pytest.fail(missing)
    pytest.skip(missing)


@pytest.fixture(scope="module")
def browser():
    with browser_page(require_chromium()) as page:
        yield page


@pytest.mark.parametrize(
    ("required", "outcome"), [("", pytest.skip.Exception), ("1", pytest.fail.Exception)]
)
def test_a_missing_browser_fails_only_where_it_is_required(
    monkeypatch: pytest.MonkeyPatch, required: str, outcome: type[Exception]
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("DLION_REQUIRE_TESTBED", required)
    with pytest.raises(outcome, match="tools/testbed-setup chromium"):
        require_chromium()


def loaded(browser: BrowserPage, path: Path, **how: int | bool) -> BrowserPage:
    browser.problems.clear()
    browser.requests.clear()
    browser.open(path, **{"width": 1280, **how})
    return browser


@pytest.mark.parametrize("name", ["one", "two", "wide"])
@pytest.mark.parametrize(
    ("width", "dark"),
    [
        pytest.param(1280, False, id="1280-light"),
        pytest.param(390, True, id="390-dark"),
        pytest.param(1280, True, id="1280-dark", marks=pytest.mark.slow),
        pytest.param(390, False, id="390-light", marks=pytest.mark.slow),
    ],
)
def test_every_chart_is_drawn_within_the_width(
    browser: BrowserPage, pages: dict[str, Path], width: int, dark: bool, name: str
) -> None:
    page = loaded(browser, pages[name], width=width, dark=dark)
    assert page.problems == []
    assert page.requests == [pages[name].resolve().as_uri()]
    assert page.evaluate("innerWidth") == width
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    height = page.evaluate("document.documentElement.scrollHeight")
    assert 1500 < height < (6000 if width == 1280 else 10_000)
    open_charts = page.evaluate(
        "[...document.querySelectorAll('.plot')].filter(e => !e.closest('details:not([open])'))"
        ".map(e => e.querySelectorAll('svg path, svg circle, svg rect').length)"
    )
    assert len(open_charts) == {"one": 10, "two": 5, "wide": 9}[name]
    assert min(open_charts) > 0
    assert page.evaluate("document.title").endswith("DLion report")
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    channels = [int(part) for part in paper.removeprefix("rgb(").rstrip(")").split(",")]
    assert (max(channels) < 60) == dark


@pytest.mark.parametrize(("width", "columns"), [(1280, 3), (390, 1)])
def test_each_metric_has_a_panel_with_its_own_scale(browser, pages, width, columns):
    page = loaded(browser, pages["one"], width=width)
    cells = "[...document.querySelectorAll('[data-chart=metrics] .panels > div')]"
    assert page.evaluate(f"{cells}.map(e => e.querySelector('h4').textContent)") == [
        "auc", "mae", HOSTILE[:59] + "…",
    ]  # fmt: skip
    assert len(set(page.evaluate(f"{cells}.map(e => e.getBoundingClientRect().x)"))) == columns
    ticks = page.evaluate(
        f"{cells}.map(e => [...e.querySelectorAll('[aria-label=\"y-axis tick label\"] text')]"
        ".map(t => t.textContent.replace('\u2212', '-')))"
    )
    auc, mae, _ = ([float(tick) for tick in panel] for panel in ticks)
    assert max(auc) <= 1
    assert min(mae) < 0 < 3 < max(mae)
    assert page.problems == []


BARS = "[data-chart=run0-parts] g[aria-label=bar] rect"


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_the_time_of_each_worker_is_a_bar_of_parts_with_values_under_a_pointer(
    browser, pages, width, dark
):
    page = loaded(browser, pages["one"], width=width, dark=dark)
    rows = page.evaluate(
        f"[...document.querySelectorAll('{BARS}')].map(e => [e.getBoundingClientRect().y,"
        " e.getBoundingClientRect().width, getComputedStyle(e).fill])"
    )
    assert len(rows) == 6 * 8
    assert len({fill for _, _, fill in rows}) == 8
    lengths = [sum(w for y, w, _ in rows if y == row) for row in {y for y, _, _ in rows}]
    assert lengths == pytest.approx([lengths[0]] * 6, rel=0.01)
    page.evaluate("document.querySelector('[data-chart=run0-parts]').scrollIntoView()")
    x, y = page.evaluate(
        f"(() => {{ const b = document.querySelectorAll('{BARS}')[8].getBoundingClientRect();"
        " return [b.x + 5, b.y + b.height / 2] })()"
    )
    for step in range(3):
        page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + step, y=y)
        page.evaluate("new Promise(done => setTimeout(done, 60))")
    tip = "document.querySelector('[data-chart=run0-parts] [aria-label=tip]').textContent"
    tip_text = page.evaluate(tip)
    assert "plant-a/small-1" in tip_text
    for name in ("computing", "waiting for others", "select", "apply", "other"):
        assert re.search(rf"{name} [0-9.]+ %, [0-9.]+ s", tip_text), name
    assert page.problems == []


def test_bars_of_runs_without_phases_have_three_parts(browser, pages):
    page = loaded(browser, pages["wide"])
    counts = page.evaluate(
        f"[document.querySelectorAll('{BARS}').length,"
        " document.querySelectorAll('[data-chart=run0-parts] .share-key span').length]"
    )
    assert counts == [2 * 3, 3]


def test_text_in_wide_charts_is_readable_on_a_phone(browser, pages):
    page = loaded(browser, pages["one"], width=390)
    sizes = page.evaluate(
        "[...document.querySelectorAll('.plot svg')].map(e =>"
        " parseFloat(getComputedStyle(e).fontSize) * e.getBoundingClientRect().width"
        " / e.viewBox.baseVal.width)"
    )
    assert min(sizes) >= 10


def test_the_legend_switches_a_line_off_and_on_in_every_chart(browser, pages):
    page = loaded(browser, pages["one"])
    before = page.evaluate(LINES)
    assert page.evaluate(METRIC_LINES) == len(METRICS) * before
    press = "document.querySelector('.keys button').click()"
    page.evaluate(press)
    assert page.evaluate(LINES) == before - 1
    assert page.evaluate("document.querySelector('.keys button').ariaPressed") == "false"
    assert page.evaluate("document.querySelectorAll('.panels .off').length") == 1
    assert page.evaluate(METRIC_LINES) == len(METRICS) * (before - 1)
    page.evaluate(press)
    assert page.evaluate(LINES) == before
    assert page.problems == []


def test_a_pointer_over_links_without_a_budget_shows_a_dash(browser, tmp_path):
    story = Story(workers=2, seconds=20, killed=None)
    with ResultFolder.create(tmp_path / "run", description(story), now=NOW) as folder:
        for record in records(story):
            if isinstance(record, LinkRecord):
                record = replace(record, budget_bytes=None, bandwidth_bytes_per_s=None)
            folder.append(record)
    page = loaded(browser, write_report([folder.path], tmp_path / "page.html"))
    chart = "document.querySelector('[data-chart=run0-uplinks]')"
    page.evaluate(f"{chart}.scrollIntoView()")
    x, y = page.evaluate(
        f"(() => {{ const b = {chart}.querySelector('svg').getBoundingClientRect();"
        " return [b.x + b.width / 2, b.y + b.height / 2] })()"
    )
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    tip_text = page.evaluate(
        f"new Promise(done => {{ const look = () => {{"
        f" const text = {chart}.querySelector('[aria-label=tip]').textContent;"
        " if (text) done(text); else requestAnimationFrame(look) }; look() })"
    )
    assert re.search("budget —.*bandwidth —$", tip_text)


def test_a_pointer_over_a_line_shows_its_values(browser, pages):
    page = loaded(browser, pages["two"])
    tip = "document.querySelector('.plot svg [aria-label=tip]').textContent"
    assert page.evaluate(tip) == ""
    page.evaluate("document.querySelector('.plot').scrollIntoView()")
    x, y = page.evaluate(  # the end of a line
        "(() => { const b = document.querySelector('.plot svg circle').getBoundingClientRect();"
        " return [b.x, b.y] })()"
    )
    for step in range(3):
        page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x - step, y=y + step)
        page.evaluate("new Promise(done => setTimeout(done, 60))")
    tip_text = page.evaluate(tip).strip("\u200b")
    assert "% at" in tip_text
    assert tip_text.startswith(("six", "plant-", "</script>"))


def test_r_squared_is_drawn_without_per_cent_and_with_its_target_and_negative_values(
    browser, pages
):
    page = loaded(browser, pages["targets"])
    assert page.problems == []
    texts = page.evaluate(
        "[...document.querySelector('.plot svg').querySelectorAll('text')].map(e => {"
        " const b = e.getBoundingClientRect(); return [e.textContent, b.y + b.height / 2] })"
    )
    assert not [text for text, _ in texts if "%" in text]
    heights = dict(texts)
    labels = [heights[label] for label in ("target 0.9", "0.5 0.5", "0.45 0.45")]
    assert min(low - high for high, low in itertools.pairwise(labels)) > 10
    top, bottom, lowest = page.evaluate(
        "(() => { const svg = document.querySelector('.plot svg');"
        " const lines = [...svg.querySelectorAll('g[aria-label=line] path')];"
        " const frame = svg.getBoundingClientRect();"
        " return [frame.top, frame.bottom,"
        " Math.max(...lines.map(e => e.getBoundingClientRect().bottom))] })()"
    )
    assert top < labels[0]
    assert lowest < bottom - 30, "the values below 0 are above the horizontal axis"


def test_the_details_of_a_run_are_drawn_when_they_are_opened(browser, pages):
    page = loaded(browser, pages["two"])
    inside = "document.querySelectorAll('#run-0 .plot svg').length"
    assert page.evaluate(inside) == 0
    page.evaluate("document.querySelector('#run-0').open = true")
    page.evaluate("new Promise(done => setTimeout(done, 150))")
    assert page.evaluate(inside) >= 4
    assert page.problems == []


def test_a_short_run_is_marked_where_it_ended(browser, pages):
    page = loaded(browser, pages["two"])
    assert "ended" in page.evaluate("document.querySelector('.plot svg').textContent")


def test_in_print_all_details_are_open(browser, pages):
    page = loaded(browser, pages["two"])
    page.call("Page.printToPDF")
    assert page.evaluate("[...document.querySelectorAll('details.run')].every(e => e.open)")
    assert page.problems == []


def test_a_page_that_breaks_a_rule_is_noticed(browser, tmp_path):
    """This tests the oracle: it finds errors, requests and excess width."""
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<body><div style='width:2000px'>x</div><img src='file:///none.png'>"
        "<script>console.error('printed')</script>"
    )
    page = loaded(browser, bad, width=390)
    assert any("printed" in problem for problem in page.problems)
    assert len(page.requests) == 2
    assert page.evaluate("document.documentElement.scrollWidth") > 390
