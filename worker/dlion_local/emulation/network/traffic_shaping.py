"""One direction of a worker's links as an htb tree: rates, queues and cuts of one interface.

Used by `emulation.network.namespaces`, also for what the workers of a site share, where a *peer* is
one link between two workers; and by the tests' Kubernetes sites, where a *peer* is a whole site
with its own network. The pipe that all peers share is the parent of narrower pipes. Each peer has a
leaf with its own queue under its narrowest pipe, so that links share evenly. The coordinator's
traffic has an unlimited leaf. Cut peers go to a leaf that drops everything.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dlion_api.errors import UnavailableError
from dlion_api.names import Rank
from dlion_environments.plan import Pipe
from dlion_local.emulation.network.in_namespace import run_batch

QUEUE_S = 0.04
"""Total length of a pipe's queues, in time at its rate. Without latency, twice the bandwidth-delay
product is less than a frame; cubic needs about this much to stay busy."""
FRAME_BYTES = 1514
MIN_QUEUE_BYTES = 16 * FRAME_BYTES
UNLIMITED_BYTES_PER_S = 5e9
ANY = "0.0.0.0/0"
"""Matches every address."""
_BURST_S = 0.002
_ROOT, _PARENT, _UNSHAPED, _DROPPED, _REST, _FIRST_PIPE, _FIRST_PEER = 0, 1, 5, 6, 0x10, 0x20, 0x200


def gso_bytes(bytes_per_s: float) -> int:
    """Maximum size of a segment that the sender's stack passes to the queue.

    About a millisecond at the rate: 64 KiB would take 26 ms at 20 Mbit/s, and htb cannot split it.
    """
    return int(min(65536.0, max(2.0 * FRAME_BYTES, bytes_per_s * 0.001)))


def queue_bytes(bytes_per_s: float, sharing_count: int = 1) -> int:
    """Queue length in bytes for each of `sharing_count` peers that share the rate."""
    return int(max(MIN_QUEUE_BYTES, bytes_per_s * QUEUE_S / sharing_count))


@dataclass(frozen=True)
class _Class:
    minor: int
    parent: int
    bytes_per_s: float
    assured_bytes_per_s: float
    queue_bytes: int | None

    def arguments(self) -> str:
        burst = int(max(gso_bytes(self.bytes_per_s), self.bytes_per_s * _BURST_S))
        return (
            f"parent 1:{f'{self.parent:x}' if self.parent else ''} classid 1:{self.minor:x} htb "
            f"rate {int(self.assured_bytes_per_s * 8)}bit ceil {int(self.bytes_per_s * 8)}bit "
            f"burst {burst} cburst {burst} quantum {gso_bytes(self.bytes_per_s)}"
        )

    def queue_arguments(self) -> str:
        return f"parent 1:{self.minor:x} handle {self.minor:x}: bfifo limit {self.queue_bytes}"


@dataclass
class ShapedInterface:
    """An interface with its tree. `start` creates the tree; other methods change its values."""

    namespace: str
    interface: str
    ends: Mapping[Rank, tuple[str, str]]
    """Source and destination of each peer's packets: addresses, or networks with their prefix
    length."""
    unshaped_address: str
    """Address of the coordinator, whose traffic has no rate limit."""
    _cut: frozenset[Rank] = frozenset()
    _classes: dict[int, _Class] = field(default_factory=dict)
    _shape: list[frozenset[Rank]] = field(default_factory=list)

    def start(self, pipes: Sequence[Pipe]) -> None:
        """Create the tree. Pipes must not overlap, except those for all peers."""
        self._shape = [pipe.peers for pipe in pipes]
        self._classes = {made.minor: made for made in self._tree(pipes)}
        device = f"dev {self.interface}"
        lines = [f"qdisc add {device} root handle 1: htb default {_REST:x}"]
        for made in self._classes.values():
            lines.append(f"class add {device} {made.arguments()}")
            if made.queue_bytes is not None:
                lines.append(f"qdisc add {device} {made.queue_arguments()}")
        lines.append(f"qdisc add {device} parent 1:{_DROPPED:x} handle {_DROPPED:x}: blackhole")
        unshaped = self.unshaped_address
        lines += [self._filter(2, ends, _UNSHAPED) for ends in ((unshaped, ANY), (ANY, unshaped))]
        lines += [self._filter(3, ends, _FIRST_PEER + peer) for peer, ends in self.ends.items()]
        run_batch("tc", self.namespace, lines)

    def set_rates(self, pipes: Sequence[Pipe]) -> None:
        """Change rates and queues. Each pipe must have the same peers as at the start."""
        if [pipe.peers for pipe in pipes] != self._shape:
            raise UnavailableError(
                f"{self.interface}: the shape of the pipes may not change during a run"
            )
        device = f"dev {self.interface}"
        lines = []
        for made in self._tree(pipes):
            if made == self._classes[made.minor]:
                continue
            self._classes[made.minor] = made
            lines.append(f"class change {device} {made.arguments()}")
            if made.queue_bytes is not None:
                lines.append(f"qdisc change {device} {made.queue_arguments()}")
        run_batch("tc", self.namespace, lines)

    def set_cuts(self, peers: frozenset[Rank]) -> None:
        """Drop all traffic to (or from) these peers, and pass all other traffic."""
        if peers == self._cut:
            return
        device = f"dev {self.interface}"
        lines = [f"filter del {device} parent 1: prio 1 protocol ip"] if self._cut else []
        lines += [self._filter(1, self.ends[peer], _DROPPED) for peer in sorted(peers)]
        run_batch("tc", self.namespace, lines)
        self._cut = peers

    def _tree(self, pipes: Sequence[Pipe]) -> list[_Class]:
        """The classes, parents first."""
        everyone = frozenset(self.ends)
        free = UNLIMITED_BYTES_PER_S
        # A worker that is alone at its site, or at the only one, has its own rate and the site's.
        total = min((p.bytes_per_s for p in pipes if p.peers == everyone), default=free)
        classes = [
            _Class(_PARENT, _ROOT, total, total, None),
            _Class(_UNSHAPED, _ROOT, free, free, queue_bytes(free)),
            _Class(_DROPPED, _ROOT, free, free, None),
        ]
        shared = {peer: (_PARENT, total, len(everyone)) for peer in everyone}
        # The leaves' assured rates must add up to less than the parent's rate: htb sends an assured
        # rate even if the parent is at its limit, and only borrows above it.
        assured = total / (2 * (len(everyone) + 1))
        for index, pipe in enumerate(pipe for pipe in pipes if pipe.peers != everyone):
            rate = min(pipe.bytes_per_s, total)
            own = min(rate, assured * len(pipe.peers))
            classes.append(_Class(_FIRST_PIPE + index, _PARENT, rate, own, None))
            shared |= {p: (_FIRST_PIPE + index, rate, len(pipe.peers)) for p in pipe.peers}
        classes.append(_Class(_REST, _PARENT, total, assured, queue_bytes(total)))
        for peer, (parent, rate, sharing) in sorted(shared.items()):
            own = min(assured, rate / (2 * sharing))
            queue = queue_bytes(rate, sharing)
            classes.append(_Class(_FIRST_PEER + peer, parent, rate, own, queue))
        return classes

    def _filter(self, priority: int, ends: tuple[str, str], minor: int) -> str:
        source, destination = (end if "/" in end else f"{end}/32" for end in ends)
        return (
            f"filter add dev {self.interface} parent 1: protocol ip prio {priority} "
            f"u32 match ip src {source} match ip dst {destination} flowid 1:{minor:x}"
        )
