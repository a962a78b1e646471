"""The network without shaping, and the client of the relay process."""

import itertools
import random
import socket
from pathlib import Path

from dlion_api.errors import UnavailableError
from dlion_api.names import Rank
from dlion_environments.plan import Conditions, Plan
from dlion_local.emulation.line_process import LineProcess
from dlion_local.emulation.network.relay import HOST, links_to_json

PURPOSES = ("exchange", "measuring")
_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


class UnshapedNetwork:
    """All workers on loopback, without shaping. Networks that shape derive from it."""

    def start(self) -> None:
        """Set up the links."""

    def apply(self, conditions: Conditions) -> None:
        """Apply these rates, latencies and cuts; connections stay open."""

    def enter_arguments(self, rank: Rank) -> list[str]:  # noqa: ARG002 (nothing to enter)
        """Flags for `dlion_local.emulation.network.enter`; empty: workers share this namespace."""
        return []

    def host(self, rank: Rank) -> str:  # noqa: ARG002 (one for all)
        """Address at which the worker listens, and at which peers reach it without a relay."""
        return HOST

    def coordinator_host(self) -> str:
        """Address of the runner that every worker reaches over unshaped links."""
        return HOST

    def port(self, rank: Rank, purpose: str) -> int:  # noqa: ARG002 (the kernel chooses)
        """Port at which the worker must listen for one of `PURPOSES`; 0: any."""
        return 0

    def link_addresses(self, rank: Rank) -> dict[str, str]:  # noqa: ARG002 (nothing between)
        """Addresses to dial instead of the announced ones, for `WorkerConfig.link_addresses`.

        Keys are `"<peer rank>/exchange"` and `"<peer rank>/measuring"`.
        """
        return {}

    def listener(self, rank: Rank) -> socket.socket:
        """A listening socket in place of the worker's sidecar, for a measurement."""
        return socket.create_server((self.host(rank), self.port(rank, "measuring")))

    def dial(self, rank: Rank, peer: Rank, port: int) -> socket.socket:  # noqa: ARG002
        """A connection from `rank` to the port of the peer's `listener`."""
        return socket.create_connection((self.host(peer), port), timeout=10)

    def failure(self) -> str:
        """Why the network does not work; empty if it does."""
        return ""

    def close(self) -> None:
        """Remove everything. May be called twice, and after a failed start."""


class RelayNetwork(UnshapedNetwork):
    """All workers on loopback, with all connections through one relay."""

    def __init__(self, plan: Plan, work_dir: Path) -> None:
        self._plan = plan
        self._ports: dict[tuple[Rank, str], int] = {}
        self._addresses: dict[Rank, dict[str, str]] = {w.rank: {} for w in plan.workers}
        self.process = LineProcess("dlion_local.emulation.network.relay", work_dir)

    def start(self) -> None:
        """Choose the workers' ports and start the relay."""
        ranks = [worker.rank for worker in self._plan.workers]
        keys = list(itertools.product(ranks, PURPOSES))
        self._ports = dict(zip(keys, free_ports(len(keys)), strict=True))
        links = [
            (dialler, target, purpose)
            for dialler, target, purpose in itertools.product(ranks, ranks, PURPOSES)
            if dialler != target
        ]
        self.process.start()
        answer = self.process.call({
            "conditions": links_to_json(self._plan.initial),
            "links": [[one, other, self._ports[other, purpose]] for one, other, purpose in links],
        })  # fmt: skip
        for (dialler, target, purpose), port in zip(links, answer["ports"], strict=True):
            self._addresses[dialler][f"{target}/{purpose}"] = f"{HOST}:{port}"

    def apply(self, conditions: Conditions) -> None:
        self.process.call({"conditions": links_to_json(conditions)})

    def port(self, rank: Rank, purpose: str) -> int:
        return self._ports[rank, purpose]

    def link_addresses(self, rank: Rank) -> dict[str, str]:
        return self._addresses[rank]

    def dial(self, rank: Rank, peer: Rank, port: int) -> socket.socket:  # noqa: ARG002
        host, _, relayed = self._addresses[rank][f"{peer}/measuring"].rpartition(":")
        return socket.create_connection((host, int(relayed)), timeout=10)

    def failure(self) -> str:
        return self.process.failure()

    def close(self) -> None:
        self.process.close()


def free_ports(count: int) -> list[int]:
    """Ports that are free and outside the range of outgoing connections.

    A port from `bind(0)` could be reassigned before its worker starts.
    """
    lowest_ephemeral = int(_EPHEMERAL_PORTS.read_text().split()[0])
    candidates = list(range(10_000, max(lowest_ephemeral, 20_000)))
    random.shuffle(candidates)
    ports: list[int] = []
    for port in candidates:
        if len(ports) == count:
            return ports
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:  # taken
                continue
        ports.append(port)
    raise UnavailableError(f"there are no {count} free ports between 10000 and {lowest_ephemeral}")
