"""All links of one worker, run by one thread with one event loop.

Methods may be called from any thread; only `start`, `pull_state` and `close` block. `on_event` runs
*in the exchange's own thread*: put the event in a queue and return, and never call a blocking
method from it.
"""

import asyncio
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import CancelledError, Future

import grpc.aio

from dlion_api.addresses import join_host_port
from dlion_api.errors import UnavailableError
from dlion_api.names import Rank, WorkerIdentity
from dlion_api.protocol.measurements import LinkDelivery, SentBytes
from dlion_api.protocol.membership import Membership, MemberState
from dlion_api.protocol.port_limits import connection_options
from dlion_api.protocol.refusals import CallerError, PeerRefusal
from dlion_core.links.deadline import HEARTBEAT_S
from dlion_core.links.events import ExchangeEvent, LinkCounters, StateRequest, StateSnapshot
from dlion_core.links.framing import MAX_FRAME_BYTES, check_outgoing
from dlion_core.links.link_budget import equalize_similar
from dlion_core.policies.interface import Message
from dlion_worker.transport.client import CHANNEL_OPTIONS, PeerConnector
from dlion_worker.transport.cpu import ExchangeCpuMeter
from dlion_worker.transport.peer_links import PeerExchangeConfig, PeerLink, PeerLinks
from dlion_worker.transport.service import ExchangeService, IncomingStream

logger = logging.getLogger(__name__)

TICK_S = HEARTBEAT_S / 2
START_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 2.0
MAX_CALLS = 4096
"""Concurrent calls of all peers, and connections: a link, its successor and a pull each. Callers
retry when rejected. For limits per caller see `service` and `state_server`."""
MAX_CALLS_PER_CONNECTION = 8
"""A conforming peer makes one call per connection; further ones wait."""

_SERVER_OPTIONS = [
    *(option for option in CHANNEL_OPTIONS if option[0] != "grpc.max_receive_message_length"),
    # Somewhat above the protocol's limit, so that our own check reports such a frame.
    ("grpc.max_receive_message_length", 2 * MAX_FRAME_BYTES),
    *connection_options(MAX_CALLS, max_calls_per_connection=MAX_CALLS_PER_CONNECTION),
    ("grpc.so_reuseport", 0),
]


