"""The network of a testbed: network namespaces, bridges, routes, and the rates of links.

A *hub* namespace has a bridge. Every site's router (the namespace of its control plane) has `eth0`
on it. The htb trees of `dlion run` (`dlion_local.emulation.network.traffic_shaping`) shape its
traffic twice: from the site, and from the hub to the site. Inside a site a second bridge joins the
nodes, unshaped. One veth pair leads to the machine itself, also unshaped and without cuts: the
tests can reach a site that is cut off from the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from ipaddress import ip_network
from pathlib import Path
from typing import TYPE_CHECKING

from dlion_api.errors import UnavailableError
from dlion_api.names import Rank
from dlion_environments.plan import Pipe
from dlion_local.emulation.network.in_namespace import in_namespace, run_batch, run_tool
from dlion_local.emulation.network.namespaces import (
    CONGESTION_CONTROLS,
    prepare_namespace,
    routed_networks,
)
from dlion_local.emulation.network.traffic_shaping import (
    ANY,
    UNLIMITED_BYTES_PER_S,
    ShapedInterface,
    gso_bytes,
)

if TYPE_CHECKING:
    from testbed.layout import Layout, NodeLayout, SiteLayout

BYTES_PER_MBIT = 125_000
_FIRST_OCTET, _LAST_OCTET = 96, 250


def free_base_octet(site_count: int) -> int:
    """A B such that 10.B to 10.(B + site_count) overlap with no route of this machine.

    Raises: UnavailableError if there is none.
    """
    taken = routed_networks()
    for base in range(_FIRST_OCTET, _LAST_OCTET - site_count):
        wanted = [ip_network(f"10.{base + k}.0.0/16") for k in range(site_count + 1)]
        if not any(mine.overlaps(other) for mine in wanted for other in taken):
            return base
    raise UnavailableError(
        f"no {site_count + 1} free /16 networks in a row under 10.0.0.0/8: see `ip route`"
    )


@dataclass
class Rates:
    """The rates of links, in Mbit/s, and the cuts; None for no limit."""

    up: dict[str, float | None] = field(default_factory=dict)
    """By site: the rate to all other sites."""
    down: dict[str, float | None] = field(default_factory=dict)
    """By site: the rate from all other sites."""
    cuts: list[list[str]] = field(default_factory=list)
    """Pairs of sites without a connection, each in the order of its names."""
    cut_nodes: list[str] = field(default_factory=list)
    """Unplugged nodes."""


class Wires:
    """Creates and changes the network of one testbed; `removal` removes it by name."""

    def __init__(self, layout: Layout, rates: Rates) -> None:
        self._layout = layout
        self._rates = rates

    def make(self) -> None:
        """Create the whole network. Raises: UnavailableError with the tool's output."""
        layout = self._layout
        namespaces = [layout.hub]
        for site in layout.sites:
            namespaces += [site.netns, *(node.netns for node in site.nodes)]
        run_batch("ip", None, [
            *(f"netns add {name}" for name in namespaces),
            f"link add {layout.host_interface} type veth peer name host netns {layout.hub}",
            f"addr add {layout.host_address}/24 dev {layout.host_interface}",
            f"link set {layout.host_interface} up",
        ])  # fmt: skip
        for name in namespaces:
            in_namespace(name, prepare_namespace)
        run_batch("ip", layout.hub, [
            "link set lo up",
            "link add br0 type bridge stp_state 0 forward_delay 0 mcast_snooping 0",
            "link set br0 up",
            "link set host master br0 up",
        ])  # fmt: skip
        for site in layout.sites:
            self._make_site(site)
        run_batch("ip", None, [
            f"route add {site.network if layout.flat else site.machine_network} "
            f"via {site.wan_address} dev {layout.host_interface}"
            for site in layout.sites
        ])  # fmt: skip
        for site in layout.sites:
            self.shape(site)

    def _make_site(self, site: SiteLayout) -> None:
        layout, base = self._layout, self._layout.base_octet
        run_batch("ip", layout.hub, [
            f"link add {_port(site)} type veth peer name eth0 netns {site.netns}",
            f"link set {_port(site)} master br0 up",
        ])  # fmt: skip
        in_namespace(site.netns, _forward)
        run_batch("ip", site.netns, [
            "link set lo up",
            f"addr add 10.{base}.0.{site.number}/24 dev eth0",
            "link set eth0 up",
            "link add br0 type bridge stp_state 0 forward_delay 0 mcast_snooping 0",
            f"addr add {site.address}/24 dev br0",
            "link set br0 up",
            *(
                f"route add {other.network if layout.flat else other.machine_network} "
                f"via {other.wan_address} dev eth0"
                for other in layout.sites
                if other != site
            ),
        ])  # fmt: skip
        for node in site.nodes:
            _make_node(node)
        if not layout.flat:  # the world outside knows no pods: they leave under the router's name
            _source_nat(site, "--append", jump="MASQUERADE")

    def shape(self, site: SiteLayout) -> None:
        """Apply the rates and cuts of one site; connections stay.

        The trees are recreated each time, so that only the rates have to be stored.
        """
        others = {Rank(o.number): o.network for o in self._layout.sites if o != site}
        if not others:
            return
        cut = frozenset(
            Rank(self._layout.site(name).number)
            for pair in self._rates.cuts
            if site.name in pair
            for name in pair
            if name != site.name
        )
        towards = {peer: (ANY, network) for peer, network in others.items()}
        back = {peer: (network, ANY) for peer, network in others.items()}
        for namespace, device, ends, mbit_per_s in (
            (site.netns, "eth0", towards, self._rates.up.get(site.name)),
            (self._layout.hub, _port(site), back, self._rates.down.get(site.name)),
        ):
            rate = UNLIMITED_BYTES_PER_S if mbit_per_s is None else mbit_per_s * BYTES_PER_MBIT
            run_batch("tc", namespace, [f"qdisc del dev {device} root"], check=False)
            run_batch("ip", namespace, [f"link set {device} gso_max_size {gso_bytes(rate)}"])
            tree = ShapedInterface(
                namespace, device, ends, unshaped_address=self._layout.host_address
            )
            tree.start([Pipe(frozenset(others), rate)])
            tree.set_cuts(cut)

    def join_pods(self) -> None:
        """Route pods of separate sites to each other, under their own addresses."""
        for site in self._layout.sites:
            others = [other for other in self._layout.sites if other != site]
            run_batch("ip", site.netns, [
                f"route replace {other.pod_network} via {other.wan_address} dev eth0"
                for other in others
            ])  # fmt: skip
            for other in others:
                _source_nat(site, "--insert", "--destination", other.pod_network, jump="ACCEPT")

    def plug(self, node: NodeLayout) -> None:
        """Plug the node in or out, according to `Rates.cut_nodes`."""
        state = "down" if node.name in self._rates.cut_nodes else "up"
        run_batch("ip", node.site.netns, [f"link set n{node.number} {state}"])


