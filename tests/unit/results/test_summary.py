"""Tests of the summary.

It conforms to its published schema. Its figures agree with a naive computation over the list of
records, which uses none of the package's own sums.

Left out: the trainer's measurements.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from importlib import resources
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from dlion_api.names import Rank
from dlion_api.protocol.progress import EvaluationRecord, EventRecord, LinkRecord, StepRecord
from dlion_results.summary.summary import LEVELS, Ending, scalability, summarise
from dlion_results.summary.tally import RunTally
from synthetic_run import Story, description, records

STORY = Story(seconds=120, killed=(4, 50.0, 10.0))
DOCS = Path(__file__).parents[3] / "docs" / "results.md"


def schema():
    """The published schema of the summary."""
    path = resources.files("dlion_results.summary").joinpath("summary.schema.json")
    return json.loads(path.read_text("utf-8"))


def summary_of(given, story=STORY, **kwargs):
    run = description(story)
    tally = RunTally(worker.rank for worker in run.workers())
    for record in given:
        tally.add(record)
    return summarise(run, tally, ending=Ending("maxSeconds"), **kwargs)


@pytest.fixture(scope="module")
def given():
    return list(records(STORY))


@pytest.fixture(scope="module")
def summary(given):
    return summary_of(given)


def test_iteration_steps_and_samples_are_those_of_workers_that_train(given):
    """Sensors of topology `staged` make steps of their own, with samples that they encode."""
    run, tally = description(STORY), RunTally(range(6))
    for record in given:
        if not (isinstance(record, StepRecord) and record.rank == 0 and record.iteration > 7):
            tally.add(record)
    found = {}
    for topology in ("allToAll", "staged"):
        spec = replace(run.spec, exchange=replace(run.spec.exchange, topology=topology))
        found[topology] = summarise(replace(run, spec=spec), tally, ending=Ending("maxSeconds"))
    steps = [record for record in given if isinstance(record, StepRecord)]
    assert found["allToAll"]["ending"]["iteration"] == max(record.iteration for record in steps)
    staged, decoder = found["staged"], tally.workers[0]
    assert staged["ending"]["iteration"] == staged["steps"] == decoder.steps == 7
    assert staged["samples"] == decoder.samples < found["allToAll"]["samples"]
    assert staged["samples_per_s"] == decoder.samples / staged["training_s"]
    reached = [level["samples"] for level in staged["levels"] if level["samples"] is not None]
    assert reached
    assert max(reached) <= decoder.samples


def of(given, kind, rank):
    return [record for record in given if isinstance(record, kind) and record.rank == rank]


def mean_accuracy(given, time_s):
    """Compute naively the mean of each replica's interpolated accuracy at that time."""
    values = []
    for rank in range(STORY.workers):
        points = [(e.time_s, e.accuracy) for e in of(given, EvaluationRecord, rank)]
        before = max((p for p in points if p[0] <= time_s), default=points[0])
        after = min((p for p in points if p[0] >= time_s), default=points[-1])
        span = after[0] - before[0]
        share = (time_s - before[0]) / span if span else 0
        values.append(before[1] + share * (after[1] - before[1]))
    return sum(values) / len(values)


def test_the_schema_is_valid_and_the_summary_conforms_to_it(summary):
    jsonschema.Draft202012Validator.check_schema(schema())
    jsonschema.validate(json.loads(json.dumps(summary, allow_nan=False)), schema())


def test_a_run_without_events_has_a_summary():
    jsonschema.validate(summary_of([]), schema())


def test_figures_that_are_not_numbers_become_null():
    lost = EvaluationRecord(1.0, Rank(0), 1, 1, math.nan, math.nan, 0, (math.nan, 0.5))
    step = StepRecord(1.0, Rank(0), 1, 1, math.inf, 8, 32, 0.1, 1.0, 1.0, 1.0, 0.0, 0.0, 8)
    summary = summary_of([lost, step])
    jsonschema.validate(json.loads(json.dumps(summary, allow_nan=False)), schema())
    assert summary["workers"][0]["accuracy"]["classes"] == [None, 0.5]
    assert summary["workers"][0]["mean_loss"] is None


