"""Proves: the report is one self-contained page with every section, escapes whatever it is given,
stays small, and shows unfinished, empty and several runs.

Leaves out: whether it is good to look at (that was looked at).
"""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import UTC, datetime
from html.parser import HTMLParser

import pytest
import yaml

from dlion_api.errors import DataError
from dlion_api.names import Rank
from dlion_api.protocol.progress import EventRecord
from dlion_cli.__main__ import main
from dlion_results.report.page import PICTURE_BYTES, render
from dlion_results.report.runs import _labels, load_run, load_runs
from dlion_results.run_folder.environment import (
    EnvironmentFigure,
    EnvironmentReport,
    environment_document,
)
from dlion_results.run_folder.folder import ResultFolder
from dlion_results.summary.summary import Ending
from synthetic_run import Story, description, records

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
STORY = Story(seconds=120, step_s=1.6, killed=(4, 50.0, 10.0))
SHORT = Story(workers=2, seconds=10, killed=None)
WITHOUT_PICTURES = 0
"""Bytes of pictures for a page of which the words alone are looked at: runs have no charts then."""
HOSTILE = "<script>alert('x')</script>&\"$\\frac{1}{0}$ ]]> --> {{ 7*7 }} {% raw %}"
VOID = {"meta", "br", "path", "use", "rect", "image", "circle", "line"}


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
        if self._open and self._open[-1] in ("h1", "h2", "b"):
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
    event = EventRecord(60.0, Rank(1), 7, HOSTILE, HOSTILE, warning=True)
    return make(tmp_path_factory.mktemp("runs") / "one", extra=[event])


@pytest.fixture(scope="module")
def text(folder):
    return render(load_runs([folder], [HOSTILE]), title=HOSTILE)


@pytest.fixture(scope="module")
def page(text):
    return Page(text)


def test_every_section_and_picture_is_there(page):
    assert {
        "Learning", "Accuracy against time", "Accuracy against bytes", "Training loss",
        "Drift between replicas", "Time, samples and bytes to an accuracy", "Scalability",
        "Workers", "Batch sizes", "Capacities", "Where time went", "Accuracy per class",
        "Uplinks over time", "Rate of each link", "Use of each link's budget", "Timeline", "Events",
        "Environment: requested and measured", "Settings",
    } <= set(page.headings)  # fmt: skip
    assert page.tags.count("svg") == 12


def test_nothing_is_fetched_from_anywhere(text, page):
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\((?!#)", text)
    loading = {"script", "link", "iframe", "object", "embed", "img"}
    assert not loading & set(page.tags)
    for name, value in page.attributes:
        if name in ("href", "src", "xlink:href"):
            assert value.startswith(("#", "data:image/png;base64,")), value


def test_a_quota_that_a_change_brought_says_since_when(tmp_path):
    path = make(tmp_path / "changed", SHORT)
    quotas = tuple(
        EnvironmentFigure(0, "CPU quota", "cores", cores, cores, begins_s=begins_s)
        for begins_s, cores in ((0.0, 2.0), (90.5, 1.0))
    )
    kept = environment_document(EnvironmentReport("dynamic-sys-a", quotas))
    (path / "environment.yaml").write_text(yaml.safe_dump(kept))
    shown = Page(render(load_runs([path], ["one"]), picture_bytes=WITHOUT_PICTURES)).words
    rows = [text for text in shown if text.startswith("CPU quota")]
    assert rows == ["CPU quota", "CPU quota, from 90.5 s"]


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


def test_an_environment_nested_without_end_is_left_out(tmp_path):
    """In a process of its own: what reads YAML would overflow the stack and end it."""
    path = make(tmp_path / "deep", SHORT)
    done = subprocess.run(
        [sys.executable, "-c", READS_NESTED, str(path)], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the report goes without it") == 3


def test_hostile_text_is_shown_and_never_obeyed(text, page):
    assert "script" not in page.tags
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert HOSTILE in "".join(page.words)


def test_ids_inside_the_page_lead_somewhere_and_belong_to_one_picture(text):
    pictures = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    clips = []
    for picture in pictures:
        ids = set(re.findall(r'\sid="([^"]+)"', picture))
        used = set(re.findall(r'href="#([^"]+)"', picture)) | set(
            re.findall(r"url\(#([^)]+)\)", picture)
        )
        assert used <= ids
        clips.append(used)
    for place, own in enumerate(clips):
        for other in clips[:place]:
            assert not own & other


def test_the_page_follows_light_and_dark(text):
    assert "prefers-color-scheme: dark" in text
    assert "var(--ink)" in "".join(re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL))


def test_many_workers_stay_below_three_megabytes(tmp_path):
    many = Story(workers=16, seconds=12, step_s=3.0, killed=None)
    one = render([load_run(make(tmp_path / "run", many), "run")])
    assert len(one.encode()) < 600_000
    assert PICTURE_BYTES + len(one.encode()) < 3_000_000


def test_several_runs_are_compared_with_one_worker_as_the_reference(three_folders):
    runs = load_runs(three_folders[1:])
    alone, together = (run.summary["scalability"] for run in runs)
    assert alone is None
    assert together["speed_up"] > 1
    page = Page(render(runs, picture_bytes=WITHOUT_PICTURES))
    assert {"Comparison", "dlion", "alone"} <= {word.strip() for word in page.words}


def test_runs_have_no_charts_once_those_before_have_used_up_the_bytes(tmp_path, text):
    run = load_run(make(tmp_path / "run", SHORT), "run")
    most = len(render([run], picture_bytes=WITHOUT_PICTURES))  # more than charts of all runs have
    several = render([run, run, run], picture_bytes=most)
    assert several.count("are left out to keep the page small") == 2
    assert len(several.encode()) < most + len(text.encode())


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
    ],
)
def test_labels_tell_all_runs_apart(folders, labels, tmp_path):
    assert _labels([tmp_path / folder for folder in folders]) == labels


