"""One network namespace per worker, joined by a bridge, with htb rates.

Layout of one run: a *hub* namespace holds a bridge. A veth pair joins each worker's namespace to it
(`eth0` in the worker, `w<rank>` in the hub). A worker's uplink is shaped at `eth0`, its downlink at
the hub's end. Workers of a site that share a pipe have a bridge of their own in the hub, `site<n>`.
A veth pair joins it to the first bridge: their uplink is shaped at `up<n>`, their downlink at
`down<n>`. One more, unshaped veth pair leads from the hub to the runner's namespace, so that
workers reach the coordinator. Nothing else is added to the runner's namespace.

Uses the `ip` and `tc` commands (`docs/environments.md` explains why not netlink). There is no
latency: netem is missing from too many kernels. `emulation.measurement` records the latencies that
were not emulated.
"""

import fcntl
import itertools
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from ipaddress import IPv4Network, ip_network
from pathlib import Path
from typing import Final

from dlion_api.errors import Problem, SpecError, UnavailableError
from dlion_api.names import Rank
from dlion_environments.plan import Conditions, Pipe, Plan
from dlion_local.emulation.compute.resource_owner import ResourceOwner
from dlion_local.emulation.network.in_namespace import in_namespace, run_batch, run_tool
from dlion_local.emulation.network.relay_network import UnshapedNetwork
from dlion_local.emulation.network.traffic_shaping import ANY, ShapedInterface, gso_bytes

log = logging.getLogger(__name__)

MAX_WORKERS = 250
MAX_SITE_LEAVES = 1000
"""How many links of a site may have a leaf each; if more, each of its workers has one, and shares
less evenly. tc takes 0.3 s for a thousand leaves and 4.6 s for four thousand."""
LOCK_FILE: Final = Path("/run/dlion-subnets.lock")
"""It stays behind, empty. A user who can open a file can lock it, so only root can open this."""
LOCK_TIMEOUT_S: Final = 30.0
"""A run of 250 workers creates its links in a few seconds."""
_LOCK_POLL_S = 0.05
_RUNNER_HOST = 254
_BRIDGE = "up type bridge stp_state 0 forward_delay 0 mcast_snooping 0"
# The kernel's default may be BBR, which ignores losses and fills queues differently. If cubic is
# not in net.ipv4.tcp_allowed_congestion_control, a namespace can only choose reno; at such short
# round trips both behave the same.
CONGESTION_CONTROLS = ("cubic", "reno")
# Keeps neighbour discovery and router solicitation out of the counted bytes.
_IPV6_OFF = ("ipv6/conf/all/disable_ipv6", "ipv6/conf/default/disable_ipv6")


def namespaces_unavailable() -> str:
    """Why network namespaces cannot be used, and what to do; empty if they can."""
    if os.geteuid() != 0:
        return "not root: run as root to get network namespaces"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"no {' and no '.join(missing)} command: install iproute2"
    if not os.access("/proc/sys/net/ipv4/tcp_congestion_control", os.W_OK):
        return "/proc/sys is read-only: run in a privileged container"
    return ""


