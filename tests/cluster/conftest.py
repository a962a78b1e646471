"""A testbed of two sites for the session, or why there is none; or the cluster that you name."""

from __future__ import annotations

import os
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from testbed.binaries import built
from testbed.existing import existing_cluster
from testbed.images import BUSYBOX_IMAGE
from testbed.requirements import missing
from testbed.sites import Testbed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from testbed.kubectl import Kubectl

REQUIRED = "DLION_REQUIRE_TESTBED"


@pytest.fixture(scope="session")
def testbed() -> Iterator[Testbed]:
    """Two sites, two nodes each; taken away at the end."""
    _require_testbed()
    with Testbed.up(name=f"t{os.getpid()}", sites=2, nodes=2) as made:
        yield made


@pytest.fixture(scope="module")
def control_plane() -> Iterator[Kubectl]:
    """An API server and nothing that runs pods; or the cluster of $DLION_TEST_KUBECONFIG."""
    kubectl = existing_cluster()
    if kubectl is not None:
        yield kubectl
        return
    _require_testbed()
    with Testbed.up(name=f"c{os.getpid()}", sites=1, nodes=0) as made:
        yield made.site("site-a").kubectl


def _require_testbed() -> None:
    """Skip where the machine lacks something; where $DLION_REQUIRE_TESTBED is set, fail."""
    lacking = missing()
    if built() is None:  # longer than any test may take
        lacking.append("Kubernetes is not built yet: run `make testbed-setup`")
    if lacking:
        reason = "no testbed here: " + "; ".join(lacking)
        if os.environ.get(REQUIRED):
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[Kubectl]:
    """A namespace of its own in the cluster of $DLION_TEST_KUBECONFIG, else at the first site."""
    kubectl = existing_cluster()
    if kubectl is None:
        kubectl = request.getfixturevalue("testbed").site("site-a").kubectl
    namespace = f"dlion-test-{uuid.uuid4().hex[:8]}"
    kubectl.run("create", "namespace", namespace)
    try:
        yield replace(kubectl, namespace=namespace)
    finally:
        kubectl.run("delete", "namespace", namespace, "--wait=false")


@pytest.fixture
def busybox() -> str:
    """An image with a shell that the cluster of `cluster` has or can get."""
    elsewhere = "docker.io/library/busybox:1.36"
    return BUSYBOX_IMAGE if existing_cluster() is None else elsewhere
