"""A testbed: real Kubernetes sites on this machine, which can be started, disturbed and removed.

This module combines the parts: `networks` creates the network, `machines` the machines on it,
`control_plane` and `nodes` their programs, and `removal` removes all of it by name. The tests and
the command line (`__main__`) use it. Not safe for two threads at once.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from dlion_api.errors import UnavailableError
from dlion_local.emulation.compute.resource_owner import ResourceOwner
from testbed import removal
from testbed.addons import VIRTUAL, core_dns, virtual_node
from testbed.binaries import Binaries, build
from testbed.control_plane import ControlPlane
from testbed.groups import Groups
from testbed.image_store import seed
from testbed.images import own_images
from testbed.layout import Layout
from testbed.machines import Machine, reap
from testbed.networks import Rates, Wires, free_base_octet
from testbed.nodes import Node
from testbed.requirements import missing
from testbed.state import State, exclusive, folder_of, known_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from types import TracebackType

    from testbed.kubectl import Kubectl
    from testbed.layout import SiteLayout

DEFAULT_NAME = "dlion"
_NODES_TIMEOUT_S = 180.0  # two cores start up to six API servers with their nodes at once
_INOTIFY_INSTANCES = Path("/proc/sys/fs/inotify/max_user_instances")
_MIN_INOTIFY_INSTANCES = 1024  # a kubelet takes 9, an API server 6; 128, the default, is 6 sites
_DNS_TIMEOUT_S = 90.0
_POLL_S = 0.25


@dataclass(frozen=True)
class Site:
    """One site's cluster."""

    layout: SiteLayout
    control_plane: ControlPlane
    nodes: tuple[Node, ...]

    @property
    def name(self) -> str:
        """`site-a` and so on."""
        return self.layout.name

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.control_plane.kubeconfig

    @property
    def kubectl(self) -> Kubectl:
        """kubectl with the administrator's rights."""
        return self.control_plane.kubectl

    def make_files(self) -> None:
        """Write all keys and configuration."""
        self.control_plane.make_files()
        for node in self.nodes:
            node.make_files()

    def start(self, archives: Iterable[Path] = ()) -> None:
        """Start all that does not run; return when every node is Ready and has these images."""
        self.control_plane.start()
        for node in self.nodes:
            node.start()
            for archive in archives:
                node.load_image(archive)
        self.wait_for_nodes()

    def wait_for_nodes(self) -> None:
        """Wait until every node is Ready.

        Raises: UnavailableError that names those that are not Ready, or whose kubelet has ended,
        with the reason.
        """
        wanted = {node.layout.name for node in self.nodes}
        deadline_s = time.monotonic() + _NODES_TIMEOUT_S
        while late := wanted - self.ready_nodes():
            for node in self.nodes:
                node.require_kubelet()
            if time.monotonic() > deadline_s:
                logs = self.nodes[0].machine.folder / "logs"
                raise UnavailableError(f"not Ready: {', '.join(sorted(late))}; see {logs}")
            time.sleep(_POLL_S)

    def ready_nodes(self) -> set[str]:
        """Names of the nodes that are Ready according to the API server."""
        found = set()
        for item in self.kubectl.get("nodes")["items"]:
            conditions = {c["type"]: c["status"] for c in item["status"].get("conditions", [])}
            if conditions.get("Ready") == "True":
                found.add(str(item["metadata"]["name"]))
        return found

    def add_virtual_nodes(self, count: int) -> None:
        """Let KWOK simulate `count` nodes, virtual-0 upwards; pods there count as running."""
        self.control_plane.start_kwok()
        self.kubectl.apply(*(virtual_node(number) for number in range(count)))
        self.kubectl.wait(
            "--for=condition=Ready", "node", f"--selector={VIRTUAL}=fake", timeout_s=120
        )


def _raise_inotify_limit() -> None:
    """Raise the number of inotify instances per user: a kubelet without one ends."""
    if int(_INOTIFY_INSTANCES.read_text()) < _MIN_INOTIFY_INSTANCES:
        _INOTIFY_INSTANCES.write_text(str(_MIN_INOTIFY_INSTANCES))


