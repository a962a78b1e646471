"""What a real API server accepts, the operator can decide about, whatever it is.

Proves: for each of 1,200 manifests changed at random, with a pod template made up at random or
none, that the API server accepts, a decision is made without an exception, with conditions that
name a reason, and a second look at the same world says the same. Prints how many were accepted.
Left out: carrying the decision out (test_operator).
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from api_server import Jobs, jobs_of
from dlion_api.spec import load_job
from manifest_strategies import changed_documents, values
from manifest_table import ACCEPTED
from operator_world import SETTINGS, World

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from testbed.kubectl import Kubectl

pytestmark = pytest.mark.cluster
CONTAINERS = st.lists(
    st.dictionaries(st.sampled_from(["name", "env", "volumeMounts", "securityContext"]), values),
    max_size=2,
)
POD = st.dictionaries(
    st.sampled_from(["containers", "volumes", "securityContext", "tolerations", "hostNetwork"]),
    CONTAINERS | values,
    max_size=3,
)
TEMPLATES = st.none() | st.fixed_dictionaries({"metadata": values, "spec": POD}) | values
accepted = 0


@st.composite
def likely(draw: st.DrawFn) -> Any:
    """A valid manifest with something changed that a user may change."""
    document = copy.deepcopy(load_job(draw(st.sampled_from(ACCEPTED)).document).to_document())
    spec = document["spec"]
    spec["suspend"] = draw(st.booleans())
    spec["failurePolicy"] = draw(st.sampled_from(["Continue", "Fail"]))
    spec["maxRestarts"] = draw(st.integers(0, 1000))
    spec["activeDeadlineSeconds"] = draw(st.integers(1, 2**31 - 1))
    group = draw(st.sampled_from([g for site in spec["sites"] for g in site["groups"]]))
    group["nodeSelector"] = draw(st.dictionaries(st.text(max_size=5), st.text(max_size=9)))
    document["metadata"]["labels"] = draw(
        st.fixed_dictionaries({}, optional={"kueue.x-k8s.io/queue-name": st.just("edge")})
    )
    return document


@pytest.fixture(scope="module")
def jobs(control_plane: Kubectl, request: pytest.FixtureRequest) -> Iterator[Jobs]:
    crd: Path = request.config.rootpath / "crds/dlionjob.yaml"
    control_plane.run("apply", "-f", str(crd))
    with jobs_of(replace(control_plane, namespace="default")) as made:
        made.wait_until_served()
        yield made
    print(f"{accepted} manifests were accepted by the API server")
    assert accepted >= 500


@given(changed_documents() | likely() | likely() | likely(), TEMPLATES)
@settings(max_examples=1200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_is_accepted_is_decided_about(jobs: Jobs, manifest: Any, template: Any) -> None:
    if isinstance(template, dict) and isinstance(manifest.get("spec"), dict):
        manifest["spec"]["podTemplate"] = template
    if isinstance(manifest.get("metadata"), dict):
        manifest["metadata"].pop("namespace", None)
    try:
        answer = jobs.create(manifest)
    except ValueError:
        return  # no JSON
    if not answer.accepted:
        return
    global accepted
    accepted += 1
    document = answer.document
    site = document["spec"]["sites"][0]["name"]
    world = World(document, replace(SETTINGS, site=site))
    first = world.look()
    if document["spec"].get("managedBy", "dlion.dev/operator") != "dlion.dev/operator":
        assert first.status is None
        return
    assert first.status is not None
    assert all(each["reason"] for each in first.status["conditions"])
    second = world.look()
    assert second.status == first.status
