"""Two real sites of one node each; the chart installs this tree's operators there.

The sites can trust each other at ports of their nodes.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from audit import refused, requests_of
from chart import CHART, NAMESPACE, Helm, image_values, merged
from several_contexts import SeveralContexts
from testbed.image_store import image_store
from testbed.project_images import build_images
from testbed.sites import Testbed

if TYPE_CHECKING:
    from pathlib import Path

    from testbed.sites import Site

JOBS = "ml"
NAMES = ("site-a", "site-b")
FEDERATION_PORT = 30446
AT_NODES: Mapping[str, Any] = {
    "federation": {"service": {"type": "NodePort", "nodePort": FEDERATION_PORT}}
}
"""Chart values for operators that federate at ports of their nodes."""


@dataclass
class InstalledSites:
    """The sites, and one kubeconfig for both."""

    testbed: Testbed
    values: Mapping[str, Any]
    """Chart values for both."""
    folder: Path

    def __post_init__(self) -> None:
        self.sites = list(self.testbed.sites.values())
        self.jobs = [replace(site.kubectl, namespace=JOBS) for site in self.sites]
        clusters = {site.name: jobs for site, jobs in zip(self.sites, self.jobs, strict=True)}
        self.contexts = SeveralContexts(clusters, self.folder)

    @classmethod
    @contextmanager
    def up(
        cls, name: str, folder: Path, *, flat: bool, prepare: Callable[..., object] | None = None
    ) -> Iterator[Self]:
        """Start a testbed of that name with operators that have created their authorities.

        `prepare` gets each site's kubectl. Each site has a namespace for jobs.
        """
        images = build_images()
        stores = dict.fromkeys(NAMES, image_store(images))
        with Testbed.up(name=name, sites=2, nodes=1, flat=flat, stores=stores) as testbed:
            for each in NAMES:
                (folder / each).mkdir()
            made = cls(testbed, image_values(images), folder)

            def at(site: Site) -> None:
                if prepare is not None:
                    prepare(site.kubectl)
                site.kubectl.run("create", "namespace", JOBS)

            with ThreadPoolExecutor() as pool:
                list(pool.map(at, made.sites))
            made.install({})
            yield made

    def install(self, values: Mapping[str, Any], own: Mapping[str, Any] | None = None) -> None:
        """Install the chart with these values; `own` adds values for each site."""

        def at(site: Site) -> None:
            helm = Helm(self.testbed.binaries.path("helm"), self.folder / site.name, site.kubectl)
            name = {"site": {"name": site.name}}
            helm.run(
                "upgrade", "--install", "dlion", str(CHART), "--namespace", NAMESPACE,
                "--create-namespace", "--wait", "--timeout", "110s",
                values=merged(self.values, values, name, (own or {}).get(site.name, {})),
            )  # fmt: skip

        with ThreadPoolExecutor() as pool:
            list(pool.map(at, self.sites))

    def trust_each_other(
        self, values: Mapping[str, Any], port: int, own: Mapping[str, Any] | None = None
    ) -> dict[str, str]:
        """Install the chart with these values and with each site's node and bundle.

        Returns the nodes' addresses by site.
        """
        nodes = {site.name: site.nodes[0].layout.address for site in self.sites}
        listed = [
            {"name": site.name, "address": f"{nodes[site.name]}:{port}", "bundle": bundle_of(site)}
            for site in self.sites
        ]
        self.install(merged(values, {"sites": listed}), own)
        return nodes

    def check_rights(self) -> None:
        """Assert that the API server refused no request of an operator."""
        account = f"system:serviceaccount:{NAMESPACE}:dlion-operator"
        for site in self.sites:
            assert refused(requests_of(account, site.control_plane.audit_log)) == [], site.name


def bundle_of(site: Site) -> str:
    """Return the public certificate (PEM) of that site's authority."""
    secret = replace(site.kubectl, namespace=NAMESPACE).get("secret", "dlion-authority")
    return base64.b64decode(secret["data"]["tls.crt"]).decode()
