"""Client of the relay process, and the network without shaping."""

from __future__ import annotations

import itertools
import json
import random
import socket
from dataclasses import dataclass, field
from pathlib import Path

from dlion_api.errors import UnavailableError
from dlion_api.names import Rank
from dlion_environments.plan import Conditions, Plan
from dlion_local.emulation.line_process import LineProcess
from dlion_local.emulation.network.conditions_json import links_to_json
from dlion_local.emulation.network.relay import HOST

PURPOSES = ("exchange", "measuring")
_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


@dataclass
class RelayNetwork:
    """All workers on loopback, with all connections through one relay."""

    plan: Plan
    work_dir: Path
    _process: LineProcess | None = None
    _ports: dict[tuple[Rank, str], int] = field(default_factory=dict)
    _addresses: dict[Rank, dict[str, str]] = field(default_factory=dict)

    def start(self) -> None:
        """Choose the workers' ports and start the relay."""
        ranks = [worker.rank for worker in self.plan.workers]
        keys = list(itertools.product(ranks, PURPOSES))
        self._ports = dict(zip(keys, free_ports(len(keys)), strict=True))
        links = [
            {
                "dialler": dialler,
                "target": target,
                "purpose": purpose,
                "target_port": self._ports[target, purpose],
            }
            for dialler, target, purpose in itertools.product(ranks, ranks, PURPOSES)
            if dialler != target
        ]
        self.work_dir.mkdir(parents=True, exist_ok=True)
        config = self.work_dir / "relay.json"
        document = {"conditions": links_to_json(self.plan.initial), "links": links}
        config.write_text(json.dumps(document), encoding="utf-8")
        self._process = LineProcess(
            "dlion_local.emulation.network.relay",
            "--config",
            str(config),
            errors_path=self.work_dir / "relay.log",
        )
        for link, port in zip(links, self._process.read()["ports"], strict=True):
            addresses = self._addresses.setdefault(Rank(int(str(link["dialler"]))), {})
            addresses[f"{link['target']}/{link['purpose']}"] = f"{HOST}:{port}"

    def apply(self, conditions: Conditions) -> None:
        """Apply these rates, latencies and cuts; connections stay open."""
        self._relay.call({"apply": links_to_json(conditions)})

    @property
    def _relay(self) -> LineProcess:
        if self._process is None:
            raise UnavailableError("the relay is not running: call start() first")
        return self._process

    @property
    def pid(self) -> int:
        """The relay's process id."""
        return self._relay.pid

    def enter_arguments(self, rank: Rank) -> list[str]:  # noqa: ARG002 (nothing to enter)
        """Empty: workers share the runner's namespace."""
        return []

    def host(self, rank: Rank) -> str:  # noqa: ARG002 (one for all)
        """The loopback address."""
        return HOST

    def coordinator_host(self) -> str:
        """The loopback address: the coordinator is not behind the relay."""
        return HOST

    def exchange_port(self, rank: Rank) -> int:
        """Port to which the relay forwards exchange connections."""
        return self._ports[rank, "exchange"]

    def measuring_port(self, rank: Rank) -> int:
        """Port to which the relay forwards probes."""
        return self._ports[rank, "measuring"]

    def link_addresses(self, rank: Rank) -> dict[str, str]:
        """The relay's ports for the peers of that worker."""
        return dict(self._addresses[rank])

    def listener(self, rank: Rank) -> socket.socket:
        """A listening socket in place of the worker's sidecar, for a measurement."""
        return socket.create_server((HOST, self.measuring_port(rank)))

    def dial(self, rank: Rank, peer: Rank, port: int) -> socket.socket:  # noqa: ARG002
        """A connection from `rank` to the peer's `listener`, through the relay."""
        host, _, relayed = self._addresses[rank][f"{peer}/measuring"].rpartition(":")
        return socket.create_connection((host, int(relayed)), timeout=10)

    def interface_bytes(self, rank: Rank) -> tuple[int, int]:
        """Stream bytes relayed from and to the worker."""
        passed = self._relay.call({})["passed_bytes"]
        return (
            sum(size for sender, _, size in passed if sender == rank),
            sum(size for _, receiver, size in passed if receiver == rank),
        )

    def failure(self) -> str:
        """Why the relay does not work; empty if it does."""
        if self._process is not None and self._process.ended():
            return "the relay process has ended: see relay.log in the run's work folder"
        return ""

    def close(self) -> None:
        """End the relay. May be called twice."""
        if self._process is not None:
            self._process.close()
            self._process = None


class UnshapedNetwork:
    """All workers on loopback, without shaping."""

    def start(self) -> None:
        """Nothing to start."""

    def apply(self, conditions: Conditions) -> None:
        """Nothing to apply."""

    def enter_arguments(self, rank: Rank) -> list[str]:  # noqa: ARG002 (nothing to enter)
        """None."""
        return []

    def host(self, rank: Rank) -> str:  # noqa: ARG002 (one for all)
        """The loopback address."""
        return HOST

    def coordinator_host(self) -> str:
        """The loopback address."""
        return HOST

    def exchange_port(self, rank: Rank) -> int:  # noqa: ARG002 (the kernel chooses)
        """Any."""
        return 0

    def measuring_port(self, rank: Rank) -> int:  # noqa: ARG002 (the kernel chooses)
        """Any."""
        return 0

    def link_addresses(self, rank: Rank) -> dict[str, str]:  # noqa: ARG002 (nothing between)
        """None."""
        return {}

    def listener(self, rank: Rank) -> socket.socket:  # noqa: ARG002 (one host for all)
        """A listening socket, for a measurement."""
        return socket.create_server((HOST, 0))

    def dial(self, rank: Rank, peer: Rank, port: int) -> socket.socket:  # noqa: ARG002
        """A connection to a `listener`'s port."""
        return socket.create_connection((HOST, port), timeout=10)

    def interface_bytes(self, rank: Rank) -> tuple[int, int]:  # noqa: ARG002 (not counted)
        """Zero: traffic is not counted."""
        return (0, 0)

    def failure(self) -> str:
        """Empty: nothing can fail."""
        return ""

    def close(self) -> None:
        """Nothing to end."""


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
