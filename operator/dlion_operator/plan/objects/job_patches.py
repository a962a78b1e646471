"""How a run's Jobs change while they exist: size, suspension and stored trust bundles. Pure."""

from collections.abc import Iterable, Iterator
from typing import Any

from dlion_api import cluster_names as names
from dlion_operator.kubernetes.client import Kind
from dlion_operator.model.job_view import WorkerJobView
from dlion_operator.plan.decisions import Action, Patch
from dlion_operator.plan.queues.queueing import placement_problem, start_job
from dlion_operator.plan.runs import Run


def update_jobs(run: Run) -> Iterator[Action]:
    """Updates to Jobs that have not ended: whether they are suspended, and their size."""
    may_start = run.may_start and not placement_problem(run)
    must_stop = run.queue is not None and run.queue.must_stop
    for group in run.groups:
        view = run.jobs.get(group.name)
        if view is None or view.ended_at is not None:
            continue
        spec: dict[str, Any] = {}
        if must_stop and not view.suspended:
            spec["suspend"] = True
        if view.workers != (size := run.size_of(group)):
            # Kueue must count the pods first; the controller then sets `startTime` again.
            spec |= {"suspend": True} if view.is_scaled_to_zero else {}
            spec |= {"parallelism": size, "completions": size}
        if view.suspended and not view.queued and may_start:
            yield from start_job(run, view, spec)
        elif spec:
            yield _patch(view, spec)


def store_bundles(run: Run) -> Iterator[Action]:
    """Store the trust bundles on the Jobs, for an operator that restarts."""
    if not run.view.bundles:
        return
    # With `cryptography`, which `dlion render` does without.
    from dlion_operator.pki.run_trust import bundles_to_text

    kept = {names.AUTHORITIES_ANNOTATION: bundles_to_text(run.view.bundles, run.site)}
    for view in run.jobs.values():
        if view.ended_at is None and not kept.items() <= view.annotations.items():
            patch = {"metadata": {"uid": view.uid, "annotations": kept}}
            yield Patch(Kind.JOB, view.name, patch)


def halt_jobs(jobs: Iterable[WorkerJobView]) -> Iterator[Action]:
    """Stop running pods; ended pods keep their logs.

    A Job that is in a queue by itself is scaled to zero instead. Kueue starts an admitted Job
    whenever it is suspended, and evicts a Job whose size has changed.
    """
    for view in jobs:
        if view.ended_at is not None:
            continue
        if view.queued and view.workers:
            yield _patch(view, {"parallelism": 0})
        elif not view.queued and not view.suspended:
            yield _patch(view, {"suspend": True})


def _patch(view: WorkerJobView, spec: dict[str, Any]) -> Patch:
    """A patch that another Job of the same name rejects."""
    return Patch(Kind.JOB, view.name, {"metadata": {"uid": view.uid}, "spec": spec})
