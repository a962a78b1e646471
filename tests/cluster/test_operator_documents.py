"""Test that the operator can decide about every document that a real API server accepts.

There are 1,200 randomly changed manifests, with a random pod template or none. For each that the
API server accepts, a decision is made without an exception, with conditions that have a reason. A
second decision about the same state is equal. Some are stored as jobs of a running operator's site.
The operator writes a status for each, has no internal error and continues. The test prints how many
were accepted. Left out: pods that run (test_training).
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from api_server import Jobs, jobs_of
from dlion_api.spec import load_job
from dlion_operator.plan.queues.dispatching import is_dispatched
from example_counts import examples
from fault_proxy import waited
from manifest_strategies import changed_documents, values
from manifest_table import ACCEPTED
from operator_process import OperatorProcess
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
OURS = "dlion.dev/operator"
ALL_WITHIN_S = 600
"""Time until each of them has a status."""
EXAMPLES = examples(1200)
accepted = 0


@st.composite
def likely(draw: st.DrawFn) -> Any:
    """Return a valid manifest with a change that a user may make."""
    document = copy.deepcopy(load_job(draw(st.sampled_from(ACCEPTED)).document).to_document())
    spec = document["spec"]
    spec["suspend"] = draw(st.booleans())
    spec["failurePolicy"] = draw(st.sampled_from(["Continue", "Fail"]))
    spec["maxRestarts"] = draw(st.integers(0, 1000))
    spec["activeDeadlineSeconds"] = draw(st.integers(1, 2**31 - 1))
    group = draw(st.sampled_from([g for site in spec["sites"] for g in site["groups"]]))
    group["podTemplate"] = draw(TEMPLATES.filter(lambda made: made is None or type(made) is dict))
    group["nodeSelector"] = draw(st.dictionaries(st.text(max_size=5), st.text(max_size=9)))
    document["metadata"]["labels"] = draw(
        st.fixed_dictionaries({}, optional={"kueue.x-k8s.io/queue-name": st.just("edge")})
    )
    return document


@pytest.fixture(scope="module")
def jobs(api: Kubectl) -> Iterator[Jobs]:
    with jobs_of(replace(api, namespace="default")) as made:
        made.wait_until_served()
        yield made
    print(f"{accepted} manifests were accepted by the API server")
    assert accepted >= 0.4 * EXAMPLES


@given(changed_documents() | likely() | likely() | likely(), TEMPLATES)
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_accepted_document_gets_a_decision(jobs: Jobs, manifest: Any, template: Any) -> None:
    if isinstance(template, dict) and isinstance(manifest.get("spec"), dict):
        manifest["spec"]["podTemplate"] = template
    if isinstance(manifest.get("metadata"), dict):
        manifest["metadata"].pop("namespace", None)
    try:
        answer = jobs.create(manifest)
    except ValueError:
        return  # not JSON
    if not answer.accepted:
        return
    global accepted
    accepted += 1
    document = answer.document
    site = document["spec"]["sites"][0]["name"]
    world = World(document, replace(SETTINGS, site=site))
    first = world.look()
    if document["spec"].get("managedBy", OURS) != OURS and not is_dispatched(document):
        assert first.status is None
        return
    assert first.status is not None
    assert all(each["reason"] for each in first.status["conditions"])
    second = world.look()
    assert second.status == first.status


@pytest.mark.usefixtures("no_running_pods")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("count", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_accepted_documents_are_served_by_a_running_operator(
    kubectl: Kubectl, tmp_path: Path, count: int
) -> None:
    """If a job is impossible, its status has the reason."""
    stored: list[str] = []

    with jobs_of(kubectl) as jobs:

        @given(likely(), TEMPLATES)
        @settings(
            max_examples=4 * count,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        def store(manifest: Any, template: Any) -> None:
            if len(stored) == count:
                return
            document = of_a_small_site(manifest, f"job-{len(stored)}")
            if isinstance(template, dict):
                document["spec"]["podTemplate"] = template
            with contextlib.suppress(ValueError):  # not JSON
                if jobs.create(document, dry_run=False).accepted:
                    stored.append(document["metadata"]["name"])

        store()
    print(f"{len(stored)} jobs are stored")
    assert len(stored) == count
    with OperatorProcess(tmp_path, kubectl.kubeconfig, namespaces=(kubectl.namespace,)) as operator:
        began_s = time.monotonic()
        waited(lambda: all(states(kubectl).values()), ALL_WITHIN_S, every_s=2)
        print(f"all have a status after {time.monotonic() - began_s:.0f} s")
        print(Counter(states(kubectl).values()))
        assert [name for name, state in states(kubectl).items() if not state] == []
        assert operator.metric('dlion_operator_reconciles_total{result="defect"}') == 0
        assert (operator.starts, operator.is_running()) == (1, True)


def states(kubectl: Kubectl) -> dict[str, str]:
    """Return the states of all jobs there by name; empty if there are none."""
    return {
        each["metadata"]["name"]: (each.get("status") or {}).get("state", "")
        for each in kubectl.get("dlj")["items"]
    }


def of_a_small_site(manifest: Any, name: str) -> Any:
    """Return that document under another name, at the site of this operator, with few workers."""
    document = copy.deepcopy(manifest)
    document["metadata"] = {"name": name, "labels": manifest["metadata"].get("labels") or {}}
    document["spec"].pop("managedBy", None)
    document["spec"]["sites"][0]["name"] = "plant-a"
    for site in document["spec"]["sites"]:
        for group in site["groups"]:
            group["workers"] = min(group.get("workers", 1), 2)
    return document
