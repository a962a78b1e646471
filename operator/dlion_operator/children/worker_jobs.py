"""The Indexed Job of one group: each pod has initializers, a native sidecar and a supervised
trainer."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from dlion_api import cluster_names as names
from dlion_api.exit_codes import ExitCode
from dlion_api.spec import BY_GROUP, RANKS_ANNOTATION, Job
from dlion_api.spec.failures import (
    ENDS,
    NAMED_CODES,
    FailureAction,
    FailureRule,
    action_after,
    matching_rule,
)
from dlion_api.spec.sites import Group, Resources
from dlion_operator.children.initializers import (
    downloads,
    downloads_volume,
    initializers,
    with_downloads,
    without_secrets,
)
from dlion_operator.children.keeper import keeper_objects
from dlion_operator.children.pod_templates import worker_template
from dlion_operator.children.pods import (
    container,
    metadata_of,
    mount,
    pod_spec,
    program_volume,
    role_arguments,
)
from dlion_operator.children.template_limits import RefusedField, refused_fields
from dlion_operator.kubernetes.client import Document, Kind
from dlion_operator.model import initial_group_sizes
from dlion_operator.model.settings import Settings

_FATAL = sorted(
    int(code) for code in ExitCode if code.fatal and code not in (ExitCode.OK, ExitCode.INTERRUPTED)
)

_POD_ACTIONS: Mapping[FailureAction, str] = {
    "Restart": "Count",
    "Ignore": "Ignore",
    "FailWorker": "FailIndex",
    # `FailJob` would end this group alone and at once; the operator ends the whole run in order.
    "FailRun": "FailIndex",
}
"""What Kubernetes does with a failed pod."""


def worker_job(job: Job, group: Group, settings: Settings, owner: Mapping[str, Any]) -> Document:
    """Return the group's Job, which is created once per run."""
    site = settings.site
    labels = {names.COMPONENT_LABEL: names.WORKER, names.GROUP_LABEL: group.name}
    name = names.group_job_name(job.key, group.name)
    metadata = metadata_of(name, job, owner, site=site, **labels)
    metadata["annotations"] = {
        names.SPEC_HASH_ANNOTATION: job.hash(),
        names.WORKERS_ANNOTATION: str(group.workers),
    }
    if settings.runtime is not None:
        metadata["annotations"][names.RUNTIME_ANNOTATION] = settings.runtime.to_json()
    if job.may_grow:
        metadata["annotations"][RANKS_ANNOTATION] = BY_GROUP
    else:
        metadata["annotations"][names.ALL_WORKERS_ANNOTATION] = initial_group_sizes.to_json(job)
    return Kind.JOB.document(
        metadata,
        spec={
            "completionMode": "Indexed",
            "completions": group.workers,
            "parallelism": group.workers,
            "backoffLimitPerIndex": job.spec.max_restarts,
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {"rules": _failure_rules(job, group)},
            # With a queue, the run's Workload decides when the Job starts. The Job itself has no
            # label of the queue: Kueue would admit it once more, alone.
            "suspend": bool(job.metadata.labels.get(names.QUEUE_LABEL)),
            "template": worker_template(
                job,
                group,
                _pod(job, group, settings),
                names.run_labels(job.key, site) | labels,
                settings.scratch.state,
                settings.runtime,
            ),
        },
    )


def refused_by_site(
    job: Job, group: Group, made: Document, settings: Settings, *, by_rights: bool
) -> tuple[RefusedField, ...]:
    """Return what the site does not allow in the group's Job, which `worker_job` made, and in the
    run's keeper. What the site's DLionRuntime gives is allowed, as administrators wrote it.

    `by_rights`: the job's writer has the rights to the Secrets and service accounts that it names.
    """
    limits = settings.tenancy.pod_template
    own_images = (settings.images.worker, settings.images.sidecar)
    limits = replace(limits, images=(*limits.images, *own_images))
    own = site_template(job, group, settings)
    fields = refused_fields(made["spec"]["template"], own, limits)
    copied = [each for each in fields if each.path in _initializer_images(job)]
    found = {_by_own_field(each) for each in fields if each not in copied}
    # The keeper runs what the job asks for, also where its groups ask for something else.
    bare_job, _ = _without_templates(job, group)
    keeper, own_keeper = (_keeper_template(each, settings) for each in (job, bare_job))
    known = {each.what for each in found}
    for each in (*copied, *refused_fields(keeper, own_keeper, limits)):
        if each.what not in known:
            is_image = each.path == f"containers[{names.KEEPER_CONTAINER}].image"
            found.add(replace(each, path="trainer.image") if is_image else each)
    return tuple(sorted(each for each in found if not (by_rights and each.by_rights)))


def _initializer_images(job: Job) -> set[str]:
    """Paths of the images of initializers, which are the trainer's."""
    return {f"initContainers[{name}].image" for name in downloads(job)}


def _by_own_field(found: RefusedField) -> RefusedField:
    """Name the job's field, where a Secret is that of a download."""
    for name, field in (
        (names.DATASET_INITIALIZER, "dataset"),
        (names.MODEL_INITIALIZER, "model"),
    ):
        if found.path.startswith(f"initContainers[{name}].env[DLION_DOWNLOAD_"):
            return replace(found, path=f"trainer.initializer.{field}.secretName")
    return found


