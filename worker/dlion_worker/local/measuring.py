"""What was asked of the machine beside what it gave: rates by real transfers, quotas by real CPU.

Used by `local.imposed` for the result folder, by `benchmarks/network.py` and by the tests.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from dlion_api.names import Rank

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlion_worker.environments.plan import Conditions, Plan

_BLOCK_BYTES = 65536


class Quantity(StrEnum):
    """What is compared, with its unit."""

    LINK_RATE = "linkBytesPerS"
    LATENCY = "latencyS"
    QUOTA = "quotaCores"


@dataclass(frozen=True)
class Comparison:
    """One thing asked for and what came of it; `measured` is None where it was not imposed."""

    quantity: Quantity
    rank: Rank
    peer: Rank | None
    requested: float
    measured: float | None
    note: str = ""
    begins_s: float = 0.0
    """Of the run: from when on it was asked for."""

    @property
    def ratio(self) -> float | None:
        """Measured over requested."""
        return None if self.measured is None else self.measured / self.requested

    def to_json(self) -> dict[str, Any]:
        """As it stands in the result folder."""
        return {**asdict(self), "ratio": self.ratio}


class Measurable(Protocol):
    """A network between whose workers sockets can be opened."""

    def listener(self, rank: Rank) -> socket.socket: ...
    def dial(self, rank: Rank, peer: Rank, port: int) -> socket.socket: ...


@dataclass
class Transfer:
    """Bytes pushed over one link as fast as it takes them, as the *receiver* saw them arrive."""

    sender: Rank
    receiver: Rank
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """Times of the monotonic clock, and bytes that had arrived by then."""

    def bytes_per_s(self, skip_s: float = 0.0) -> float:
        """Mean rate, without the first `skip_s` in which TCP finds its pace."""
        if not self.arrivals:
            return 0.0
        begin_s = self.arrivals[0][0] + skip_s
        counted = [arrival for arrival in self.arrivals if arrival[0] >= begin_s]
        if len(counted) < 2:
            return 0.0
        (from_s, from_bytes), (to_s, to_bytes) = counted[0], counted[-1]
        return (to_bytes - from_bytes) / (to_s - from_s)

    def windows_bytes_per_s(self, window_s: float, step_s: float = 0.05) -> list[float]:
        """Rates over windows of that length, one beginning every `step_s`."""
        rates: list[float] = []
        if not self.arrivals:
            return rates
        start_s = self.arrivals[0][0]
        while start_s + window_s <= self.arrivals[-1][0]:
            inside = [n for t, n in self.arrivals if start_s <= t <= start_s + window_s]
            rates.append((inside[-1] - inside[0]) / window_s)
            start_s += step_s
        return rates


def transfer(
    network: Measurable, pairs: Sequence[tuple[Rank, Rank]], seconds: float
) -> list[Transfer]:
    """All pairs at once, each sender pushing for that long. What is still queued then is dropped.

    Raises: OSError where a link cannot be dialled.
    """
    transfers = [Transfer(sender, receiver) for sender, receiver in pairs]
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


def _count(connection: socket.socket, into: Transfer, seconds: float) -> None:
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


def compare_links(network: Measurable, conditions: Conditions, seconds: float) -> list[Comparison]:
    """Each worker to the next, all at once, so that every uplink and downlink carries one link.

    Cut links are left out. The rate is that of the payload at the receiver: where real packets
    pass, their headers take about 4.5 % of what was asked for.
    """
    count = len(conditions.workers)
    ring = [(Rank(k), Rank((k + 1) % count)) for k in range(count)] if count > 1 else []
    asked = {pair: conditions.link_bytes_per_s(*pair) for pair in ring}
    pairs = [pair for pair, rate in asked.items() if 0 < rate < float("inf")]
    return [
        Comparison(
            quantity=Quantity.LINK_RATE,
            rank=one.sender,
            peer=one.receiver,
            requested=asked[one.sender, one.receiver],
            measured=one.bytes_per_s(skip_s=0.3 * seconds),
            note="payload at the receiver, every worker sending to the next at once",
        )
        for one in transfer(network, pairs, seconds)
    ]


@dataclass
class HeldQuota:
    """One quota of one worker, and what the worker used while it was held."""

    begins_s: float
    """Of the run: when the plan began to ask for it."""
    cores: float
    held_s: float = 0.0
    """Less than it was asked for: not while the worker imports, or after its end."""
    used_s: float = 0.0
    throttled_s: float = 0.0

    def compared(self, rank: Rank) -> Comparison:
        """The quota beside the mean use."""
        return Comparison(
            quantity=Quantity.QUOTA,
            rank=rank,
            peer=None,
            requested=self.cores,
            measured=self.used_s / self.held_s,
            note=f"mean over {self.held_s:.0f} s, waiting included; held back for "
            f"{self.throttled_s:.1f} s",
            begins_s=self.begins_s,
        )


class QuotaLedger:
    """What one worker was allowed and what it used while a quota held it, by the plan's changes."""

    def __init__(self) -> None:
        self._held: list[HeldQuota] = []
        self._is_held = False
        self._noted = (0.0, 0.0, 0.0)

    @property
    def is_held(self) -> bool:
        """Whether a quota holds now."""
        return self._is_held

    def note(
        self,
        cores: float | None,
        now_s: float,
        used_s: float,
        throttled_s: float = 0.0,
        *,
        begins_s: float = 0.0,
    ) -> None:
        """From `now_s` on the quota is `cores` (None: none), as the plan has it from `begins_s` on.

        `used_s` of CPU and `throttled_s` are what there was of both so far.
        """
        self.look(now_s, used_s, throttled_s)
        self._is_held = cores is not None
        if cores is not None and not (self._held and self._held[-1].begins_s == begins_s):
            self._held.append(HeldQuota(begins_s, cores))

    def look(self, now_s: float, used_s: float, throttled_s: float = 0.0) -> None:
        """Books what has passed; the quota stays."""
        before_s, used_before_s, throttled_before_s = self._noted
        if self._is_held:
            held = self._held[-1]
            held.held_s += now_s - before_s
            held.used_s += used_s - used_before_s
            held.throttled_s += throttled_s - throttled_before_s
        self._noted = (now_s, used_s, throttled_s)

    def compared(self, rank: Rank) -> list[Comparison]:
        """Each quota that has held beside the mean use."""
        return [held.compared(rank) for held in self._held if held.held_s > 0]


def latencies_not_imposed(plan: Plan) -> list[Comparison]:
    """The latencies that were asked for where nothing can impose them, each at its largest."""
    every = (plan.initial, *(change.conditions for change in plan.changes))
    largest: dict[tuple[Rank, Rank], float] = {}
    for worker in (worker for conditions in every for worker in conditions.workers):
        for peer, seconds in worker.latency_s.items():
            link = (worker.rank, peer)
            largest[link] = max(seconds, largest.get(link, 0.0))
    return [
        Comparison(
            quantity=Quantity.LATENCY,
            rank=rank,
            peer=peer,
            requested=seconds,
            measured=None,
            note="requested latency not imposed: this way of shaping links has none",
        )
        for (rank, peer), seconds in sorted(largest.items())
        if seconds > 0
    ]
