"""Test shaped links with a real relay process and TCP on loopback.

Rates are held (90 % used, 5 % overshoot), shared, and changed and cut during connections. Latency
is added. Back-pressure reaches the sender. The relay ends with the runner, even with a killed one.

Left out: real queues and packet loss, which a relay does not have (test_network_namespaces).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from attempts import first_that_holds
from child_states import alive
from dlion_api.errors import UnavailableError
from dlion_api.names import Rank, SiteName, WorkerIdentity
from dlion_environments.plan import BYTES_PER_MBIT, Conditions, Pipe, Plan, WorkerConditions
from dlion_local.emulation.compute.quotas import process_cpu_s
from dlion_local.emulation.measurement import measure_transfers
from dlion_local.emulation.network.relay_network import RelayNetwork
from transfer_windows import max_mean_bytes_per_s, windows_bytes_per_s

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

COUNT = 3
RANKS = [Rank(k) for k in range(COUNT)]
LONG_S = 30.0
SILENCE_S = 0.3
"""How long to listen for a message that must not arrive."""


def conditions(
    mbit_per_s: float, cuts: Mapping[int, set[int]] | None = None, latency_s: float = 0.0
) -> Conditions:
    made = []
    for rank in RANKS:
        peers = frozenset(RANKS) - {rank}
        pipe = Pipe(peers, mbit_per_s * BYTES_PER_MBIT)
        cut = frozenset(Rank(peer) for peer in (cuts or {}).get(rank, set()))
        latencies = dict.fromkeys(peers, latency_s)
        made.append(WorkerConditions(rank, None, (pipe,), (pipe,), latencies, cut))
    return Conditions(tuple(made))


def plan(mbit_per_s: float) -> Plan:
    identities = tuple(WorkerIdentity(rank, SiteName("a"), "g", rank) for rank in RANKS)
    return Plan("test", identities, 1.0, 1.0, conditions(mbit_per_s))


@pytest.fixture
def network(tmp_path: Path) -> Iterator[RelayNetwork]:
    made = RelayNetwork(plan(20), tmp_path)
    made.start()
    pid = made.process.pid
    yield made
    made.close()
    made.close()
    assert not Path(f"/proc/{pid}").exists()


def connect(network: RelayNetwork, sender: Rank, receiver: Rank) -> tuple[socket.socket, ...]:
    with network.listener(receiver) as listener:
        sending = network.dial(sender, receiver, 0)
        receiving, _ = listener.accept()
    sending.settimeout(LONG_S)
    receiving.settimeout(LONG_S)
    return sending, receiving


def rates(network: RelayNetwork, pairs: list[tuple[int, int]]) -> list[float]:
    """Return Mbit/s of each link with all of them busy."""
    links = [(Rank(sender), Rank(receiver)) for sender, receiver in pairs]
    done = measure_transfers(network, links, seconds=1.5)
    return [one.bytes_per_s(skip_s=0.5) / BYTES_PER_MBIT for one in done]


def test_a_20_mbit_link_is_used_and_not_overshot_for_little_cpu(network: RelayNetwork) -> None:
    asked = 20 * BYTES_PER_MBIT

    def used() -> tuple[float, float]:
        before_s, began_s = process_cpu_s(network.process.pid) or 0.0, time.monotonic()
        (one,) = measure_transfers(network, [(Rank(0), Rank(1))], seconds=2.0)
        assert max_mean_bytes_per_s(one, began_s) <= 1.05 * asked
        assert (process_cpu_s(network.process.pid) or 0.0) - before_s < 0.15 * 2.0
        return one.bytes_per_s(skip_s=0.5), max(windows_bytes_per_s(one, 1.0), default=0.0)

    first_that_holds(used, lambda rates: rates[0] >= 0.9 * asked and 0 < rates[1] <= 1.05 * asked)


def test_links_share_their_workers_rate_evenly(network: RelayNetwork) -> None:
    for pairs in ([(0, 1), (0, 2)], [(1, 0), (2, 0)]):
        first_that_holds(
            lambda pairs=pairs: rates(network, pairs),
            lambda them: 18 <= sum(them) <= 21 and max(them) <= 1.3 * min(them),
        )


def test_links_share_evenly_also_towards_slower_workers(network: RelayNetwork) -> None:
    made = list(conditions(20).workers)
    slower = Pipe(made[2].downlink[0].peers, 12 * BYTES_PER_MBIT)
    made[2] = dataclasses.replace(made[2], downlink=(slower,))
    network.apply(Conditions(tuple(made)))
    first_that_holds(
        lambda: rates(network, [(0, 1), (0, 2)]),
        lambda them: 18 <= sum(them) <= 21 and max(them) <= 1.2 * min(them),
    )


def test_a_busy_downlink_does_not_block_the_senders_other_link(network: RelayNetwork) -> None:
    first_that_holds(
        lambda: rates(network, [(1, 0), (2, 0), (1, 2)]),
        # The downlink of 0 and the uplink of 1 are both full.
        lambda them: them[0] + them[1] >= 17 and them[0] + them[2] >= 17,
    )


def test_back_pressure_reaches_the_sender(network: RelayNetwork) -> None:
    network.apply(conditions(5))
    sending, receiving = connect(network, Rank(0), Rank(1))
    with sending, receiving:
        sending.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
        sending.setblocking(False)
        written, end_s = 0, time.monotonic() + 1.0
        started_s = time.monotonic()
        while time.monotonic() < end_s:
            try:
                written += sending.send(bytes(8192))
            except BlockingIOError:
                time.sleep(0.005)
        carried = (time.monotonic() - started_s) * 5 * BYTES_PER_MBIT
        # In flight on both sides is at most 0.5 s of the rate.
        assert written <= carried + 0.5 * 5 * BYTES_PER_MBIT


def test_a_new_rate_and_latency_hold_without_a_new_connection(network: RelayNetwork) -> None:
    sending, receiving = connect(network, Rank(0), Rank(1))
    with sending, receiving:
        sending.sendall(b"a")
        assert receiving.recv(1) == b"a"
        network.apply(conditions(20, latency_s=0.1))

        def took_s() -> float:
            started_s = time.monotonic()
            sending.sendall(b"b")
            assert receiving.recv(1) == b"b"
            return time.monotonic() - started_s

        assert first_that_holds(took_s, lambda seconds: seconds <= 0.2) >= 0.1
    network.apply(conditions(5))
    first_that_holds(lambda: rates(network, [(0, 1)])[0], lambda rate: 4.5 <= rate <= 5.25)


def test_latency_does_not_reduce_the_rate(network: RelayNetwork) -> None:
    network.apply(conditions(20, latency_s=0.039))
    first_that_holds(lambda: rates(network, [(0, 1)])[0], lambda rate: 18 <= rate <= 21)


def test_a_latency_added_during_a_transfer_does_not_reduce_the_rate(network: RelayNetwork) -> None:
    def rate_after_change() -> float:
        network.apply(conditions(20))
        change = threading.Timer(0.25, lambda: network.apply(conditions(20, latency_s=0.1)))
        change.start()
        rate = rates(network, [(0, 1)])[0]
        change.join()
        return rate

    first_that_holds(rate_after_change, lambda rate: 17 <= rate <= 21)


def test_a_cut_link_is_silent_and_continues_when_restored(network: RelayNetwork) -> None:
    cut, cut_receiving = connect(network, Rank(0), Rank(1))
    other, other_receiving = connect(network, Rank(0), Rank(2))
    with cut, cut_receiving, other, other_receiving:
        network.apply(conditions(20, {0: {1}, 1: {0}}))
        cut.sendall(b"held")
        other.sendall(b"free")
        assert other_receiving.recv(4) == b"free"
        cut_receiving.settimeout(SILENCE_S)
        with pytest.raises(TimeoutError):
            cut_receiving.recv(4)
        cut_receiving.settimeout(LONG_S)
        network.apply(conditions(20))
        assert cut_receiving.recv(4) == b"held"


def test_a_half_closed_stream_stays_open_in_the_other_direction(network: RelayNetwork) -> None:
    sending, receiving = connect(network, Rank(0), Rank(1))
    with sending, receiving:
        sending.sendall(b"last")
        sending.shutdown(socket.SHUT_WR)
        assert receiving.recv(16) == b"last"
        assert receiving.recv(16) == b""
        receiving.sendall(b"answer")
        receiving.close()
        assert sending.recv(16) == b"answer"
        assert sending.recv(16) == b""


def test_a_target_that_does_not_listen_ends_the_connection(network: RelayNetwork) -> None:
    with network.dial(Rank(0), Rank(1), 0) as dialled:
        dialled.settimeout(LONG_S)
        assert dialled.recv(1) == b""


def test_a_missing_relay_is_detected(network: RelayNetwork) -> None:
    assert network.failure() == ""
    os.kill(network.process.pid, signal.SIGKILL)
    with pytest.raises(UnavailableError, match="has ended"):
        network.apply(conditions(5))
    assert "relay" in network.failure()


def test_the_relay_may_open_as_many_files_as_the_machine_allows(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    made = RelayNetwork(plan(20), tmp_path)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft // 2, hard))
    try:
        made.start()
        assert resource.prlimit(made.process.pid, resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        made.close()


@pytest.mark.parametrize("free", [0, 1])
def test_a_relay_that_can_open_no_file_ends(network: RelayNetwork, free: int) -> None:
    pid = network.process.pid
    used = {int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir()}
    most = min(set(range(len(used) + 1)) - used) + free
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, most))
    # Accepting a connection takes a file, and its way to the target another one.
    with network.dial(Rank(0), Rank(1), 0) as dialled, contextlib.suppress(ConnectionResetError):
        dialled.settimeout(LONG_S)
        assert dialled.recv(1) == b""
    with pytest.raises(UnavailableError, match=r"Too many open files\. Raise"):
        network.apply(conditions(5))
    why = "no connection can be made: Too many open files. Raise the hard limit"
    assert network.failure().startswith(
        f"the relay process has ended with 1; its last output: {why}"
    )
    assert "Traceback" not in network.failure()


def test_a_relay_ends_with_a_killed_runner(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from dlion_local.emulation.line_process import LineProcess\n"
        "relay = LineProcess('dlion_local.emulation.network.relay', Path())\n"
        "relay.start(); relay.call({'conditions': [], 'links': []})\n"
        "print(relay.pid, flush=True); time.sleep(60)\n"
    )
    runner = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    assert runner.stdout is not None
    pid = int(runner.stdout.readline())
    runner.kill()
    runner.wait()
    runner.stdout.close()
    end_s = time.monotonic() + LONG_S
    while alive(pid):
        assert time.monotonic() < end_s
        time.sleep(0.02)
