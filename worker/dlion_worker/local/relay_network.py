"""The runner's side of the relay: which ports there are, what is asked of the relay process.

Driven by `local.imposed`; holds also the network that shapes nothing.
"""

from __future__ import annotations

import itertools
import json
import random
import socket
from dataclasses import dataclass, field
from pathlib import Path

from dlion_api.errors import UnavailableError
from dlion_api.names import Rank
from dlion_worker.environments.plan import Conditions, Plan
from dlion_worker.local.conditions_json import links_to_json
from dlion_worker.local.line_process import LineProcess
from dlion_worker.local.relay import HOST

PURPOSES = ("exchange", "measuring")
_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


@dataclass
class RelayNetwork:
    """All workers on this machine's loopback, each pair's connections through one relay."""

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
            "dlion_worker.local.relay",
            "--config",
            str(config),
            errors_path=self.work_dir / "relay.log",
        )
        for link, port in zip(links, self._process.read()["ports"], strict=True):
            addresses = self._addresses.setdefault(Rank(int(str(link["dialler"]))), {})
            addresses[f"{link['target']}/{link['purpose']}"] = f"{HOST}:{port}"

    def apply(self, conditions: Conditions) -> None:
        """Put these rates, latencies and cuts in force; connections stay as they are."""
        self._relay.ask({"apply": links_to_json(conditions)})

    @property
    def _relay(self) -> LineProcess:
        if self._process is None:
            raise UnavailableError("the relay is not there: start() comes first")
        return self._process

    @property
    def pid(self) -> int:
        """The relay's process id."""
        return self._relay.pid

    def enter_arguments(self, rank: Rank) -> list[str]:  # noqa: ARG002 (nothing to enter)
        """None: workers run where the runner does."""
        return []

    def host(self, rank: Rank) -> str:  # noqa: ARG002 (one for all)
        """The loopback address."""
        return HOST

    def coordinator_host(self) -> str:
        """The loopback address: the coordinator is reached past the relay."""
        return HOST

    def exchange_port(self, rank: Rank) -> int:
        """Where the relay will look for the worker's exchange."""
        return self._ports[rank, "exchange"]

    def measuring_port(self, rank: Rank) -> int:
        """Where the relay will look for the worker's sidecar."""
        return self._ports[rank, "measuring"]

    def link_addresses(self, rank: Rank) -> dict[str, str]:
        """The relay's ports for what that worker dials."""
        return dict(self._addresses[rank])

    def listener(self, rank: Rank) -> socket.socket:
        """A listening socket in the place of the worker's sidecar, for a measurement."""
        return socket.create_server((HOST, self.measuring_port(rank)))

    def dial(self, rank: Rank, peer: Rank, port: int) -> socket.socket:  # noqa: ARG002
        """A connection from worker to worker, to the peer's `listener`."""
        host, _, relayed = self._addresses[rank][f"{peer}/measuring"].rpartition(":")
        return socket.create_connection((host, int(relayed)), timeout=10)

    def interface_bytes(self, rank: Rank) -> tuple[int, int]:
        """Bytes of streams that the relay has let pass from and to the worker."""
        passed = self._relay.ask({})["passed_bytes"]
        return (
            sum(size for sender, _, size in passed if sender == rank),
            sum(size for _, receiver, size in passed if receiver == rank),
        )

    def failure(self) -> str:
        """What is wrong with the relay; empty where nothing is."""
        if self._process is not None and self._process.ended():
            return "the relay process has ended: see relay.log in the run's work folder"
        return ""

    def close(self) -> None:
        """End the relay. Safe to call twice."""
        if self._process is not None:
            self._process.close()
            self._process = None


class UnshapedNetwork:
    """All workers on this machine's loopback, nothing between them."""

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
        """Zero: nothing counts them."""
        return (0, 0)

    def failure(self) -> str:
        """Empty: nothing can fail."""
        return ""

    def close(self) -> None:
        """Nothing to end."""


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on and that the kernel gives to no outgoing connection.

    A port from `bind(0)` could be given away again before its worker has started.
    """
    lowest_ephemeral = int(_EPHEMERAL_PORTS.read_text().split()[0])
    candidates = list(range(10_000, max(lowest_ephemeral, 20_000)))
    random.shuffle(candidates)
    found: list[int] = []
    for port in candidates:
        if len(found) == count:
            return found
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:  # taken
                continue
        found.append(port)
    raise UnavailableError(f"there are no {count} free ports between 10000 and {lowest_ephemeral}")
