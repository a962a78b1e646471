"""Tests of the live view.

It shows every worker's figures and state, the totals and the rate of each link, on a terminal of
any width. Without a terminal it prints plain lines. It does not guess times that it cannot foresee.
Equal failures of workers share one line. No text of a record controls the terminal.

Left out: the refreshing thread of Rich.
"""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from dlion_api.names import Rank
from dlion_api.protocol.progress import EventRecord, LinkRecord, StepRecord
from dlion_cli.views.live_view import LINE_INTERVAL_S, LiveView
from synthetic_run import Story, description, records

STORY = Story(seconds=200, killed=(4, 140.0, 100.0))


class Clock:
    """A clock that moves only when it is set."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def view_of(
    *,
    terminal=True,
    until_s=150.0,
    width=160,
    height=24,
    story=STORY,
    given=None,
    is_virtual=False,
    elapsed_s=0.0,
    **changes,
):
    clock = Clock()
    run = description(story)
    stop = dataclasses.replace(run.spec.trainer.stop, **changes)
    trainer = dataclasses.replace(run.spec.trainer, stop=stop)
    run = dataclasses.replace(run, spec=dataclasses.replace(run.spec, trainer=trainer))
    console = Console(
        file=io.StringIO(), force_terminal=terminal, width=width, height=height, color_system=None,
        record=True,
    )  # fmt: skip
    view = LiveView(
        run, console, environment="hetero-sys-a", is_virtual=is_virtual, elapsed_s=elapsed_s,
        clock=clock,
    )  # fmt: skip
    for record in records(story) if given is None else given:
        if record.time_s <= until_s:
            clock.now_s = record.time_s
            view.update(record)
    return view, console, clock


def picture(view, console):
    console.print(view.render())
    return console.export_text()


def test_a_link_to_a_worker_that_is_not_a_neighbour_is_not_shown_as_down():
    record = next(each for each in records(STORY) if isinstance(each, LinkRecord))
    away = dataclasses.replace(record, connected=False, neighbour=False)
    view, console, _ = view_of(given=[away])
    assert "down" not in picture(view, console)
    view, console, _ = view_of(given=[dataclasses.replace(away, neighbour=True)])
    assert "down" in picture(view, console)


def test_the_clock_of_a_resumed_run_goes_on():
    view, console, clock = view_of(terminal=False, given=[], elapsed_s=3_600.0)
    clock.now_s = 5.0
    assert view.line().startswith("1:00:05 elapsed, ETA —")
    view.update(dataclasses.replace(next(record for record in records(STORY)), time_s=3_604.0))
    assert "elapsed" not in console.export_text(), "no line is due yet"


def test_every_worker_has_a_row_with_its_figures():
    view, console, _ = view_of()
    text = picture(view, console)
    row = next(line for line in text.splitlines() if line.startswith("plant-a/small-0"))
    assert "training" in row
    assert " 173 " in row  # the batch
    assert "MB" in row
    assert "→1" in row
    for heading in ("worker", "state", "step", "loss", "accuracy", "batch", "samples/s", "sent/s"):
        assert heading in text
    assert "cifar10" in text
    assert "hetero-sys-a" in text
    assert "of 65.0 %" in text


def test_a_lost_worker_is_shown_as_lost_with_its_event():
    text = picture(*view_of(until_s=150.0)[:2])
    row = next(line for line in text.splitlines() if line.startswith("plant-b/gpu-0"))
    assert "lost" in row
    assert "WorkerLost" in text


def test_a_worker_without_steps_for_a_while_is_waiting():
    view, console, clock = view_of(until_s=100.0)
    clock.now_s += 30
    rows = [line for line in picture(view, console).splitlines() if line.startswith("plant-")]
    assert all("waiting" in row for row in rows)


def test_before_the_first_step_workers_are_starting():
    text = picture(*view_of(given=[])[:2])
    assert text.count("starting") == 6
    assert "ETA —" in text


@pytest.mark.parametrize(
    ("changes", "remaining"),
    [
        ({"max_seconds": 200, "max_steps": None, "target_accuracy": None}, "0:52"),
        ({"max_seconds": 200, "max_steps": None, "target_accuracy": 0.9}, "≤ 0:52"),
        ({"max_seconds": None, "max_steps": None, "target_accuracy": 0.9}, "—"),
        ({"max_seconds": None, "max_steps": None, "target_accuracy": None}, "—"),
    ],
)
def test_the_remaining_time_is_shown_only_if_it_can_be_foreseen(changes, remaining):
    view, _, _ = view_of(**changes)
    assert view.remaining() == remaining


def test_past_its_stop_the_workers_that_it_waits_for_are_named():
    story = Story(seconds=200, workers=6, killed=None)
    view, _, _ = view_of(story=story, max_seconds=100, max_steps=None)
    assert "stop reached, waits for a step or exchange of plant-a/small-0, " in view.line()
    assert "and 2 more" in view.line()
    assert "ETA" not in view.line()
    for rank in range(5):
        view.update(EventRecord(151.0, Rank(rank), 1, "TrainingStopped", "maxSeconds 100 reached"))
    assert "stop reached, waits for a step or exchange of plant-b/gpu-1, " in view.line()
    view.update(EventRecord(152.0, Rank(5), 1, "TrainingStopped", "maxSeconds 100 reached"))
    assert "stop reached" not in view.line()


def test_virtual_time_is_named_and_advances_only_with_the_records():
    view, _, clock = view_of(until_s=100.0, is_virtual=True)
    line = view.line()
    assert " of virtual time, " in line
    clock.now_s += 50
    elapsed, _, rest = line.partition(", ")
    assert view.line().partition(", ")[2] == rest
    assert not view.line().startswith(elapsed)


def test_remaining_steps_are_counted_at_the_rate_of_the_fastest_worker():
    given = [
        StepRecord(float(i), Rank(rank), 1, i, 1.0, 8, 32, 0.1, 1.0, 1.0, 1.0, 0.0, 0.0, 8 * i)
        for i in range(1, 11)
        for rank in (0, 1)
    ]
    view, _, _ = view_of(given=given, max_steps=100, max_seconds=None, target_accuracy=None)
    assert view.remaining() == "1:30"


@pytest.mark.parametrize(("epochs", "remaining"), [(5, "0:40"), (1, "0:00"), (None, "—")], ids=str)
def test_remaining_epochs_are_counted_at_the_rate_of_the_run(epochs, remaining):
    """Both workers count the samples of both: a tenth of the data in each second."""
    given = [
        StepRecord(
            float(i), Rank(rank), 1, i, 1.0, 8, 16, 0.1, 1.0, 1.0, 1.0, 0.0, 0.0, 8 * i,
            epochs=i / 10,
        )
        for i in range(1, 11)
        for rank in (0, 1)
    ]  # fmt: skip
    view, _, _ = view_of(
        given=given, max_steps=None, max_seconds=None, target_accuracy=None, max_epochs=epochs
    )
    assert view.remaining() == remaining


def test_data_that_grow_faster_than_training_have_no_foreseen_end():
    given = [
        StepRecord(
            float(i), Rank(0), 1, i, 1.0, 8, 16, 0.1, 1.0, 1.0, 1.0, 0.0, 0.0, 8 * i,
            epochs=1 / i,
        )
        for i in range(1, 11)
    ]  # fmt: skip
    view, _, _ = view_of(
        given=given, max_steps=None, max_seconds=None, target_accuracy=None, max_epochs=5
    )
    assert view.remaining() == "—"


@pytest.mark.parametrize("width", [80, 120, 150])
def test_a_narrow_terminal_shows_each_links_rate_on_separate_lines(width):
    view, console, _ = view_of(width=width)
    lines = picture(view, console).splitlines()
    rows = [line for line in lines if line.startswith("plant-")]
    assert len(rows) == 12, "each worker has a line of figures and one of links"
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(rows)
    (heading,) = [line for line in lines if line.startswith("sent to")]
    assert [word for word in heading.split() if "→" in word] == [f"→{k}/s" for k in range(6)]
    links = next(line for line in rows[6:] if line.startswith("plant-a/small-0"))
    assert links.count("MB") == 6, "a total and five links"
    assert "█" in links
    assert "WorkerLost" in lines[-1]


@pytest.mark.parametrize("width", [80, 160])
def test_of_many_links_the_slowest_the_fastest_and_lost_ones_are_shown(width):
    story = Story(seconds=30, workers=10, killed=None)
    down = LinkRecord(29.5, Rank(0), Rank(6), 1, 0, 0, 0, 0, None, None, 0, False)
    given = [*records(story), down]
    view, console, _ = view_of(story=story, given=given, until_s=29.5, width=width, height=40)
    lines = picture(view, console).splitlines()
    rows = [line for line in lines if line.startswith("plant-a/small-0")]
    assert len(rows) == (2 if width == 80 else 1)
    assert max(map(len, lines)) <= width
    for words in ("MB", "█", "slowest →", "fastest →", "→6 down"):
        assert words in rows[-1]


def test_a_low_terminal_keeps_the_workers_and_the_newest_event():
    view, console, _ = view_of(width=80, height=11)
    lines = picture(view, console).splitlines()
    assert sum(line.startswith("plant-") for line in lines) == 6
    assert "WorkerLost" in lines[-1]
    assert len(lines) <= 11


def test_without_a_terminal_there_are_periodic_lines_and_every_warning():
    view, console, _ = view_of(terminal=False)
    with view:
        pass
    lines = console.export_text().splitlines()
    plain = [line for line in lines if "elapsed" in line]
    assert len(plain) <= 150 / LINE_INTERVAL_S + 2
    assert len(plain) >= 10
    assert sum("WorkerLost" in line for line in lines) == 1
    assert "samples/s" in plain[-1]
    assert "ETA ≤ 0:5" in plain[-1]
    assert "\x1b" not in console.file.getvalue()


def failed(rank, message="no layer", at_s=1.0):
    return EventRecord(at_s, Rank(rank), 1, "WorkerFailed", message, True)


def failures(text):
    """The lines of failed workers, without the time."""
    lines = [line.split(maxsplit=1)[1] for line in text.splitlines() if "WorkerFailed" in line]
    return [" ".join(line.split()) for line in lines]


@pytest.mark.parametrize("terminal", [True, False])
def test_workers_with_equal_failures_share_one_line(terminal):
    given = [failed(0), failed(1), failed(1), failed(2, "no data"), failed(3)]
    view, console, _ = view_of(terminal=terminal, given=given)
    if terminal:
        text = picture(view, console)
    else:
        view.__exit__()
        text = console.export_text()
    assert failures(text) == [
        "plant-a/small-0, plant-a/small-1 WorkerFailed no layer",
        "plant-a/small-2 WorkerFailed no data",
        "plant-a/small-3 WorkerFailed no layer",
    ]


def test_of_many_workers_with_equal_failures_four_are_named():
    text = picture(*view_of(given=[failed(rank) for rank in range(6)])[:2])
    assert failures(text)[0].endswith(", plant-a/small-3 and 2 more WorkerFailed no layer")


def test_a_failure_is_printed_seconds_later_and_before_any_other_warning():
    step = StepRecord(9.0, Rank(1), 1, 1, 1.0, 8, 32, 0.1, 1.0, 1.0, 1.0, 0.0, 0.0, 8)
    assert failures(view_of(terminal=False, given=[failed(0)])[1].export_text()) == []
    assert len(failures(view_of(terminal=False, given=[failed(0), step])[1].export_text())) == 1
    lost = EventRecord(1.0, Rank(1), 1, "WorkerLost", "away", True)
    lines = view_of(terminal=False, given=[failed(0), lost])[1].export_text().splitlines()
    assert ["WorkerFailed" in lines[0], "WorkerLost" in lines[1]] == [True, True]


def test_the_line_of_a_finished_run_has_no_remaining_time():
    given = [EventRecord(1.0, Rank(k), 1, "TrainingStopped", "maxSteps") for k in range(6)]
    line = view_of(given=given)[0].line()
    assert line.endswith("elapsed, 6 finished")


def test_text_of_records_cannot_control_the_terminal():
    hostile = "\x1b[2J\x1b]0;owned\x07[bold red]not markup[/]\r\n\u202e"
    view, console, _ = view_of(given=[EventRecord(1.0, Rank(0), 1, hostile, hostile, True)])
    text = picture(view, console)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "[bold red]not markup[/]" in text


def test_a_link_that_is_down_is_shown_as_down():
    down = LinkRecord(2.0, Rank(0), Rank(1), 1, 0, 0, 0, 0, None, None, 0, False)
    step = StepRecord(1.0, Rank(0), 1, 1, 1.0, 8, 32, 0.1, 1.0, 1.0, 1.0, 0.0, 0.0, 8)
    assert "→1 down" in picture(*view_of(given=[step, down])[:2])


def test_a_record_of_an_unknown_worker_is_harmless():
    stranger = EventRecord(1.0, Rank(99), 0, "WorkerReady", "hello")
    assert "worker 99" in picture(*view_of(given=[stranger])[:2])
