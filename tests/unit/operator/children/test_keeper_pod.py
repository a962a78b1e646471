"""Test where the pod of a keeper runs, and what it takes from its job.

It takes scheduling, image pull settings and unreserved labels and annotations of the job's
podTemplate. It takes nothing of a group's template. The site's own settings take precedence.
Tolerations and pull Secrets of both are added. Account, volumes, containers, host access and
selectors stay the operator's. A malformed podTemplate is ignored. Jobs that share a claim have a
folder each.

Left out: that a scheduler places the pod accordingly (tests/cluster/test_shaped_pods.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlion_api.errors import SpecError
from dlion_api.spec import load_job
from dlion_operator.children.keeper import keeper_objects
from dlion_operator.model.settings import KeeperSettings, Settings
from example_counts import examples
from manifest_strategies import values
from operator_world import SETTINGS, World, dlion_job

EDGE = {"key": "edge", "operator": "Exists"}
STORAGE = {"key": "storage", "operator": "Exists"}
NODES: dict[str, Any] = {
    "requiredDuringSchedulingIgnoredDuringExecution": {
        "nodeSelectorTerms": [{"matchFields": [{"key": "metadata.name", "operator": "Exists"}]}]
    }
}
OTHERS = {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "host"}]}
PLACE: dict[str, Any] = {
    "nodeSelector": {"pool": "edge"},
    "affinity": {"nodeAffinity": NODES, "podAntiAffinity": OTHERS, "podAffinity": OTHERS},
    "priorityClassName": "training",
    "runtimeClassName": "gvisor",
    "imagePullSecrets": [{"name": "private"}],
    "tolerations": [EDGE],
}
NEVER: dict[str, Any] = {
    "serviceAccountName": "admin",
    "serviceAccount": "admin",
    "automountServiceAccountToken": True,
    "volumes": [{"name": "state", "hostPath": {"path": "/"}}, {"name": "x", "emptyDir": {}}],
    "containers": [{"name": "keeper", "image": "mine:1"}, {"name": "mine", "image": "mine:1"}],
    "initContainers": [{"name": "mine", "image": "mine:1"}],
    "ephemeralContainers": [{"name": "mine", "image": "mine:1"}],
    "hostNetwork": True,
    "hostPID": True,
    "hostIPC": True,
    "hostUsers": True,
    "hostAliases": [{"ip": "192.0.2.1", "hostnames": ["dlion-operator.dlion-system.svc"]}],
    "hostname": "x",
    "setHostnameAsFQDN": True,
    "nodeName": "node-1",
    "securityContext": {"runAsUser": 0},
    "shareProcessNamespace": True,
    "dnsConfig": {"nameservers": ["192.0.2.1"]},
    "schedulerName": "mine",
    "terminationGracePeriodSeconds": 0,
    "$patch": "replace",
}


def keeper(template: Any = None, site: Settings = SETTINGS, **metadata: Any) -> dict[str, Any]:
    """Return the Deployment of the job's keeper."""
    document = dlion_job(podTemplate=template)
    document["metadata"] |= metadata
    *_, deployment = keeper_objects(load_job(document), site, {"uid": "u"})
    return dict(deployment)


def pod(template: Any = None, site: Settings = SETTINGS) -> dict[str, Any]:
    return dict(keeper(template, site)["spec"]["template"]["spec"])


def at_site(**changes: Any) -> Settings:
    return replace(SETTINGS, keeper=KeeperSettings(**changes))


BARE = pod()


def test_the_keeper_has_the_jobs_scheduling() -> None:
    made = pod({"spec": PLACE})
    assert made == BARE | PLACE | {
        "affinity": {"nodeAffinity": NODES},
        "tolerations": [*BARE["tolerations"], EDGE],
    }
    assert BARE.keys().isdisjoint(PLACE.keys() - {"tolerations"})


def test_a_groups_template_applies_only_to_its_workers() -> None:
    document = dlion_job()
    document["spec"]["sites"][0]["groups"][0] |= {
        "image": "gpu:1",
        "podTemplate": {"spec": PLACE, "metadata": {"labels": {"a": "b"}}},
    }
    *_, deployment = keeper_objects(load_job(document), SETTINGS, {"uid": "u"})
    assert deployment == keeper()


def test_the_sites_settings_take_precedence_and_lists_are_added() -> None:
    site = at_site(
        node_selector={"disk": "ssd"},
        affinity={"podAffinity": OTHERS},
        priority_class_name="storage",
        tolerations=(STORAGE,),
    )
    site = replace(site, images=replace(site.images, pull_secrets=("mirror", "private")))
    made = pod({"spec": PLACE}, site)
    assert made["nodeSelector"] == {"disk": "ssd"}
    assert made["affinity"] == {"podAffinity": OTHERS}
    assert made["priorityClassName"] == "storage"
    assert made["runtimeClassName"] == "gvisor"
    assert made["tolerations"] == [*BARE["tolerations"], STORAGE, EDGE]
    assert made["imagePullSecrets"] == [{"name": "mirror"}, {"name": "private"}]


