"""Tests of the picture of one run and of several.

It is a well-formed SVG without external resources. It escapes every input, stays small, and is
written where `dlion report --picture` names.

Left out: the charts (test_report) and the appearance.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from xml.etree import ElementTree

import pytest

from dlion_api.exit_codes import ExitCode
from dlion_api.names import Rank
from dlion_api.protocol.progress import StepRecord
from dlion_cli.__main__ import main
from dlion_results.report.curve_charts import loss_over_time
from dlion_results.report.picture import picture
from dlion_results.report.progress_charts import loss_against_time
from dlion_results.report.runs import load_runs
from dlion_results.run_folder.folder import ResultFolder
from dlion_results.summary.summary import Ending
from synthetic_run import Story, description, records

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
HOSTILE = "<script>alert('x')</script>&\"$\\frac{1}{0}$ ]]> --> {{ 7*7 }}"
MINUS = chr(0x2212)
REST = (8, 8, 0.1, 1.0, 1.0, 1.0, 0.0, 0.0, 8)
"""The fields of a step after its loss."""
SVG = "{http://www.w3.org/2000/svg}"


def make(path, story):
    with ResultFolder.create(path, description(story), now=NOW) as folder:
        for record in records(story):
            folder.append(record)
        folder.finish(Ending("maxSeconds"))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make(tmp_path_factory.mktemp("runs") / "one", Story(seconds=30, killed=None))


def words(text):
    return "".join(ElementTree.fromstring(text).itertext())


def test_one_run_shows_its_workers_and_five_charts(folder):
    runs = load_runs([folder])
    text = picture(runs)
    for name in ("Accuracy against time", "Batch sizes", "Drift between replicas", "Uplinks"):
        assert name in words(text)
    assert len(ElementTree.fromstring(text).findall(f"{SVG}svg")) == 5
    for worker in runs[0].workers:
        assert runs[0].worker_name(worker.rank) in words(text)


def test_several_runs_are_distinguished_by_their_labels(folder):
    text = picture(load_runs([folder, folder], ["first", "second"]))
    assert {"first", "second"} <= {
        element.text for element in ElementTree.fromstring(text).findall(f"{SVG}text")
    }
    assert "Training loss" in words(text)


@pytest.mark.parametrize("losses", [(2.0, -3.0), (-1.0, -3.0), (0.0, 0.0)])
def test_the_axis_of_a_negative_loss_shows_all_of_it(tmp_path, losses):
    """A custom loss may be a log-likelihood or a similarity. One of 0 has an axis, too."""
    first, last = losses
    path = tmp_path / "run"
    with ResultFolder.create(path, description(Story(workers=1)), now=NOW) as folder:
        for second in range(1, 201):
            loss = first + (last - first) * second / 200
            folder.append(StepRecord(float(second), Rank(0), 1, second, loss, *REST))
        folder.finish(Ending("maxSeconds"))
    runs = load_runs([path])
    spec = loss_over_time(runs).spec
    assert spec["bottom"] <= min(last, 0) <= max(first, 0) <= spec["top"]
    assert spec["bottom"] < spec["top"]
    ticks = re.findall(rf">([{MINUS}\d.]+)</text>", loss_against_time(runs).svg)
    values = [float(each.replace(MINUS, "-")) for each in ticks]
    assert (min(values) <= -2.5) == (last == -3.0)


def test_a_picture_needs_no_resources_and_shows_hostile_names_as_text(folder):
    text = picture(load_runs([folder, folder], [HOSTILE, "other"]), title=HOSTILE)
    assert HOSTILE in words(text)
    tags = {element.tag for element in ElementTree.fromstring(text).iter()}
    assert f"{SVG}script" not in tags
    assert not re.search(r"(href|src)=\"(?!#|data:)", text)


def test_a_picture_of_many_workers_stays_small(tmp_path):
    folder = make(tmp_path / "many", Story(seconds=4, workers=40))
    text = picture(load_runs([folder]))
    assert len(text) < 600_000
    box = ElementTree.fromstring(text).get("viewBox").split()
    assert float(box[3]) < 3000


def test_the_command_writes_the_picture_beside_the_page(tmp_path, capsys):
    folder = make(tmp_path / "short", Story(workers=2, seconds=10, killed=None))
    out = tmp_path / "run.svg"
    page = ["--out", str(tmp_path / "r.html")]
    assert main(["report", str(folder), *page, "--picture", str(out)]) == ExitCode.OK
    assert out.read_text().startswith("<svg ")
    assert str(out) in capsys.readouterr().out
