"""A user's pod template over a rendered pod.

Proves, with a table whose expected values were written by hand from Kubernetes' documents of the
strategic merge patch: which lists are merged by which key, which are replaced, and what null
and `$patch` do. And of a worker's Job: the volume and the
variable that a user gives have one source, and a command is the user's alone.
Left out: that an API server takes the outcome (tests/cluster/test_operator_documents.py).
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

from dlion_api.spec import load_job
from dlion_operator.children.strategic_merge import merged
from dlion_operator.children.worker_jobs import worker_job
from operator_world import SETTINGS, dlion_job

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "mapping by key": (
        {"securityContext": {"runAsUser": 1, "fsGroup": 2}},
        {"securityContext": {"fsGroup": 3}},
        {"securityContext": {"runAsUser": 1, "fsGroup": 3}},
    ),
    "null deletes": (
        {"a": 1, "b": {"c": 1, "d": 2}},
        {"a": None, "b": {"c": None}, "never": None},
        {"b": {"d": 2}},
    ),
    "null in what is new": ({}, {"b": {"c": None, "d": 1}}, {"b": {"d": 1}}),
    "containers by name": (
        {"containers": [{"name": "trainer", "image": "a", "tty": True}]},
        {"containers": [{"name": "trainer", "image": "b"}, {"name": "mine", "image": "c"}]},
        {
            "containers": [
                {"name": "trainer", "image": "b", "tty": True},
                {"name": "mine", "image": "c"},
            ]
        },
    ),
    "command and args are atomic": (
        {"command": ["python3", "-m", "dlion"], "args": ["x"]},
        {"command": ["sh"], "args": []},
        {"command": ["sh"], "args": []},
    ),
    "capabilities are atomic": (
        {"capabilities": {"drop": ["ALL"]}},
        {"capabilities": {"drop": ["NET_RAW"]}},
        {"capabilities": {"drop": ["NET_RAW"]}},
    ),
    "a volume has the overlay's source": (
        {"volumes": [{"name": "tmp", "emptyDir": {}}, {"name": "state", "emptyDir": {}}]},
        {"volumes": [{"name": "state", "hostPath": {"path": "/ssd"}}]},
        {
            "volumes": [
                {"name": "tmp", "emptyDir": {}},
                {"name": "state", "hostPath": {"path": "/ssd"}},
            ]
        },
    ),
    "a variable has the overlay's source": (
        {"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]},
        {"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]},
        {
            "env": [
                {"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
                {"name": "B", "value": "2"},
            ]
        },
    ),
    "mounts by path": (
        {"volumeMounts": [{"mountPath": "/tmp", "name": "tmp", "readOnly": True}]},
        {"volumeMounts": [{"mountPath": "/tmp", "name": "ssd"}]},
        {"volumeMounts": [{"mountPath": "/tmp", "name": "ssd", "readOnly": True}]},
    ),
    "ports by number": (
        {"ports": [{"containerPort": 1, "name": "a"}]},
        {"ports": [{"containerPort": 1, "protocol": "TCP"}, {"containerPort": 2}]},
        {"ports": [{"containerPort": 1, "name": "a", "protocol": "TCP"}, {"containerPort": 2}]},
    ),
    "an entry is deleted": (
        {"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]},
        {"env": [{"name": "A", "$patch": "delete"}, {"name": "no such", "$patch": "delete"}]},
        {"env": [{"name": "B", "value": "2"}]},
    ),
    "an entry is replaced": (
        {"containers": [{"name": "a", "tty": True}, {"name": "b", "tty": True}]},
        {"containers": [{"name": "a", "image": "x", "$patch": "replace"}]},
        {"containers": [{"name": "a", "image": "x"}, {"name": "b", "tty": True}]},
    ),
    "a list is replaced": (
        {"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]},
        {"env": [{"$patch": "replace"}, {"name": "C", "value": "3"}]},
        {"env": [{"name": "C", "value": "3"}]},
    ),
    "a mapping is replaced": (
        {"nodeSelector": {"a": "1"}},
        {"nodeSelector": {"$patch": "replace", "b": "2"}},
        {"nodeSelector": {"b": "2"}},
    ),
    "a mapping is deleted": (
        {"affinity": {"nodeAffinity": {}}, "tty": True},
        {"affinity": {"$patch": "delete"}},
        {"affinity": {}, "tty": True},
    ),
    "tolerations are atomic": (
        {"tolerations": [{"key": "edge"}]},
        {"tolerations": [{"key": "gpu"}]},
        {"tolerations": [{"key": "gpu"}]},
    ),
    "another kind of value": ({"a": {"b": 1}, "c": [1]}, {"a": 2, "c": "x"}, {"a": 2, "c": "x"}),
}


@pytest.mark.parametrize("name", CASES)
def test_as_strategic_merge_does(name: str) -> None:
    base, overlay, expected = CASES[name]
    before = copy.deepcopy((base, overlay))
    assert merged(base, overlay) == expected
    assert (base, overlay) == before


def test_of_a_workers_pod_the_users_sources_and_command_stand_alone() -> None:
    template = {
        "spec": {
            "volumes": [{"name": "state", "persistentVolumeClaim": {"claimName": "ssd"}}],
            "containers": [
                {
                    "name": "trainer",
                    "command": ["my-trainer"],
                    "env": [{"name": "DLION_POD_IP", "value": "192.0.2.1"}],
                }
            ],
        }
    }
    job = load_job(dlion_job(podTemplate=template))
    (group,) = job.spec.sites[0].groups
    spec = worker_job(job, group, SETTINGS, {"uid": "u"})["spec"]["template"]["spec"]
    states = [each for each in spec["volumes"] if each["name"] == "state"]
    assert states == [{"name": "state", "persistentVolumeClaim": {"claimName": "ssd"}}]
    (trainer,) = spec["containers"]
    assert trainer["command"] == ["my-trainer"]
    given = [each for each in trainer["env"] if each["name"] == "DLION_POD_IP"]
    assert given == [{"name": "DLION_POD_IP", "value": "192.0.2.1"}]
