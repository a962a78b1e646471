"""Whether a run may start with the DLionRuntime that its job names, and what it may not ask. Pure.

It applies only to a run that lacks the Job of a group: existing Jobs keep their values, so later
changes of the runtime take effect in the next run.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from decimal import Decimal
from itertools import chain, islice
from typing import Any, Final

from dlion_api import cluster_names as names
from dlion_api.spec.sites import Group
from dlion_api.status import Reason
from dlion_operator.children.initializers import downloads
from dlion_operator.children.pods import resources_of
from dlion_operator.children.worker_jobs import site_template, worker_job
from dlion_operator.kubernetes.quantities import parse_quantity
from dlion_operator.model.site_runtime import SiteRuntime
from dlion_operator.plan.observed import first_of
from dlion_operator.plan.outcome.diagnosis import join_messages
from dlion_operator.plan.outcome.job_phases import Diagnosis, JobPhase
from dlion_operator.plan.runs import Run
from dlion_operator.plan.startup_delays import STUCK_AFTER

BLOCKING: Final = frozenset({Reason.RUNTIME_UNAVAILABLE, Reason.RUNTIME_LIMIT_EXCEEDED})
"""Reasons for which nothing of a run is created: even its keeper needs the runtime."""
_MAX_LISTED: Final = 3
_UNBOUNDED: Final = frozenset({"cpu", "memory", "ephemeral-storage"})
"""Resources of which a container without a limit may use all that its node has. Without a limit of
another, such as a device, it has none."""


def runtime_blocker(run: Run) -> Diagnosis | None:
    """Return why a run, or its groups without Jobs, may not start by the runtime. None: it may."""
    state = run.observed.runtime
    if state is None:
        if not (run.job.spec.runtime or run.settings.default_runtime):
            return None
        message = "the site's DLionRuntime has not been read yet"
        return Diagnosis(JobPhase.WAITING, Reason.RUNTIME_UNAVAILABLE, message)
    if state.problem:
        is_overdue = state.missing_s >= STUCK_AFTER.total_seconds()
        phase = JobPhase.STUCK if is_overdue else JobPhase.WAITING
        return Diagnosis(phase, Reason.RUNTIME_UNAVAILABLE, state.problem)
    if run.runtime is None:
        return None
    if excess := list(_excess(run, run.runtime)):
        allowed = f"DLionRuntime {run.runtime.name} of this site does not allow it"
        message = join_messages([f"{allowed}: {excess[0]}", *excess[1:]])
        return Diagnosis(JobPhase.STUCK, Reason.RUNTIME_LIMIT_EXCEEDED, message)
    return None


def _excess(run: Run, runtime: SiteRuntime) -> Iterator[str]:
    """Everything that the job asks and may not."""
    spec = runtime.spec
    namespace = run.job.key.namespace
    if spec.namespaces and namespace not in spec.namespaces:
        allowed = first_of(spec.namespaces, _MAX_LISTED)
        yield f"the job is in namespace {namespace}, allowed: {allowed}"
    if run.too_many_workers:
        yield f"{run.too_many_workers}: lower the groups' workers"
    for field, paths in _overrides(run).items():
        if paths and field not in spec.limits.may_override:
            yield f"the job sets {first_of(paths, _MAX_LISTED)}: remove it"
    for group in run.groups:
        yield from _resource_excess(run, group, spec.limits.max_resources)


def _overrides(run: Run) -> Mapping[str, list[str]]:
    """The paths of the job that set each of the fields, here."""
    spec, found = run.job.spec, defaultdict[str, list[str]](list)
    found["image"] += ["trainer.image"] if spec.trainer.image else []
    found["podTemplate"] += ["podTemplate"] if spec.pod_template else []
    for group in run.groups:
        given = {
            "image": group.image,
            "nodeSelector": group.node_selector,
            "podTemplate": group.pod_template,
        }
        for field, value in given.items():
            found[field] += [f"{field} of group {group.name}"] if value else []
    return found


# ---- resources -------------------------------------------------------------------------------


def _resource_excess(run: Run, group: Group, most: Mapping[str, str]) -> Iterator[str]:
    """What one worker of the group may use beyond the limits."""
    if not most:
        return
    try:
        made = worker_job(run.job, group, run.settings, run.owner)
        pod = made["spec"]["template"]["spec"]
        stages = _stages(pod, run, group)
    except (AttributeError, TypeError, ValueError, KeyError):
        return  # `template_problem` reports a malformed podTemplate, and nothing starts
    for resource, allowed in most.items():
        try:
            found = (_of_resource(resource, allowed, stage, group) for stage in stages)
            whole = _of_pod(resource, allowed, pod.get("resources") or {}, group)
            yield from islice(filter(None, chain([whole], found)), 1)
        except (AttributeError, TypeError, ValueError) as error:
            yield f"the limit of {resource} of group {group.name} cannot be read: {error}"


def _stages(pod: Mapping[str, Any], run: Run, group: Group) -> list[list[Mapping[str, Any]]]:
    """The containers that may use resources at the same time: first all but the initializers, which
    end before the trainer begins; then each initializer with those that stay beside it.

    The sidecar that the operator renders does not count, also with what the runtime adds. With
    another image or command it counts like any other container.
    """
    site = site_template(run.job, group, run.settings)["spec"]["initContainers"]
    rendered = resources_of(run.settings.sidecar.resources)
    passing = downloads(run.job)
    counted = [
        each
        for each in pod.get("initContainers") or ()
        if each.get("name") != names.SIDECAR_CONTAINER
        or (each.get("resources") or {}) != rendered
        or each not in site
    ]
    staying = [each for each in counted if each.get("restartPolicy") == "Always"]
    alone = [each for each in counted if each.get("name") in passing and each not in staying]
    others = [each for each in counted if each not in alone]
    return [[*others, *pod["containers"]], *([*staying, each] for each in alone)]


def _of_resource(
    resource: str, allowed: str, containers: list[Mapping[str, Any]], group: Group
) -> str:
    """Compare the sum of the limits of all containers with `allowed`. Empty: it is within.

    Raises: ValueError.
    """
    total = Decimal(0)
    for container in containers:
        given = container.get("resources") or {}
        amount = (given.get("limits") or {}).get(resource)
        if amount is None:
            if resource not in _UNBOUNDED:
                continue
            return (
                f"container {container.get('name')} of group {group.name} has no limit of"
                f" {resource}: set resources.limits, at most {allowed}"
            )
        total += parse_quantity(str(amount))
    if total > parse_quantity(allowed):
        return (
            f"a worker of group {group.name} may use {resource} {_shown(total)}: lower its"
            f" resources.limits to {allowed}"
        )
    return ""


def _of_pod(resource: str, allowed: str, given: Mapping[str, Any], group: Group) -> str:
    """Compare what the pod has as a whole with `allowed`: its request keeps others off the node,
    whatever its containers may use. Empty: it is within. Raises: ValueError."""
    amounts = [(given.get(field) or {}).get(resource) for field in ("requests", "limits")]
    most = max((parse_quantity(str(each)) for each in amounts if each is not None), default=None)
    if most is None or most <= parse_quantity(allowed):
        return ""
    return (
        f"the pod of a worker of group {group.name} has {resource} {_shown(most)}: lower resources"
        f" in the spec of its podTemplate to {allowed}"
    )


def _shown(number: Decimal) -> str:
    return f"{number:f}".rstrip("0").rstrip(".") if "." in f"{number:f}" else f"{number:f}"