def test_a_quarantined_replica_counts_only_once_it_is_accepted_again():
    def evaluation(rank, accuracy):
        return EvaluationRecord(5.0, Rank(rank), 1, 1, accuracy, 1.0, 10, metrics={"f1": accuracy})

    def event(reason, text=""):
        return EventRecord(6.0, Rank(1), 1, reason, text, warning=True)

    evaluated = [evaluation(0, 0.9), evaluation(1, 0.1)]
    quarantined = [*evaluated, event("WorkerQuarantined", "it is bad")]
    for given, replicas, least in ((evaluated, 2, 0.1), (quarantined, 1, 0.9)):
        summary = summary_of(given)
        jsonschema.validate(summary, schema())
        assert (summary["accuracy"]["replicas"], summary["accuracy"]["min"]) == (replicas, least)
        assert summary["metrics"]["f1"]["min"] == least
    assert [each["quarantine"] for each in summary["workers"][:2]] == ["", "it is bad"]
    assert summary["levels"][0]["time_s"] == 5.0
    resumed = summary_of([*quarantined, event("WorkerReady")])
    assert (resumed["workers"][1]["quarantine"], resumed["accuracy"]["replicas"]) == ("", 2)


def session_of(rank, start, first, last, before):
    """Steps of a second each of one trainer process."""
    return [
        StepRecord(
            float(second), rank, start, second, 1.0, 8, 8, 0.1, compute_s=1.0, wall_s=1.0,
            cpu_s=1.0, exchange_cpu_s=0.0, waited_s=0.0, samples=8,
            trained_s=None if before is None else float(before + second - first),
        )
        for second in range(first + 1, last + 1)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("sessions", "wall_s"),
    [
        # Incarnation, first and last second on the run's clock, seconds of training before.
        pytest.param([(1, 0, 10, 0), (2, 110, 120, 10)], 20.0, id="resumed"),
        pytest.param([(1, 0, 10, 0), (2, 110, 120, 4)], 20.0, id="killed, six seconds are lost"),
        pytest.param([(1, 0, 10, 0), (1, 110, 120, 10)], 120.0, id="no other start"),
        pytest.param([(1, 0, 10, None), (2, 110, 120, None)], 120.0, id="not counted"),
    ],
)
def test_the_pause_before_a_resume_is_not_part_of_a_workers_time(sessions, wall_s):
    steps = [step for session in sessions for step in session_of(Rank(0), *session)]
    summary = summary_of(steps)
    worker = summary["workers"][0]
    assert summary["training_s"] == worker["wall_s"] == wall_s
    assert worker["samples_per_s"] == 160 / wall_s
    assert summary["time_use"]["compute_fraction"] == pytest.approx(20 / wall_s)
    assert worker["other_s"] == wall_s - 20


def test_the_time_to_a_level_lacks_the_pause_before_a_resume():
    steps = [*session_of(Rank(0), 1, 0, 10, 0), *session_of(Rank(0), 2, 110, 120, 10)]
    evaluations = [
        EvaluationRecord(time_s, Rank(0), 1, 8, accuracy, 1.0, 10)
        for time_s, accuracy in ((5.0, 0.26), (115.0, 0.51))
    ]
    levels = {each["accuracy"]: each for each in summary_of([*steps, *evaluations])["levels"]}
    assert (levels[0.25]["time_s"], levels[0.25]["training_time_s"]) == (5.0, 5.0)
    assert levels[0.5]["time_s"] > 110
    assert levels[0.5]["training_time_s"] == levels[0.5]["time_s"] - 100


@pytest.mark.parametrize("order", ["by time", "by worker", "by worker, the restarted one first"])
def test_a_worker_that_restarts_while_others_train_makes_no_pause(order):
    """Worker 1 ends at 50 s and rejoins at 140 s. It adopts a peer's state, which leaves the count
    of training that its own checkpoint has."""
    steady = session_of(Rank(0), 1, 0, 200, 0)
    restarted = [*session_of(Rank(1), 1, 0, 50, 0), *session_of(Rank(1), 2, 140, 200, 45)]
    steps = [*restarted, *steady] if order.endswith("first") else [*steady, *restarted]
    if order == "by time":
        steps.sort(key=lambda step: step.time_s)
    summary = summary_of(steps)
    assert summary["training_s"] == 200.0
    assert [worker["wall_s"] for worker in summary["workers"][:2]] == [200.0, 200.0]