class NamespaceNetwork(UnshapedNetwork):
    """The namespaces, bridge and rates of one run, from `start` to `close`."""

    _subnet: IPv4Network

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._shaped: dict[tuple[Rank, bool], ShapedInterface] = {}
        """Interfaces by rank and whether it is the downlink."""
        self._sites = [*dict.fromkeys(site for site, _ in _site_pipes(plan.initial))]
        """The workers of each site that share a pipe."""
        self._shaped_sites: dict[tuple[frozenset[Rank], bool], ShapedInterface] = {}
        """Interfaces by the workers of the site and whether it is their downlink."""
        self._prefix = ""

    def start(self) -> None:
        """Create everything, after removing what crashed runs left.

        Raises UnavailableError with the tool's error output, or if other runs keep this one from
        choosing a subnet, and SpecError for too many workers.
        """
        if len(self._plan.workers) > MAX_WORKERS:
            raise SpecError([
                Problem(
                    path="spec.sites",
                    message="more workers than one machine's network namespaces are laid out for",
                    value=str(len(self._plan.workers)),
                    allowed=f"at most {MAX_WORKERS}",
                    advice="Use fewer workers, or run unprivileged (through the relay).",
                )
            ])  # fmt: skip
        remove_stale()
        self._prefix = ResourceOwner.of_this_process().next_prefix()
        try:
            with subnet_lock():
                self._subnet = free_subnet()
                self._make_links()
            self._shape_links()
            self.apply(self._plan.initial)
        except BaseException:
            self.close()
            raise

    def _make_links(self) -> None:
        ranks = [worker.rank for worker in self._plan.workers]
        run_batch("ip", None, [
            f"netns add {self.hub}",
            *(f"netns add {self.namespace(rank)}" for rank in ranks),
            f"link add {self.runner_interface} type veth peer name runner netns {self.hub}",
            f"addr add {self.coordinator_host()}/24 dev {self.runner_interface}",
            f"link set {self.runner_interface} up",
        ])  # fmt: skip
        in_namespace(self.hub, _turn_ipv6_off)
        numbers = range(len(self._sites))
        bridges = {rank: f"site{n}" for n in numbers for rank in self._sites[n]}
        run_batch("ip", self.hub, [
            "link set lo up",
            *(f"link add {name} {_BRIDGE}" for name in ("br0", *(f"site{n}" for n in numbers))),
            "link set runner master br0 up",
            *(f"link add up{n} type veth peer name down{n}" for n in numbers),
            *(f"link set up{n} master site{n} up" for n in numbers),
            *(f"link set down{n} master br0 up" for n in numbers),
            *(
                f"link add w{rank} type veth peer name eth0 netns {self.namespace(rank)}"
                for rank in ranks
            ),
            *(f"link set w{rank} master {bridges.get(rank, 'br0')} up" for rank in ranks),
        ])  # fmt: skip
        for rank in ranks:
            in_namespace(self.namespace(rank), prepare_namespace)
            run_batch("ip", self.namespace(rank), [
                "link set lo up",
                f"addr add {self.host(rank)}/24 dev eth0",
                f"link set eth0 gso_max_size {gso_bytes(_slowest(self._plan, rank))} up",
            ])  # fmt: skip

    def _shape_links(self) -> None:
        hosts = {worker.rank: self.host(worker.rank) for worker in self._plan.workers}
        for worker in self._plan.initial.workers:
            own = hosts[worker.rank]
            peers = {rank: host for rank, host in hosts.items() if rank != worker.rank}
            for down in (False, True):
                interface = ShapedInterface(
                    namespace=self.hub if down else self.namespace(worker.rank),
                    interface=f"w{worker.rank}" if down else "eth0",
                    ends={p: (host, own) if down else (own, host) for p, host in peers.items()},
                    unshaped_address=self.coordinator_host(),
                )
                interface.start(worker.downlink if down else worker.uplink)
                self._shaped[worker.rank, down] = interface
        for (site, down), pipe in _site_pipes(self._plan.initial).items():
            senders, receivers = (pipe.peers, site) if down else (site, pipe.peers)
            links = itertools.product(sorted(senders), sorted(receivers))
            ends = [(hosts[sender], hosts[receiver]) for sender, receiver in links]
            if len(ends) > MAX_SITE_LEAVES:
                ends = [(ANY, hosts[rank]) if down else (hosts[rank], ANY) for rank in sorted(site)]
            interface = ShapedInterface(
                namespace=self.hub,
                interface=f"{'down' if down else 'up'}{self._sites.index(site)}",
                ends={Rank(n): both for n, both in enumerate(ends)},
                unshaped_address=self.coordinator_host(),
            )
            interface.start([_over_all(interface, pipe)])
            self._shaped_sites[site, down] = interface

    def apply(self, conditions: Conditions) -> None:
        for worker in conditions.workers:
            for down in (False, True):
                interface = self._shaped[worker.rank, down]
                interface.set_rates(worker.downlink if down else worker.uplink)
                interface.set_cuts(worker.cut_peers)
        for of_site, pipe in _site_pipes(conditions).items():
            interface = self._shaped_sites[of_site]
            interface.set_rates([_over_all(interface, pipe)])

    @property
    def hub(self) -> str:
        """Name of the namespace that holds the bridge."""
        return f"{self._prefix}-hub"

    @property
    def runner_interface(self) -> str:
        """The only interface in the runner's namespace; at most 15 characters."""
        return f"dl{os.getpid()}x{self._prefix.rpartition('-')[2]}"

    def namespace(self, rank: Rank) -> str:
        return f"{self._prefix}-w{rank}"

    def enter_arguments(self, rank: Rank) -> list[str]:
        return ["--netns", self.namespace(rank)]

    def host(self, rank: Rank) -> str:
        return str(self._subnet[rank + 1])

    def coordinator_host(self) -> str:
        """The runner's address on the bridge."""
        return str(self._subnet[_RUNNER_HOST])

    def listener(self, rank: Rank) -> socket.socket:
        return in_namespace(self.namespace(rank), partial(super().listener, rank))

    def dial(self, rank: Rank, peer: Rank, port: int) -> socket.socket:
        return in_namespace(self.namespace(rank), partial(super().dial, rank, peer, port))

    def close(self) -> None:
        self._shaped.clear()
        self._shaped_sites.clear()
        if self._prefix:
            remove(self._prefix, self.runner_interface)
            self._prefix = ""