def missing_parts(job: Job, made: Document) -> Iterator[str]:
    """What the group's Job, which `worker_job` made, lacks of what makes its pods workers: a
    podTemplate may remove or replace it. A command may be put before the operator's own."""
    spec = made["spec"]["template"]["spec"]
    for field, role in (
        ("containers", names.TRAINER_CONTAINER),
        ("initContainers", names.SIDECAR_CONTAINER),
        *(("initContainers", name) for name in downloads(job)),
    ):
        found = [each for each in spec.get(field) or () if each.get("name") == role]
        own = role_arguments(role)
        if not found:
            yield f"{field}[{role}] is missing"
        elif list(found[0].get("command") or ())[-len(own) :] != own:
            yield f"{field}[{role}].command must end with {' '.join(own)}"


def _without_templates(job: Job, group: Group) -> tuple[Job, Group]:
    """Both without an image, a podTemplate, a ConfigMap or a Secret of the job's writer."""
    program = replace(job.spec.trainer.program, config_map=None)
    initializer = without_secrets(job.spec.trainer.initializer)
    trainer = replace(job.spec.trainer, image="", program=program, initializer=initializer)
    bare_job = replace(job, spec=replace(job.spec, trainer=trainer, pod_template=None))
    return bare_job, replace(group, image="", pod_template=None)


def _keeper_template(job: Job, settings: Settings) -> Document:
    *_, deployment = keeper_objects(job, settings, {})
    template: Document = deployment["spec"]["template"]
    return template


def site_template(job: Job, group: Group, settings: Settings) -> Document:
    """Return the group's pod template without what the job's writer asks for: what the operator
    renders, with what the site's DLionRuntime gives."""
    bare_job, bare_group = _without_templates(job, group)
    return worker_template(
        bare_job,
        bare_group,
        _pod(bare_job, bare_group, settings),
        {},
        settings.scratch.state,
        settings.runtime,
    )


def _failure_rules(job: Job, group: Group) -> list[Document]:
    """The manifest's failure rules for ends of this group's pods, and what follows without them.

    An end by Kubernetes comes first, so that a pod that is killed in a drain was not `Killed`. An
    end on request, as by suspending, is none, and may not be counted or final.
    """
    rules = job.spec.failure_rules
    disrupted = _POD_ACTIONS[action_after(rules, "Disrupted", group.name)]
    condition = {"type": "DisruptionTarget", "status": "True"}
    made: list[Document] = [
        {"action": disrupted, "onPodConditions": [condition]},
        _exit_rule("Ignore", "In", [int(ExitCode.INTERRUPTED)]),
    ]
    for rule in rules:
        if not rule.groups or group.name in rule.groups:
            made += _rules_for_exits(rule)
    made.append(_exit_rule("FailIndex", "In", _FATAL))
    is_ruled = matching_rule(rules, "InitializerFailed", group.name) is not None
    action = _POD_ACTIONS[action_after(rules, "InitializerFailed", group.name)]
    on_request = [int(ExitCode.INTERRUPTED)]
    for name in downloads(job):
        made.append(_exit_rule("Ignore", "In", on_request, name))
        made.append(
            _exit_rule(action, "NotIn", on_request, name)
            if is_ruled
            else _exit_rule("FailIndex", "In", _FATAL, name)
        )
    return made


def _rules_for_exits(rule: FailureRule) -> list[Document]:
    """The rule for exit codes; none, if it has none."""
    codes = {code for end in rule.on_ends for code in ENDS[end].codes}
    if "Crashed" in rule.on_ends:
        return [_exit_rule(_POD_ACTIONS[rule.action], "NotIn", sorted(NAMED_CODES - codes))]
    return [_exit_rule(_POD_ACTIONS[rule.action], "In", sorted(codes))] if codes else []


def _exit_rule(
    action: str, operator: str, codes: list[int], container_name: str = names.TRAINER_CONTAINER
) -> Document:
    matched = {"containerName": container_name, "operator": operator, "values": codes}
    return {"action": action, "onExitCodes": matched}


def _pod(job: Job, group: Group, settings: Settings) -> Document:
    """The pod without the fields of job and group that `worker_template` merges."""
    volumes, program = program_volume(job)
    own = [mount("shared", names.SHARED_DIR), mount("state", names.STATE_DIR)]
    trainer = container(
        names.TRAINER_CONTAINER,
        settings.worker_image,
        settings,
        Resources(),
        mounts=[*own, *program],
    )
    # Puts the trainer's last output in the pod's status, and from there in the job's.
    trainer["terminationMessagePolicy"] = "FallbackToLogsOnError"
    trainer["ports"] = [{"name": "exchange", "containerPort": names.EXCHANGE_PORT}]
    sidecar = container(
        names.SIDECAR_CONTAINER,
        settings.images.sidecar,
        settings,
        settings.sidecar.resources,
        mounts=own,
    )
    sidecar["ports"] = [
        {"name": "measuring", "containerPort": names.MEASURING_PORT},
        {"name": "metrics", "containerPort": names.METRICS_PORT},
    ]
    sidecar["restartPolicy"] = "Always"
    for each in (trainer, sidecar):
        each["env"].append({"name": names.GROUP_VARIABLE, "value": group.name})
    spec = pod_spec(
        settings,
        names.run_name(job.key),
        containers=[with_downloads(trainer, job)],
        init_containers=[*initializers(job, group, settings), sidecar],
        volumes=[
            {"name": "shared", "emptyDir": {"sizeLimit": settings.scratch.shared}},
            {"name": "state", "emptyDir": {"sizeLimit": settings.scratch.state}},
            *downloads_volume(job, settings),
            *volumes,
        ],
    )
    spec["restartPolicy"] = "Never"
    spec["subdomain"] = names.run_name(job.key)
    return spec
