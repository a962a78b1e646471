"""Test tokens that a real API server issues for pods.

A token is checked with the published keys and issuer. A pod's token is valid for that pod's worker.
It is not valid for another audience, without a pod, or for a pod with the same labels without a
Job.

Left out: hostile tokens (tests/unit/operator/pki/test_pod_tokens.py), pods that run.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from dlion_api.cluster_names import INDEX_LABEL, TOKEN_AUDIENCE, group_job_name
from dlion_api.names import JobKey, Rank, SiteName, WorkerIdentity
from dlion_operator.kubernetes.client import Kind, SigningKeys
from dlion_operator.kubernetes.store import ClusterStore
from dlion_operator.pki.pod_tokens import PodTokens, expected_labels
from fault_proxy import waited

if TYPE_CHECKING:
    from testbed.kubectl import Kubectl

pytestmark = pytest.mark.cluster
WORKER = WorkerIdentity(Rank(0), SiteName("plant-a"), "small", 0)


@dataclass
class Cluster:
    """Pods and keys as the API server has them."""

    kubectl: Kubectl

    def store(self) -> ClusterStore:
        store = ClusterStore()
        for kind, plural in ((Kind.POD, "pods"), (Kind.JOB, "jobs")):
            for each in self.kubectl.get(plural)["items"]:
                store.put(kind, each)
        return store

    async def read_keys(self) -> SigningKeys:
        jwks = self.kubectl.run("get", "--raw", "/openid/v1/jwks")
        about = json.loads(self.kubectl.run("get", "--raw", "/.well-known/openid-configuration"))
        return SigningKeys(jwks.encode(), about["issuer"])


def test_a_token_of_the_api_server_is_valid_for_its_pod(kubectl: Kubectl) -> None:
    job = JobKey(kubectl.namespace, "digits", "1")
    kubectl.run("create", "serviceaccount", "worker")
    kubectl.apply(indexed_job(group_job_name(job, WORKER.group), expected_labels(WORKER, job)))
    assert waited(lambda: len(kubectl.get("pods")["items"]) == 2, 60)
    mine, other = (
        each["metadata"]["name"]
        for each in sorted(
            kubectl.get("pods")["items"], key=lambda pod: pod["metadata"]["labels"][INDEX_LABEL]
        )
    )
    kubectl.apply(pod("made-up", expected_labels(WORKER, job)))
    cluster = Cluster(kubectl)

    def holds(token: str) -> bool:
        tokens = PodTokens(cluster.store(), cluster.read_keys)
        return asyncio.run(tokens.verify(token, WORKER, job)) is not None

    assert holds(token(kubectl, TOKEN_AUDIENCE, mine))
    assert not holds(token(kubectl, TOKEN_AUDIENCE, other))
    assert not holds(token(kubectl, TOKEN_AUDIENCE, "made-up"))
    assert not holds(token(kubectl, "somebody.else", mine))
    assert not holds(token(kubectl, TOKEN_AUDIENCE, None))


def token(kubectl: Kubectl, audience: str, pod_name: str | None) -> str:
    arguments = ["create", "token", "worker", f"--audience={audience}"]
    if pod_name is not None:
        arguments += ["--bound-object-kind=Pod", f"--bound-object-name={pod_name}"]
    return kubectl.run(*arguments).strip()


def indexed_job(name: str, labels: Mapping[str, str]) -> dict[str, object]:
    """Create a Job of two workers, each with its index."""
    given = {key: value for key, value in labels.items() if key != INDEX_LABEL}
    template = pod("any", given)
    counts = {"completions": 2, "parallelism": 2, "completionMode": "Indexed"}
    spec = {**dict(template["spec"]), "restartPolicy": "Never"}  # type: ignore[call-overload]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {**counts, "template": {"metadata": {"labels": given}, "spec": spec}},
    }


def pod(name: str, labels: Mapping[str, str]) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": dict(labels)},
        "spec": {
            "serviceAccountName": "worker",
            "containers": [{"name": "c", "image": "none"}],
        },
    }
