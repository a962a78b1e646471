"""Test the progress and the figures of a served run.

- Progress and remaining time follow the end that comes first: steps, seconds, or passes over data
  that may grow. They use the measured rate. A restarted operator computes the same.
- Figures are means over replicas without non-finite values, with the drift of the replicas. Metrics
  of `compile()` have names that the operator does not use, within the bounds of the definition. The
  slowest pair of sites is named.
- Impossible reports about peers are not kept. Impossible figures leave a status that the definition
  accepts. The last report of a present worker about a link counts.

Left out: which record is accepted (tests/unit/operator/coordinator), how a status is written.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from dlion_api.names import Rank, SiteName
from dlion_api.protocol.membership import Member, Membership, MemberState
from dlion_api.protocol.progress import EvaluationRecord, LinkRecord, StepRecord
from dlion_api.spec import Job, load_job
from dlion_api.status_names import is_of_program
from dlion_operator.federation.reports import LinksTo
from dlion_operator.served_runs.progress import RunProgress

NOW = "2026-01-31T12:00:00Z"


def job(**stop: Any) -> Job:
    sites = [{"name": name, "groups": [{"name": "g", "workers": 1}]} for name in ("a", "b", "c")]
    spec = {
        "sites": sites,
        "trainer": {
            "program": {"builtin": "digits"},
            "dataset": {"name": "digits"},
            "stop": stop or {"maxSteps": 100},
        },
    }
    return load_job(
        {
            "apiVersion": "dlion.dev/v1alpha1",
            "kind": "DLionJob",
            "metadata": {"name": "digits"},
            "spec": spec,
        }
    )


def step(
    rank: int, iteration: int, time_s: float, *, wall_s: float = 1.0, loss: float = 0.5,
    epochs: float | None = None,
) -> Any:  # fmt: skip
    return StepRecord(
        time_s, Rank(rank), 1, iteration, loss, 8, 24, 0.1, 0.1, wall_s, 0.1, 0.0, 0.0, 8,
        epochs=epochs,
    )  # fmt: skip


def link(rank: int, peer: int, bandwidth: float | None, *, connected: bool = True) -> LinkRecord:
    return LinkRecord(1.0, Rank(rank), Rank(peer), 1, 0, 0, 0, 0, None, bandwidth, 0, connected)


def evaluation(
    rank: int, accuracy: float, sketch: tuple[float, ...] = (), time_s: float = 1.0
) -> EvaluationRecord:
    return EvaluationRecord(time_s, Rank(rank), 1, 10, accuracy, 1.0, 10, (), sketch, 5.0)


def progress_of(of: Job, *records: Any) -> RunProgress:
    progress = RunProgress(of)
    for record in records:
        progress.take(record)
    return progress


def estimates(progress: RunProgress) -> tuple[int | None, int | None]:
    status = progress.trainer_status(NOW)
    assert status is not None
    return status.progress_percentage, status.estimated_remaining_seconds


def figures(progress: RunProgress) -> dict[str, str]:
    status = progress.trainer_status(NOW)
    assert status is not None
    return {metric.name: metric.value for metric in status.metrics}


def regular_steps(count: int, *, since: int = 1, rank: int = 0) -> list[Any]:
    """Return one step per second from second 10 of the run, ten steps per pass over the data."""
    return [
        step(rank, number, 10.0 + number, epochs=number / 10)
        for number in range(since, since + count)
    ]


def test_there_is_no_progress_before_the_first_step() -> None:
    assert RunProgress(job()).trainer_status(NOW) is None
    assert RunProgress(job()).steps_per_second() == ""


def test_the_remaining_time_uses_the_measured_rate() -> None:
    progress = progress_of(job(maxSteps=100), *regular_steps(25))
    assert estimates(progress) == (25, 75)
    assert progress.steps_per_second() == "1.00"


def test_the_worker_that_ends_first_counts() -> None:
    quick = [step(1, number, 10.0 + number / 2, wall_s=0.5) for number in range(1, 51)]
    assert estimates(progress_of(job(maxSteps=100), *regular_steps(25), *quick)) == (50, 25)


def test_iterations_are_those_of_workers_that_train() -> None:
    """Sensors of topology `staged` make steps of their own."""
    staged = job(maxSteps=100)
    exchange = replace(staged.spec.exchange, topology="staged")
    staged = replace(staged, spec=replace(staged.spec, exchange=exchange))
    sensors = [step(rank, number, 10.0 + number / 9) for number in range(1, 200) for rank in (1, 2)]
    progress = progress_of(staged, *regular_steps(25), *sensors)
    assert progress.iteration() == 25
    assert progress.steps_per_second() == "1.00"
    assert estimates(progress) == (25, 75)


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ({"maxSeconds": 50}, (50, 25)),
        ({"maxSeconds": 50, "maxSteps": 1000}, (50, 25)),
        ({"maxSeconds": 5000, "maxSteps": 50}, (50, 25)),
        ({"maxEpochs": 10}, (25, 75)),
        ({"maxEpochs": 10, "maxSteps": 50}, (50, 25)),
        ({"maxEpochs": 2}, (100, 0)),
        ({"targetAccuracy": 0.9}, (None, None)),
        ({"continuous": True}, (None, None)),
        ({"maxSeconds": 20}, (100, 0)),
        ({"maxSteps": 10**12}, (0, 2**31 - 1)),
    ],
    ids=str,
)
def test_the_end_that_comes_first_counts(stop: dict[str, Any], expected: tuple[Any, Any]) -> None:
    assert estimates(progress_of(job(**stop), *regular_steps(25))) == expected


@pytest.mark.parametrize(
    "stop", [{"maxSteps": 100}, {"maxSeconds": 100}, {"maxEpochs": 10}], ids=str
)
def test_a_restarted_operator_computes_the_same(stop: dict[str, Any]) -> None:
    before = estimates(progress_of(job(**stop), *regular_steps(60)))
    after = estimates(progress_of(job(**stop), *regular_steps(10, since=51)))
    assert before == after == (60, 40)


def test_data_that_grow_faster_than_the_passes_have_no_remaining_time() -> None:
    grown = [step(0, 26, 36.0, epochs=1.3), step(0, 27, 37.0, epochs=0.1)]
    assert estimates(progress_of(job(maxEpochs=10), *regular_steps(25), *grown)) == (None, None)
    without = [step(0, number, 10.0 + number) for number in range(1, 5)]
    assert estimates(progress_of(job(maxEpochs=10), *without)) == (None, None)


def test_a_return_to_a_checkpoint_gives_no_negative_rate() -> None:
    progress = progress_of(job(), *regular_steps(25), step(0, 11, 40.0), step(0, 12, 41.0))
    assert progress.steps_per_second() == "1.00"
    assert estimates(progress)[1] == 88


def test_repeated_records_change_nothing() -> None:
    records = [*regular_steps(25), evaluation(0, 0.5)]
    assert figures(progress_of(job(), *records, records[-1])) == figures(
        progress_of(job(), *records)
    )


def test_the_drift_is_that_of_the_last_comparable_evaluation() -> None:
    progress = progress_of(job(), step(0, 1, 1.0), evaluation(0, 0.5, (3.0, 4.0)))
    assert "drift" not in figures(progress)
    progress.take(evaluation(1, 0.5, (3.0, 3.0)))
    assert figures(progress)["drift"] == "0.2"
    progress.take(evaluation(1, 0.5, (3.0, 3.0), time_s=2.0))
    assert figures(progress)["drift"] == "0.2"
    progress.take(evaluation(0, 0.5, (math.nan, 4.0), time_s=2.0))
    assert "drift" not in figures(progress)


def test_figures_are_means_over_replicas_without_those_not_finite() -> None:
    progress = progress_of(
        job(),
        step(0, 7, 1.0, loss=1.0),
        step(1, 9, 1.0, loss=2.0),
        step(2, 8, 1.0, loss=math.nan),
        evaluation(0, 0.25),
        evaluation(1, 0.75),
        evaluation(2, math.inf),
    )
    reported = {n: v for n, v in figures(progress).items() if not n.endswith("Fraction")}
    assert reported == {
        "loss": "1.5", "accuracy": "0.5000", "globalBatchSize": "24", "iteration": "9",
    }  # fmt: skip


def test_the_parts_of_the_step_time_and_the_slowest_peer_are_reported() -> None:
    def spent(rank: int, waited_for: tuple[int, ...]) -> Any:
        return replace(
            step(rank, 1, 1.0, wall_s=2.0), compute_s=1.0, waited_s=0.5, waited_for=waited_for,
            select_s=0.2, encode_s=0.1, send_s=0.0, decode_s=0.06, apply_s=0.04,
        )  # fmt: skip

    reported = figures(progress_of(job(), spent(0, (2,)), spent(1, (0, 2)), spent(1, (10**6,))))
    main = ("compute", "wait", "select", "encode", "send", "decode", "apply", "other")
    assert sum(float(reported[f"{part}Fraction"]) for part in main) == pytest.approx(1.0, abs=1e-3)
    assert (reported["selectFraction"], reported["otherFraction"]) == ("0.1000", "0.0500")
    assert reported["waitedForRank"] == "2"
    assert float(reported["waitedForFraction"]) == pytest.approx(0.5)


def with_metrics(rank: int, metrics: dict[str, float]) -> EvaluationRecord:
    return replace(evaluation(rank, 0.9), metrics=metrics)


def test_metrics_of_a_program_are_means_of_the_newest_evaluations() -> None:
    reported = figures(
        progress_of(
            job(), step(0, 1, 1.0), with_metrics(0, {"auc": 0.1}),
            with_metrics(0, {"auc": 0.25, "mae": 2.0, "loss": 7.0, "waitFraction": 3.0,
                             "metric_loss": 8.0}),
            with_metrics(1, {"auc": 0.75, "mae": math.nan, "top": math.inf}),
        )
    )  # fmt: skip
    of_program = {name: value for name, value in reported.items() if is_of_program(name)}
    assert of_program == {
        "auc": "0.5", "mae": "2", "metric_loss": "7", "metric_waitFraction": "3",
        "metric_metric_loss": "8",
    }  # fmt: skip
    assert reported["loss"] == "0.5"


def test_no_figure_of_the_operator_counts_as_a_metric_of_the_program() -> None:
    slow = replace(step(0, 40, 60.0), waited_for=(1,), waited_s=0.5)
    learned = [evaluation(0, 0.1 * n, (1.0,), 10.0 * n) for n in range(1, 7)]
    reported = figures(progress_of(job(targetAccuracy=0.8), *regular_steps(39), slow, *learned))
    assert {"secondsToTarget", "waitedForRank", "waitedForFraction"} <= reported.keys()
    assert not any(map(is_of_program, reported))


def test_metrics_of_a_program_stay_within_the_definition() -> None:
    """Also those of faulty workers: too many, too long or too large names and values."""
    hostile = [
        with_metrics(rank, {f"{rank}-{number}": 1.7e308 for number in range(64)} | {"": 1.0})
        for rank in range(3)
    ]
    long = with_metrics(0, {"x" * 65: 1.0, "y" * 64: 2.0, "z" * 59 + "Fraction": 3.0})
    for records in ([long], hostile, [*hostile, long]):
        status = progress_of(job(targetAccuracy=0.8), step(0, 1, 1.0), *records).trainer_status(NOW)
        assert status is not None
        assert len(status.metrics) <= 32
        assert all(1 <= len(each.name) <= 64 >= len(each.value) for each in status.metrics)
        names = [each.name for each in status.metrics]
        assert len(set(names)) == len(names)
    assert {"y" * 64: "2"}.items() <= figures(progress_of(job(), step(0, 1, 1.0), long)).items()


@pytest.mark.parametrize("wall_s", [-1e300, 1e-300, 1.7e308])
def test_a_faulty_worker_cannot_make_a_status_that_the_definition_refuses(wall_s: float) -> None:
    steps = [
        replace(
            step(0, number, time_s, wall_s=wall_s), waited_for=(1,), waited_s=-wall_s,
            select_s=-1e300, compute_s=1e300,
        )
        for number, time_s in enumerate((-1e300, 5.0, 1e300), 1)
    ]  # fmt: skip
    status = progress_of(job(maxSeconds=100), *steps, step(1, 1, 1.0)).trainer_status(NOW)
    assert status is not None
    assert 0 <= (status.progress_percentage or 0) <= 100
    assert all(len(metric.value) <= 64 for metric in status.metrics)


def test_links_are_those_of_present_workers() -> None:
    of = job()
    members = tuple(
        Member(worker, 1, state, "h:1")
        for worker, state in zip(
            of.workers(), (MemberState.READY, MemberState.READY, MemberState.LOST), strict=True
        )
    )
    progress = progress_of(of, link(0, 1, 9e6), link(1, 0, 5e6, connected=False), link(0, 2, 1e3))
    links = progress.links(Membership(1, of.key, 3, members))
    assert links is not None
    assert (links.connected, links.expected, links.slowest) == (1, 2, "b to a")
    progress.take(replace(link(1, 0, 5e6, connected=False), neighbour=False))
    links = progress.links(Membership(1, of.key, 3, members))
    assert links is not None
    assert (links.connected, links.expected) == (1, 1), "no neighbours need no link"


def test_links_to_other_sites_are_summed_and_small_rate_changes_are_ignored() -> None:
    """The sums use the last link reports of the own present workers."""
    progress = progress_of(job(), link(0, 1, 9e6), link(0, 2, 5e6), link(1, 0, 1e3))
    own, b, c = SiteName("a"), SiteName("b"), SiteName("c")
    assert progress.links_to(own, present(0, 1)) == (LinksTo(b, 1, 1, 9e6), LinksTo(c, 1, 1, 5e6))
    assert progress.links_to(own, present(1)) == ()
    for rate, expected in ((8.5e6, 9e6), (8e6, 8e6), (8.7e6, 8e6)):
        progress.take(replace(link(0, 1, rate), time_s=2.0))
        progress.take(replace(link(0, 2, None, connected=False), time_s=2.0))
        reported = progress.links_to(own, present(0, 1))
        assert reported == (LinksTo(b, 1, 1, expected), LinksTo(c, 0, 1, 0.0))


def test_impossible_peers_use_no_memory() -> None:
    progress = progress_of(job(), *(link(0, 10**6 + number, 1.0) for number in range(5000)))
    assert not progress._links
    assert progress.links(Membership(1, job().key, 3)) is None


def present(*ranks: int) -> Membership:
    members = [Member(w, 1, MemberState.READY, "") for w in job().workers() if w.rank in ranks]
    return Membership(1, job().key, 3, tuple(members))


def test_the_last_report_of_a_present_worker_about_a_link_counts() -> None:
    progress = RunProgress(job())
    for peer in (1, 2):
        progress.take(link(0, peer, None))
    assert progress.linked(present(0)) == {"b": 1, "c": 1}
    progress.take(replace(link(0, 1, None), time_s=2.0))  # the other worker reports nothing more
    assert progress.linked(present(0)) == {"b": 1}
    progress.take(replace(link(0, 1, None, connected=False), time_s=3.0))
    assert progress.linked(present(0)) == {}
    progress.take(link(1, 0, None))
    assert progress.linked(present(0)) == {}  # the worker that reported it is absent
    assert progress.linked(present(0, 1)) == {"a": 1}
