"""`summary.json`: the figures of a finished run, in a versioned format.

Defines the format (`summary.schema.json`, docs/results.md) and computes each figure from the tally.
Used by `folder` at the end of a run and by `report`.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dlion_api.names import WorkerIdentity
from dlion_api.reasons import RECORDS_MISSED
from dlion_api.spec import Job
from dlion_results.run_folder.description import find_worker
from dlion_results.run_folder.environment import (
    EnvironmentReport,
    environment_document,
    finite_or_none,
)
from dlion_results.run_folder.models import SiteModel
from dlion_results.run_folder.stored_values import MAX_NUMBER
from dlion_results.summary.accuracy_name import common_name
from dlion_results.summary.culprit import find_culprit, run_use
from dlion_results.summary.curves import Points, at_times, time_to_accuracy
from dlion_results.summary.judgement import EndReason
from dlion_results.summary.privacy import privacy_spent
from dlion_results.summary.tally import (
    LinkTally,
    RunTally,
    WorkerTally,
    first_step_s,
    training_s,
    trusted_workers,
)
from dlion_results.summary.time_parts import (
    fractions,
    link_bytes,
    pace_change,
    process_parts,
    time_parts,
)

SCHEMA_VERSION = 1
"""Raised when a field changes its meaning or is removed, but not for new fields."""

LEVELS = (0.25, 0.5, 0.65, 0.75, 0.8, 0.9, 0.95, 0.99)
"""Accuracies whose time and bytes are reported, besides the job's target."""

Json = dict[str, Any]


@dataclass(frozen=True)
class Ending:
    """How a run ended.

    `stop_reason` is the met condition of `stop`, or the error. `started_at` is the wall-clock
    start, ISO 8601.
    """

    stop_reason: str
    message: str = ""
    succeeded: bool = True
    started_at: str = ""
    reason: str = ""
    """`EndReason`; empty: derived from `succeeded`."""
    missing: tuple[int, ...] = ()
    """Ranks of replicas that a saved model lacks."""
    command_s: float | None = None
    """Seconds from the start of `dlion run` to that of the run; None: it was started otherwise."""
    virtual_time: bool = False
    """Whether the run was simulated. No process of it starts or ends."""


def summarise(
    job: Job,
    tally: RunTally,
    *,
    ending: Ending,
    models: Sequence[SiteModel] = (),
    environment: EnvironmentReport | None = None,
    reference: Mapping[str, Any] | None = None,
    bad_line_count: int = 0,
) -> Json:
    """The content of `summary.json`.

    `reference` is the summary of the same job on a single worker; without it there is no speed-up.
    """
    workers = [tally.workers[rank] for rank in sorted(tally.workers)]
    trained = [each for each in workers if job.spec.exchange.trains(each.rank)]
    known = {worker.rank: worker for worker in job.workers()}  # a look-up in the job takes all
    target, began_s = job.spec.trainer.stop.target_accuracy, first_step_s(workers)
    summary: Json = {
        "schema_version": SCHEMA_VERSION,
        "job": {
            "name": job.metadata.name,
            "namespace": job.metadata.namespace,
            "run_id": job.spec.run_id,
            "spec_hash": job.hash(),
        },
        "ending": _ending(ending, trained),
        "included_sites": sorted({site for model in models for site in model.sites}),
        "models": [_model(model) for model in models],
        "time_s": tally.end_s,
        **_totals(workers, trained),
        "time_use": _time_use(workers),
        "accuracy": _accuracy(workers, models),
        "metrics": _metrics(workers),
        "target": level_reached(workers, target, trained) if target else None,
        "levels": [level_reached(workers, level, trained) for level in LEVELS],
        "drift": _drift(tally.drift_curve.points()),
        "workers": [
            {
                **_worker(worker, known.get(worker.rank) or find_worker(job, worker.rank)),
                "process": process_parts(worker, began_s),
                "privacy": privacy_spent(
                    job.spec.trainer.privacy, worker, complete=not tally.reasons[RECORDS_MISSED]
                ),
            }
            for worker in workers
        ],
        "events": {"warnings": tally.warning_count, "reasons": dict(sorted(tally.reasons.items()))},
        "bad_line_count": bad_line_count,
        "environment": environment_document(environment) if environment else None,
    }
    culprit = find_culprit(run_use(summary, job.spec.exchange.policy))
    summary["culprit"] = culprit.as_json() if culprit else None
    summary["scalability"] = scalability(summary, reference) if reference else None
    return summary


