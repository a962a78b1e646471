"""Compares requested with measured values: link rates by real transfers, quotas by CPU time.

Used by `emulation.emulation`, by `benchmarks/network.py` and by the tests.
"""

import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from dlion_api.names import Rank
from dlion_environments.plan import BYTES_PER_MBIT, Conditions, Plan
from dlion_local.emulation.network.relay_network import UnshapedNetwork
from dlion_results.run_folder.environment import LATENCY, LINK_RATE, QUOTA, EnvironmentFigure

_BLOCK_BYTES = 65536


@dataclass
class TransferMeasurement:
    """A transfer over one link at full rate, as measured at the *receiver*."""

    sender: Rank
    receiver: Rank
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """(Monotonic time, total bytes that had arrived by then)."""

    def bytes_per_s(self, skip_s: float = 0.0) -> float:
        """Mean rate, without the first `skip_s`, in which TCP ramps up."""
        if not self.arrivals:
            return 0.0
        begin_s = self.arrivals[0][0] + skip_s
        counted = [arrival for arrival in self.arrivals if arrival[0] >= begin_s]
        if len(counted) < 2:
            return 0.0
        (from_s, from_bytes), (to_s, to_bytes) = counted[0], counted[-1]
        return (to_bytes - from_bytes) / (to_s - from_s)


def measure_transfers(
    network: UnshapedNetwork, pairs: Sequence[tuple[Rank, Rank]], seconds: float
) -> list[TransferMeasurement]:
    """Transfer over all pairs at once for `seconds`. Data still queued then is dropped.

    Raises OSError if a link cannot be dialled.
    """
    transfers = [TransferMeasurement(sender, receiver) for sender, receiver in pairs]
    threads = []
    sockets = []
    for one in transfers:
        with network.listener(one.receiver) as listener:
            listener.settimeout(10)
            sending = network.dial(one.sender, one.receiver, listener.getsockname()[1])
            receiving, _ = listener.accept()
        sockets += [sending, receiving]
        threads.append(threading.Thread(target=_push, args=(sending, seconds)))
        threads.append(threading.Thread(target=_count, args=(receiving, one, seconds)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one_socket in sockets:
        one_socket.close()
    return transfers


def _push(connection: socket.socket, seconds: float) -> None:
    # Closing drops what is queued, instead of draining it at the link's rate.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.settimeout(0.5)
    block = bytes(_BLOCK_BYTES)
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        try:
            connection.send(block)
        except TimeoutError:
            continue
        except ConnectionError:
            return
    connection.close()


def _count(connection: socket.socket, into: TransferMeasurement, seconds: float) -> None:
    end_s = time.monotonic() + seconds
    total = 0
    connection.settimeout(0.5)
    buffer = bytearray(_BLOCK_BYTES)
    while time.monotonic() < end_s:
        try:
            size = connection.recv_into(buffer)
        except TimeoutError:
            continue
        except ConnectionError:
            return
        if not size:
            return
        total += size
        into.arrivals.append((time.monotonic(), total))


def compare_links(
    network: UnshapedNetwork, conditions: Conditions, seconds: float
) -> list[EnvironmentFigure]:
    """Measure each worker sending to the next, all at once, so that every pipe carries one link.

    Cut links are left out. The rate is payload at the receiver; headers of real packets take about
    4.5 % of the requested rate.
    """
    count = len(conditions.workers)
    ring = [(Rank(k), Rank((k + 1) % count)) for k in range(count)] if count > 1 else []
    asked = {pair: conditions.link_bytes_per_s(*pair) for pair in ring}
    pairs = [pair for pair, rate in asked.items() if 0 < rate < float("inf")]
    return [
        EnvironmentFigure(
            one.sender,
            LINK_RATE,
            "Mbit/s",
            requested=asked[one.sender, one.receiver] / BYTES_PER_MBIT,
            measured=one.bytes_per_s(skip_s=0.3 * seconds) / BYTES_PER_MBIT,
            peer=one.receiver,
            note="payload at the receiver, every worker sending to the next at once",
        )
        for one in measure_transfers(network, pairs, seconds)
    ]


@dataclass
class QuotaInterval:
    """One quota of one worker, and the CPU used while it was in force."""

    begins_s: float
    """When the plan requested it, in seconds of the run."""
    cores: float
    held_s: float = 0.0
    """Time in force. Shorter than requested: not during imports or after the worker's end."""
    used_s: float = 0.0
    throttled_s: float = 0.0


class QuotaUsage:
    """All quotas of one worker and the CPU used under each."""

    def __init__(self) -> None:
        self._intervals: list[QuotaInterval] = []
        self.is_held = False
        """Whether a quota is in force."""
        self._last_reading = (0.0, 0.0, 0.0)

    def begin_quota(
        self,
        cores: float | None,
        now_s: float,
        used_s: float,
        throttled_s: float = 0.0,
        *,
        begins_s: float = 0.0,
    ) -> None:
        """Set the quota to `cores` (None: none) at `now_s`; the plan has it from `begins_s` on.

        `used_s` and `throttled_s` are the CPU counters at that time.
        """
        self.update(now_s, used_s, throttled_s)
        self.is_held = cores is not None
        last = self._intervals[-1] if self._intervals else None
        # Of two changes at one time, the later one counts.
        is_same = last is not None and (last.begins_s, last.cores) == (begins_s, cores)
        if cores is not None and not is_same:
            self._intervals.append(QuotaInterval(begins_s, cores))

    def update(self, now_s: float, used_s: float, throttled_s: float = 0.0) -> None:
        """Account for the time since the last call; the quota stays."""
        before_s, used_before_s, throttled_before_s = self._last_reading
        if self.is_held:
            interval = self._intervals[-1]
            interval.held_s += now_s - before_s
            interval.used_s += used_s - used_before_s
            interval.throttled_s += throttled_s - throttled_before_s
        self._last_reading = (now_s, used_s, throttled_s)

    def figures(self, rank: Rank) -> list[EnvironmentFigure]:
        """Each quota that was in force, and its mean use."""
        return [
            EnvironmentFigure(
                rank,
                QUOTA,
                "cores",
                requested=one.cores,
                measured=one.used_s / one.held_s,
                note=f"mean over {one.held_s:.0f} s, waiting included; held back for "
                f"{one.throttled_s:.1f} s",
                begins_s=one.begins_s,
            )
            for one in self._intervals
            if one.held_s > 0
        ]


def unsupported_latencies(plan: Plan) -> list[EnvironmentFigure]:
    """Requested latencies, each at its maximum, for backends that cannot emulate them."""
    every = (plan.initial, *(change.conditions for change in plan.changes))
    largest: dict[tuple[Rank, Rank], float] = {}
    for worker in (worker for conditions in every for worker in conditions.workers):
        for peer, seconds in worker.latency_s.items():
            link = (worker.rank, peer)
            largest[link] = max(seconds, largest.get(link, 0.0))
    note = "requested latency not imposed: this way of shaping links has none"
    return [
        EnvironmentFigure(rank, LATENCY, "ms", 1000 * seconds, None, peer, note)
        for (rank, peer), seconds in sorted(largest.items())
        if seconds > 0
    ]
