"""Tests of the report.

It is one self-contained page with every section. It escapes every input, and stays small for any
names, texts, and numbers of workers and runs. It accepts impossible figures and names that are not
text. It shows unfinished, empty and several runs, and why sidecars decided what explains a worker.
The work for it is linear in the number of workers. Runs of unequal length share one time axis, and
the end of each is marked.

Left out: the page in a browser (test_report_in_browser); its sentences (test_headline).
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from html.parser import HTMLParser
from importlib.resources import files

import pytest
import yaml

from dlion_api.errors import DataError
from dlion_api.names import Rank
from dlion_api.protocol.measurements import Directive, Grouping
from dlion_api.protocol.progress import (
    DirectiveRecord,
    EvaluationRecord,
    EventRecord,
    LinkRecord,
    StepRecord,
)
from dlion_api.protocol.records import record_to_json
from dlion_api.reasons import EventReason
from dlion_cli.__main__ import main
from dlion_core.demand.demand_predictor import DemandDecision, DemandState
from dlion_core.resource_control.directive_reasons import reason_for
from dlion_results.comparison import Goal, variant_run
from dlion_results.report import curve_charts, link_charts, progress_charts, time_charts
from dlion_results.report.formats import size
from dlion_results.report.page import MAX_RUNS, PAGE_BYTES, SCRIPTS, render
from dlion_results.report.runs import _labels, load_run, load_runs
from dlion_results.report.tiles import worst_class
from dlion_results.run_folder.environment import (
    EnvironmentFigure,
    EnvironmentReport,
    environment_document,
)
from dlion_results.run_folder.folder import ResultFolder
from dlion_results.summary.decisions import MAX_DECISIONS
from dlion_results.summary.link_use import KINDS
from dlion_results.summary.summary import Ending
from dlion_results.summary.tally import MAIN_PHASES, RunTally
from synthetic_run import Story, description, records

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
STORY = Story(seconds=120, step_s=1.6, killed=(4, 50.0, 10.0))
SHORT = Story(workers=2, seconds=10, killed=None)
VENDORED = {
    "d3.min.js": "912111098ea99503a6f4967361d2bbdc9dbf58cf9c678c8e27e5b02d1a07f0c1",
    "plot.umd.min.js": "4358086467740777dd788d6b27a95cebdbaefdd50c730a3060117073bd7134cb",
}
"""SHA-256 of the files of the npm packages d3 7.9.2 and @observablehq/plot 0.6.17."""
HOSTILE = "<script>alert('x')</script>&\"$\\frac{1}{0}$ ]]> --> {{ 7*7 }} {% raw %}"
VOID = {"meta", "br"}


class Page(HTMLParser):
    """Elements, attributes and balance of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.headings, self.words = [], [], [], []
        self._open = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        if tag in VOID:
            return
        assert self._open, f"</{tag}> closes nothing"
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)
        if self._open and self._open[-1] in ("h1", "h2", "h3"):
            self.headings.append(data.strip())


def make(path, story=STORY, *, extra=(), finish=True):
    with ResultFolder.create(path, description(story), now=NOW) as folder:
        for record in (*records(story), *extra):
            folder.append(record)
        figures = tuple(EnvironmentFigure(r, "CPU quota", "cores", 2.0, 1.5) for r in range(2))
        folder.write_environment(EnvironmentReport("hetero-sys-a", figures, (HOSTILE,)))
        if finish:
            folder.finish(Ending("maxSeconds", message=HOSTILE))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    reasons = (HOSTILE, EventReason.MESSAGE_REFUSED)
    events = [EventRecord(60.0, Rank(1), 7, each, HOSTILE, warning=True) for each in reasons]
    return make(tmp_path_factory.mktemp("runs") / "one", extra=events)


@pytest.fixture(scope="module")
def text(folder):
    return render(load_runs([folder], [HOSTILE]), title=HOSTILE)


@pytest.fixture(scope="module")
def page(text):
    return Page(text)


def test_every_section_and_picture_is_there_and_settings_are_last(page, text):
    headings = list(dict.fromkeys(heading for heading in page.headings if heading))
    assert {
        "Accuracy", "Time to the target", "Samples per second", "Sent", "Workers", "Time use",
        "Accuracy over time", "What the time went to", "Each worker's time",
        "Workers that the others waited for", "Links", "Uplinks over time", "Rate of each link",
        "Use of each link's budget", "Batches and capacities", "Batch sizes", "Capacities",
        "Accuracy per class", "Bytes, loss and drift", "Accuracy over bytes sent", "Training loss",
        "Drift between replicas", "Time, samples and bytes to an accuracy", "Events", "Timeline",
    } <= set(headings)  # fmt: skip
    order = ["Accuracy over time", "What the time went to", "Links", "Batches and capacities",
             "Bytes, loss and drift", "Events", "Environment and settings"]  # fmt: skip
    assert [heading for heading in headings if heading in order] == order
    assert headings[-1] == order[-1]
    drawn = [value for name, value in page.attributes if name == "data-chart"]
    assert sorted(drawn) == sorted(chart_data(text))
    assert len(drawn) == 9