def test_a_pause_of_the_run_is_one_for_all_its_workers():
    """Both restart, one of them once more; the last steps of one before the pause come late."""
    late = session_of(Rank(1), 1, 10, 12, 10)
    steps = [
        *session_of(Rank(0), 1, 0, 10, 0), *session_of(Rank(1), 1, 0, 10, 0),
        *session_of(Rank(0), 2, 110, 130, 10), *late, *session_of(Rank(1), 2, 109, 115, 12),
        *session_of(Rank(1), 3, 120, 130, 15),
    ]  # fmt: skip
    summary = summary_of(steps)
    assert summary["training_s"] == 130.0 - (109.0 - 12.0)
    assert [worker["wall_s"] for worker in summary["workers"][:2]] == [33.0, 33.0]


def test_hundreds_of_starts_cost_no_more_than_256_pauses():
    steps = [step for n in range(600) for step in session_of(Rank(0), n, 3 * n, 3 * n + 1, n)]
    assert summary_of(steps)["training_s"] == 1798.0 - 256 * 2.0


def test_metrics_are_those_of_each_replicas_last_evaluation():
    def evaluation(time_s, rank, metrics, *, final=False):
        return EvaluationRecord(
            time_s, Rank(rank), 1, 1, 0.5, 1.0, 10, metrics=metrics, final=final
        )

    found = summary_of(
        [
            evaluation(1.0, 0, {"auc": 0.1, "mae": 3.0}),
            evaluation(2.0, 0, {"auc": 0.9, "mae": math.inf}, final=True),
            evaluation(3.0, 0, {"auc": 0.2, "mae": 1.0}),  # late, and not final
            evaluation(1.0, 1, {"auc": 0.7, "own": -2.0, "huge": 1e308}),
        ]
    )
    jsonschema.validate(json.loads(json.dumps(found, allow_nan=False)), schema())
    assert found["workers"][0]["metrics"] == {"auc": 0.9, "mae": None}
    assert found["workers"][1]["metrics"] == {"auc": 0.7, "own": -2.0}
    assert found["metrics"] == {
        "auc": {"mean": pytest.approx(0.8), "min": 0.7, "max": 0.9},
        "own": {"mean": -2.0, "min": -2.0, "max": -2.0},
    }


def test_a_worker_with_thousands_of_metrics_costs_no_more_than_64():
    many = {f"metric {number}": 1.0 for number in range(4000)}
    given = [
        EvaluationRecord(float(time_s), Rank(0), 1, 1, 0.5, 1.0, 10, metrics=many)
        for time_s in range(300)
    ]
    tally = RunTally([Rank(0)])
    for record in given:
        tally.add(record)
    curves = tally.workers[Rank(0)].metric_curves
    assert [*curves] == [f"metric {number}" for number in range(64)]
    assert max(map(len, curves.values())) <= 256
    assert len(summary_of(given)["metrics"]) == 64


def test_every_field_has_a_description_and_the_page_names_the_top_level_ones():
    def described(part):
        for name, value in part.get("properties", {}).items():
            yield name, "description" in value or "$ref" in value or "anyOf" in value
            yield from described(value)
        for inside in ("items", "anyOf"):
            for value in np.atleast_1d(part.get(inside, [])):
                yield from described(value)

    whole = schema()
    parts = [whole, *whole["$defs"].values()]
    assert {name for part in parts for name, found in described(part) if not found} == set()
    words = DOCS.read_text("utf-8")
    assert {name for name in whole["properties"] if f"`{name}`" not in words} == set()


