"""Test a job with a DLionRuntime.

- Image and podTemplate of the runtime are the lowest layer in workers, keeper and the queue's
  Workload.
- A run without its runtime, or one that exceeds the limits, gets no object. The status names the
  remedy. Every way to exceed them is found, also a podTemplate.
- Jobs keep the runtime that they were created with. A later change or edit reaches no started run.
  A group does not grow beyond the limit.

Left out: how a runtime is read (apply/test_runtime_reader), and that an API server accepts the
objects (tests/cluster/test_runtimes).
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from dlion_api.cluster_names import RUNTIME_ANNOTATION
from dlion_api.spec import RuntimeLimits, RuntimeSpec, load_job
from dlion_api.spec.sites import Resources
from dlion_operator.model.settings import SidecarSettings
from dlion_operator.model.site_runtime import RuntimeState, SiteRuntime
from dlion_operator.model.workload_view import QueueState
from dlion_operator.plan.decisions import Create, Decision, OpenRun, Patch
from dlion_operator.plan.observed import RunView
from dlion_operator.plan.runs import Run
from operator_world import SETTINGS, World, condition_statuses, dlion_job, ready_reason

TEMPLATE = {
    "metadata": {"labels": {"team": "site", "pool": "edge"}, "annotations": {"note": "site"}},
    "spec": {
        "nodeSelector": {"disk": "ssd", "arch": "arm64"},
        "priorityClassName": "training",
        "tolerations": [{"key": "edge"}],
        "containers": [
            {
                "name": "trainer",
                "resources": {"limits": {"cpu": "1", "memory": "1Gi"}},
                "env": [{"name": "A", "value": "site"}, {"name": "B", "value": "site"}],
            }
        ],
    },
}


def runtime(**limits: Any) -> SiteRuntime:
    return SiteRuntime("edge", RuntimeSpec(limits=RuntimeLimits(**limits)))


def world(used: SiteRuntime | None, **spec: Any) -> World:
    made = World(dlion_job(runtime="edge", **spec))
    made.runtime = RuntimeState(used)
    return made


def created(decision: Decision, kind: str) -> list[dict[str, Any]]:
    made = [a.document for a in decision.actions if isinstance(a, Create)]
    return [each for each in made if each["kind"] == kind]


def pod(decision: Decision, kind: str = "Job") -> dict[str, Any]:
    template: dict[str, Any] = created(decision, kind)[0]["spec"]["template"]
    return template


def refused(decision: Decision) -> str:
    """Return the message of a run that exceeds the limits."""
    assert not created(decision, "Job")
    assert not created(decision, "Deployment")
    reason, message = ready_reason(decision)
    assert reason == "RuntimeLimitExceeded"
    assert condition_statuses(decision)["Stalled"] == "True"
    return message


# ---- defaults --------------------------------------------------------------------------------


def test_a_runtime_sets_what_the_job_omits() -> None:
    used = SiteRuntime("edge", RuntimeSpec(image="site/worker:2", pod_template=TEMPLATE))
    decision = world(used).look()
    made = pod(decision)
    trainer = made["spec"]["containers"][0]
    assert trainer["image"] == "site/worker:2"
    assert trainer["resources"] == {"limits": {"cpu": "1", "memory": "1Gi"}}
    assert made["spec"]["nodeSelector"] == {"disk": "ssd", "arch": "arm64"}
    assert made["spec"]["tolerations"][-1] == {"key": "edge"}
    assert made["metadata"]["labels"]["team"] == "site"
    keeper = pod(decision, "Deployment")
    assert keeper["spec"]["containers"][0]["image"] == "site/worker:2"
    assert keeper["spec"]["priorityClassName"] == "training"
    assert {"key": "edge"} in keeper["spec"]["tolerations"]
    assert "env" not in keeper["spec"]["containers"][0] or all(
        each["name"] not in "AB" for each in keeper["spec"]["containers"][0]["env"]
    )


def test_fields_of_the_job_take_precedence() -> None:
    used = SiteRuntime("edge", RuntimeSpec(image="site/worker:2", pod_template=TEMPLATE))
    document = dlion_job(runtime="edge", podTemplate={
        "metadata": {"annotations": {"note": "job"}},
        "spec": {"priorityClassName": "urgent", "containers": [
            {"name": "trainer", "env": [{"name": "B", "value": "job"}]}]},
    })  # fmt: skip
    document["metadata"]["labels"] = {"team": "job"}
    document["spec"]["sites"][0]["groups"][0] |= {
        "image": "own/worker:3",
        "nodeSelector": {"arch": "amd64"},
        "resources": {"limits": {"memory": "2Gi", "nvidia.com/gpu": "1"}},
    }
    made = World(document)
    made.runtime = RuntimeState(used)
    decision = made.look()
    spec, metadata = pod(decision)["spec"], pod(decision)["metadata"]
    trainer = spec["containers"][0]
    assert trainer["image"] == "own/worker:3"
    limits = {"cpu": "1", "memory": "2Gi", "nvidia.com/gpu": "1"}
    assert trainer["resources"]["limits"] == limits
    assert {"name": "A", "value": "site"} in trainer["env"]
    assert {"name": "B", "value": "job"} in trainer["env"]
    assert spec["nodeSelector"] == {"disk": "ssd", "arch": "amd64"}
    assert spec["priorityClassName"] == "urgent"
    assert metadata["labels"]["team"] == "job"
    assert metadata["labels"]["pool"] == "edge"
    assert metadata["annotations"] == {"note": "job"}
    keeper = pod(decision, "Deployment")["spec"]
    assert keeper["containers"][0]["image"] == "site/worker:2", (
        "a group's image is not the keeper's"
    )
    assert keeper["priorityClassName"] == "urgent"


def test_a_queued_run_requests_the_pods_of_its_runtime() -> None:
    document = dlion_job(runtime="edge")
    document["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "edge"}
    made = World(document, replace(SETTINGS, kueue=True))
    made.runtime = RuntimeState(SiteRuntime("edge", RuntimeSpec(pod_template=TEMPLATE)))
    made.queue = QueueState()
    (workload,) = created(made.look(), "Workload")
    spec = workload["spec"]["podSets"][0]["template"]["spec"]
    assert spec["containers"][0]["resources"]["limits"]["memory"] == "1Gi"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ({"spec": {"hostNetwork": True}}, "hostNetwork must not be true"),
        ({"spec": {"$patch": "merge"}}, "is not a valid pod template"),
        ({"status": {}}, "is not a valid pod template"),
        ({"spec": {"containers": [{"name": "trainer", "env": 7}]}}, ""),
    ],
)
def test_a_wrong_template_of_the_runtime_names_it(template: dict[str, Any], words: str) -> None:
    decision = world(SiteRuntime("edge", RuntimeSpec(pod_template=template))).look()
    if words:
        reason, message = ready_reason(decision)
        assert reason == "InvalidSpec"
        assert "with that of DLionRuntime edge" in message
        assert words in message
        assert not created(decision, "Job")
    else:  # the API server refuses it
        assert created(decision, "Job")


# ---- the start -------------------------------------------------------------------------------


def test_a_run_waits_for_its_runtime_and_then_starts() -> None:
    made = world(None)
    missing = "DLionRuntime dlion-system/edge does not exist at this site"
    early = made.look(runtime=RuntimeState(problem=missing, missing_s=1.0))
    assert ready_reason(early) == ("RuntimeUnavailable", missing)
    assert condition_statuses(early)["Reconciling"] == "True"
    assert not [a for a in early.actions if isinstance(a, Create | OpenRun)]
    late = made.look(runtime=RuntimeState(problem=missing, missing_s=60.0))
    assert condition_statuses(late)["Stalled"] == "True"
    assert late.requeue_after_s is not None
    assert created(made.look(runtime=RuntimeState(runtime())), "Job")


def test_a_runtime_that_is_not_read_yet_starts_nothing() -> None:
    decision = world(None).look(runtime=None)
    assert ready_reason(decision)[0] == "RuntimeUnavailable"
    assert not created(decision, "Job")
    unnamed = World(dlion_job())
    assert created(unnamed.look(runtime=None), "Job")
    by_default = World(dlion_job(), replace(SETTINGS, default_runtime="edge"))
    assert ready_reason(by_default.look(runtime=None))[0] == "RuntimeUnavailable"


# ---- limits ----------------------------------------------------------------------------------


def test_workers_are_counted_over_the_groups_of_this_site() -> None:
    document = dlion_job({"small": 3, "large": 2}, runtime="edge")
    document["spec"]["sites"].append(
        {"name": "plant-b", "groups": [{**document["spec"]["sites"][0]["groups"][0]}]}
    )
    made = World(document)
    made.runtime = RuntimeState(runtime(max_workers=4))
    message = refused(made.look())
    assert "5 workers wanted, DLionRuntime edge allows 4" in message
    made.runtime = RuntimeState(runtime(max_workers=5))
    assert created(made.look(), "Job")


def test_a_job_of_another_namespace_may_not_use_the_runtime() -> None:
    used = SiteRuntime("edge", RuntimeSpec(namespaces=("ml", "vision", "a", "b")))
    message = refused(world(used).look())
    assert "the job is in namespace default, allowed: ml, vision, a and 1 more" in message
    allowed = SiteRuntime("edge", RuntimeSpec(namespaces=("ml", "default")))
    assert created(world(allowed).look(), "Job")


@pytest.mark.parametrize(
    ("may", "changes", "group", "words"),
    [
        ((), {}, {"image": "own:1"}, "image of group small"),
        ((), {}, {"nodeSelector": {"a": "b"}}, "nodeSelector of group small"),
        ((), {}, {"podTemplate": {"spec": {"hostname": "a"}}}, "podTemplate of group small"),
        ((), {"podTemplate": {"spec": {"hostname": "a"}}}, {}, "the job sets podTemplate"),
        (("nodeSelector",), {}, {"image": "own:1"}, "image of group small"),
        (("image", "nodeSelector"), {}, {"podTemplate": {"spec": {}}}, "podTemplate of group"),
    ],
)
def test_a_field_that_may_not_be_overridden_is_named(
    may: tuple[Any, ...], changes: dict[str, Any], group: dict[str, Any], words: str
) -> None:
    made = world(runtime(may_override=may), **changes)
    made.document["spec"]["sites"][0]["groups"][0] |= group
    message = refused(made.look())
    assert words in message
    assert "remove it" in message
    made.runtime = RuntimeState(runtime())
    assert created(made.look(), "Job")


def test_a_group_added_to_a_run_is_checked_against_the_limits() -> None:
    made = world(runtime(may_override=()))
    made.look()
    made.make_jobs()
    made.train()
    groups = made.document["spec"]["sites"][0]["groups"]
    groups.append({**groups[0], "name": "added", "image": "own:1"})
    decision = made.look()
    assert not created(decision, "Job")
    assert "the job sets image of group added" in ready_reason(decision)[1]
    del groups[1]["image"]
    (job,) = created(made.look(), "Job")
    assert "added" in job["metadata"]["name"]


def test_an_image_of_the_trainer_container_counts() -> None:
    made = world(runtime(may_override=("nodeSelector",)))
    made.document["spec"]["trainer"]["image"] = "own:1"
    assert "the job sets trainer.image" in refused(made.look())


GPU = "nvidia.com/gpu"


@pytest.mark.parametrize(
    ("most", "limits", "words"),
    [
        ({"cpu": "2"}, {"cpu": "2001m"}, "may use cpu 2.001: lower its resources.limits to 2"),
        ({"cpu": "2"}, {"cpu": "2000m"}, ""),
        ({"memory": "1Gi"}, {"memory": "1073741825"}, "may use memory 1073741825"),
        ({"memory": "1Gi"}, {"memory": "1024Mi"}, ""),
        (
            {"memory": "1Gi"},
            {"cpu": "1"},
            "trainer of group small has no limit of memory",
        ),
        ({"ephemeral-storage": "1Gi"}, {}, "has no limit of ephemeral-storage"),
        ({GPU: "1"}, {}, ""),
        ({GPU: "0"}, {GPU: "1"}, "may use nvidia.com/gpu 1"),
        ({"hugepages-2Mi": "0"}, {}, ""),
        ({"cpu": "1"}, {"cpu": "1", "memory": "99Ti"}, ""),
    ],
)
def test_resources_of_a_worker_are_checked_against_the_limits(
    most: dict[str, str], limits: dict[str, str], words: str
) -> None:
    made = world(runtime(max_resources=most))
    made.document["spec"]["sites"][0]["groups"][0]["resources"] = {"limits": limits}
    decision = made.look()
    if words:
        assert words in refused(decision)
    else:
        assert created(decision, "Job")


def test_a_device_request_without_a_limit_counts() -> None:
    made = world(runtime(max_resources={GPU: "1"}))
    made.document["spec"]["sites"][0]["groups"][0]["resources"] = {"requests": {GPU: "2"}}
    assert "may use nvidia.com/gpu 2" in refused(made.look())


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"containers": [{"name": "trainer", "resources": {"limits": {"cpu": 3}}}]}, "cpu 3"),
        ({"containers": [{"name": "more", "resources": {"limits": {"cpu": "1500m"}}}]}, "cpu 2.5"),
        ({"initContainers": [{"name": "more"}]}, "container more of group small has no limit"),
        ({"initContainers": [{"name": "sidecar", "resources": {"limits": {"cpu": 9}}}]}, "cpu 10"),
        (
            {"containers": [{"name": "more", "resources": {"limits": {"cpu": "all"}}}]},
            "not a quantity",
        ),
        ({"containers": [{"name": "more", "resources": {"limits": [1]}}]}, "cannot be read"),
        ({"resources": {"requests": {"cpu": "64"}, "limits": {"cpu": "64"}}}, "has cpu 64"),
        ({"resources": {"requests": {"cpu": "2500m"}}}, "has cpu 2.5"),
        ({"resources": {"limits": {"cpu": "all"}}}, "not a quantity"),
    ],
)
def test_a_pod_template_cannot_bypass_the_limits(spec: dict[str, Any], words: str) -> None:
    closed = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    for each in (*spec.get("containers", ()), *spec.get("initContainers", ())):
        each["securityContext"] = closed
    made = world(runtime(max_resources={"cpu": "2"}), podTemplate={"spec": spec})
    made.document["spec"]["sites"][0]["groups"][0]["resources"] = {"limits": {"cpu": "1"}}
    assert words in refused(made.look())


def test_resources_of_the_pod_as_a_whole_are_allowed_within_the_limits() -> None:
    spec = {"resources": {"requests": {"cpu": "1"}, "limits": {"cpu": "2", "memory": "9Ti"}}}
    made = world(runtime(max_resources={"cpu": "2"}), podTemplate={"spec": spec})
    made.document["spec"]["sites"][0]["groups"][0]["resources"] = {"limits": {"cpu": "1"}}
    assert created(made.look(), "Job")


DOWNLOADS = {
    "program": {"builtin": "digits"},
    "dataset": {"path": "d.npz", "format": "npz"},
    "initializer": {"dataset": {"url": "https://example.com/d.npz", "sha256": "0" * 64}},
    "stop": {"maxSteps": 1},
}


@pytest.mark.parametrize(
    ("init_containers", "words"),
    [
        ([], ""),
        ([{"resources": {"limits": {"cpu": "2"}}}], ""),
        ([{"resources": {"limits": {"cpu": "64"}}}], "may use cpu 64"),
        (
            [{"resources": {"limits": {"cpu": None}}}],
            "container dataset-initializer of group small has no limit of cpu",
        ),
        ([{"restartPolicy": "Always", "resources": {"limits": {"cpu": "1500m"}}}], "cpu 2.5"),
        (
            [
                {"resources": {"limits": {"cpu": "2"}}},
                {"name": "more", "restartPolicy": "Always", "resources": {"limits": {"cpu": "1"}}},
            ],
            "cpu 3",
        ),
    ],
)
def test_each_initializer_is_checked_against_the_limits_separately(
    init_containers: list[dict[str, Any]], words: str
) -> None:
    trainer = {"name": "trainer", "resources": {"limits": {"cpu": "1"}}}
    own = [{"name": "dataset-initializer"} | each for each in init_containers]
    template = {"spec": {"containers": [trainer], "initContainers": own}}
    made = world(runtime(max_resources={"cpu": "2"}), trainer=DOWNLOADS, podTemplate=template)
    made.document["spec"]["sites"][0]["groups"][0]["resources"] = {"limits": {"cpu": "64"}}
    decision = made.look()
    if words:
        assert words in refused(decision)
    else:
        assert created(decision, "Job")


@pytest.mark.parametrize("change", [{"image": "own:1"}, {"command": ["train"]}])
def test_a_sidecar_with_another_program_counts(change: dict[str, Any]) -> None:
    spec = {"initContainers": [{"name": "sidecar", **change}]}
    made = world(runtime(max_resources={"cpu": "2"}), podTemplate={"spec": spec})
    made.document["spec"]["sites"][0]["groups"][0]["resources"] = {"limits": {"cpu": "1"}}
    assert "container sidecar of group small has no limit of cpu" in refused(made.look())


def test_the_sites_own_sidecar_does_not_count() -> None:
    sidecar = SidecarSettings(resources=Resources(limits={"memory": "384Mi"}))
    document = dlion_job(runtime="edge")
    document["spec"]["sites"][0]["groups"][0]["resources"] = {
        "limits": {"cpu": "1", "memory": "1Gi"}
    }
    made = World(document, replace(SETTINGS, sidecar=sidecar))
    made.runtime = RuntimeState(runtime(max_resources={"cpu": "1", "memory": "1Gi"}))
    assert created(made.look(), "Job")


def test_all_exceeded_limits_are_reported_together() -> None:
    made = world(runtime(max_workers=1, may_override=(), max_resources={"cpu": "1"}))
    made.document["spec"]["sites"][0]["groups"][0]["image"] = "own:1"
    message = refused(made.look())
    for words in ("2 workers wanted", "image of group small", "no limit of cpu"):
        assert words in message


# ---- a started run --------------------------------------------------------------------------


def test_jobs_keep_the_runtime_that_they_were_created_with() -> None:
    made = world(SiteRuntime("edge", RuntimeSpec(image="site/worker:2")))
    made.make_jobs()
    made.train()
    made.runtime = RuntimeState(runtime(max_workers=1))
    decision = made.look()
    assert ready_reason(decision) == ("Training", "2 workers train")
    made.runtime = RuntimeState(problem="gone", missing_s=999)
    assert ready_reason(made.look())[0] == "Training"
    del made.jobs["small"]
    two = world(SiteRuntime("edge", RuntimeSpec(image="site/worker:2")))
    two.document = dlion_job({"small": 1, "large": 1}, runtime="edge")
    two.make_jobs()
    del two.jobs["small"]
    two.runtime = RuntimeState(SiteRuntime("edge", RuntimeSpec(image="site/worker:9")))
    (again,) = created(two.look(), "Job")
    assert again["spec"]["template"]["spec"]["containers"][0]["image"] == "site/worker:2"
    assert "site/worker:2" in again["metadata"]["annotations"][RUNTIME_ANNOTATION]


def test_a_run_that_began_without_a_runtime_gets_none_later() -> None:
    made = World(dlion_job())
    made.make_jobs()
    made.train()
    made.runtime = RuntimeState(runtime(max_workers=1))
    assert ready_reason(made.look()) == ("Training", "2 workers train")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"name": 1}', '{"name": "a", "spec": 7}', "[" * 9999]
)
def test_an_edited_annotation_ends_nothing(text: str) -> None:
    made = world(runtime(max_workers=2))
    made.make_jobs()
    made.train()
    made.jobs["small"]["metadata"]["annotations"][RUNTIME_ANNOTATION] = text
    assert ready_reason(made.look())[0] == "Training"


def test_a_group_does_not_grow_beyond_the_runtimes_limit() -> None:
    made = world(runtime(max_workers=3))
    made.make_jobs()
    made.train()
    group = made.document["spec"]["sites"][0]["groups"][0]
    group["workers"] = 4
    decision = made.look()
    assert not [a for a in decision.actions if isinstance(a, Patch)]
    assert "4 workers wanted, DLionRuntime edge allows 3" in ready_reason(decision)[1]
    made.run = RunView(open_s=9.0)
    assert "4 workers wanted, DLionRuntime edge allows 3" in ready_reason(made.look())[1]
    made.train()
    group["workers"] = 3
    (patch,) = [a for a in made.look().actions if isinstance(a, Patch)]
    assert patch.patch["spec"] == {"parallelism": 3, "completions": 3}


def test_another_runtime_name_recreates_the_objects() -> None:
    made = world(runtime())
    made.make_jobs()
    made.run = RunView(open_s=3600.0)
    made.document["spec"]["runtime"] = "other"
    assert "created again" in ready_reason(made.look())[1]


def test_the_annotation_holds_the_runtime() -> None:
    used = SiteRuntime("edge", RuntimeSpec(image="a", pod_template=TEMPLATE))
    made = world(used)
    made.make_jobs()
    values = json.loads(made.jobs["small"]["metadata"]["annotations"][RUNTIME_ANNOTATION])
    assert values == {"name": "edge", "spec": {"image": "a", "podTemplate": TEMPLATE}}
    run = Run.of(load_job(made.document), made.observed(), made.settings)
    assert run.runtime == used
