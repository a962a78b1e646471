"""Names and addresses of a testbed: of its machines, and of their networks.

Pure. `networks`, `machines` and other modules take names only from here, so that `removal` finds by
name what they created. With base octet B, site i (from 1) has 10.(B+i).0.0/16 for machines and pods
alike, so that one prefix covers all of a site's traffic. Between the sites is 10.B.0.0/24.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from dlion_api.errors import UnavailableError

_NAME = re.compile(r"[a-z][a-z0-9]{0,9}")
MAX_SITES = 40
MAX_NODES = 60
API_PORT = 6443


def checked_name(name: str) -> str:
    """Return the name if it is valid for a testbed. Raises: UnavailableError with the allowed
    form."""
    if not _NAME.fullmatch(name):
        raise UnavailableError(
            f"testbed name {name!r}; allowed: a letter, then up to nine letters and digits, lower "
            "case (interfaces are named after it)"
        )
    return name


@dataclass(frozen=True)
class NodeLayout:
    """One node of a site, a separate machine. `number` counts from 0."""

    site: SiteLayout
    number: int

    @property
    def name(self) -> str:
        """The node's name in its cluster."""
        return f"{self.site.name}-n{self.number}"

    @property
    def address(self) -> str:
        """Its InternalIP."""
        return f"10.{self.site.octet}.0.{11 + self.number}"

    @property
    def pod_network(self) -> str:
        """The network of its pods' addresses."""
        return f"10.{self.site.octet}.{128 + self.number}.0/24"

    @property
    def netns(self) -> str:
        """Its network namespace."""
        return f"{self.site.testbed.prefix}-{self.name}"


@dataclass(frozen=True)
class SiteLayout:
    """One site: a control plane that is also the site's router, and nodes. `number` from 1."""

    testbed: Layout
    number: int

    @property
    def name(self) -> str:
        """`site-a`, `site-b`, ..., `site-z`, `site-27`, ..."""
        letter = chr(ord("a") + self.number - 1)
        return f"site-{letter if self.number <= 26 else self.number}"

    @property
    def octet(self) -> int:
        """Second octet of every address of the site."""
        return self.testbed.base_octet + self.number

    @property
    def network(self) -> str:
        """Every address of the site, machines and pods."""
        return f"10.{self.octet}.0.0/16"

    @property
    def address(self) -> str:
        """The address of the control plane inside the site: API server and router."""
        return f"10.{self.octet}.0.1"

    @property
    def wan_address(self) -> str:
        """The address of the router between the sites."""
        return f"10.{self.testbed.base_octet}.0.{self.number}"

    @property
    def load_balancer(self) -> str:
        """The shared address of all Services with a load balancer."""
        return f"10.{self.octet}.0.200"

    @property
    def machine_network(self) -> str:
        """The network of control plane and nodes."""
        return f"10.{self.octet}.0.0/24"

    @property
    def pod_network(self) -> str:
        """All pods of the site."""
        return f"10.{self.octet}.128.0/17"

    @property
    def service_network(self) -> str:
        """Cluster IPs; known inside the site only."""
        return f"10.{self.octet}.64.0/18"

    @property
    def kubernetes_service(self) -> str:
        """Cluster IP of the API server."""
        return f"10.{self.octet}.64.1"

    @property
    def dns_service(self) -> str:
        """Cluster IP of CoreDNS."""
        return f"10.{self.octet}.64.10"

    @property
    def api_server(self) -> str:
        """URL of the API server, also from the machine of the tests."""
        return f"https://{self.address}:{API_PORT}"

    @property
    def netns(self) -> str:
        """The network namespace of control plane and router."""
        return f"{self.testbed.prefix}-{self.name}"

    @property
    def nodes(self) -> tuple[NodeLayout, ...]:
        """Its nodes."""
        return tuple(NodeLayout(self, number) for number in range(self.testbed.nodes_per_site))


@dataclass(frozen=True)
class Layout:
    """The whole testbed."""

    name: str
    site_count: int
    nodes_per_site: int
    base_octet: int
    flat: bool = True
    """Whether pods of different sites reach each other by their own addresses."""

    def __post_init__(self) -> None:
        checked_name(self.name)
        for what, count, least, most in (
            ("sites", self.site_count, 1, MAX_SITES),
            ("nodes per site", self.nodes_per_site, 0, MAX_NODES),
        ):
            if not least <= count <= most:
                raise UnavailableError(f"{count} {what}; allowed: {least} to {most}")

    @property
    def prefix(self) -> str:
        """The prefix of the names of all network namespaces."""
        return prefix(self.name)

    @property
    def hub(self) -> str:
        """The namespace with the bridge between the sites."""
        return f"{self.prefix}-hub"

    @property
    def host_interface(self) -> str:
        """The only interface on the machine itself, through which tests reach the sites."""
        return host_interface(self.name)

    @property
    def host_address(self) -> str:
        """The machine's own address between the sites."""
        return f"10.{self.base_octet}.0.254"

    @property
    def sites(self) -> tuple[SiteLayout, ...]:
        """The sites, in order."""
        return tuple(SiteLayout(self, 1 + index) for index in range(self.site_count))

    def site(self, name: str) -> SiteLayout:
        """The site of that name. Raises: UnavailableError that names the existing ones."""
        for site in self.sites:
            if site.name == name:
                return site
        known = ", ".join(site.name for site in self.sites)
        raise UnavailableError(f"no site {name!r} in testbed {self.name}; there are: {known}")

    def node(self, name: str) -> NodeLayout:
        """The node of that name. Raises: UnavailableError that names the existing ones."""
        nodes = [node for site in self.sites for node in site.nodes]
        for node in nodes:
            if node.name == name:
                return node
        known = ", ".join(node.name for node in nodes)
        raise UnavailableError(f"no node {name!r} in testbed {self.name}; there are: {known}")


def prefix(name: str) -> str:
    """The prefix of the network namespaces of the testbed of that name."""
    return f"testbed-{checked_name(name)}"


def host_interface(name: str) -> str:
    """The interface on the machine itself of the testbed of that name."""
    return f"tb-{checked_name(name)}"


def control_group(name: str) -> str:
    """The control group, in every hierarchy, that contains all its processes."""
    return f"dlion-testbed-{checked_name(name)}"