@pytest.fixture(scope="module")
def three_folders(tmp_path_factory):
    """A machine with everybody's cores, one worker alone, and all of them together."""
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
    page = render(runs, picture_bytes=WITHOUT_PICTURES)
    section = page.partition('id="scalability"')[2].partition("</section>")[0]
    words = [word.strip() for word in Page(section).words]
    assert f"accuracy, against the one worker of “{reference}”." in " ".join(words)
    assert reference in words  # in the table


@pytest.mark.parametrize("reference", ["aloen", "dlion"])
def test_a_reference_that_is_no_run_of_one_worker_is_refused(three_folders, reference, capsys):
    folders = [str(folder) for folder in three_folders]
    assert main(["report", *folders, "--reference", reference]) == 66
    said = capsys.readouterr().err
    assert f"given: '{reference}'" in said
    assert "allowed: 'ideal', 'alone'" in said


def test_a_killed_run_has_a_page_that_says_so(tmp_path):
    folder = make(tmp_path / "run", Story(workers=2, seconds=20, killed=None), finish=False)
    with (folder / "events.jsonl").open("ab") as stream:
        stream.write(b'garbage\n{"kind": "st')
    run = load_run(folder, "run")
    assert len(run.bad_lines) == 1
    words = "".join(Page(render([run])).words)
    assert "no summary: still running, or killed" in words
    assert "1 line of events.jsonl could not be read" in words


def test_a_run_in_which_nothing_happened_has_a_page(tmp_path):
    with ResultFolder.create(tmp_path / "run", description(STORY), now=NOW):
        pass
    words = "".join(Page(render([load_run(tmp_path / "run", "run")])).words)
    assert "no replica was evaluated" in words
    assert "No event was recorded." in words


def test_a_folder_without_a_run_is_said(tmp_path):
    with pytest.raises(DataError, match="dlion run"):
        load_run(tmp_path, "x")


def test_the_command_writes_the_page_and_says_where(tmp_path, folder, text, capsys):
    """The same page as before, to the byte."""
    out = tmp_path / "page.html"
    told = ["--label", HOSTILE, "--title", HOSTILE]
    assert main(["report", str(folder), *told, "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert out.read_text("utf-8") == text
    assert text.startswith("<!doctype html>")
    assert main(["report", str(tmp_path / "none")]) == 66
    assert main(["report", str(folder), "--label", "a", "--label", "b"]) == 2