def _make_node(node: NodeLayout) -> None:
    site = node.site
    run_batch("ip", site.netns, [
        f"link add n{node.number} type veth peer name eth0 netns {node.netns}",
        f"link set n{node.number} master br0 up",
        f"route add {node.pod_network} via {node.address} dev br0",
    ])  # fmt: skip
    in_namespace(node.netns, _forward)
    run_batch("ip", node.netns, [
        "link set lo up",
        f"addr add {node.address}/24 dev eth0",
        "link set eth0 up",
        f"route add default via {site.address} dev eth0",
        *(
            f"route add {other.pod_network} via {other.address} dev eth0"
            for other in site.nodes
            if other != node
        ),
    ])  # fmt: skip


def congestion_control() -> str:
    """The congestion control of pods. The kernel's default may be BBR, which treats losses
    differently."""
    allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().split()
    return next(name for name in (*CONGESTION_CONTROLS, *allowed) if name in allowed)


def _port(site: SiteLayout) -> str:
    """The hub's end of the site's cable."""
    return f"s{site.number}"


def _forward() -> None:
    """Turn the calling thread's namespace into a router.

    Its bridge's traffic passes iptables, for a pod that calls a service which is served on the same
    node.
    """
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    bridged = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")
    if bridged.exists():
        bridged.write_text("1")


def _source_nat(site: SiteLayout, change: str, *where: str, jump: str) -> None:
    """The translation of the addresses of pods that call out of the site."""
    run_tool(
        "nsenter", f"--net=/run/netns/{site.netns}", "iptables", "--table", "nat", change,
        "POSTROUTING", "--source", site.pod_network, "--out-interface", "eth0", *where,
        "--jump", jump,
    )  # fmt: skip
