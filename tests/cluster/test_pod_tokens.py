"""Facts: a token that a real API server gives for a pod, checked with the keys and the issuer that
it publishes, is that pod's worker's; one for another audience, or bound to no pod, is not.

Left out: hostile tokens (tests/unit/operator/test_pod_tokens.py), pods that run.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest

from dlion_api.cluster_names import TOKEN_AUDIENCE
from dlion_api.names import JobKey, Rank, SiteName, WorkerIdentity
from dlion_operator.pod_tokens import Keys, PodTokens, wanted_labels

if TYPE_CHECKING:
    from testbed.kubectl import Kubectl

pytestmark = pytest.mark.cluster
WORKER = WorkerIdentity(Rank(0), SiteName("plant-a"), "small", 0)


@dataclass
class Cluster:
    """Pods and keys as the API server has them."""

    kubectl: Kubectl

    def labels_of(self, namespace: str, name: str, uid: str) -> Mapping[str, str] | None:
        pod = replace(self.kubectl, namespace=namespace).get("pod", name)["metadata"]
        labels: Mapping[str, str] = pod["labels"]
        return labels if pod["uid"] == uid else None

    async def read_keys(self) -> Keys:
        jwks = self.kubectl.run("get", "--raw", "/openid/v1/jwks")
        about = json.loads(self.kubectl.run("get", "--raw", "/.well-known/openid-configuration"))
        return Keys(jwks.encode(), about["issuer"])


def test_a_token_of_the_api_server_is_its_pods(control_plane: Kubectl) -> None:
    namespace = f"dlion-test-{uuid.uuid4().hex[:8]}"
    control_plane.run("create", "namespace", namespace)
    kubectl = replace(control_plane, namespace=namespace)
    job = JobKey(namespace, "digits", "1")
    try:
        kubectl.run("create", "serviceaccount", "worker")
        for name, worker in {"mine": WORKER, "other": replace(WORKER, index=1)}.items():
            kubectl.apply(pod(name, wanted_labels(worker, job)))
        tokens = PodTokens(cluster := Cluster(kubectl), cluster.read_keys)

        def holds(token: str) -> bool:
            return asyncio.run(tokens.verify(token, WORKER, job))

        assert holds(token(kubectl, TOKEN_AUDIENCE, "mine"))
        assert not holds(token(kubectl, TOKEN_AUDIENCE, "other"))
        assert not holds(token(kubectl, "somebody.else", "mine"))
        assert not holds(token(kubectl, TOKEN_AUDIENCE, None))
    finally:
        control_plane.run("delete", "namespace", namespace, "--wait=false")


def token(kubectl: Kubectl, audience: str, pod_name: str | None) -> str:
    arguments = ["create", "token", "worker", f"--audience={audience}"]
    if pod_name is not None:
        arguments += ["--bound-object-kind=Pod", f"--bound-object-name={pod_name}"]
    return kubectl.run(*arguments).strip()


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
