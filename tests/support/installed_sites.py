"""Two real sites of one node each, with this tree's operators, which the chart installs. They may
trust each other at ports of their nodes."""

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
"""Of the chart: operators hear each other there."""


@dataclass
class InstalledSites:
    """The sites, and one file that leads to both."""

    testbed: Testbed
    values: Mapping[str, Any]
    """Of the chart, for both."""
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
        """A testbed of that name, with what `prepare` makes of each site's kubectl, a namespace for
        jobs, and operators that have made their authorities."""
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
        """The chart with these; `own` has more for each site."""

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
        """Install the chart with these, and with each site's node and bundle; the nodes' addresses
        by site."""
        nodes = {site.name: site.nodes[0].layout.address for site in self.sites}
        listed = [
            {"name": site.name, "address": f"{nodes[site.name]}:{port}", "bundle": bundle_of(site)}
            for site in self.sites
        ]
        self.install(merged(values, {"sites": listed}), own)
        return nodes

    def check_rights(self) -> None:
        """Nothing that an operator asked for was refused."""
        account = f"system:serviceaccount:{NAMESPACE}:dlion-operator"
        for site in self.sites:
            assert refused(requests_of(account, site.control_plane.audit_log)) == [], site.name


def bundle_of(site: Site) -> str:
    """The public certificate (PEM) of that site's authority."""
    secret = replace(site.kubectl, namespace=NAMESPACE).get("secret", "dlion-authority")
    return base64.b64decode(secret["data"]["tls.crt"]).decode()
