"""Tests of the page's headline and tiles.

The headline states the result of one run, of a failed run and of several. The tiles have each run's
figures.

Summaries are given directly, because only their texts matter here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from dlion_api.names import Rank
from dlion_api.protocol.progress import EventRecord
from dlion_api.spec import Job, load_job
from dlion_results.report.headline import headline, setting
from dlion_results.report.runs import LoadedRun
from dlion_results.report.stored_files import UNFINISHED, stored_ending
from dlion_results.report.tiles import MAX_TILED_RUNS, tiles
from dlion_results.summary.summary import Ending, summarise
from dlion_results.summary.tally import RunTally
from synthetic_run import Story, description, records

if TYPE_CHECKING:
    from collections.abc import Iterable

STORY = Story(workers=4, seconds=60, killed=None)
HALVES = [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def job(
    *, policy: str = "adaptive", workers: tuple[int, ...] = (3, 1), classes: Any = None,
    target: float | None = None, rate: float = 0.05,
) -> Job:  # fmt: skip
    names = [f"plant-{letter}" for letter, _ in zip("abcdefgh", workers, strict=False)]
    document = description(STORY, target=target).to_document()
    spec = document["spec"]
    spec["sites"] = [
        {"name": name, "groups": [{"name": "small", "workers": count}]}
        for name, count in zip(names, workers, strict=True)
    ]
    spec["exchange"] = {"policy": policy}
    spec["trainer"]["optimizer"] = {"name": "sgd", "learningRate": rate}
    if classes is not None:
        spec["trainer"]["dataset"] = {
            "name": "digits",
            "partition": "bySite",
            "siteClasses": [
                {"site": name, "classes": own} for name, own in zip(names, classes, strict=True)
            ],
        }
    return load_job(document)


def run(
    manifest: Job, *accuracies: float, label: str = "a", trained_s: float = 41.0,
    reached_s: float | None = None, ending: Ending | None = None, quarantined: Iterable[int] = (),
) -> LoadedRun:  # fmt: skip
    tally = RunTally(worker.rank for worker in manifest.workers())
    for rank in quarantined:
        tally.add(EventRecord(1.0, Rank(rank), 1, "WorkerQuarantined", "it is bad", warning=True))
    summary = summarise(manifest, tally, ending=ending or Ending("maxSeconds 60 reached"))
    summary["training_s"] = trained_s
    if accuracies:
        mean = sum(accuracies) / len(accuracies)
        summary["accuracy"] |= {
            "mean": mean, "min": min(accuracies), "max": max(accuracies),
            "replicas": len(accuracies),
        }  # fmt: skip
    if summary["target"]:
        summary["target"] |= {"training_time_s": reached_s, "sent_bytes": 2_500_000}
    return LoadedRun(label, manifest, tally, summary, None, "")


def failed(reason: str, **more: Any) -> Ending:
    return Ending("an error ended the run", succeeded=False, reason=reason, **more)


ALONE = job(workers=(1,))
SKEWED = job(classes=HALVES)
AIMING = job(target=0.65)
ONE_RUN = {
    "every replica the same": (
        run(SKEWED, 0.981, 0.983, 0.98, 0.9799),
        "Two sites, each with half of the classes: 98 % at every replica after 41 s.",
    ),
    "replicas apart": (
        run(SKEWED, 0.5, 0.47, 0.5, 0.1),
        "Two sites, each with half of the classes: 39 % on average (10 % to 50 %) after 41 s.",
    ),
    "one worker": (run(ALONE, 0.9967), "One worker: 99.7 % after 41 s."),
    "thirteen workers": (run(job(workers=(13,)), 0.5, 0.5), "13 workers: 50 % at every replica"),
    "no classes given": (run(job(), 0.5, 0.5), "Two sites, four workers: 50 % at every replica"),
    "classes that overlap": (
        run(job(classes=[[0, 1], [1, 2]]), 0.5),
        "Two sites, four workers: 50 %",
    ),
    "unequal classes": (
        run(job(workers=(1, 1, 1), classes=[[0], [1, 2], [3]]), 0.5),
        "Three sites, each with classes of its own: 50 %",
    ),
    "a target that was reached": (
        run(AIMING, 0.66, 0.66, reached_s=123),
        "Two sites, four workers: 65 % reached after 2:03 min, 66 % at every replica at the end.",
    ),
    "a target that was reached before the first known step": (
        run(AIMING, 0.66, 0.66, reached_s=0.0),
        "Two sites, four workers: 65 % reached after 0.0 s, 66 % at every replica at the end.",
    ),
    "a target that was missed": (
        run(AIMING, 0.6, 0.6),
        "Two sites, four workers: 60 % at every replica after 41 s; the target of 65 % was missed.",
    ),
    "no evaluation": (run(ALONE), "One worker: no replica was evaluated."),
    "killed": (
        run(ALONE, 0.3, ending=Ending(UNFINISHED, succeeded=False)),
        "Still running, or killed. One worker: 30 % after 41 s.",
    ),
    "partial": (
        run(job(), 0.5, 0.5, 0.5, ending=failed("Partial", missing=(3,))),
        "Partial: the model lacks plant-b/small-0. Two sites, four workers: 50 %",
    ),
    "partial, most missing": (
        run(job(), 0.5, ending=failed("Partial", missing=(0, 1, 2))),
        "Partial: the model lacks three of four replicas. Two sites",
    ),
    "one quarantined": (
        run(ALONE, 0.5, quarantined=(0,)),
        "One worker: 50 % after 41 s, with plant-a/small-0 quarantined.",
    ),
    "three quarantined": (
        run(job(), 0.5, quarantined=(0, 2, 3)),
        "Two sites, four workers: 50 % after 41 s, with three workers quarantined.",
    ),
    "diverged": (
        run(ALONE, ending=failed("Diverged")),
        "Training diverged. One worker: no replica was evaluated.",
    ),
    "an unknown reason": (run(ALONE, 0.1, ending=failed("New")), "Failed. One worker"),
    "deadline": (
        run(ALONE, 0.1, ending=failed("DeadlineExceeded")), "Stopped by its deadline. One worker"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ONE_RUN, ids=str)
def test_one_run_has_a_sentence(case: str) -> None:
    run_summary, expected = ONE_RUN[case]
    assert headline([run_summary]).startswith(expected)
    assert headline([run_summary]).endswith(".")


NONE = job(policy="none", classes=HALVES)
SEVERAL = {
    "without exchange beside it": (
        [run(SKEWED, 0.98, 0.98), run(NONE, 0.5, 0.5, label="b")],
        (
            "Two sites, each with half of the classes: 98 % at every replica after 41 s. "
            "Without exchange: 50 %."
        ),
    ),
    "without exchange first": (
        [run(NONE, 0.5, 0.5), run(SKEWED, 0.98, 0.98, label="b")],
        (
            "Two sites, each with half of the classes. Without exchange: 50 %. "
            "With exchange (adaptive): 98 %."
        ),
    ),
    "another policy": (
        [run(job(), 0.98), run(job(policy="dlion"), 0.5, label="dlion")],
        "Two sites, four workers. “a”: 98 %. “dlion”: 50 %.",
    ),
    "more than the exchange differs": (
        [run(SKEWED, 0.98), run(job(policy="none", rate=0.1, classes=HALVES), 0.5, label="b")],
        "Two sites, each with half of the classes. “a”: 98 %. “b”: 50 %.",
    ),
    "one of them failed": (
        [run(SKEWED, 0.98), run(NONE, 0.2, label="b", ending=failed("Interrupted"))],
        (
            "Two sites, each with half of the classes: 98 % after 41 s. "
            "Without exchange: interrupted; 20 %."
        ),
    ),
    "other places": (
        [run(job(), 0.98), run(ALONE, 0.9, label="alone")],
        "Two sites, four workers. “a”: 98 %. “alone” (one worker): 90 %.",
    ),
    "many": (
        [run(job(), level / 10, label=f"run {level}") for level in range(1, 6)],
        "Five runs: from 10 % (“run 1”) to 50 % (“run 5”).",
    ),
    "many, some failed": (
        [
            run(job(), level / 10, ending=failed("Failed") if level < 3 else None)
            for level in range(1, 6)
        ],
        "Five runs: from 10 % (“a”) to 50 % (“a”). Two did not succeed.",
    ),
    "many without an evaluation": ([run(job())] * 4, "Four runs: no replica was evaluated."),
}


@pytest.mark.parametrize("case", SEVERAL, ids=str)
def test_the_headline_of_several_runs_names_their_differences(case: str) -> None:
    runs, expected = SEVERAL[case]
    assert headline(runs) == expected


def test_an_endless_label_is_shortened() -> None:
    text = headline([run(job(), 0.9), run(job(rate=0.2), 0.8, label="x" * 10_000)])
    assert len(text) < 300


def test_the_setting_of_a_real_story_counts_its_workers() -> None:
    assert setting(description(STORY)) == "Four workers"


def real(story: Story, label: str = "a") -> LoadedRun:
    manifest = description(story)
    tally = RunTally(worker.rank for worker in manifest.workers())
    for record in records(story):
        tally.add(record)
    return LoadedRun(
        label, manifest, tally, summarise(manifest, tally, ending=Ending("x")), None, ""
    )


def test_each_tile_has_every_runs_figure_and_its_explanation() -> None:
    one = real(Story(seconds=120))
    restarted = real(Story(seconds=160), "b")
    shown = {tile.name: tile.values for tile in tiles([one, restarted])}
    assert list(shown) == [
        "Accuracy", "Time to the target", "Samples per second", "Sent", "Workers", "Time use"
    ]  # fmt: skip
    assert shown["Workers"][0].text == "6"
    assert shown["Workers"][0].note == "at 2 sites"
    assert shown["Workers"][1].note == "at 2 sites, 1 restart"
    assert shown["Accuracy"][0].text == f"{one.summary['accuracy']['mean'] * 100:.1f} %"
    assert sum(shown["Time use"][0].shares) == pytest.approx(1)
    assert shown["Time to the target"][0].text == "missed"


def test_a_target_that_was_reached_has_its_time_and_bytes() -> None:
    [tile] = [tile for tile in tiles([run(AIMING, 0.7, reached_s=45)]) if "target" in tile.name]
    assert (tile.values[0].text, tile.values[0].note) == ("45 s", "65 % with 2.5 MB sent")


def test_what_was_sent_has_the_total_of_the_links_beside_it() -> None:
    sending = run(ALONE)
    sending.summary["sent_bytes"] = 8_000_000
    sending.summary["bytes"] |= {"weights_bytes": 8_000_000, "probe_bytes": 2_000_000}
    (sent,) = (tile.values[0] for tile in tiles([sending]) if tile.name == "Sent")
    assert sent.text == "8 MB"
    assert sent.note.endswith("; 10 MB on the links in all")
    sending.summary["bytes"]["probe_bytes"] = 0
    (sent,) = (tile.values[0] for tile in tiles([sending]) if tile.name == "Sent")
    assert "on the links" not in sent.note


def test_without_a_step_tiles_state_this_and_many_runs_have_none() -> None:
    empty = run(ALONE)
    notes = [value.note for tile in tiles([empty]) for value in tile.values]
    assert "no step was done" in notes
    assert "no replica was evaluated" in notes
    assert tiles([replace(empty, label=str(i)) for i in range(MAX_TILED_RUNS + 1)]) == []


@pytest.mark.parametrize(
    ("stored", "command_s"),
    [(1.5, 1.5), (0, 0.0), (-5.0, None), (1e299, None), (10**400, None), ("1", None), (True, None)],
)
def test_a_stored_ending_has_a_possible_time_of_the_command(
    stored: Any, command_s: float | None
) -> None:
    assert stored_ending({"ending": {"command_s": stored}}).command_s == command_s


@pytest.mark.parametrize(("stored", "known"), [(True, True), (False, False), (1, False)])
def test_a_stored_ending_keeps_that_time_was_virtual(stored: Any, known: bool) -> None:
    assert stored_ending({"ending": {"virtual_time": stored}}).virtual_time is known
