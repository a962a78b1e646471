"""Test shaped links with real namespaces, queues and TCP.

Rates are held (90 % used, 5 % overshoot), shared evenly by a worker's links, and changed and cut
during connections. The rates do not limit traffic to the runner. Leftovers of crashed runs are
removed, and nothing stays behind.

Left out: latency (no netem), CPU (test_quota), the relay (test_network_relay).
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from attempts import first_that_holds
from dlion_api.names import Rank, SiteName, WorkerIdentity
from dlion_environments.plan import BYTES_PER_MBIT, Conditions, Pipe, Plan, WorkerConditions
from dlion_local.emulation.compute.resource_owner import ResourceOwner
from dlion_local.emulation.measurement import measure_transfers
from dlion_local.emulation.network.in_namespace import in_namespace, run_batch, run_tool
from dlion_local.emulation.network.namespaces import (
    CONGESTION_CONTROLS,
    NamespaceNetwork,
    namespaces_unavailable,
    remove_stale,
)
from transfer_windows import max_mean_bytes_per_s, windows_bytes_per_s

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(bool(namespaces_unavailable()), reason=namespaces_unavailable() or "-"),
]
COUNT = 3
RANKS = [Rank(k) for k in range(COUNT)]


def conditions(mbit_per_s: float, cuts: Mapping[int, set[int]] | None = None) -> Conditions:
    made = []
    for rank in RANKS:
        pipe = Pipe(frozenset(RANKS) - {rank}, mbit_per_s * BYTES_PER_MBIT)
        cut = frozenset(Rank(peer) for peer in (cuts or {}).get(rank, set()))
        made.append(WorkerConditions(rank, None, (pipe,), (pipe,), {}, cut))
    return Conditions(tuple(made))


def plan(mbit_per_s: float) -> Plan:
    identities = tuple(WorkerIdentity(rank, SiteName("a"), "g", rank) for rank in RANKS)
    return Plan("test", identities, 1.0, 1.0, conditions(mbit_per_s))


def traces() -> set[str]:
    """Return everything on this machine that such a network could leave behind."""
    namespaces = Path("/run/netns")
    names = {path.name for path in namespaces.iterdir()} if namespaces.is_dir() else set()
    links = {path.name for path in Path("/sys/class/net").iterdir()}
    mine = f"-{os.getpid()}-"
    return {name for name in names if mine in name} | {
        name for name in links if name.startswith(f"dl{os.getpid()}x")
    }


def traces_of(prefix: str) -> list[str]:
    """Return the network namespaces of one run."""
    return [path.name for path in Path("/run/netns").glob(f"{prefix}-*")]


@pytest.fixture
def network() -> Iterator[NamespaceNetwork]:
    made = NamespaceNetwork(plan(20))
    made.start()
    yield made
    made.close()
    assert traces() == set()


def connect(network: NamespaceNetwork, sender: Rank, receiver: Rank) -> tuple[socket.socket, ...]:
    with network.listener(receiver) as listener:
        sending = network.dial(sender, receiver, listener.getsockname()[1])
        receiving, _ = listener.accept()
    sending.settimeout(3)
    receiving.settimeout(0.3)
    return sending, receiving


def sent_on_wire(network: NamespaceNetwork) -> int:
    """Return the bytes that the first worker's interface has sent, headers included."""
    shown = run_tool("ip", "-n", network.namespace(Rank(0)), "-j", "-s", "link", "show", "eth0")
    return int(json.loads(shown)[0]["stats64"]["tx"]["bytes"])


def test_a_20_mbit_link_is_used_and_not_overshot(network: NamespaceNetwork) -> None:
    asked = 20 * BYTES_PER_MBIT

    def used() -> tuple[float, float, float]:
        before, started_s = sent_on_wire(network), time.monotonic()
        (one,) = measure_transfers(network, [(Rank(0), Rank(1))], seconds=2.0)
        on_wire = (sent_on_wire(network) - before) / (time.monotonic() - started_s)
        assert max_mean_bytes_per_s(one, started_s) <= 1.05 * asked
        in_a_second = max(windows_bytes_per_s(one, 1.0), default=0.0)
        return on_wire, one.bytes_per_s(skip_s=0.5), in_a_second

    first_that_holds(used, lambda rates: min(rates) >= 0.9 * asked and rates[2] <= 1.05 * asked)