def chart_data(text):
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(found[1])


def test_headings_have_no_gaps_and_pictures_have_texts(page):
    levels = [int(tag[1]) for tag in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    assert page.tags.count("figcaption") == page.tags.count("figure")
    images = [value for name, value in page.attributes if (name, value) == ("role", "img")]
    labels = [value for name, value in page.attributes if name == "aria-label"]
    assert len(labels) >= len(images)
    assert all(labels)


def test_a_page_loads_no_resources(text, page):
    """Only the scripts may contain an address; test_report_in_browser checks them."""
    without_scripts = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r"https?:|@import|url\(", without_scripts)
    loading = {"link", "iframe", "object", "embed", "img", "base", "form"}
    assert not loading & set(page.tags)
    for name, value in page.attributes:
        if name in ("href", "src", "xlink:href"):
            assert value.startswith("#"), value


def test_the_policy_in_the_page_names_the_hash_of_each_script_and_allows_no_request(text, page):
    [policy] = [value for _, value in page.attributes if value.startswith("default-src")]
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert len(scripts) == len(SCRIPTS)
    for script in scripts:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "script-src 'sha256-" in policy
    assert "http" not in policy


@pytest.mark.parametrize("name", VENDORED)
def test_vendored_scripts_equal_those_of_their_packages_and_have_their_licence(name, text):
    content = files("dlion_results.report").joinpath("static", name).read_bytes()
    assert hashlib.sha256(content).hexdigest() == VENDORED[name]
    assert content.decode() in text
    assert "Permission to use, copy, modify, and/or distribute this software" in text


def test_a_changed_quota_has_its_time(tmp_path):
    path = make(tmp_path / "changed", SHORT)
    quotas = tuple(
        EnvironmentFigure(0, "CPU quota", "cores", cores, cores, begins_s=begins_s)
        for begins_s, cores in ((0.0, 2.0), (90.5, 1.0))
    )
    kept = environment_document(EnvironmentReport("dynamic-sys-a", quotas))
    (path / "environment.yaml").write_text(yaml.safe_dump(kept))
    shown = Page(render(load_runs([path], ["one"]))).words
    rows = [text for text in shown if text.startswith("CPU quota")]
    assert rows == ["CPU quota", "CPU quota, from 90.5 s"]


def test_a_requested_link_has_the_names_of_both_workers(tmp_path):
    path = make(tmp_path / "links", SHORT)
    rate = EnvironmentFigure(0, "link rate", "Mbit/s", 20.0, 19.0, peer=1)
    kept = environment_document(EnvironmentReport("two-sites", (rate,)))
    (path / "environment.yaml").write_text(yaml.safe_dump(kept))
    (run,) = load_runs([path], ["one"])
    words = Page(render([run])).words
    names = [run.worker_name(Rank(rank)) for rank in (0, 1)]
    assert words[words.index("link rate") - 1] == " → ".join(names)


READS_NESTED = """
import sys
from pathlib import Path
from dlion_results.report.runs import load_run

path = Path(sys.argv[1])
for opening in ("[", "{a: ", "- "):
    (path / "environment.yaml").write_text(opening * 100_000)
    if load_run(path, "deep").environment is not None:
        sys.exit(f"{opening} was read")
"""


