"""Tests of the output at the end of `dlion run`.

It is a table with a row per replica, or one JSON object and nothing else. No name controls the
terminal.
"""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from dlion_api.protocol.progress import END_PHASES, START_PHASES
from dlion_cli.terminal.formatting import format_bytes
from dlion_cli.terminal.sent_bytes import links_parts
from dlion_cli.terminal.table import print_result
from dlion_results.summary.summary import Ending, summarise
from dlion_results.summary.tally import RunTally
from synthetic_run import Story, description, records

STORY = Story(workers=4, seconds=60, killed=None)


def result(reason="maxSeconds"):
    run = description(STORY)
    tally = RunTally(worker.rank for worker in run.workers())
    for record in records(STORY):
        tally.add(record)
    return summarise(run, tally, ending=Ending(reason))


def printed(summary, width=120, **options):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    print_result(console, summary, folder=Path("runs/a"), **options)
    return console.file.getvalue()


@pytest.fixture(scope="module")
def summary():
    return result()


def test_every_replica_has_its_row_and_the_report_is_named(summary):
    text = printed(summary, report=Path("runs/a/report.html"))
    for worker in summary["workers"]:
        row = next(line for line in text.splitlines() if worker["name"] in line)
        assert f"{worker['accuracy']['final'] * 100:.1f} %" in row
        assert f"{min(worker['accuracy']['classes']) * 100:.1f} %" in row
    assert f"{summary['accuracy']['mean'] * 100:.1f} %" in text
    assert "runs/a/report.html" in text
    assert "Target of 65.0 % (mean over replicas): not reached" in text


@pytest.mark.parametrize(
    ("wait_fraction", "fraction", "waited_s", "expected"),
    [
        (
            0.4,
            0.9,
            1.0,
            "90.0 % of the waiting was for plant-b/large-0, which waited little itself",
        ),
        (0.4, 0.9, 90.0, "for plant-b/large-0, which waited itself, too: its messages arrive late"),
        (0.05, 0.9, 1.0, None),
        (0.4, 0.3, 1.0, None),
    ],
)
def test_the_worker_that_others_waited_for_is_named(
    summary, wait_fraction, fraction, waited_s, expected
):
    """It is named if others waited much, and for no other worker as much."""
    worker = {**summary["workers"][3], "name": "plant-b/large-0", "compute_s": 100.0}
    use = {"compute_fraction": 0.5, "wait_fraction": wait_fraction,
           "waited_for": [{"rank": 3, "fraction": fraction}]}  # fmt: skip
    workers = [*summary["workers"][:3], {**worker, "waited_s": waited_s}]
    changed = {**summary, "time_use": use, "workers": workers, "culprit": None}
    text = " ".join(printed(changed).split())
    assert f"Time: computing 50.0 %, waiting {100 * wait_fraction:.1f} %, exchange" in text
    assert ("of the waiting was for" in text) == (expected is not None)
    assert expected is None or expected in text


def test_the_account_of_a_simulation_has_no_start_and_end(summary):
    ending = {**summary["ending"], "virtual_time": True}
    account = "Start-up and ending: none, as a simulation starts no processes"
    assert account in printed({**summary, "ending": ending})
    assert "Start-up" not in printed(summary)


def test_bytes_are_listed_by_kind_with_the_link_that_carried_most(summary):
    workers = [dict(worker) for worker in summary["workers"]]
    first = {**workers[1]["links"][0], "gradient_bytes": 10**12, "probe_bytes": 7}
    workers[1]["links"] = [first, *workers[1]["links"][1:]]
    kinds = {"gradient_bytes": 790, "control_bytes": 10, "state_bytes": 150, "header_bytes": 50}
    changed = {**summary, "workers": workers, "bytes": kinds}
    text = " ".join(printed(changed).split())
    sender, receiver = workers[1]["name"], workers[0]["name"]
    parts = "sent 800 B (gradient 790 B, control 10 B), header 50 B, state 150 B"
    assert f"Bytes on links: 1 kB: {parts}" in text
    assert f"most from {sender} to {receiver}, 1 TB" in text
    table, *_ = links_parts(changed)
    assert [str(column.header) for column in table.columns] == [
        "LINK", "BYTES", "GRADIENT", "PROBE", "USED",
    ]  # fmt: skip
    cells = [str(next(iter(column.cells))) for column in table.columns]
    assert cells[:4] == [f"{sender} → {receiver}", "1 TB", "1 TB", "7 B"]
    used = first["sent_bytes"] / workers[1]["wall_s"] / first["last_bandwidth_bytes_per_s"]
    assert cells[4] == f"{100 * used:.1f} %"


