"""Small jobs that an operator really trains at a site: manifests and conditions to wait for."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from local_run import blobs_in_a_cluster

if TYPE_CHECKING:
    from pathlib import Path

    from testbed.kubectl import Kubectl

SITE = "site-a"
SYSTEM = "dlion-system"
"""The operator's namespace."""


def manifest(groups: dict[str, int], *, workers: int = 1, **spec: Any) -> dict[str, Any]:
    """The digits at one site; `groups` gives thousandths of a core."""
    return {
        "apiVersion": "dlion.dev/v1alpha1",
        "kind": "DLionJob",
        "metadata": {"name": "digits"},
        "spec": {
            "sites": [
                {
                    "name": SITE,
                    "groups": [
                        {
                            "name": name,
                            "workers": workers,
                            "resources": {
                                "requests": {"cpu": "50m"},
                                "limits": {"cpu": f"{cpu}m", "memory": "2Gi"},
                            },
                        }
                        for name, cpu in groups.items()
                    ],
                }
            ],
            "trainer": {
                "program": {"builtin": "digits"},
                "dataset": {"name": "digits", "evaluationFraction": 0.2},
                # At 0.05 the loss jumps late: one of six simulated runs ended at 88 %. At 0.02
                # eight ended at 94 to 98 %.
                "optimizer": {"name": "sgd", "learningRate": 0.02, "momentum": 0.9},
                "seed": 1,
                "evaluation": {"everySamples": 5000},
                "stop": {"maxSeconds": 40},
            },
            "batching": {"policy": "weighted", "globalBatchSize": {"initial": 240, "max": 480}},
            "exchange": {"policy": "dlion", "codec": "float16", "weighting": "sample_mean"},
            "synchronization": {"mode": "synchronous"},
            "checkpoint": {"everySeconds": 5},
            **spec,
        },
    }


def mostly_waiting(document: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A ConfigMap, and that manifest with its program. A step sleeps for a tenth of a second and
    computes almost nothing, however long the run lasts."""
    config_map, program = blobs_in_a_cluster(nap_s=0.1)
    trainer = document["spec"]["trainer"]
    del trainer["dataset"]
    trainer["program"] = program
    document["spec"]["batching"]["globalBatchSize"] = {"initial": 32, "max": 32}
    return config_map, document


@contextmanager
def restricted_namespace(kubectl: Kubectl) -> Iterator[Kubectl]:
    """A new namespace with pod security `restricted`."""
    name = f"dlion-test-{uuid.uuid4().hex[:8]}"
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    kubectl.apply(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
    )
    try:
        yield replace(kubectl, namespace=name)
    finally:
        kubectl.run("delete", "namespace", name, "--wait=false")


def eventually(look: Callable[[], Any], *, within_s: float = 60.0, what: str = "") -> Any:
    """Return the result of `look` once it is true."""
    deadline_s = time.monotonic() + within_s
    while not (found := look()):
        assert time.monotonic() < deadline_s, f"{what}: not within {within_s:g} s"
        time.sleep(0.5)
    return found


def status_of(kubectl: Kubectl, name: str = "digits") -> dict[str, Any]:
    """The job's status."""
    status: dict[str, Any] = kubectl.get("dlj", name).get("status") or {}
    return status


def degraded(kubectl: Kubectl) -> dict[str, Any] | None:
    """The job, while its status calls it Degraded."""
    document: dict[str, Any] = kubectl.get("dlj", "digits")
    return document if (document.get("status") or {}).get("state") == "Degraded" else None


def iteration(kubectl: Kubectl) -> int:
    """The iteration of the most advanced worker, from the status."""
    metrics = (status_of(kubectl).get("trainerStatus") or {}).get("metrics") or ()
    return next((int(m["value"]) for m in metrics if m["name"] == "iteration"), 0)


def wait_until_trains(kubectl: Kubectl, name: str = "digits", within_s: float = 180.0) -> None:
    """Return once the status reports that all workers train."""
    eventually(
        lambda: status_of(kubectl, name).get("state") == "Training",
        within_s=within_s,
        what="Training",
    )


def fetched(kubectl: Kubectl, out: Path, *arguments: str, name: str = "digits") -> Path:
    """The result folder that `dlion fetch` writes."""
    done = fetch(kubectl, out, *arguments, name=name)
    assert done.returncode == 0, done.stderr
    return out


def fetch(
    kubectl: Kubectl, out: Path, *arguments: str, name: str = "digits"
) -> subprocess.CompletedProcess[str]:
    """Run `dlion fetch` to its end, successful or not."""
    command = [
        sys.executable, "-m", "dlion_cli", "fetch", name, "--out", str(out),
        "--kubeconfig", str(kubectl.kubeconfig), "--namespace", kubectl.namespace, *arguments,
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Records of that kind in a fetched result folder."""
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [each for each in map(json.loads, lines) if each["kind"] == kind]