def test_an_endlessly_nested_environment_is_left_out(tmp_path):
    """This uses a separate process, because the YAML reader would overflow the
    stack and end it.
    """
    path = make(tmp_path / "deep", SHORT)
    done = subprocess.run(
        [sys.executable, "-c", READS_NESTED, str(path)], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the report goes without it") == 3


def test_hostile_text_is_shown_and_never_executed(text, page):
    assert page.tags.count("script") == len(SCRIPTS) + 1
    assert text.count("</script") == len(SCRIPTS) + 1
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert HOSTILE in "".join(page.words)
    timeline = chart_data(text)["run0-timeline"]
    assert any(HOSTILE in dot[-1] for dot in timeline["dots"])


def test_events_of_the_operator_name_no_worker(tmp_path):
    events = [
        EventRecord(60.0, Rank(0), 0, "BandwidthDropped", "it dropped", warning=True),
        EventRecord(61.0, Rank(0), 3, EventReason.RESUMED, "it resumed"),
    ]
    text = render(load_runs([make(tmp_path / "run", SHORT, extra=events)]))
    rows = {each.partition("</tr>")[0] for each in text.split("<tr>") if "BandwidthDropped" in each}
    assert [re.findall(r'<td class="left">([^<]*)</td>', row)[1] for row in rows] == ["job"]
    dots = [dot[-1] for dot in chart_data(text)["run0-timeline"]["dots"]]
    assert [dot for dot in dots if "resumed" in dot] == ["plant-a/small-0: Resumed: it resumed"]
    assert not [dot for dot in dots if "dropped" in dot]


def test_long_lists_of_events_and_of_the_environment_are_marked_as_cut(tmp_path):
    events = [EventRecord(60.0, Rank(0), 0, EventReason.CHECKPOINT_SAVED, "it")] * 100
    path = make(tmp_path / "run", SHORT, extra=events)
    quota = EnvironmentFigure(0, "CPU quota", "cores", 2.0, 2.0)
    kept = environment_document(EnvironmentReport("many", (quota,) * 201))
    (path / "environment.yaml").write_text(yaml.safe_dump(kept))
    (run,) = load_runs([path])
    words = Page(render([run])).words
    count = run.tally.reasons.total()
    assert f"{count} events: 80 of them, warnings before others" in words
    assert "the rest is in environment.yaml" in words


def test_a_script_element_cannot_be_ended_by_data(tmp_path):
    """Labels are in the legend, the headline, alternative texts, tables and the charts' data."""
    path = make(tmp_path / "run", SHORT)
    label = "</script><script>alert(1)</script><!-- <script> &amp; \u2028"
    text = render(load_runs([path, path], [label, "other"]))
    assert text.count("</script") == text.count("<script") == len(SCRIPTS) + 1
    assert label in {one["n"] for one in chart_data(text)["accuracy"]["series"]}


def test_the_page_follows_light_and_dark_and_can_be_printed(text):
    for query in ("prefers-color-scheme: dark", "@media print", "max-width: 760px"):
        assert query in text


@pytest.mark.parametrize(
    "story",
    [
        Story(workers=96, seconds=6, step_s=3.0, killed=None),
        Story(workers=3, seconds=3 * 3600, step_s=6.0, killed=None),
    ],
    ids=["96 workers", "three hours"],
)
def test_many_workers_and_hours_stay_below_a_megabyte(tmp_path, story):
    one = render([load_run(make(tmp_path / "run", story), "run")])
    assert len(one.encode()) < 1_000_000
    assert PAGE_BYTES < 2_000_000


def directive(time_s, before, after, *, rank=0):
    """A record of a directive with the reason that a sidecar gives for it."""
    made = Directive(2, 48, 192, **after)
    reason = reason_for(Directive(1, 48, 192, **before), made)
    return DirectiveRecord(time_s, Rank(rank), 7, 48, 192, reason=reason)


def test_decisions_on_heat_other_work_and_groups_are_listed_with_their_reasons(tmp_path):
    two, three = (
        Grouping(version, Rank(1), groups, gateways)
        for version, groups, gateways in (
            (1, ((0, 1), (2, 3, 4, 5)), (0, 2)), (2, ((0, 1, 2, 3), (4,), (5,)), (0, 4, 5)),
        )
    )  # fmt: skip
    demand = DemandDecision(90.0, DemandState.PREDICTED, 0.1, 2.0, 4.0, HOSTILE).reason()
    cooler = directive(62.0, {}, {"compute_share": 0.625}, rank=4)
    extra = [
        *(directive(61.0, {"grouping": two}, {"grouping": three}, rank=rank) for rank in range(6)),
        cooler,
        replace(cooler, time_s=63.0, reason=f"batch rose from 40 to 48 samples; {demand}"),
        directive(64.0, {"capacities": {0: 300.0}}, {"capacities": {0: 900.0}}),
    ]
    words = Page(render(load_runs([make(tmp_path / "run", extra=extra)]))).words
    assert "3 decisions on heat, other work and groups" in words
    assert words.count("worker 1 made groups (2) of links: 0 1 2 3 | 4 | 5") == 1
    assert "the heat budget fell from 100% to 62.5% of compute" in words
    assert f"other work is expected to take 2.0 of 4 cores, now 0.1 ({HOSTILE})" in words
    assert not any("capacity of 0" in word for word in words)


def test_decisions_that_are_left_out_are_counted(tmp_path):
    """One that every worker reports counts once."""
    one, two = (Grouping(version, Rank(1), ((0, 1), (2, 3)), (0, 2)) for version in (1, 2))
    extra = [
        *(directive(1.0 + n, {}, {"compute_share": 0.5}) for n in range(MAX_DECISIONS + 20)),
        *(directive(900.0, {"grouping": one}, {"grouping": two}, rank=rank) for rank in range(4)),
    ]
    text = render(load_runs([make(tmp_path / "run", extra=extra)]))
    assert f"{MAX_DECISIONS + 21} decisions on heat, other work and groups: the first 80" in text
    assert "on heat" not in render(load_runs([make(tmp_path / "other")]))


def test_links_that_lose_segments_are_listed_with_their_round_trips(tmp_path):
    def link(rank, peer, sent, again, longest_s, shortest_s):
        record = LinkRecord(110.0, Rank(rank), Rank(peer), 9, 0, 0, 0, 0, None, None, 0, True)
        figures = {"sent_segments": sent, "retransmitted_segments": again,
                   "round_trip_s": longest_s, "min_round_trip_s": shortest_s}  # fmt: skip
        return replace(record, **figures)

    closed = LinkRecord(111.0, Rank(0), Rank(1), 9, 0, 0, 0, 0, None, None, 0, False)
    measured = [link(0, 1, 400, 9, 0.18, 0.041), link(1, 0, 400, 40, 0.2, None), closed]
    run = load_run(make(tmp_path / "run", extra=measured), "run")
    table = link_charts.loss_table(run)
    names = [run.worker_name(Rank(rank)) for rank in (0, 1)]
    rows = [(group.name, *(cell.text for cell in cells)) for group, cells in table.rows]
    assert rows == [
        (f"{names[1]} → {names[0]}", "10.00 %", "", "200 ms"),
        (f"{names[0]} → {names[1]}", "2.25 %", "41 ms", "180 ms"),
    ]
    assert table.title in Page(render([run])).words
    (own,) = [each for each in run.summary["workers"][0]["links"] if each["peer"] == 1]
    assert (own["sent_segments"], own["retransmitted_segments"]) == (400, 9)
    assert link_charts.loss_table(load_run(make(tmp_path / "other"), "other")) is None


def of_many_workers(path, count):
    """A folder of a run with three steps and evaluations of each worker."""
    document = description(SHORT).to_document()
    sites = [
        {"name": f"s{place}", "groups": [{"name": "w", "workers": count // 40}]}
        for place in range(40)
    ]
    batching = {"globalBatchSize": {"initial": 8 * count, "max": 16 * count}}
    spec = {**document["spec"], "sites": sites, "batching": batching}
    path.mkdir()
    (path / "job.yaml").write_text(yaml.safe_dump({**document, "spec": spec}))
    lines = [
        record_to_json(record)
        for time_s in (1.0, 2.0, 3.0)
        for rank in range(count)
        for record in (
            step(time_s, rank=Rank(rank)),
            EvaluationRecord(time_s, Rank(rank), int(time_s), 8, time_s / 4, 1.0, 100),
        )
    ]
    (path / "events.jsonl").write_text("\n".join(lines) + "\n")
    return path


def step(time_s, *, loss=1.0, rank=0, seconds=0.1):
    own = [seconds] * 5
    return StepRecord(time_s, Rank(rank), 0, int(min(time_s, 9)), loss, 8, 16, 0.1, *own, 8)


def test_a_run_of_thousands_of_workers_has_details_below_two_megabytes(tmp_path):
    run = load_run(of_many_workers(tmp_path / "run", 4000), "run")
    text, shortened = render([run]), render([run], page_bytes=900_000)
    assert len(text.encode()) < 2_000_000
    assert {"s0/w-0", "s39/w-99"} <= set(Page(text).words)
    assert len(shortened.encode()) <= 900_000
    words = set(Page(shortened).words)
    assert {"s0/w-0", "and 3,900 more workers, left out to keep the page small"} <= words
    assert "The manifest with its defaults" in words
    assert "At most 200 of 4,000 workers have a line." in text
    specs = chart_data(text)
    assert len(specs["accuracy"]["series"]) == curve_charts.MAX_WORKER_LINES + 1
    assert len(specs["run0-timeline"]["bars"]) == len(specs["run0-timeline"]["rows"])


def test_the_work_for_a_page_is_linear_in_the_workers(tmp_path):
    """The test counts calls of functions, because times vary."""
    few, many = (calls_to_render(of_many_workers(tmp_path / f"{n}", n)) for n in (240, 960))
    assert many < 5 * few


def calls_to_render(folder):
    calls = 0

    def count(_frame, event, _argument):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        render([load_run(folder, "run")])
    finally:
        sys.setprofile(None)
    return calls


HUGE = {
    "losses": [step(float(t), loss=1.7e308) for t in range(3)],
    "losses of both signs": [step(float(t), loss=(-1) ** t * 1e300) for t in range(3)],
    "times": [step(1.0), step(1.7e308), step(1.7e308)],
    "seconds": [step(float(t), seconds=1.7e308) for t in range(3)],
    "seconds that cancel out": [
        replace(step(1.0), waited_s=5.0, waited_for=(1,)), replace(step(2.0), waited_s=-5.0),
    ],
    "steps at next to one time": [step(0.0, seconds=0.0), step(1e-310, seconds=0.0)],
    "evaluations": [
        EvaluationRecord(t, Rank(0), 1, 8, a, 1.0, 10, sketch=(1e308,), weights_norm=1e308)
        for t, a in ((0.0, -1e9), (1e-310, 1e9), (1.0, 1.7e308))
    ],
    "links": [
        LinkRecord(t, Rank(0), Rank(1), 1, 2**53, 1, 1, 1, 2**53, 1.7e308, 0, True)
        for t in (0.0, 1e-310, 1.0)
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", HUGE)
def test_impossible_numbers_do_not_prevent_the_page(tmp_path, name):
    path = make(tmp_path / "run", SHORT)
    lines = [record_to_json(record) for record in (step(0.5), *HUGE[name], step(9.0))]
    (path / "events.jsonl").write_text("\n".join(lines) + "\n")
    for folders in ([path], [path, path]):
        text = render(load_runs(folders))
        chart_data(text)
        assert not re.search(r"\d{40}|(,\d{3}){12}", text.partition("<script")[0])


def test_a_folder_whose_name_is_not_text_has_a_page(tmp_path, capfdbinary):
    path = make(tmp_path / "run", SHORT)
    named = [path.rename(os.fsdecode(os.fsencode(tmp_path) + b"/run\xff"))]
    named.append(make(tmp_path / os.fsdecode(b"run\xfe"), SHORT))
    assert _labels(named) == ["run? (1)", "run? (2)"]
    assert (
        main(["report", *map(str, named), "--title", "a\udcff", "--out", str(tmp_path / "p")]) == 0
    )
    text = (tmp_path / "p").read_text("utf-8")
    assert "a?" in text
    assert "run? (1)" in text
    labels = ["--label", "b\udcff", "--label", "c"]
    assert main(["report", *map(str, named), *labels, "--out", str(tmp_path / "p")]) == 0
    capfdbinary.readouterr()
    assert main(["report", str(named[0])]) == 0
    assert capfdbinary.readouterr().out == os.fsencode(named[0] / "report.html") + b"\n"


def test_long_names_and_hostile_files_do_not_make_a_large_page(tmp_path):
    path = make(tmp_path / "run", SHORT)
    plain = len(render(load_runs([path])).encode())
    text = f"name: &n '{'&' * 5_000_000}'\nnotes: [{', '.join(['*n'] * 5000)}]\n"
    (path / "environment.yaml").write_text(text)
    with (path / "events.jsonl").open("a") as events:
        for place in range(300):
            event = EventRecord(1.0, Rank(0), 1, "<" * 80, f"{place}" + "\U0001f600" * 900)
            events.write(record_to_json(event) + "\n")
    text = render(load_runs([path]))
    assert len(text.encode()) < 2_000_000
    assert len(text.encode()) < plain + 1_000_000
    assert "The manifest with its defaults" in text


def test_the_manifest_of_a_shortened_page_is_marked_as_shortened(tmp_path):
    path = make(tmp_path / "run", SHORT)
    document = description(SHORT).to_document()
    document["metadata"]["annotations"] = {"a/b": "<" * 250_000}
    (path / "job.yaml").write_text(yaml.safe_dump(document))
    text = render(load_runs([path]), page_bytes=900_000)
    assert len(text.encode()) <= 900_000
    assert "the rest is in job.yaml" in text


def test_signatures_of_presigned_urls_are_not_in_the_page(tmp_path):
    folders = [make(tmp_path / name, SHORT) for name in ("one", "two")]
    for folder in folders:
        document = description(SHORT).to_document()
        url = f"https://example.com/d.npz?X-Amz-Date=1&X-Amz-Signature=of-{folder.name}'s"
        download = {"url": url, "sha256": "0" * 64}
        document["spec"]["trainer"] |= {
            "dataset": {"path": "d.npz", "format": "npz"},
            "initializer": {"dataset": download, "model": download},
            "startFrom": "d.npz",
        }
        (folder / "job.yaml").write_text(yaml.safe_dump(document))
    for text in (render(load_runs(folders)), render(load_runs(folders[:1]))):
        assert "Signature" not in text
        assert "X-Amz" not in text
    assert "https://example.com/d.npz?…" in text


def test_a_single_run_without_room_for_details_has_valid_advice(tmp_path):
    text = render(load_runs([make(tmp_path / "run", SHORT)]), page_bytes=1)
    assert "The files of its folder have them" in text
    assert "Make a report of its folder alone" not in text


def test_of_many_runs_the_first_are_shown_and_the_others_named(tmp_path):
    run = load_run(make(tmp_path / "run", SHORT), "")
    runs = [replace(run, label=f"{place} " + "<" * 200) for place in range(400)]
    text = render(runs)
    assert len(text.encode()) < 2_000_000
    assert "400 runs side by side" in text
    assert f"{400 - MAX_RUNS} more runs are not shown, to keep the page small: {MAX_RUNS} " in text
    assert text.count('<section class="run"') + text.count('<details class="run"') == MAX_RUNS


def test_several_runs_are_compared_with_one_worker_as_the_reference(three_folders):
    runs = load_runs(three_folders[1:])
    alone, together = (run.summary["scalability"] for run in runs)
    assert alone is None
    assert together["speed_up"] > 1
    page = Page(render(runs))
    assert {"Comparison", "dlion", "alone"} <= {word.strip() for word in page.words}


def test_runs_have_no_details_after_earlier_ones_have_used_the_allowed_bytes(tmp_path):
    run = load_run(make(tmp_path / "run", SHORT), "run")
    whole = render([run, run, run])
    assert "left out to keep the page small" not in whole
    most = len(whole.encode()) - 1
    several = render([run, run, run], page_bytes=most)
    assert several.count("left out to keep the page small") == 1
    assert len(several.encode()) <= most
    assert {name for name in chart_data(several) if name.startswith("run2-")} == set()


def test_bars_of_time_have_the_seconds_of_the_summary(tmp_path):
    story = replace(STORY, phases=(0.2, 0.1, 0.05, 0.15, 0.1))
    run = load_run(make(tmp_path / "a", story), "a")
    chart = time_charts.time_bars(run)
    fields = ("compute_s", "waited_s", *MAIN_PHASES, "other_s")
    for row, worker in zip(chart.spec["rows"], run.summary["workers"], strict=True):
        assert row["n"] == worker["name"]
        assert row["v"] == pytest.approx([worker[name] for name in fields], rel=1e-3)
        assert sum(row["v"]) == pytest.approx(worker["wall_s"], rel=1e-2)
    assert len(chart.spec["parts"]) == len(fields)
    assert "plant-a/small-0 computing " in chart.alt


def test_bars_of_an_old_run_count_the_exchange_as_rest_and_an_empty_run_has_none(folder):
    run = load_run(folder, "a")
    chart = time_charts.time_bars(run)
    assert chart.spec["parts"] == ["computing", "waiting for others", "exchange and the rest"]
    assert {len(row["v"]) for row in chart.spec["rows"]} == {3}
    nothing = replace(run, tally=RunTally([Rank(0)]))
    assert time_charts.time_bars(nothing).spec == {}
    assert time_charts.time_bars(nothing).alt == "No step was done."


def test_bars_of_time_are_of_workers_although_one_has_made_no_step(folder):
    run = load_run(folder, "a")
    assert time_charts.time_bars(run).title == "Each worker's time"
    ranks = [worker.rank for worker in run.workers]
    more = replace(run, tally=RunTally([*ranks, Rank(len(ranks))]))
    more.tally.workers.update(run.tally.workers)
    chart = time_charts.time_bars(more)
    assert len(chart.spec["rows"]) == len(ranks)
    assert chart.title == "Each worker's time"


def test_a_quarantined_replica_is_no_part_of_the_mean(tmp_path):
    def evaluation(time_s, rank, accuracy):
        return EvaluationRecord(time_s, Rank(rank), 1, 1, accuracy, 1.0, 10)

    bad = EventRecord(9.0, Rank(1), 1, EventReason.WORKER_QUARANTINED, "it is bad", warning=True)
    evaluations = [evaluation(5.0, 0, 0.6), evaluation(5.0, 1, 0.1)]
    story = Story(workers=2, seconds=1, step_s=5.0, killed=None)
    run = load_run(make(tmp_path / "run", story, extra=[*evaluations, bad]), "run")
    assert run.mean_accuracy()[-1].tolist() == [5.0, 0.6]
    found = variant_run(run, Goal(target_accuracy=0.5, at_s=10.0), seed=1)
    assert found.accuracy == 0.6
    assert found.time_to_target_s is not None


def test_other_figures_leave_a_quarantined_replica_out_as_well(tmp_path):
    """With 25 workers, a row of the accuracies per class is the mean of a site."""
    with ResultFolder.create(tmp_path / "run", description(Story(workers=25)), now=NOW) as folder:
        for rank, each in ((Rank(0), 0.75), (Rank(1), 0.25)):
            classes, metrics = (each, each), {"auc": each}
            folder.append(
                EvaluationRecord(5.0, rank, 1, 1, each, 1.0, 10, classes, metrics=metrics)
            )
        folder.append(
            EventRecord(9.0, Rank(1), 1, EventReason.WORKER_QUARANTINED, "it is bad", warning=True)
        )
    run = load_run(folder.path, "run")
    (panel,) = curve_charts.metrics_over_time([run]).spec["panels"]
    assert panel["spec"]["series"][0]["y"] == [0.75]
    assert worst_class(run) == 0.75
    cells = link_charts.class_map(run).rows[0][1]
    assert [cell.text for cell in cells] == ["75", "75"]


@pytest.mark.parametrize(("targets", "line"), [((0.5, 0.5), 50.0), ((0.5, 0.75), None)])
def test_a_chart_of_several_runs_has_the_line_of_their_common_target(tmp_path, targets, line):
    folders = [tmp_path / name for name in ("a", "b")]
    for path, target in zip(folders, targets, strict=True):
        with ResultFolder.create(path, description(SHORT, target=target), now=NOW) as folder:
            for record in records(SHORT):
                folder.append(record)
    runs = load_runs(folders)
    assert curve_charts.accuracy_over_time(runs).spec["rule"] == line
    is_dashed = "stroke-dasharray" in progress_charts.accuracy_against_time(runs).svg
    assert is_dashed == (line is not None)


def test_metrics_of_several_runs_have_a_panel_each_with_means(tmp_path):
    first = make(tmp_path / "a", replace(SHORT, metric_names=("auc", "mae")))
    second = make(tmp_path / "b", replace(SHORT, metric_names=("auc",)))
    third = make(tmp_path / "c", SHORT)
    runs = load_runs([first, second, third], ["a", "b", "c"])
    chart = curve_charts.metrics_over_time(runs)
    assert [panel["n"] for panel in chart.spec["panels"]] == ["auc", "mae"]
    auc, mae = (panel["spec"]["series"] for panel in chart.spec["panels"])
    assert [one["n"] for one in auc] == ["a", "b"]
    assert [one["n"] for one in mae] == ["a"]
    ends = runs[0].summary["metrics"]
    assert auc[0]["y"][-1] == pytest.approx(ends["auc"]["mean"], rel=1e-3)
    assert f"mae {ends['mae']['mean']:.4g} (a)" in chart.alt
    assert 'data-chart="metrics"' in render(runs)
    assert curve_charts.metrics_over_time([runs[2]]) is None
    assert 'data-chart="metrics"' not in render([runs[2]])


def test_of_many_metrics_the_first_have_panels_and_the_page_stays_small(tmp_path):
    names = tuple(f"{HOSTILE} {number}" for number in range(60))
    run = load_run(make(tmp_path / "a", replace(SHORT, seconds=200, metric_names=names)), "a")
    chart = curve_charts.metrics_over_time([run])
    assert len(chart.spec["panels"]) == curve_charts.MAX_METRIC_PANELS
    assert "The first 12 of 60" in chart.caption
    page = render([run])
    assert len(page.encode()) < 1_000_000
    assert HOSTILE not in page


def test_runs_of_unequal_length_share_the_time_and_the_short_one_is_marked(tmp_path):
    long, short = (
        load_run(make(tmp_path / str(s), Story(workers=2, seconds=s, killed=None)), str(s))
        for s in (60, 20)
    )
    spec = curve_charts.accuracy_over_time([long, short]).spec
    assert spec["end"] == pytest.approx(long.length_s)
    marks = {one["n"]: one["m"] for one in spec["series"] if one["m"]}
    assert marks == {"60": "end", "20": "ended"}
    assert all(max(one["x"]) <= spec["end"] * 1.001 for one in spec["series"])
    alone = curve_charts.accuracy_over_time([short]).spec
    assert alone["end"] == pytest.approx(short.length_s)
    assert [one["m"] for one in alone["series"] if one["m"]] == ["end"]
    assert curve_charts.loss_over_time([long, short]).spec["end"] == spec["end"]
    assert curve_charts.drift_over_time([long, short]).spec["end"] == spec["end"]


def test_time_counts_from_the_first_step_and_a_worker_has_one_colour(folder):
    run = load_run(folder, "one")
    assert run.began_s == pytest.approx(1.0)
    charts = [
        curve_charts.accuracy_over_time([run]),
        curve_charts.batch_sizes(run),
        curve_charts.capacities(run),
    ]
    colours = [
        {one["n"]: one["c"] for one in chart.spec["series"] if one["n"] != "mean"}
        for chart in charts
    ]
    assert colours[0] == colours[1] == colours[2]
    panels = {panel["n"]: panel["c"] for panel in link_charts.uplinks(run).spec["panels"]}
    bars = {bar[0]: bar[1] for bar in curve_charts.timeline(run).spec["bars"]}
    assert panels == bars == colours[0]


def test_links_show_sent_bytes_and_their_share_of_budgets(folder):
    run = load_run(folder, "one")
    rates = link_charts.link_map(run)
    assert len(rates.rows) == len(rates.columns) == 6
    for place, (_, cells) in enumerate(rates.rows):
        assert cells[place].shade is None  # no worker sends to itself
        assert all(0 < cell.shade <= 1 for i, cell in enumerate(cells) if i != place)
    panels = link_charts.uplinks(run).spec
    sent = {panel["n"]: sum(panel["sent"]) * panels["end"] / link_charts.BINS
            for panel in panels["panels"]}  # fmt: skip
    for worker in run.summary["workers"]:
        assert sent[worker["name"]] == pytest.approx(worker["sent_bytes"], rel=0.05)


def test_the_rate_of_a_sender_that_made_no_step_is_that_over_the_whole_run(folder):
    """So do sensors of topology `staged`, which send features."""
    run = load_run(folder, "one")
    sensor = run.workers[0]
    sensor.steps = 0
    _, cells = link_charts.link_map(run).rows[0]
    rates = {peer: link.sent_bytes / run.length_s for peer, link in sensor.links.items()}
    assert [cells[peer].text for peer in rates] == [f"{size(rate)}/s" for rate in rates.values()]


def test_a_map_has_the_bytes_of_the_busiest_links_by_kind(folder):
    run = load_run(folder, "one")
    found = link_charts.byte_map(run)
    assert found.columns == KINDS
    assert len(found.rows) == link_charts.MAX_BYTE_ROWS
    assert "The 20 of 30 links" in found.caption
    links = {f"{worker['name']} → {run.worker_name(Rank(link['peer']))}": link
             for worker in run.summary["workers"] for link in worker["links"]}  # fmt: skip
    shades = []
    for group, cells in found.rows:
        link = links[group.name]
        assert [cell.text for cell in cells] == [size(link[f"{kind}_bytes"]) for kind in KINDS]
        shades.append(cells[0].shade)
    assert shades == sorted(shades, reverse=True)
    assert shades[0] == 1.0
    assert found.title in render([run])


@pytest.mark.parametrize(
    ("folders", "labels"),
    [
        (["a", "b"], ["a", "b"]),
        (["x/a", "y/a"], ["x/a", "y/a"]),
        (
            ["full/lr-0.05/seed-1", "none/lr-0.05/seed-1"],
            ["full/lr-0.05/seed-1", "none/lr-0.05/seed-1"],
        ),
        (["x/a", "x/a", "y/a"], ["x/a (1)", "x/a (2)", "y/a"]),
        (["a", "a", "a (1)", "a (3)"], ["a (2)", "a (4)", "a (1)", "a (3)"]),
    ],
)
def test_labels_distinguish_all_runs(folders, labels, tmp_path):
    assert _labels([tmp_path / folder for folder in folders]) == labels


@pytest.fixture(scope="module")
def three_folders(tmp_path_factory):
    """A machine with the cores of all, one worker alone, and all workers together."""
    path = tmp_path_factory.mktemp("three")
    ideal = Story(workers=1, seconds=120, step_s=1.6, learning_s=20, killed=None)
    alone = Story(workers=1, seconds=120, step_s=1.6, learning_s=200, killed=None)
    return [make(path / "ideal", ideal), make(path / "alone", alone), make(path / "dlion")]


def test_of_two_runs_of_one_worker_the_named_one_is_the_reference(three_folders):
    ideal, alone, together = load_runs(three_folders, reference="alone")
    assert together.reference == "alone"
    assert together.summary["scalability"]["speed_up"] > 1
    assert ideal.summary["scalability"] is alone.summary["scalability"] is None
    first = load_runs(three_folders)[2]
    assert first.reference == "ideal"
    assert first.summary["scalability"]["speed_up"] < 1


@pytest.mark.parametrize("reference", ["alone", pytest.param("ideal", marks=pytest.mark.slow)])
def test_the_page_names_the_reference_of_its_speed_up(three_folders, reference):
    runs = load_runs(three_folders, reference=reference)
    page = render(runs)
    section = page.partition('id="scalability"')[2].partition("</section>")[0]
    words = [word.strip() for word in Page(section).words]
    assert words[words.index("dlion") + 3] == reference  # the cell after workers and accuracy


@pytest.mark.parametrize("reference", ["aloen", "dlion"])
def test_a_reference_that_is_not_a_run_of_one_worker_is_refused(three_folders, reference, capsys):
    folders = [str(folder) for folder in three_folders]
    assert main(["report", *folders, "--reference", reference]) == 66
    error = capsys.readouterr().err
    assert f"given: '{reference}'" in error
    assert "allowed: 'ideal', 'alone'" in error


def test_the_page_of_a_killed_run_states_this(tmp_path):
    folder = make(tmp_path / "run", Story(workers=2, seconds=20, killed=None), finish=False)
    with (folder / "events.jsonl").open("ab") as stream:
        stream.write(b'garbage\n{"kind": "st')
    run = load_run(folder, "run")
    assert len(run.bad_lines) == 1
    words = "".join(Page(render([run])).words)
    assert "Still running, or killed. Two workers" in words
    assert "no summary: still running, or killed" in words
    assert "1 line of events.jsonl could not be read" in words


def test_a_run_without_events_has_a_page(tmp_path):
    with ResultFolder.create(tmp_path / "run", description(STORY), now=NOW):
        pass
    words = "".join(Page(render([load_run(tmp_path / "run", "run")])).words)
    assert "no replica was evaluated." in words
    assert "No step was done." in words
    assert "No event was recorded." in words


def test_a_run_that_was_not_evaluated_yet_has_sent_bytes(tmp_path):
    with ResultFolder.create(tmp_path / "run", description(SHORT), now=NOW) as folder:
        for record in records(SHORT):
            if not isinstance(record, EvaluationRecord):
                folder.append(record)
    run = load_run(tmp_path / "run", "run")
    assert run.summary["sent_bytes"] > 0
    silent = replace(run, summary={**run.summary, "sent_bytes": 0})
    for runs in ([run], [run, silent]):
        alt = "No replica of a run that sent bytes was evaluated."
        assert curve_charts.accuracy_over_bytes(runs).alt == alt
    assert "Nothing was sent" not in render([run])


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(DataError, match="dlion run"):
        load_run(tmp_path, "x")


def test_the_command_writes_the_page_and_prints_its_path(tmp_path, folder, text, capsys):
    """The page is the same as before, byte for byte."""
    out = tmp_path / "page.html"
    options = ["--label", HOSTILE, "--title", HOSTILE]
    assert main(["report", str(folder), *options, "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert out.read_text("utf-8") == text
    assert text.startswith("<!doctype html>")
    assert main(["report", str(tmp_path / "none")]) == 66
    assert main(["report", str(folder), "--label", "a", "--label", "b"]) == 2
