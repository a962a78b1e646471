"""The exchange of one worker: one thread, one loop, all its links.

Called by the trainer. Every method may be called from any thread; only `start`, `pull_state` and
`close` block. `on_event` is called *from the exchange's own thread*: hand the event to a queue and
return; never call a blocking method of the exchange from it. Nothing here decides what is sent, or
when a peer is worth waiting for: that is the policies'.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass

import grpc.aio

from dlion_api.addresses import joined
from dlion_api.errors import UnavailableError
from dlion_api.measurements import LinkDelivery
from dlion_api.membership import Membership, MemberState
from dlion_api.names import JobKey, Rank, WorkerIdentity
from dlion_worker.credentials import WorkerCredentials
from dlion_worker.exchange.client import Dialler
from dlion_worker.exchange.cpu import ExchangeCpu
from dlion_worker.exchange.deadline import HEARTBEAT_S
from dlion_worker.exchange.events import ExchangeEvent, LinkState, StateSnapshot, StateWanted
from dlion_worker.exchange.framing import check_outgoing
from dlion_worker.exchange.links import Link, Links, Self, Surroundings
from dlion_worker.exchange.service import ExchangeService
from dlion_worker.exchange.serving import bounded_server, listen
from dlion_worker.exchange.watching import watch
from dlion_worker.exchange.window import QueueRule, levelled
from dlion_worker.policies.interface import Message

logger = logging.getLogger(__name__)

TICK_S = HEARTBEAT_S / 2
START_WITHIN_S = 10.0
CLOSE_WITHIN_S = 2.0


@dataclass(frozen=True)
class ExchangeConfig:
    """Everything that an exchange has to know before it starts."""

    job: JobKey
    identity: WorkerIdentity
    incarnation: int
    credentials: WorkerCredentials
    listen_host: str = "127.0.0.1"
    listen_port: int = 0  # 0: any free one
    advertise_host: str = ""  # empty: the same as `listen_host`
    is_exposed: bool = False  # other sites' peers dial another address, which the membership has
    max_message_bytes: int = 256 * 2**20
    max_state_bytes: int = 2**30
    queue_rule: QueueRule = QueueRule.KEEP
    max_queued_messages: int = 64
    """More than this on one link ends the link: its peer is too slow to be kept up with."""


class Exchange:
    """All links of one worker."""

    def __init__(
        self,
        config: ExchangeConfig,
        on_event: Callable[[ExchangeEvent], None],
        state_provider: Callable[[StateWanted], StateSnapshot],
    ) -> None:
        """`state_provider(wanted)` is called from a thread of its own; it may block, and
        may raise `UnavailableError` where there is no state to give."""
        self._config = config
        me = Self(
            config.job,
            config.identity,
            config.incarnation,
            config.queue_rule,
            config.max_queued_messages,
            config.max_message_bytes,
        )
        self._shared = Surroundings(me, on_event, config.is_exposed)
        self._links = Links(self._shared)
        self._service = ExchangeService(self._links, config.credentials, state_provider)
        self._diallers: dict[Rank, Dialler] = {}
        self._dialling: dict[Rank, asyncio.Task[None]] = {}
        self._outgoing: deque[tuple[Rank, Message]] = deque()
        self._budgets: Mapping[Rank, int] = {}
        self._bandwidths: Mapping[Rank, float] = {}
        self._reported: dict[Rank, tuple[int, int, float]] = {}
        self._chance = random.Random()  # noqa: S311 -- jitter
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="exchange", daemon=True)
        self._cpu = ExchangeCpu(self._thread)
        self._started: Future[int] = Future()

    # ---- from any thread ----

    def start(self) -> int:
        """Starts the thread and serves; the port it serves on.

        Raises:
            UnavailableError: The address cannot be listened on.
        """
        self._thread.start()
        return self._started.result(START_WITHIN_S)

    @property
    def address(self) -> str:
        """`host:port` that peers are to dial; empty before `start`."""
        return self._shared.address

    def set_members(
        self,
        membership: Membership,
        dial: Mapping[Rank, str] | None = None,
        *,
        linked: Collection[Rank] | None = None,
    ) -> None:
        """Keeps links to these members, or to those `linked` among them: of the others only states
        are pulled, and links that there are to them end. `dial` names other addresses to dial (a
        relay's)."""
        self._call(self._set_members, membership, dict(dial or {}), linked)

    def set_iteration(self, iteration: int) -> None:
        """The last iteration that this worker has finished: peers hear it in hellos."""
        self._shared.iteration = iteration

    def send(self, peer: Rank, message: Message) -> None:
        """Queues a message; it is lost, and counted, where the link is down.

        The payload is not copied and must not change.

        Raises:
            ContractError: No peer would take such a message.
        """
        check_outgoing(message, self._config.max_message_bytes)
        self._outgoing.append((peer, message))
        self._call(self._drain)

    def set_budgets(
        self,
        budget_bytes: Mapping[Rank, int],
        bandwidth_bytes_per_s: Mapping[Rank, float] | None = None,
    ) -> None:
        """Bytes per iteration for each link; one that is not named is unbounded. And their rates,
        where they are known."""
        self._budgets = dict(budget_bytes)
        self._bandwidths = dict(bandwidth_bytes_per_s or {})
        for rank, link in list(self._links.by_rank.items()):
            link.outbox.set_budget(self._budgets.get(rank), self._bandwidths.get(rank))
        self._call(self._wake)

    def room_bytes(self) -> dict[Rank, int]:
        """For each link with a budget, how large a gradient it takes now: at most a budget, less
        where more than half of one is still under way, or where others have little less room."""
        rooms = {rank: link.outbox.room_bytes() for rank, link in list(self._links.by_rank.items())}
        return levelled({rank: room for rank, room in rooms.items() if room is not None})

    def one_way_delays_s(self) -> dict[Rank, float]:
        """Of each idle link: half the least time until something was acknowledged."""
        links = list(self._links.by_rank.items())
        delays = {rank: link.outbox.idle_delay_s for rank, link in links}
        return {rank: delay_s / 2 for rank, delay_s in delays.items() if delay_s is not None}

    def renew_links(self, reason: str) -> None:
        """Ends all links; they are opened anew, as after a restart."""
        self._call(self._links.break_off, reason)

    def remake_links(self) -> None:
        """Remakes all connections with the newest certificate, each before the old one goes: no
        link goes down, and nothing on its way is lost."""
        self._call(self._remake_links)

    def offended(self, peer: Rank, reason: str) -> None:
        """A whole message of that peer's made no sense: counted with what the link itself refuses,
        and too often in one incarnation shuts it out until it is restarted."""
        self._call(self._offended, peer, reason)

    def link_states(self) -> dict[Rank, LinkState]:
        """Every link's counters just now."""
        links = list(self._links.by_rank.items())
        return {rank: link.state() for rank, link in links if link.was_wanted}

    def wire_bytes(self) -> int:
        """Bytes sent and received so far, on all links that there have been."""
        return sum(link.wire_bytes for link in list(self._links.by_rank.values()))

    def cpu_s(self) -> float:
        """CPU seconds of the exchange so far, gRPC's threads included; call it from one thread."""
        return self._cpu.seconds()

    def take_deliveries(self) -> list[LinkDelivery]:
        """What each peer has acknowledged since the last call; call it from one thread."""
        deliveries = []
        for rank, link in list(self._links.by_rank.items()):
            box = link.outbox
            total = (box.acknowledged_total, box.busy_bytes_total, box.receiver_busy_s_total)
            before = self._reported.get(rank, (0, 0, 0.0))
            self._reported[rank] = total
            if total[0] == before[0] and not box.unacknowledged_bytes:
                continue
            deliveries.append(
                LinkDelivery(
                    peer=rank,
                    acknowledged_bytes=total[0] - before[0],
                    busy_bytes=total[1] - before[1],
                    receiver_busy_s=total[2] - before[2],
                    unacknowledged_bytes=box.unacknowledged_bytes,
                )
            )
        return deliveries

    def pull_state(self, peer: Rank, wanted: StateWanted | None = None) -> StateSnapshot:
        """That peer's state; blocks while it keeps coming.

        Raises:
            UnavailableError: The peer cannot be reached or fell silent, or the exchange closed.
            ContractError: What came is not a state.
        """
        loop = self._loop
        if loop is None or not self._thread.is_alive():
            raise UnavailableError("the exchange is not running")
        pulling = asyncio.run_coroutine_threadsafe(self._pull(peer, wanted or StateWanted()), loop)
        try:
            return pulling.result()
        except CancelledError as error:
            raise UnavailableError("the exchange was closed") from error

    def close(self) -> None:
        """Ends every stream, the loop and the thread."""
        self._call(self._request_stop)
        if self._thread.is_alive():
            self._thread.join(2 * CLOSE_WITHIN_S)
            if self._thread.is_alive():
                logger.error("the exchange's thread did not end within %s s", 2 * CLOSE_WITHIN_S)

    def _call(self, what: Callable[..., None], *arguments: object) -> None:
        """Runs it on the loop, in order; silently not at all where there is no loop any more."""
        loop = self._loop
        if loop is None:
            return
        try:
            loop.call_soon_threadsafe(what, *arguments)
        except RuntimeError:  # closed in the meantime: there is nobody left to tell
            return

    # ---- on the loop ----

    def _run(self) -> None:
        with asyncio.Runner() as runner:
            self._loop = runner.get_loop()
            self._loop.set_exception_handler(_on_loop_error)
            runner.run(self._main())

    async def _main(self) -> None:
        self._stop = asyncio.Event()
        own = self._config
        server = bounded_server(self._service.handler())
        try:
            port = listen(server, own.listen_host, own.listen_port, own.credentials)
            await server.start()
        except UnavailableError as error:
            self._started.set_exception(error)
            return
        self._shared.address = joined(own.advertise_host or own.listen_host, port)
        ticking = asyncio.create_task(self._tick())
        self._started.set_result(port)
        await self._stop.wait()
        self._shared.emit = lambda _: None  # whoever closes knows that the links go down
        await self._end(server, [ticking, *self._dialling.values()])

    async def _end(self, server: grpc.aio.Server, tasks: list[asyncio.Task[None]]) -> None:
        self._links.break_off(f"{self._config.identity.name} is closing")
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=CLOSE_WITHIN_S / 2)
        await server.stop(grace=CLOSE_WITHIN_S / 4)

    def _request_stop(self) -> None:
        if self._stop is not None:
            self._stop.set()

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
                self._keep(link)
            elif link.wanted and not is_wanted:
                self._let_go(link)
            if rank in dial and dial[rank] != link.override:
                link.override = dial[rank]
                link.redial.set()
            if member.state is MemberState.READY:
                link.known_as(member.incarnation, member.exchange_address)

    def _add(self, identity: WorkerIdentity) -> Link:
        rank = identity.rank
        link = self._links.by_rank[rank] = Link(identity, self._shared)
        link.outbox.set_budget(self._budgets.get(rank), self._bandwidths.get(rank))
        self._diallers[rank] = Dialler(
            link, self._shared.me, self._config.credentials, self._chance
        )
        return link

    def _keep(self, link: Link) -> None:
        link.wanted = link.was_wanted = True
        dialling = self._diallers[link.rank].run(after=self._dialling.get(link.rank))
        task = asyncio.create_task(dialling, name=f"dial rank {link.rank}")
        self._dialling[link.rank] = task
        task.add_done_callback(_report_defect)

    def _let_go(self, link: Link) -> None:
        """The peer hears that the stream has ended; what it dials is refused until it is wanted."""
        link.wanted = False
        link.break_off("no neighbour any more")
        self._dialling[link.rank].cancel()

    def _drain(self) -> None:
        while self._outgoing:
            peer, message = self._outgoing.popleft()
            link = self._links.by_rank.get(peer)
            if link is None:
                logger.warning("message to rank %d, which is not a member: lost", peer)
            else:
                link.push(message)

    def _wake(self) -> None:
        for link in self._links.by_rank.values():
            link.wake.set()

    def _remake_links(self) -> None:
        for dialler in self._diallers.values():
            dialler.renew()

    def _offended(self, peer: Rank, reason: str) -> None:
        if (link := self._links.by_rank.get(peer)) is not None:
            link.offended(reason)

    async def _pull(self, peer: Rank, wanted: StateWanted) -> StateSnapshot:
        dialler = self._diallers.get(peer)
        if dialler is None:
            raise UnavailableError(f"rank {peer} is not a member, as far as is known here")
        limit = self._config.max_state_bytes
        return await dialler.pull(wanted, max_state_bytes=limit)

    async def _tick(self) -> None:
        """Heartbeats where nothing else is said, and an end to streams that have gone silent."""
        expected_s = time.monotonic() + TICK_S
        broken: set[Rank] = set()
        while True:
            await asyncio.sleep(max(0.0, expected_s - time.monotonic()))
            now_s = time.monotonic()
            late_s = now_s - expected_s
            expected_s = now_s + TICK_S
            for rank, link in self._links.by_rank.items():
                try:
                    watch(link, self._diallers[rank], now_s, late_s)
                except Exception:  # else one link's defect would leave all of them unwatched
                    if rank not in broken:  # it may fail at every tick
                        logger.exception("defect: the link to rank %d is not looked after", rank)
                    broken.add(rank)


def _report_defect(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("defect: %s ended", task.get_name(), exc_info=error)


def _on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    # Two loops of gRPC in one process wake each other for nothing; the second finds no event.
    if isinstance(context.get("exception"), BlockingIOError):
        return
    loop.default_exception_handler(context)