def remove_stale() -> list[str]:
    """Remove the namespaces of runs whose owner has ended. Return the removed prefixes.

    A name contains the owner's process id and start time, because process ids are reused.
    """
    prefixes = {
        name.rpartition("-")[0]
        for name in _namespaces()
        if (owner := ResourceOwner.parse(name)) is not None and not owner.alive()
    }
    for prefix in prefixes:
        log.warning("removing network namespaces of a run that has ended: %s-*", prefix)
        remove(prefix, "")
    return sorted(prefixes)


def remove(prefix: str, runner_interface: str) -> None:
    """Remove the namespaces of that prefix and their contents."""
    if runner_interface and Path(f"/sys/class/net/{runner_interface}").exists():
        # Delete it now: the kernel removes it with a delay when its namespace goes.
        run_batch("ip", None, [f"link del {runner_interface}"], check=False)
    names = [name for name in _namespaces() if name.startswith(f"{prefix}-")]
    run_batch("ip", None, [f"netns del {name}" for name in names], check=False)


def free_subnet() -> IPv4Network:
    """A private /24 that overlaps with no route of the runner's namespace.

    Raises UnavailableError if there is none.
    """
    taken = routed_networks()
    for candidate in ip_network("10.213.0.0/16").subnets(new_prefix=24):
        if not any(candidate.overlaps(other) for other in taken):
            assert isinstance(candidate, IPv4Network)
            return candidate
    raise UnavailableError(
        "no free subnet among 10.213.0.0/16: every /24 of it overlaps with a route of this "
        "machine. Remove what uses them, or run unprivileged (through the relay)"
    )


def routed_networks() -> list[IPv4Network]:
    """Networks in the routes of the runner's namespace, without the default route."""
    routes = json.loads(run_tool("ip", "-j", "-4", "route", "show", "table", "all"))
    return [
        IPv4Network(route["dst"], strict=False)
        for route in routes
        if route.get("dst", "default") != "default"
    ]


def _namespaces() -> list[str]:
    folder = Path("/run/netns")
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def _turn_ipv6_off() -> None:
    for name in _IPV6_OFF:
        path = Path("/proc/sys/net") / name
        if path.exists():
            path.write_text("1")


def prepare_namespace() -> None:
    """Disable IPv6 and BBR in the namespace of the calling thread."""
    _turn_ipv6_off()
    for name in CONGESTION_CONTROLS:
        try:
            Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text(name)
        except (PermissionError, FileNotFoundError):  # not allowed in a namespace; not built in
            continue
        return


def _site_pipes(conditions: Conditions) -> dict[tuple[frozenset[Rank], bool], Pipe]:
    """The pipes of sites, by the workers that share each and whether it is their downlink."""
    return {
        (pipe.sharers, down): pipe
        for worker in conditions.workers
        for down in (False, True)
        for pipe in (worker.downlink if down else worker.uplink)
        if pipe.sharers
    }


def _over_all(interface: ShapedInterface, pipe: Pipe) -> Pipe:
    """The pipe as that of all links of a site's interface."""
    return replace(pipe, peers=frozenset(interface.ends))


def _slowest(plan: Plan, rank: Rank) -> float:
    every: list[Pipe] = []
    for conditions in (plan.initial, *(change.conditions for change in plan.changes)):
        every += conditions.worker(rank).uplink
    return min((pipe.bytes_per_s for pipe in every), default=float("inf"))


@contextmanager
def subnet_lock(path: Path = LOCK_FILE, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """Keep other runs on this machine from choosing a subnet, until the route of this one exists.

    Raises UnavailableError, with what to do, if another process holds it for that long, or the file
    cannot be opened.
    """
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        raise UnavailableError(
            f"cannot open {path}: {error.strerror}. Remove it if it is a link or a folder, and "
            f"make {path.parent} writable for root"
        ) from error
    try:
        deadline_s = time.monotonic() + timeout_s
        while not _acquired(descriptor):
            if time.monotonic() > deadline_s:
                raise UnavailableError(
                    f"another process has held {path} for {timeout_s:g} s: a run that creates its "
                    f"network, or one that hangs. `fuser -v {path}` names it. Wait until it has "
                    "ended, or end it"
                )
            time.sleep(_LOCK_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _acquired(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