def scalability(summary: Mapping[str, Any], reference: Mapping[str, Any]) -> Json:
    """Speed-up X on Y workers, and X/Y, relative to the reference.

    Uses the time to the highest accuracy that both reached, if any, and samples/s. Time counts from
    the first step, because start-up time depends on the machine, not on training.
    """
    workers = len(summary["workers"])
    own, other = (
        {entry["accuracy"]: entry["training_time_s"] for entry in each["levels"]}
        for each in (summary, reference)
    )
    both = [level for level in own if own[level] and other.get(level)]
    level = max(both, default=None)
    speed_up = other[level] / own[level] if level is not None else None
    rate = reference["samples_per_s"]
    return {
        "workers": workers,
        "reference_workers": len(reference["workers"]),
        "accuracy": level,
        "speed_up": speed_up,
        "efficiency": speed_up / workers if speed_up is not None else None,
        "throughput_ratio": summary["samples_per_s"] / rate if rate else None,
    }


def _ending(ending: Ending, workers: Sequence[WorkerTally]) -> Json:
    return {
        "reason": ending.reason or (EndReason.COMPLETED if ending.succeeded else EndReason.FAILED),
        "stop_reason": ending.stop_reason,
        "message": ending.message,
        "succeeded": ending.succeeded,
        "started_at": ending.started_at,
        "iteration": max((worker.last_iteration for worker in workers), default=0),
        "missing": list(ending.missing),
        "command_s": finite_or_none(ending.command_s),
        "virtual_time": ending.virtual_time,
    }


def _model(model: SiteModel) -> Json:
    accuracies = (model.accuracy, model.averaged_accuracy)
    accuracy, averaged = map(finite_or_none, accuracies)
    return {**asdict(model), "accuracy": accuracy, "averaged_accuracy": averaged}


def _totals(workers: Sequence[WorkerTally], trained: Sequence[WorkerTally]) -> Json:
    """Sums over the workers. Steps and samples: of those that train, without sensors."""
    cpu_s = sum(worker.cpu_s for worker in workers)
    span_s = training_s(workers)
    samples = sum(worker.samples for worker in trained)
    return {
        "training_s": span_s,
        "steps": sum(worker.steps for worker in trained),
        "samples": samples,
        "samples_per_s": samples / span_s if span_s > 0 else 0.0,
        "sent_bytes": sum(worker.sent_bytes for worker in workers),
        "bytes": link_bytes(link for worker in workers for link in worker.links.values()),
        "exchange_cpu_fraction": (
            sum(worker.exchange_cpu_s for worker in workers) / cpu_s if cpu_s > 0 else None
        ),
    }


def _time_use(workers: Sequence[WorkerTally]) -> Json | None:
    """How all workers spent their time, and for which peers they waited; None without a step."""
    trained = [worker for worker in workers if worker.steps]
    span_s = sum(worker.span_s for worker in trained)
    if span_s <= 0:
        return None
    computed_s = sum(worker.compute_s for worker in trained)
    waited_s = sum(worker.waited_s for worker in trained)
    waited_for_s: dict[int, float] = defaultdict(float)
    for worker in trained:
        for rank, seconds in worker.waited_for_s.items():
            waited_for_s[rank] += seconds
    return {
        "compute_fraction": min(1.0, computed_s / span_s),
        "wait_fraction": min(1.0, waited_s / span_s),
        **fractions(trained),
        "waited_for": [
            {"rank": rank, "fraction": min(1.0, seconds / waited_s)}
            for rank, seconds in sorted(waited_for_s.items(), key=lambda item: (-item[1], item[0]))
            if seconds > 0 and waited_s > 0
        ],
    }


def _accuracy(workers: Sequence[WorkerTally], models: Sequence[SiteModel]) -> Json:
    """Accuracy over replicas, each by its final evaluation, or else its last."""
    final = {
        worker.rank: worker.last_evaluation.accuracy
        for worker in trusted_workers(workers)
        if worker.last_evaluation is not None and math.isfinite(worker.last_evaluation.accuracy)
    }
    averaged = max((model.averaged_accuracy for model in models), default=None)
    evaluated = [worker.last_evaluation for worker in trusted_workers(workers)]
    return {
        "name": common_name(each.accuracy_name for each in evaluated if each is not None),
        "mean": float(np.mean(list(final.values()))) if final else None,
        "min": min(final.values(), default=None),
        "max": max(final.values(), default=None),
        "best_rank": max(final, key=lambda rank: final[rank], default=None),
        "replicas": len(final),
        "averaged_model": finite_or_none(averaged),
    }


def _metrics(workers: Sequence[WorkerTally]) -> Json:
    """Other figures of the program by name, over the replicas that have them, as `_accuracy`."""
    known: dict[str, list[float]] = {}
    for worker in trusted_workers(workers):
        for name, value in worker.last_metrics.items():
            if abs(value) < MAX_NUMBER:
                known.setdefault(name, []).append(value)
    return {
        name: {"mean": sum(each) / len(each), "min": min(each), "max": max(each)}
        for name, each in known.items()
    }