@pytest.mark.parametrize("rank", range(STORY.workers))
def test_a_workers_figures_agree_with_the_records(given, summary, rank):
    worker = summary["workers"][rank]
    steps = of(given, StepRecord, rank)
    links = of(given, LinkRecord, rank)
    evaluations = of(given, EvaluationRecord, rank)
    batches = [step.local_batch_size for step in steps]
    span_s = steps[-1].time_s - (steps[0].time_s - steps[0].wall_s)
    assert worker["rank"] == rank
    assert worker["steps"] == len(steps)
    assert worker["samples"] == sum(batches)
    assert worker["samples_per_s"] == pytest.approx(sum(batches) / span_s)
    assert worker["mean_loss"] == pytest.approx(np.mean([step.loss for step in steps]))
    assert worker["batch_size"] == {"min": min(batches), "max": max(batches), "last": batches[-1]}
    assert worker["incarnations"] == (2 if rank == 4 else 1)
    assert worker["waited_s"] == pytest.approx(sum(step.waited_s for step in steps))
    assert sum(each["seconds"] for each in worker["waited_for"]) == pytest.approx(
        worker["waited_s"]
    )
    assert len({each["seconds"] for each in worker["waited_for"]}) == 1, "both parts are equal"
    assert worker["sent_bytes"] == sum(link.sent_bytes for link in links)
    for link in worker["links"]:
        own = [record for record in links if record.peer == link["peer"]]
        assert link["sent_bytes"] == sum(record.sent_bytes for record in own)
        assert link["acknowledged_bytes"] == sum(record.acknowledged_bytes for record in own)
        assert link["last_budget_bytes"] == own[-1].budget_bytes
    assert worker["accuracy"]["final"] == evaluations[-1].accuracy
    assert worker["accuracy"]["best"] == max(e.accuracy for e in evaluations)
    assert worker["accuracy"]["evaluated_samples"] == 10_000  # the final one, over all of the split


def test_the_jobs_figures_agree_with_the_records(given, summary):
    final = [of(given, EvaluationRecord, rank)[-1].accuracy for rank in range(STORY.workers)]
    assert summary["accuracy"]["mean"] == pytest.approx(np.mean(final))
    assert (summary["accuracy"]["min"], summary["accuracy"]["max"]) == (min(final), max(final))
    assert summary["accuracy"]["best_rank"] == int(np.argmax(final))
    assert summary["time_s"] == max(record.time_s for record in given)
    steps = [record for record in given if isinstance(record, StepRecord)]
    assert summary["samples"] == sum(step.local_batch_size for step in steps)
    assert summary["exchange_cpu_fraction"] == pytest.approx(
        sum(step.exchange_cpu_s for step in steps) / sum(step.cpu_s for step in steps)
    )
    events = [record for record in given if isinstance(record, EventRecord)]
    assert summary["events"]["warnings"] == sum(event.warning for event in events)
    assert summary["events"]["reasons"]["WorkerStarted"] == STORY.workers


def test_the_use_of_time_agrees_with_the_workers(given, summary):
    """Ranks 0 and 1 are the last workers in the story, except for themselves."""
    use, workers = summary["time_use"], summary["workers"]
    waited_s = sum(worker["waited_s"] for worker in workers)
    compute_s = sum(worker["compute_s"] for worker in workers)
    assert use["compute_fraction"] / use["wait_fraction"] == pytest.approx(compute_s / waited_s)
    assert 0 < use["compute_fraction"] + use["wait_fraction"] <= 1 + 1e-9
    fractions = {each["rank"]: each["fraction"] for each in use["waited_for"]}
    of_0 = sum(w["waited_s"] for w in workers if w["rank"] != 0) / 2 / waited_s
    assert fractions[0] == pytest.approx(of_0)
    assert sum(fractions.values()) == pytest.approx(1)
    assert list(fractions.values()) == sorted(fractions.values(), reverse=True)