def test_links_share_their_workers_rate_evenly(network: NamespaceNetwork) -> None:
    for pairs in ([(0, 1), (0, 2)], [(1, 0), (2, 0)]):

        def rates(pairs: list[tuple[int, int]] = pairs) -> list[float]:
            links = [(Rank(sender), Rank(receiver)) for sender, receiver in pairs]
            done = measure_transfers(network, links, seconds=1.5)
            return [one.bytes_per_s(skip_s=0.5) / BYTES_PER_MBIT for one in done]

        first_that_holds(rates, lambda them: 18 <= sum(them) <= 21 and max(them) <= 1.3 * min(them))


def test_a_new_rate_holds_without_a_new_connection(network: NamespaceNetwork) -> None:
    sending, receiving = connect(network, Rank(0), Rank(1))
    network.apply(conditions(5))

    def mbit_per_s() -> float:
        received, started_s = 0, time.monotonic()
        while time.monotonic() < started_s + 1.0:
            try:
                sending.send(bytes(65536))
            except BlockingIOError:
                time.sleep(0.001)
            received += len(receiving.recv(65536))
        return received / (time.monotonic() - started_s) / BYTES_PER_MBIT

    with sending, receiving:
        receiving.settimeout(20)  # a retransmission may be lost, too
        sending.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        sending.setblocking(False)
        first_that_holds(mbit_per_s, lambda rate: 4.2 <= rate <= 5.1)


def test_a_cut_link_is_silent_and_continues_when_restored(network: NamespaceNetwork) -> None:
    cut, cut_receiving = connect(network, Rank(0), Rank(1))
    other, other_receiving = connect(network, Rank(0), Rank(2))
    with cut, cut_receiving, other, other_receiving:
        network.apply(conditions(20, {0: {1}, 1: {0}}))
        cut.sendall(b"held")
        other.sendall(b"free")
        other_receiving.settimeout(20)
        assert other_receiving.recv(4) == b"free"
        with pytest.raises(TimeoutError):
            cut_receiving.recv(4)
        network.apply(conditions(20))
        cut_receiving.settimeout(60)  # TCP retries after its own delay
        assert cut_receiving.recv(4) == b"held"


def test_a_workers_rate_does_not_limit_traffic_to_the_runner(network: NamespaceNetwork) -> None:
    with socket.create_server((network.coordinator_host(), 0)) as server:
        port = server.getsockname()[1]
        worker = in_namespace(
            network.namespace(Rank(0)),
            lambda: socket.create_connection((network.coordinator_host(), port), timeout=3),
        )
        accepted, _ = server.accept()
    with worker, accepted:
        assert accepted.getpeername()[0] == network.host(Rank(0))

        def seconds() -> float:
            started_s = time.monotonic()
            # 0.4 s at 20 Mbit/s
            sender = threading.Thread(target=worker.sendall, args=(bytes(1_000_000),))
            sender.start()
            received = 0
            while received < 1_000_000:
                received += len(accepted.recv(1 << 20))
            sender.join()
            return time.monotonic() - started_s

        first_that_holds(seconds, lambda took_s: took_s < 0.25)


def test_a_command_runs_inside_with_a_congestion_control_that_reacts_to_loss(
    network: NamespaceNetwork,
) -> None:
    done = subprocess.run(
        [
            *[sys.executable, "-m", "dlion_local.emulation.network.enter"],
            *[*network.enter_arguments(Rank(1)), "--"],
            *["cat", "/proc/sys/net/ipv4/tcp_congestion_control", "/proc/net/dev"],
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[0] in CONGESTION_CONTROLS
    names = {line.split(":")[0].strip() for line in done.stdout.splitlines() if ":" in line}
    assert names == {"lo", "eth0"} or names - {"ifb0", "ifb1"} == {"lo", "eth0"}


def test_two_runs_that_start_at_once_coexist() -> None:
    first, second = NamespaceNetwork(plan(20)), NamespaceNetwork(plan(5))
    with closing(first), closing(second), ThreadPoolExecutor() as both:
        for started in [both.submit(network.start) for network in (first, second)]:
            started.result()
        assert first.host(Rank(0)) != second.host(Rank(0))
        for network in (first, second):
            for one in connect(network, Rank(0), Rank(1)):
                one.close()
            network.close()
    assert traces() == set()


def test_leftovers_of_crashed_runs_are_removed_and_running_ones_kept(
    network: NamespaceNetwork,
) -> None:
    mine = ResourceOwner.of_this_process()
    crashed = ResourceOwner(mine.pid, mine.start_ticks + 1).next_prefix()
    run_batch("ip", None, [f"netns add {crashed}-hub", f"netns add {crashed}-w0"])
    removed, deadline_s = remove_stale(), time.monotonic() + 20
    while traces_of(crashed):  # a run that starts now on this machine may remove them first
        assert crashed not in removed
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    assert Path(f"/run/netns/{network.hub}").exists()