def level_reached(
    workers: Sequence[WorkerTally], accuracy: float, trained: Sequence[WorkerTally]
) -> Json:
    """When the mean over replicas reached that accuracy; the bytes that all had sent by then, and
    the samples of those that train."""
    curves = [worker.accuracy_curve.points() for worker in trusted_workers(workers)]
    time_s = time_to_accuracy(curves, accuracy)
    samples = None if time_s is None else round(samples_at(trained, [time_s])[0])
    sent = None if time_s is None else round(sent_bytes_at(workers, [time_s])[0])
    began_s = first_step_s(workers)
    trained_s = None
    if time_s is not None and began_s is not None:
        paused_s = max(worker.pauses.within(began_s, time_s) for worker in workers)
        trained_s = max(0.0, time_s - began_s - paused_s)
    return {
        "accuracy": accuracy,
        "time_s": time_s,
        "training_time_s": trained_s,
        "samples": samples,
        "sent_bytes": sent,
    }


def sent_bytes_at(workers: Sequence[WorkerTally], times_s: Sequence[float] | Points) -> Points:
    """Bytes that all workers had sent by those times; 0 at time 0."""
    return _total_at([worker.sent_curve.points() for worker in workers], times_s)


def samples_at(workers: Sequence[WorkerTally], times_s: Sequence[float] | Points) -> Points:
    """Samples that these workers had trained on by those times; 0 at time 0."""
    return _total_at([worker.samples_curve.points() for worker in workers], times_s)


def _total_at(curves: Sequence[Points], times_s: Sequence[float] | Points) -> Points:
    total = np.zeros(len(times_s))
    for points in curves:
        if len(points):
            begin = np.zeros((1, points.shape[1]))
            total += at_times(np.concatenate((begin, points)), times_s)
    return total


def _drift(points: Points) -> Json:
    return {
        "last": float(points[-1, 1]) if len(points) else None,
        "max": float(points[:, 1].max()) if len(points) else None,
        "comparisons": len(points),
    }


def _worker(worker: WorkerTally, identity: WorkerIdentity | None) -> Json:
    evaluation = worker.last_evaluation
    return {
        "rank": worker.rank,
        "name": identity.name if identity else f"worker {worker.rank}",
        "site": identity.site if identity else "",
        "group": identity.group if identity else "",
        "quarantine": worker.quarantine,
        "incarnations": len(worker.incarnations),
        "steps": worker.steps,
        "samples": worker.samples,
        "samples_per_s": worker.samples_per_s,
        "mean_loss": worker.loss_sum / worker.loss_count if worker.loss_count else None,
        "last_loss": finite_or_none(worker.last_loss),
        "accuracy": {
            "final": finite_or_none(evaluation.accuracy) if evaluation else None,
            "best": finite_or_none(worker.best_accuracy),
            "evaluated_samples": evaluation.evaluated_samples if evaluation else 0,
            "classes": [finite_or_none(a) for a in evaluation.class_accuracy] if evaluation else [],
        },
        "metrics": {name: finite_or_none(v) for name, v in worker.last_metrics.items()},
        "batch_size": {
            "min": worker.batch_min,
            "max": worker.batch_max,
            "last": worker.batch_last,
        },
        "compute_s": worker.compute_s,
        "waited_s": worker.waited_s,
        **time_parts(worker),
        **pace_change(worker),
        "waited_for": [
            {"peer": peer, "seconds": seconds}
            for peer, seconds in sorted(worker.waited_for_s.items())
        ],
        "cpu_s": worker.cpu_s,
        "exchange_cpu_s": worker.exchange_cpu_s,
        "sent_bytes": worker.sent_bytes,
        "links": [_link(peer, worker.links[peer]) for peer in sorted(worker.links)],
    }


def _link(peer: int, link: LinkTally) -> Json:
    return {
        "peer": peer,
        "sent_bytes": link.sent_bytes,
        **link_bytes([link]),
        "acknowledged_bytes": link.acknowledged_bytes,
        "max_unacknowledged_bytes": link.max_unacknowledged_bytes,
        "max_queued_bytes": link.max_queued_bytes,
        "dropped_messages": link.dropped_messages,
        "last_budget_bytes": link.budget_bytes,
        "last_bandwidth_bytes_per_s": finite_or_none(link.bandwidth_bytes_per_s),
        "sent_segments": link.sent_segments,
        "retransmitted_segments": link.retransmitted_segments,
        "round_trip_s": finite_or_none(link.round_trip_s),
        "min_round_trip_s": finite_or_none(link.min_round_trip_s),
    }