@pytest.mark.parametrize("level", LEVELS)
def test_the_time_to_a_level_is_when_the_mean_first_reaches_it(given, summary, level):
    entry = next(entry for entry in summary["levels"] if entry["accuracy"] == level)
    times = sorted({r.time_s for r in given if isinstance(r, EvaluationRecord)})
    first = max(of(given, EvaluationRecord, rank)[0].time_s for rank in range(STORY.workers))
    reached = [t for t in times if t >= first and mean_accuracy(given, t) >= level]
    if not reached:
        assert entry["time_s"] is None
        assert entry["samples"] is entry["sent_bytes"] is None
        return
    assert mean_accuracy(given, entry["time_s"]) == pytest.approx(level)
    assert entry["time_s"] <= reached[0]
    steps = [r for r in given if isinstance(r, StepRecord) and r.time_s <= entry["time_s"]]
    assert entry["samples"] == pytest.approx(sum(s.local_batch_size for s in steps), rel=0.05)
    sent = [r for r in given if isinstance(r, LinkRecord) and r.time_s <= entry["time_s"]]
    assert entry["sent_bytes"] == pytest.approx(sum(r.sent_bytes for r in sent), rel=0.05)


def test_a_target_is_reported_separately(summary):
    level = next(entry for entry in summary["levels"] if entry["accuracy"] == 0.65)
    assert summary["target"] == level


def test_drift_agrees_with_the_distances_of_the_sketches(given, summary):
    """Compare sketches of all replicas at one common time, interpolated by NumPy, pair by pair."""
    time_s = min(of(given, EvaluationRecord, rank)[-1].time_s for rank in range(STORY.workers))
    vectors, norms = [], []
    for rank in range(STORY.workers):
        own = of(given, EvaluationRecord, rank)
        at_s = [e.time_s for e in own]
        sketch = np.array([e.sketch for e in own])
        vectors.append([np.interp(time_s, at_s, column) for column in sketch.T])
        norms.append(np.interp(time_s, at_s, [e.weights_norm for e in own]))
    vectors = np.array(vectors)
    largest = max(np.linalg.norm(a - b) for a in vectors for b in vectors)
    assert summary["drift"]["last"] == pytest.approx(largest / np.mean(norms))


def began(given):
    """Start of the first step of any worker."""
    return min(r.time_s - r.wall_s for r in given if isinstance(r, StepRecord))


def test_the_time_of_training_counts_from_the_first_step(given, summary):
    assert began(given) > 0
    for entry in summary["levels"]:
        if entry["time_s"] is None:
            assert entry["training_time_s"] is None
        else:
            assert entry["training_time_s"] == pytest.approx(entry["time_s"] - began(given))


def test_speed_up_is_the_quotient_of_times_to_the_highest_common_level(given, summary):
    alone = Story(workers=1, seconds=120, learning_s=200, killed=None)
    reference = summary_of(records(alone), alone)
    result = scalability(summary, reference)
    level = result["accuracy"]
    times = [
        next(e["time_s"] for e in s["levels"] if e["accuracy"] == level) - began_s
        for s, began_s in ((reference, began(records(alone))), (summary, began(given)))
    ]
    assert level == max(e["accuracy"] for e in reference["levels"] if e["time_s"])
    assert result["speed_up"] == pytest.approx(times[0] / times[1])
    assert result["efficiency"] == pytest.approx(times[0] / times[1] / 6)


def test_a_long_run_takes_no_more_memory_than_a_short_one():
    """The rows kept after 20,000 steps of two workers stay within the curves' limits."""
    tally = RunTally([Rank(0), Rank(1)])
    for i in range(20_000):
        rank = Rank(i % 2)
        tally.add(StepRecord(i / 10, rank, 1, i, 1.0, 8, 16, 0.1, 0.1, 0.1, 0.1, 0.0, 0.0, 8 * i))
        tally.add(LinkRecord(i / 10, rank, Rank(1 - rank), i, 10, 10, 0, 0, 100, 1e3, 0, True))
        tally.add(EventRecord(i / 10, rank, i, "Reason", "message"))
        tally.add(EvaluationRecord(i / 10, rank, i, 8 * i, 0.5, 1.0, 10, (), (1.0, float(i)), 1.0))
    for worker in tally.workers.values():
        curves = [worker.loss_curve, worker.batch_curve, worker.accuracy_curve, worker.sent_curve]
        assert max(len(curve) for curve in curves) <= 4097
        assert all(len(link.curve) <= 513 for link in worker.links.values())
    assert len(tally.drift_curve) <= 2049
    assert len(tally.events) <= 2000
