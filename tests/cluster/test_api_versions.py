"""Test that the plan for a second version of the API holds on a real API server (decision 50).

Today's schema is served as v1alpha1 and as v1beta1 without a webhook. An object written as one
version reads as the other, with the same spec, defaults and status. CEL rules, bounds and the
immutability of a running job apply to both with the same messages. The stored version can be
changed and changed back with existing objects. A version can be removed only after all objects are
stored as the other.

Left out: the operator, which reads one version.
"""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import pytest

import manifest_schema
from dlion_api.errors import UnavailableError
from dlion_api.names import GROUP, KIND, VERSION
from fault_proxy import waited
from manifest_table import changed, smallest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from testbed.kubectl import Kubectl

pytestmark = [pytest.mark.cluster, pytest.mark.root]

NEXT = "v1beta1"
CRD = f"dlionjobs.{GROUP}"
TRAINS = {"runId": "r1", "trainingStartTime": "2026-01-31T12:00:00Z", "state": "Training"}


def definition(*versions: str, stored: str) -> dict[str, Any]:
    """Return today's definition with these versions, all with today's schema."""
    found = manifest_schema.crd()
    (today,) = found["spec"]["versions"]
    found["spec"]["versions"] = [
        copy.deepcopy(today) | {"name": version, "storage": version == stored}
        for version in versions
    ]
    return found


def job(name: str, version: str, **changes: Any) -> dict[str, Any]:
    """Return the smallest manifest in that version, of run r1."""
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    made = changed(smallest(), {"metadata.name": name, "spec.runId": "r1", **changes})
    return made | {"apiVersion": f"{GROUP}/{version}"}


def read(kubectl: Kubectl, name: str, version: str) -> dict[str, Any]:
    """Read that job as that version, without the fields that depend on the version."""
    found: dict[str, Any] = kubectl.get(f"dlionjobs.{version}.{GROUP}", name)
    assert (found["apiVersion"], found["kind"]) == (f"{GROUP}/{version}", KIND)
    return {part: found.get(part) for part in ("spec", "status")}


def replace_definition(kubectl: Kubectl, *versions: str, stored: str) -> None:
    """Apply it, and wait until exactly these versions are served and that one is stored."""
    kubectl.run("replace", "-f", "-", text=json.dumps(definition(*versions, stored=stored)))
    wait_until_served(kubectl, *versions, stored=stored)


def wait_until_served(kubectl: Kubectl, *versions: str, stored: str) -> None:
    def is_so() -> bool:
        served = json.loads(kubectl.run("get", "--raw", "/apis"))["groups"]
        names = [v["version"] for g in served if g["name"] == GROUP for v in g["versions"]]
        if sorted(names) != sorted(versions) or stored not in stored_versions(kubectl):
            return False
        # It is listed before it is served, and each write needs its own version.
        return all(kubectl.knows(f"dlionjobs.{version}.{GROUP}") for version in versions)

    assert waited(is_so, 30), f"{versions} are not served"


def stored_versions(kubectl: Kubectl) -> list[str]:
    """Return the versions in which objects may be stored, from the definition's status."""
    return list(kubectl.get("crd", CRD)["status"].get("storedVersions") or ())


def refusal(kubectl: Kubectl, document: dict[str, Any], *command: str) -> str:
    """Return why that document is refused; fail if it is accepted."""
    with pytest.raises(UnavailableError) as refused:
        kubectl.run(*(command or ("create",)), "-f", "-", text=json.dumps(document))
    return str(refused.value)


@pytest.fixture
def kubectl(
    control_plane: Kubectl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Kubectl]:
    """A cluster with only today's definition, which is removed at the end."""
    # kubectl caches the versions by address for hours.
    monkeypatch.setenv("KUBECACHEDIR", str(tmp_path / "kubectl"))
    control_plane.run("create", "-f", "-", text=json.dumps(definition(VERSION, stored=VERSION)))
    try:
        wait_until_served(control_plane, VERSION, stored=VERSION)
        yield control_plane
    finally:
        control_plane.run("delete", "crd", CRD)


def test_a_second_version_with_the_same_schema_needs_no_webhook(kubectl: Kubectl) -> None:
    kubectl.apply(job("old", VERSION))
    kubectl.run("patch", "dlj", "old", "--subresource=status", "--type=merge", "-p",
                json.dumps({"status": TRAINS}))  # fmt: skip
    before = read(kubectl, "old", VERSION)

    # Release N: both served, the old one stored.
    replace_definition(kubectl, VERSION, NEXT, stored=VERSION)
    assert read(kubectl, "old", NEXT) == before
    kubectl.apply(job("new", NEXT))
    as_new, as_old = (read(kubectl, "new", version) for version in (NEXT, VERSION))
    assert as_new == as_old
    assert as_new["spec"]["exchange"]["policy"] == before["spec"]["exchange"]["policy"]
    assert as_new["status"]["observedGeneration"] == -1
    for version in (VERSION, NEXT):
        group = {"name": "small", "workers": 1}
        twice = job("twice", version, spec__sites=[
            {"name": "plant-a", "groups": [group]}, {"name": "plant-b", "groups": [group, group]},
        ])  # fmt: skip
        assert "Duplicate value" in refusal(kubectl, twice)
        changed_run = job("old", version, spec__trainer__stop={"maxSteps": 7, "maxSeconds": 5})
        changed_run["spec"]["exchange"] = {"policy": "none"}
        assert "spec" in refusal(kubectl, changed_run, "apply")
    first, second = (
        refusal(kubectl, job("bad", version, spec__minSites=9)) for version in (VERSION, NEXT)
    )
    assert "minSites" in first
    assert first == second

    # Release N+1: the new one stored; back to N and again to N+1.
    for stored in (NEXT, VERSION, NEXT):
        replace_definition(kubectl, VERSION, NEXT, stored=stored)
        assert read(kubectl, "old", NEXT) == read(kubectl, "old", VERSION) == before
        assert read(kubectl, "new", NEXT) == read(kubectl, "new", VERSION) == as_new

    # Release N+3: the old one stays while objects may be stored in it.
    assert sorted(stored_versions(kubectl)) == [VERSION, NEXT]
    assert VERSION in refusal(kubectl, definition(NEXT, stored=NEXT), "replace")
    stored_jobs = kubectl.get("dlj")
    kubectl.run("replace", "-f", "-", text=json.dumps(stored_jobs))
    kubectl.run("patch", "crd", CRD, "--subresource=status", "--type=merge", "-p",
                json.dumps({"status": {"storedVersions": [NEXT]}}))  # fmt: skip
    replace_definition(kubectl, NEXT, stored=NEXT)
    assert read(kubectl, "old", NEXT) == before
    assert read(kubectl, "new", NEXT) == as_new