def test_start_and_end_are_those_of_the_worker_that_took_longest(summary):
    assert "Start-up" not in printed(summary)
    none = dict.fromkeys(
        ("launch_s", *START_PHASES, "train_s", *END_PHASES, "process_s"), 0.0
    )  # fmt: skip
    workers = [{**worker, "process": none} for worker in summary["workers"]]
    workers[1]["process"] = none | {"launch_s": 1.0, "model_s": 4.24, "data_s": 0.04}
    workers[2]["process"] = none | {"final_wait_s": 2.0, "save_s": 0.5, "train_s": 99.0}
    changed = {**summary, "workers": workers, "ending": {**summary["ending"], "command_s": 1.5}}
    text = " ".join(printed(changed).split())
    first, second = workers[1]["name"], workers[2]["name"]
    assert f"Start-up: 6.8 s at {first}: command 1.5 s, launch 1.0 s, model 4.2 s End" in text
    assert f"Ending: 2.5 s at {second}: waiting for others 2.0 s, save 0.5 s " in text
    late = [{**worker, "process": none | {"launch_s": None}} for worker in workers]
    text = printed({**changed, "workers": late})
    assert f"Start-up: 1.5 s at {workers[0]['name']}: command 1.5 s\n" in text
    assert "Ending:" not in text


def test_the_parts_of_all_bytes_have_the_total_of_the_table(summary):
    text = " ".join(printed(summary).split())
    sent = format_bytes(summary["sent_bytes"])
    row = text.partition("all, mean")[2].partition(" │ averaged")[0]
    assert f"│ {sent}" in row
    assert f": sent {sent} (" in text.partition("Bytes on links: ")[2]


def test_uncounted_bytes_are_not_listed(summary):
    """An earlier release counted no kinds; a run may have no links."""
    assert "Bytes on links:" in printed(summary)
    old = {name: value for name, value in summary.items() if name != "bytes"}
    assert "Bytes on links" not in printed(old)
    alone = [{**worker, "links": []} for worker in summary["workers"]]
    assert "Bytes on links" not in printed({**summary, "workers": alone})


def test_in_eighty_columns_whole_columns_are_omitted_and_no_figure_is_truncated(summary):
    text = printed(summary, width=80)
    assert "…" not in text
    assert "samples/s" in text
    assert "steps" not in text


def test_json_output_is_one_object_and_nothing_else(summary):
    document = json.loads(printed(summary, output="json", report=Path("r.html")))
    assert document["report"] == "r.html"
    assert document["folder"] == "runs/a"
    assert document["accuracy"] == summary["accuracy"]


def test_metrics_of_compile_have_a_line(summary):
    def metric(*values):
        return dict(zip(("mean", "min", "max"), values, strict=True))

    assert "Metrics" not in printed(summary)
    known = {"auc": metric(0.91234, 0.9, 0.925), "\x1b[31mmae": metric(1234567.0, *[1234567.0] * 2)}
    text = printed({**summary, "metrics": known})
    assert "Metrics (mean over replicas): auc 0.9123 (0.9 to 0.925), " in text
    assert "mae 1.235e+06\n" in text
    assert "\x1b" not in text
    many = {f"m{number}": metric(0.5, 0.5, 0.5) for number in range(20)}
    assert "m7 0.5, 12 more in summary.json" in printed({**summary, "metrics": many})


def test_a_run_without_a_step_has_no_table():
    run = description(STORY)
    tally = RunTally(worker.rank for worker in run.workers())
    text = printed(summarise(run, tally, ending=Ending("failed", succeeded=False)))
    assert "plant-a/small-0" not in text
    assert "Failed: failed after 0:00" in text


def test_a_hostile_reason_is_printed_harmlessly():
    assert "\x1b" not in printed(result("\x1b[2J[blink]x"))
