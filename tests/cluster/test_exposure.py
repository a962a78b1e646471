"""Workers of two sites whose pods do not reach each other train together by ports of their nodes.

Proves: with `exposure: NodePort`, installed as docs/several-sites.md says (the operators too hear
each other at ports of nodes), the job trains; each site's status shows both sites' workers and all
links; it comes to its end at both; the workers' Services, and so their ports, are gone then, and
neither operator asked for what the chart does not grant. Prints how long it took.
Left out: load balancers and gateways (tests/unit/operator, tests/local/test_gateway.py).
"""

from __future__ import annotations

import base64
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from audit import asked_by, refused
from chart import CHART, NAMESPACE, Helm, helm_program, merged
from testbed.project_images import build_images
from testbed.sites import Testbed
from trained_jobs import eventually, manifest, status_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from testbed.kubectl import Kubectl
    from testbed.sites import Site

pytestmark = [pytest.mark.cluster, pytest.mark.root, pytest.mark.timeout(900)]

FEDERATION_PORT = 30446
JOBS = "ml"


@pytest.fixture(scope="module")
def sites(testbed_possible: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Site]]:
    """Two separate sites that trust each other, with this tree's operators."""
    assert testbed_possible is None
    images = build_images()
    values: dict[str, Any] = {
        "images": {"pullPolicy": "Never"},
        "federation": {"service": {"type": "NodePort", "nodePort": FEDERATION_PORT}},
    }
    for image in images:
        repository, _, tag = image.reference.partition(":")
        values["images"][image.target.value] = {"repository": repository, "tag": tag}
    with Testbed.up(name=f"e{os.getpid()}", sites=2, nodes=1, flat=False) as made:
        found = list(made.sites.values())
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda site: site.nodes[0].load_missing(images), found))
        program = helm_program()
        assert program is not None
        helms = [Helm(program, tmp_path_factory.mktemp("helm"), site.kubectl) for site in found]
        for site, helm in zip(found, helms, strict=True):
            _install(helm, merged(values, {"site": {"name": site.name}}))
        listed = {"sites": [_entry(site) for site in found]}
        for site, helm in zip(found, helms, strict=True):
            _install(helm, merged(values, listed, {"site": {"name": site.name}}))
            site.kubectl.run("create", "namespace", JOBS)
        yield found


def _install(helm: Helm, values: dict[str, Any]) -> None:
    helm.run(
        "upgrade", "--install", "dlion", str(CHART), "--namespace", NAMESPACE, "--create-namespace",
        "--wait", "--timeout", "120s", values=values,
    )  # fmt: skip


def _entry(site: Site) -> dict[str, str]:
    """What others are told of it."""
    secret = replace(site.kubectl, namespace=NAMESPACE).get("secret", "dlion-authority")
    return {
        "name": site.name,
        "address": f"{site.nodes[0].layout.address}:{FEDERATION_PORT}",
        "bundle": base64.b64decode(secret["data"]["tls.crt"]).decode(),
    }


def _job(first: Site, second: Site) -> dict[str, Any]:
    """Two workers and one."""
    document = manifest({"small": 500}, workers=2, network={"exposure": "NodePort"})
    alone = manifest({"small": 500})["spec"]["sites"]
    document["spec"]["sites"][0]["name"], alone[0]["name"] = first.name, second.name
    document["spec"]["sites"] += alone
    return document


def _shown(kubectl: Kubectl) -> tuple[str, str, str, int]:
    """What a site's status says of the whole job."""
    status = status_of(kubectl)
    connected = (status.get("links") or {}).get("connected", 0)
    return (
        status.get("state", ""),
        status.get("readySites", ""),
        status.get("readyWorkers", ""),
        connected,
    )


def _ports(kubectl: Kubectl) -> list[Any]:
    chosen = "app.kubernetes.io/component=worker"
    return list(kubectl.get("services", "-l", chosen)["items"])


def test_two_separate_sites_train_by_ports_of_their_nodes(sites: list[Site]) -> None:
    began_s = time.monotonic()
    jobs = [replace(site.kubectl, namespace=JOBS) for site in sites]
    for kubectl in jobs:
        kubectl.apply(_job(*sites))
    # A site tells of the links of its own workers.
    training = [("Training", "2/2", "3/3", 4), ("Training", "2/2", "3/3", 2)]
    eventually(
        lambda: [_shown(kubectl) for kubectl in jobs] == training,
        within_s=240,
        what="both sites in both statuses",
    )
    print(f"trains after {time.monotonic() - began_s:.0f} s")
    for kubectl in jobs:
        names = {site["name"]: site["state"] for site in status_of(kubectl)["sites"]}
        assert names == {site.name: "Ready" for site in sites}
        assert {each["spec"]["type"] for each in _ports(kubectl)} == {"NodePort"}
    for kubectl in jobs:
        kubectl.wait("--for=condition=Succeeded", "dlj/digits", timeout_s=240)
    print(f"has ended after {time.monotonic() - began_s:.0f} s")
    eventually(lambda: not any(_ports(kubectl) for kubectl in jobs), what="ports gone")
    account = f"system:serviceaccount:{NAMESPACE}:dlion-operator"
    for site in sites:
        assert refused(asked_by(account, site.control_plane.audit_log)) == [], site.name