def test_without_a_template_the_keeper_has_the_sites_settings() -> None:
    site = at_site(node_selector={"disk": "ssd"}, tolerations=(STORAGE,))
    site = replace(site, images=replace(site.images, pull_secrets=("mirror",)))
    for template in (None, {}, {"spec": None}, {"spec": {"imagePullSecrets": None}}):
        made = pod(template, site)
        assert made["nodeSelector"] == {"disk": "ssd"}
        assert made["tolerations"] == [*BARE["tolerations"], STORAGE]
        assert made["imagePullSecrets"] == [{"name": "mirror"}]


@pytest.mark.parametrize("field", NEVER)
def test_the_keeper_has_no_other_field_of_the_template(field: str) -> None:
    assert pod({"spec": {field: NEVER[field]}}) == BARE


def test_the_keeper_has_unreserved_labels_and_annotations() -> None:
    given = {
        "labels": {"team": "sound", "app.kubernetes.io/component": "x", "dlion.dev/job-name": "x",
                   "kueue.x-k8s.io/queue-name": "q"},
        "annotations": {"linkerd.io/inject": "disabled", "kubectl.kubernetes.io/x": "y"},
    }  # fmt: skip
    made, bare = keeper({"metadata": given}, labels={"team": "vision", "a": "b"}), keeper()
    template = made["spec"]["template"]["metadata"]
    before = bare["spec"]["template"]["metadata"]["labels"]
    assert template["labels"] == before | {"team": "sound", "a": "b"}
    assert template["annotations"] == {"linkerd.io/inject": "disabled"}
    assert made["spec"]["selector"] == bare["spec"]["selector"]
    # Labels and annotations of a pod template apply to pods only.
    assert made["metadata"]["labels"] == bare["metadata"]["labels"] | {"team": "vision", "a": "b"}
    assert "annotations" not in made["metadata"]


@pytest.mark.parametrize(
    "template",
    [
        {"tolerations": [EDGE]},
        {"spec": "x"},
        {"spec": [EDGE]},
        {"metadata": 3, "spec": PLACE},
        {"metadata": {"labels": {"a": {"$patch": "x"}}}, "spec": PLACE},
        {"spec": {"nodeSelector": {"$patch": "x"}, "tolerations": [EDGE]}},
        {"spec": {"tolerations": 3, "nodeSelector": [1], "affinity": "x", "priorityClassName": {}}},
        {"spec": {"affinity": {"nodeAffinity": None}, "imagePullSecrets": {"name": "x"}}},
        {"metadata": {"labels": ["a"], "annotations": {"a": 1}}},
    ],
)
def test_a_malformed_template_is_ignored(template: Any) -> None:
    assert keeper(template) == keeper()


@given(st.dictionaries(st.sampled_from([*PLACE, *NEVER]), values), values)
@settings(max_examples=examples(300), deadline=None)
def test_no_template_changes_the_other_fields(spec: dict[str, Any], metadata: Any) -> None:
    try:
        made = keeper({"spec": spec, "metadata": metadata})
    except SpecError:
        return  # not JSON
    assert made["spec"]["selector"] == keeper()["spec"]["selector"]
    ours, bare = made["spec"]["template"], keeper()["spec"]["template"]
    assert ours["metadata"]["labels"].items() >= bare["metadata"]["labels"].items()
    for name in (ours["spec"].keys() | BARE.keys()) - PLACE.keys():
        assert ours["spec"].get(name) == BARE.get(name), name
    assert ours["spec"]["tolerations"][:2] == BARE["tolerations"]


def test_a_template_that_becomes_invalid_during_training_changes_nothing() -> None:
    """The change takes effect in the next run."""
    world = World(dlion_job())
    world.look()
    world.make_jobs()
    world.train()
    before = world.look()
    world.document["spec"]["podTemplate"] = {"spec": ["x"], "metadata": {"labels": 3}}
    assert world.look().status == before.status


def test_jobs_that_share_a_claim_have_a_folder_each() -> None:
    shared = replace(SETTINGS, keeper=KeeperSettings(claim_name="models"))

    def state_of(site: Settings, uid: str, **metadata: Any) -> dict[str, Any]:
        document = dlion_job()
        document["metadata"] |= metadata
        *_, deployment = keeper_objects(load_job(document), site, {"uid": uid})
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        (mount,) = (each for each in container["volumeMounts"] if each["name"] == "state")
        return dict(mount)

    first = state_of(shared, "u-1")
    assert first == {"name": "state", "mountPath": "/var/lib/dlion", "subPath": "digits-u-1"}
    assert state_of(shared, "u-2") != first, "the job was created again"
    assert state_of(shared, "u-1", name="other") != first
    own = replace(SETTINGS, keeper=KeeperSettings(size="1Gi"))
    assert "subPath" not in state_of(own, "u-1")