class PeerExchange:
    def __init__(
        self,
        config: PeerExchangeConfig,
        on_event: Callable[[ExchangeEvent], None],
        state_provider: Callable[[StateRequest], StateSnapshot],
    ) -> None:
        """`state_provider` runs in a separate thread. It may block, and may raise
        `UnavailableError` if there is no state to send."""
        self._config = config
        self._links = PeerLinks(config, on_event)
        self._service = ExchangeService(self._links, state_provider)
        self._connectors: dict[Rank, PeerConnector] = {}
        self._connector_tasks: dict[Rank, asyncio.Task[None]] = {}
        self._outgoing: deque[tuple[Rank, Message, int | None]] = deque()
        self._budgets: Mapping[Rank, int] = {}
        self._bandwidths: Mapping[Rank, float] = {}
        self._reported: dict[Rank, tuple[int, int, float]] = {}
        self._reported_sent: dict[Rank, SentBytes] = {}
        self._rng = random.Random()  # noqa: S311 -- jitter
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="exchange", daemon=True)
        self._cpu = ExchangeCpuMeter(self._thread)
        self._started: Future[int] = Future()

    # ---- from any thread ----

    def start(self) -> int:
        """Start the thread and the server; return the server's port.

        Raises: UnavailableError (the address cannot be listened on).
        """
        self._thread.start()
        return self._started.result(START_TIMEOUT_S)

    @property
    def address(self) -> str:
        """`host:port` for peers to connect to; empty before `start`."""
        return self._links.address

    def set_members(
        self,
        membership: Membership,
        dial: Mapping[Rank, str] | None = None,
        *,
        linked: Collection[Rank] | None = None,
    ) -> None:
        """Keep links to these members, or only to those in `linked`.

        Links to other members are closed; states can still be pulled from them. `dial` overrides
        addresses (for a relay).
        """
        self._call(self._set_members, membership, dict(dial or {}), linked)

    def set_iteration(self, iteration: int) -> None:
        """Set the last finished iteration, which hellos report to peers."""
        self._links.iteration = iteration

    def send(self, peer: Rank, message: Message, epoch: int | None = None) -> None:
        """Queue a message; if the link is down, drop and count it.

        With `epoch` (`LinkUp.epoch`), also if the link has been reopened since. The payload is not
        copied and must not change. Raises: ContractError (the message exceeds what peers accept).
        """
        check_outgoing(message, self._config.max_message_bytes)
        self._outgoing.append((peer, message, epoch))
        self._call(self._drain)

    def set_budgets(
        self,
        budget_bytes: Mapping[Rank, int],
        bandwidth_bytes_per_s: Mapping[Rank, float] | None = None,
    ) -> None:
        """Set bytes per iteration (none: unbounded) and, where known, bandwidth per link."""
        self._budgets = dict(budget_bytes)
        self._bandwidths = dict(bandwidth_bytes_per_s or {})
        for rank, link in list(self._links.by_rank.items()):
            link.send_queue.set_budget(self._budgets.get(rank), self._bandwidths.get(rank))
            self._call(link.wake.set)

    def sendable_bytes(self) -> dict[Rank, int]:
        """For each link with a budget, the largest gradient in bytes to send now.

        This is one budget at most, less while more than half a budget is in flight. Similar sizes
        are made equal (see `equalize_similar`).
        """
        rooms = {
            rank: link.send_queue.sendable_bytes()
            for rank, link in list(self._links.by_rank.items())
        }
        return equalize_similar({rank: room for rank, room in rooms.items() if room is not None})

    def one_way_delays_s(self) -> dict[Rank, float]:
        """For each idle link, half the minimum round-trip time."""
        links = list(self._links.by_rank.items())
        delays = {rank: link.send_queue.idle_delay_s for rank, link in links}
        return {rank: delay_s / 2 for rank, delay_s in delays.items() if delay_s is not None}

    def reset_links(self, reason: str) -> None:
        """Close all links; they are opened again as after a restart."""
        self._call(self._links.close_streams, reason)

    def migrate_links(self) -> None:
        """Move all links to connections with the newest certificate, without a loss."""
        for connector in list(self._connectors.values()):
            self._call(connector.renew)

    def record_violation(
        self, peer: Rank, reason: str, kind: PeerRefusal = PeerRefusal.MALFORMED
    ) -> None:
        """Count an invalid message against the peer's incarnation.

        Violations of the link protocol count too. At `MAX_VIOLATIONS` the peer is rejected until it
        restarts.
        """
        if (link := self._links.by_rank.get(peer)) is not None:
            self._call(link.record_violation, reason, kind)

    def count_probe(self, peer: Rank, sent_bytes: int) -> None:
        """Count what this worker's sidecar sent to the peer's. Call it from one thread only."""
        if (link := self._links.by_rank.get(peer)) is not None:
            link.probe_bytes += sent_bytes

    def quarantined(self) -> set[Rank]:
        """Return the peers that are rejected, and that no link will come from."""
        return {rank for rank, link in list(self._links.by_rank.items()) if link.quarantined}

    def link_counters(self) -> dict[Rank, LinkCounters]:
        """The counters of links that are or were kept, and of peers that anything was sent to."""
        links = list(self._links.by_rank.items())
        states = ((rank, link.was_wanted, link.state()) for rank, link in links)
        return {rank: s for rank, kept, s in states if kept or s.by_kind != SentBytes()}

    def wire_bytes(self) -> int:
        """Bytes sent and received so far, on all current and former links."""
        return sum(link.wire_bytes for link in list(self._links.by_rank.values()))

    def framing_s(self) -> tuple[float, float]:
        """Seconds so far in which this thread cut messages into frames, and joined others."""
        links = list(self._links.by_rank.values())
        return sum(link.send_s for link in links), sum(link.receive_s for link in links)

    def cpu_s(self) -> float:
        """CPU seconds so far, including gRPC's threads. Call it from one thread only."""
        return self._cpu.seconds()

    def take_deliveries(self) -> list[LinkDelivery]:
        """What each peer has acknowledged, and what was sent to it, since the last call. Call it
        from one thread only."""
        deliveries = []
        for rank, link in list(self._links.by_rank.items()):
            box = link.send_queue
            total = (box.acknowledged_total, box.busy_bytes_total, box.receiver_busy_s_total)
            before = self._reported.get(rank, (0, 0, 0.0))
            self._reported[rank] = total
            sent, sent_before = link.state().by_kind, self._reported_sent.get(rank, SentBytes())
            self._reported_sent[rank] = sent
            if total[0] == before[0] and not box.unacknowledged_bytes and sent == sent_before:
                continue
            deliveries.append(
                LinkDelivery(
                    peer=rank,
                    acknowledged_bytes=total[0] - before[0],
                    busy_bytes=total[1] - before[1],
                    receiver_busy_s=total[2] - before[2],
                    unacknowledged_bytes=box.unacknowledged_bytes,
                    sent=sent.since(sent_before),
                )
            )
        return deliveries

    def pull_state(self, peer: Rank, wanted: StateRequest | None = None) -> StateSnapshot:
        """Pull that peer's state; block while it keeps arriving.

        Raises: UnavailableError (the peer is unreachable or went silent, or the exchange was
        closed), ContractError (the data received is not a state).
        """
        loop = self._loop
        if loop is None or not self._thread.is_alive():
            raise UnavailableError("the exchange is not running")
        pulling = asyncio.run_coroutine_threadsafe(self._pull(peer, wanted or StateRequest()), loop)
        try:
            return pulling.result()
        except CancelledError as error:
            raise UnavailableError("the exchange was closed") from error

    def close(self) -> None:
        self._call(self._stop.set)
        if self._thread.is_alive():
            self._thread.join(2 * CLOSE_TIMEOUT_S)
            if self._thread.is_alive():
                logger.error("the exchange's thread did not end within %s s", 2 * CLOSE_TIMEOUT_S)

    def _call(self, what: Callable[..., None], *arguments: object) -> None:
        """Run `what` on the loop, in call order; do nothing if the loop is closed."""
        loop = self._loop
        if loop is None:
            return
        try:
            loop.call_soon_threadsafe(what, *arguments)
        except RuntimeError:  # closed meanwhile: there is nothing to run it on
            return

    # ---- on the loop ----

    def _run(self) -> None:
        with asyncio.Runner() as runner:
            self._loop = runner.get_loop()
            self._loop.set_exception_handler(_on_loop_error)
            runner.run(self._main())

    async def _main(self) -> None:
        own = self._config
        server = grpc.aio.server(options=_SERVER_OPTIONS, maximum_concurrent_rpcs=MAX_CALLS)
        server.add_generic_rpc_handlers((self._service.handler(),))
        address = join_host_port(own.listen_host, own.listen_port)
        try:
            port = own.credentials.add_port(server, address)
        except RuntimeError as error:
            self._started.set_exception(UnavailableError(f"cannot listen on {address}: {error}"))
            return
        await server.start()
        self._links.address = join_host_port(own.advertise_host or own.listen_host, port)
        ticking = asyncio.create_task(self._tick())
        self._started.set_result(port)
        await self._stop.wait()
        self._links.emit = lambda _: None  # the caller of `close` expects links to go down
        await self._end(server, [ticking, *self._connector_tasks.values()])

    async def _end(self, server: grpc.aio.Server, tasks: list[asyncio.Task[None]]) -> None:
        self._links.close_streams(f"{self._config.identity.name} is closing")
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S / 2)
        await server.stop(grace=CLOSE_TIMEOUT_S / 4)

    def _set_members(
        self, membership: Membership, dial: Mapping[Rank, str], linked: Collection[Rank] | None
    ) -> None:
        for member in membership.members:
            rank = member.identity.rank
            if rank == self._config.identity.rank:
                continue
            link = self._links.by_rank.get(rank) or self._add(member.identity)
            is_wanted = linked is None or rank in linked
            if is_wanted and not link.wanted:
                self._connect(link)
            elif link.wanted and not is_wanted:
                self._disconnect(link)
            if rank in dial and dial[rank] != link.dial_override:
                link.dial_override = dial[rank]
                link.redial.set()
            link.set_revoked(member.revoked)
            if member.state is MemberState.READY:
                link.set_member(member.incarnation, member.exchange_address)

    def _add(self, identity: WorkerIdentity) -> PeerLink:
        rank = identity.rank
        link = self._links.by_rank[rank] = PeerLink(identity, self._links)
        link.send_queue.set_budget(self._budgets.get(rank), self._bandwidths.get(rank))
        self._connectors[rank] = PeerConnector(link, self._config, self._rng)
        return link

    def _connect(self, link: PeerLink) -> None:
        link.wanted = link.was_wanted = True
        dialling = self._connectors[link.rank].run(after=self._connector_tasks.get(link.rank))
        task = asyncio.create_task(dialling, name=f"dial rank {link.rank}")
        self._connector_tasks[link.rank] = task
        task.add_done_callback(_report_defect)

    def _disconnect(self, link: PeerLink) -> None:
        """Close the link; the peer's streams are rejected until it is a neighbour again."""
        link.wanted = False
        link.close_streams("no neighbour any more")
        self._connector_tasks[link.rank].cancel()

    def _drain(self) -> None:
        while self._outgoing:
            peer, message, epoch = self._outgoing.popleft()
            link = self._links.by_rank.get(peer)
            if link is None:
                logger.warning("message to rank %d, which is not a member: dropped", peer)
            else:
                link.push(message, epoch)

    async def _pull(self, peer: Rank, wanted: StateRequest) -> StateSnapshot:
        connector = self._connectors.get(peer)
        if connector is None:
            raise UnavailableError(f"rank {peer} is not a known member")
        return await connector.pull(wanted)

    async def _tick(self) -> None:
        """Check every link, twice per heartbeat."""
        expected_s = time.monotonic() + TICK_S
        broken: set[Rank] = set()
        while True:
            await asyncio.sleep(max(0.0, expected_s - time.monotonic()))
            now_s = time.monotonic()
            late_s = now_s - expected_s
            expected_s = now_s + TICK_S
            for rank, link in self._links.by_rank.items():
                try:
                    check_link(link, self._connectors[rank], now_s, late_s)
                except Exception:  # a defect of one link must not leave the others unchecked
                    if rank not in broken:  # log once: it may fail at every tick
                        logger.exception("defect: the link to rank %d is not checked", rank)
                    broken.add(rank)