class Testbed:
    """A running testbed; a context that removes it at the end."""

    __test__ = False  # pytest must not collect this

    def __init__(self, state: State) -> None:
        self._state = state

    @classmethod
    def up(
        cls,
        *,
        name: str = DEFAULT_NAME,
        sites: int = 1,
        nodes: int = 1,
        flat: bool = True,
        stays: bool = False,
        images: Iterable[Path] = (),
        stores: Mapping[str, Path] | None = None,
    ) -> Self:
        """Start `sites` clusters with `nodes` nodes each, ready to run pods.

        Without nodes there are control planes only, for tests of an API server alone. `stays`: it
        outlives this process, until `down`; otherwise the next `up` of any testbed removes it once
        this process has ended. `flat`: pods of different sites reach each other. `images`: archives
        that every node gets before it is Ready. `stores`: by site, a result of `image_store` that
        its nodes have from the start.

        Raises: UnavailableError that names what the machine lacks, or what did not start.
        """
        if lacking := missing():
            raise UnavailableError("a testbed cannot start here:\n  " + "\n  ".join(lacking))
        binaries = build()
        _raise_inotify_limit()
        with exclusive():
            remove_orphans()
            if left := removal.traces(name, folder_of(name)):
                raise UnavailableError(
                    f"testbed {name} exists already ({left[0]}, ...): remove it first, or "
                    "choose another name"
                )
            layout = Layout(name, sites, nodes, free_base_octet(sites), flat)
            owner = None if stays else ResourceOwner.of_this_process()
            state = State(layout, Rates(), str(binaries.folder), owner)
            state.save()
            try:
                Wires(layout, state.rates).make()
            except BaseException:
                removal.remove(name, state.folder)
                raise
        made = cls(state)
        try:
            made._start_all(images, stores or {})
        except BaseException:
            made.down()
            raise
        return made

    @classmethod
    def load(cls, name: str = DEFAULT_NAME) -> Self:
        """The existing testbed of that name. Raises: UnavailableError if there is none."""
        return cls(State.load(name))

    def down(self) -> None:
        """Remove it. Raises: UnavailableError that names what remains."""
        with exclusive():
            removal.remove(self.layout.name, self._state.folder)
        reap()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.down()

    @property
    def layout(self) -> Layout:
        """Names and addresses."""
        return self._state.layout

    @cached_property
    def binaries(self) -> Binaries:
        """Its programs, helm and kubectl among them."""
        return Binaries(Path(self._state.binaries))

    @cached_property
    def sites(self) -> dict[str, Site]:
        """Every site by name."""
        return {site.name: self._site(site) for site in self.layout.sites}

    def site(self, name: str) -> Site:
        """One site. Raises: UnavailableError that names the existing ones."""
        return self.sites[self.layout.site(name).name]

    def node(self, name: str) -> Node:
        """One node. Raises: UnavailableError that names the existing ones."""
        layout = self.layout.node(name)
        return self.sites[layout.site.name].nodes[layout.number]

    def set_rate(self, site: str, *, up: float | None = None, down: float | None = None) -> None:
        """Limit a site's traffic to and from all others, in Mbit/s; None for no limit."""
        layout = self.layout.site(site)
        self._state.rates.up[site], self._state.rates.down[site] = up, down
        self._state.save()
        self._wires.shape(layout)

    def join_pods(self) -> None:
        """Connect the pods of separate sites, as a network that joins clusters does."""
        self._wires.join_pods()

    def cut(self, first: str, second: str) -> None:
        """Block all traffic between two sites, in both directions."""
        self._set_cut(first, second, cut=True)

    def mend(self, first: str, second: str) -> None:
        """Undo `cut`."""
        self._set_cut(first, second, cut=False)

    def cut_site(self, site: str) -> None:
        """Cut a site off from all others; the machine of the tests can still reach it."""
        self._set_site_cut(site, cut=True)

    def mend_site(self, site: str) -> None:
        """Undo `cut_site`, and every `cut` of that site."""
        self._set_site_cut(site, cut=False)

    def cut_node(self, node: str) -> None:
        """Unplug a node; its programs continue."""
        self._set_node_cut(node, cut=True)

    def mend_node(self, node: str) -> None:
        """Plug the node in."""
        self._set_node_cut(node, cut=False)

    def kill_node(self, node: str) -> None:
        """Cut a node's power."""
        self.node(node).machine.power_off()

    def start_node(self, node: str) -> None:
        """Power a node on again; its disk is unchanged. Does not wait until it is Ready."""
        self.node(node).start()

    def kill_site(self, site: str) -> None:
        """Cut the power of a whole site, control plane and nodes."""
        found = self.site(site)
        for machine in (found.control_plane.machine, *(n.machine for n in found.nodes)):
            machine.power_off()

    def start_site(self, site: str) -> None:
        """Power a whole site on again; return when its nodes are Ready."""
        self.site(site).start()

    def load_image(self, archive: Path, sites: Iterable[str] = ()) -> None:
        """Import an image archive on every node of these sites, or of all."""
        chosen = [self.site(name) for name in sites] or list(self.sites.values())
        for node in (node for site in chosen for node in site.nodes):
            node.load_image(archive)

    def status(self) -> dict[str, Any]:
        """The whole state, for people and programs; sends no request to an API server."""
        rates = self._state.rates
        return {
            "name": self.layout.name,
            "flat": self.layout.flat,
            "folder": str(self._state.folder),
            "binaries": self._state.binaries,
            "cuts": rates.cuts,
            "sites": [
                {
                    "name": site.name,
                    "apiServer": site.layout.api_server,
                    "kubeconfig": str(site.kubeconfig),
                    "podNetwork": site.layout.pod_network,
                    "upMbitPerS": rates.up.get(site.name),
                    "downMbitPerS": rates.down.get(site.name),
                    "programs": site.control_plane.machine.programs(),
                    "nodes": [
                        {
                            "name": node.layout.name,
                            "address": node.layout.address,
                            "podNetwork": node.layout.pod_network,
                            "cut": node.layout.name in rates.cut_nodes,
                            "programs": node.machine.programs(),
                        }
                        for node in site.nodes
                    ],
                }
                for site in self.sites.values()
            ],
        }

    @property
    def _wires(self) -> Wires:
        return Wires(self.layout, self._state.rates)

    def _start_all(self, images: Iterable[Path], stores: Mapping[str, Path]) -> None:
        folder = self._state.folder / "images"
        folder.mkdir(exist_ok=True)
        archives = [
            image.write(folder / f"{number}.tar")
            for number, image in enumerate(own_images(self.binaries))
            if self.layout.nodes_per_site
        ]
        archives += images

        def start(site: Site) -> None:
            site.make_files()
            for node in site.nodes if site.name in stores else ():
                seed(stores[site.name], node.machine.folder / "lib" / "containerd")
            site.start(archives)
            if site.nodes:
                site.kubectl.apply(*core_dns(site.layout))

        def wait(site: Site) -> None:
            site.kubectl.wait(
                "--for=condition=Available", "deployment/coredns", "--namespace=kube-system",
                timeout_s=_DNS_TIMEOUT_S,
            )  # fmt: skip

        self._at_every_site(start)
        if self.layout.nodes_per_site:
            self._at_every_site(wait)

    def _at_every_site(self, action: Callable[[Site], None]) -> None:
        with ThreadPoolExecutor(max_workers=8) as pool:
            for done in [pool.submit(action, site) for site in self.sites.values()]:
                done.result()

    def _site(self, layout: SiteLayout) -> Site:
        keys = self._state.folder / layout.name
        plane = ControlPlane(layout, self._machine(layout.name, layout.netns), self.binaries, keys)
        nodes = tuple(
            Node(
                node,
                self._machine(node.name, node.netns),
                self.binaries,
                self._state.folder / node.name,
                keys,
            )
            for node in layout.nodes
        )
        return Site(layout, plane, nodes)

    def _machine(self, name: str, netns: str) -> Machine:
        folder = self._state.folder / "machines" / name
        groups = Groups(self.layout.name, name)
        return Machine(name, netns, folder, groups, self.binaries.path("pause"))

    def _set_cut(self, first: str, second: str, *, cut: bool) -> None:
        sites = [self.layout.site(first), self.layout.site(second)]
        if first == second:
            raise UnavailableError(f"{first} cannot be cut off from itself; name two sites")
        _put(self._state.rates.cuts, sorted([first, second]), there=cut)
        self._state.save()
        for site in sites:
            self._wires.shape(site)

    def _set_site_cut(self, site: str, *, cut: bool) -> None:
        self.layout.site(site)
        for other in self.layout.sites:
            if other.name != site:
                _put(self._state.rates.cuts, sorted([site, other.name]), there=cut)
        self._state.save()
        for each in self.layout.sites:
            self._wires.shape(each)

    def _set_node_cut(self, node: str, *, cut: bool) -> None:
        layout = self.layout.node(node)
        _put(self._state.rates.cut_nodes, node, there=cut)
        self._state.save()
        self._wires.plug(layout)


def remove_orphans() -> list[str]:
    """Remove testbeds whose owner has ended; return their names."""
    removed = []
    for name in known_names():
        try:
            owner = State.load(name).owner
        except UnavailableError:  # half made: `down` removes it
            continue
        if owner is not None and not owner.alive():
            removal.remove(name, folder_of(name))
            removed.append(name)
    return removed


def _put(values: list[Any], value: object, *, there: bool) -> None:
    if there and value not in values:
        values.append(value)
    elif not there and value in values:
        values.remove(value)
