"""Test the pod of a worker under the templates of its job and of its group.

Image, resources and podTemplate of a group apply only to its own workers. The group's template
follows the job's. A requested device is its limit. The operator's labels stay under any template,
as do its tolerations for dead nodes. A malformed template is refused with the group's name. Workers
never read a template.

Left out: how two lists merge (test_strategic_merge), the keeper's pod (test_keeper_pod).
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from dlion_api import cluster_names as names
from dlion_api.spec import load_job
from dlion_operator.children.run_objects import config_map
from dlion_operator.children.worker_jobs import worker_job
from operator_world import SETTINGS, World, dlion_job, ready_reason

GPU = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
EDGE = {"key": "edge", "operator": "Exists"}
DEAD_NODES = ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"]


def pods(
    job_template: Any = None, image: str = "", **groups: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return the pod template of each group."""
    document = dlion_job(dict.fromkeys(groups, 1))
    document["spec"]["podTemplate"] = job_template
    document["spec"]["trainer"]["image"] = image
    for group in document["spec"]["sites"][0]["groups"]:
        group.update(groups[group["name"]])
    job = load_job(document)
    return {
        group.name: worker_job(job, group, SETTINGS, {"uid": "u"})["spec"]["template"]
        for group in job.spec.sites[0].groups
    }


def trainer(template: dict[str, Any]) -> dict[str, Any]:
    (found,) = (c for c in template["spec"]["containers"] if c["name"] == "trainer")
    return dict(found)