def check_link(link: PeerLink, connector: PeerConnector, now_s: float, late_s: float) -> None:
    """Send a heartbeat if idle; end streams that are silent or whose authentication has expired.

    `late_s`: how long this process itself was suspended.
    """
    if (outgoing := connector.stream) is not None:
        if now_s - outgoing.last_sent_s >= HEARTBEAT_S:
            link.send_queue.heartbeat()
            link.wake.set()
        outgoing.deadline.extend(late_s)
        if outgoing.deadline.overdue(now_s):
            outgoing.end(f"no acknowledgement: {outgoing.deadline.describe(now_s)}")
    inbound_proof = None
    if isinstance(incoming := link.incoming, IncomingStream):
        incoming.deadline.extend(late_s)
        if incoming.deadline.overdue(now_s):
            incoming.end(incoming.deadline.describe(now_s))
        inbound_proof = incoming.proof
        try:
            incoming.check_proof()
        except CallerError as error:
            link.trust_expired(error)
    connector.check_trust(inbound_proof, now_s)


def _report_defect(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("defect: %s ended", task.get_name(), exc_info=error)


def _on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    # Two gRPC loops in one process wake each other spuriously; the second finds no event.
    if isinstance(context.get("exception"), BlockingIOError):
        return
    loop.default_exception_handler(context)