def test_the_most_specific_image_applies() -> None:
    found = pods(image="mine:1", gpu={"image": "mine:1-gpu"}, small={})
    assert {name: trainer(each)["image"] for name, each in found.items()} == {
        "gpu": "mine:1-gpu",
        "small": "mine:1",
    }
    assert trainer(pods(small={})["small"])["image"] == SETTINGS.images.worker
    sidecars = {each["spec"]["initContainers"][0]["image"] for each in found.values()}
    assert sidecars == {SETTINGS.images.sidecar}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"limits": {"nvidia.com/gpu": 2}}, {"limits": {"nvidia.com/gpu": "2"}}),
        (
            {"requests": {"nvidia.com/gpu": 1, "cpu": "500m"}},
            {
                "requests": {"nvidia.com/gpu": "1", "cpu": "500m"},
                "limits": {"nvidia.com/gpu": "1"},
            },
        ),
        # The API server refuses contradictions.
        (
            {"requests": {"nvidia.com/gpu": 1}, "limits": {"nvidia.com/gpu": 2, "cpu": 1}},
            {"requests": {"nvidia.com/gpu": "1"}, "limits": {"nvidia.com/gpu": "2", "cpu": "1"}},
        ),
        ({}, {}),
    ],
)
def test_a_requested_device_is_its_limit(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert trainer(pods(gpu={"resources": given})["gpu"])["resources"] == expected


def test_a_groups_template_follows_the_jobs_and_applies_to_its_workers_only() -> None:
    job = {
        "metadata": {"labels": {"tier": "edge", "a": "job"}, "annotations": {"x": "1", "y": "1"}},
        "spec": {
            "priorityClassName": "training",
            "nodeSelector": {"pool": "edge"},
            "containers": [{"name": "trainer", "env": [{"name": "A", "value": "job"}]}],
        },
    }
    own = {
        "metadata": {"labels": {"a": "group"}, "annotations": {"x": "2", "y": None}},
        "spec": {
            "runtimeClassName": "nvidia",
            "nodeSelector": {"gpu": "yes"},
            "containers": [{"name": "trainer", "env": [{"name": "A", "value": "group"}]}],
        },
    }
    found = pods(job, gpu={"podTemplate": own}, small={})
    gpu, small = found["gpu"], found["small"]
    assert gpu["metadata"]["labels"].items() >= {"tier": "edge", "a": "group"}.items()
    assert gpu["metadata"]["annotations"] == {"x": "2"}
    assert gpu["spec"]["nodeSelector"] == {"pool": "edge", "gpu": "yes"}
    assert (gpu["spec"]["runtimeClassName"], gpu["spec"]["priorityClassName"]) == (
        "nvidia",
        "training",
    )
    assert {"name": "A", "value": "group"} in trainer(gpu)["env"]
    assert small["metadata"]["labels"].items() >= {"tier": "edge", "a": "job"}.items()
    assert small["metadata"]["annotations"] == {"x": "1", "y": "1"}
    assert small["spec"]["nodeSelector"] == {"pool": "edge"}
    assert "runtimeClassName" not in small["spec"]
    assert {"name": "A", "value": "job"} in trainer(small)["env"]


def test_a_group_can_delete_fields_of_the_job() -> None:
    job = {"spec": {"priorityClassName": "training", "volumes": [{"name": "d", "emptyDir": {}}]}}
    own = {"spec": {"priorityClassName": None, "volumes": [{"name": "d", "$patch": "delete"}]}}
    spec = pods(job, gpu={"podTemplate": own})["gpu"]["spec"]
    assert "priorityClassName" not in spec
    assert "d" not in [volume["name"] for volume in spec["volumes"]]
    assert "state" in [volume["name"] for volume in spec["volumes"]]


@pytest.mark.parametrize(
    ("job", "group", "added"),
    [
        ([EDGE], None, [EDGE]),
        (None, [GPU], [GPU]),
        ([EDGE], [GPU], [GPU]),
        ([EDGE], [EDGE, GPU], [EDGE, GPU]),
        ([EDGE], [], []),
        (None, None, []),
    ],
)
def test_the_last_list_of_tolerations_is_added_to_the_operators(
    job: Any, group: Any, added: list[Any]
) -> None:
    template = {"spec": {"tolerations": group}} if group is not None else None
    given = {"spec": {"tolerations": job}} if job is not None else None
    found = pods(given, gpu={"podTemplate": template})["gpu"]["spec"]["tolerations"]
    assert [each["key"] for each in found[:2]] == DEAD_NODES
    assert found[2:] == added


@pytest.mark.parametrize("whole", [{"$patch": "delete"}, {"$patch": "replace"}, {}])
def test_the_operators_tolerations_and_labels_are_kept(whole: dict[str, Any]) -> None:
    labels = {names.JOB_LABEL: "x", names.GROUP_LABEL: "y", "$patch": "replace"}
    own = {"metadata": {"labels": labels}, "spec": {"tolerations": None, **whole}}
    made = pods(own, gpu={"podTemplate": own})["gpu"]
    assert [each["key"] for each in made["spec"]["tolerations"]] == DEAD_NODES
    assert made["metadata"]["labels"][names.JOB_LABEL] == "digits"
    assert made["metadata"]["labels"][names.GROUP_LABEL] == "gpu"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ({"tolerations": [GPU]}, "it has tolerations; allowed: metadata and spec"),
        ({"spec": ["a"]}, ""),
        ({"metadata": "a"}, ""),
        ({"metadata": {"labels": ["a"]}}, ""),
        ({"metadata": {"labels": 3}}, ""),
    ],
)
def test_a_malformed_pod_template_is_reported_with_its_group(template: Any, words: str) -> None:
    document = dlion_job({"small": 1, "gpu": 1})
    document["spec"]["sites"][0]["groups"][1]["podTemplate"] = template
    reason, message = ready_reason(World(document).look())
    assert reason == "InvalidSpec"
    assert "podTemplate is not a valid pod template, for group gpu: " in message
    assert words in message


def test_a_groups_pods_comply_with_pod_security() -> None:
    document = dlion_job({"small": 1, "gpu": 1})
    document["spec"]["sites"][0]["groups"][1]["podTemplate"] = {"spec": {"hostPID": True}}
    assert ready_reason(World(document).look()) == (
        "InvalidSpec",
        "podTemplate violates pod security `restricted`: hostPID must not be true",
    )


def test_workers_never_read_a_template() -> None:
    """A template may name Secrets, and its changes must not reach running workers."""
    document = dlion_job({"small": 1})
    document["spec"]["podTemplate"] = {"spec": {"priorityClassName": "secret-of-the-job"}}
    own = {"spec": {"priorityClassName": "secret-of-the-group"}}
    document["spec"]["sites"][0]["groups"][0]["podTemplate"] = own
    made = config_map(load_job(document), SETTINGS, {"uid": "u"}, authority_pem="PEM")
    assert "secret-of" not in json.dumps(made)
    assert "secret-of" in json.dumps(document)
