"""Calls to the other sidecars: this worker's capacity for theirs, and probes.

Owns one channel and one task per peer. Called by the process, which says who the peers are and
when there is news. Decides nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import grpc
import grpc.aio

from dlion_api.errors import ContractError, UnavailableError
from dlion_api.membership import Member
from dlion_api.names import JobKey, Rank, WorkerIdentity
from dlion_api.refusals import PeerRefusal
from dlion_api.wire import measuring_pb2, measuring_pb2_grpc
from dlion_worker.credentials import UnknownAuthorityError, WorkerCredentials
from dlion_worker.refused_calls import Handshakes, refusal_of
from dlion_worker.sidecar.measuring_service import MAX_MESSAGE_BYTES
from dlion_worker.sidecar.peer_words import (
    PROBE_CHUNK_BYTES,
    PROBE_CHUNK_COUNT,
    OwnWorker,
    from_wire,
    to_wire,
)

_LOG = logging.getLogger(__name__)

REGULAR_S = 5.0
ANSWER_S = 5.0
PROBE_S = 20.0
FIRST_RETRY_S, LAST_RETRY_S = 0.5, 30.0


class _Link:
    """One peer's connection and what keeps it."""

    def __init__(self, member: Member, address: str) -> None:
        self.member = member
        self.address = address
        self.news = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.channel: grpc.aio.Channel | None = None
        """None: not yet, as its site's authority is not known."""
        self.handshakes = Handshakes()

    def connect(self, channel: grpc.aio.Channel, renewals: int) -> None:
        """Calls go over that channel from now on, by the certificate of that renewal."""
        self.channel, self.renewals = channel, renewals
        self.stub: Any = measuring_pb2_grpc.MeasuringStub(channel)  # type: ignore[no-untyped-call]


class PeerCaller:
    """Keeps telling every peer this worker's capacity, and hears theirs in the answers."""

    def __init__(
        self,
        *,
        job: JobKey,
        rank: Rank,
        worker: OwnWorker,
        credentials: WorkerCredentials,
        dial: Callable[[Rank], str | None],
        by_gateway: bool = False,
    ) -> None:
        """`dial`: the address to take in place of a peer's announced one, if there is one.
        `by_gateway`: peers' two ports may share an address, and are told apart by their names."""
        self._job, self._rank, self._worker = job, rank, worker
        self._by_gateway = by_gateway
        self._credentials, self._dial = credentials, dial
        self._links: dict[Rank, _Link] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def set_peers(self, members: Iterable[Member]) -> None:
        """Calls those peers from now on, and no others."""
        wanted = {m.identity.rank: m for m in members if self._address(m)}
        for rank, link in list(self._links.items()):
            if rank not in wanted or self._address(wanted[rank]) != link.address:
                self._drop(rank)
        for rank, member in wanted.items():
            if rank not in self._links:
                self._add(member)

    def tell(self) -> None:
        """There is news: every peer is told now, not at its next regular turn."""
        for link in self._links.values():
            link.news.set()

    async def probe(self, member: Member) -> tuple[int, float]:
        """Bytes and seconds of a short train, as that peer saw it arrive.

        Raises: UnavailableError where the peer does not answer; ContractError where its answer
            makes no sense.
        """
        link = self._links.get(member.identity.rank)
        if link is None or link.channel is None:
            raise UnavailableError(f"sidecar of worker {member.identity.rank}: no connection yet")
        try:
            result = await link.stub.Probe(self._train(), timeout=PROBE_S)
        except grpc.aio.AioRpcError as error:
            raise UnavailableError(_told(member.identity.rank, error)) from error
        seconds = result.receiver_busy_micros / 1e6
        most = PROBE_CHUNK_BYTES * PROBE_CHUNK_COUNT
        if not 0 < result.busy_bytes <= most or not 0 < seconds <= PROBE_S:
            raise ContractError(
                f"sidecar of worker {member.identity.rank}: probe of {result.busy_bytes} bytes in"
                f" {seconds} s; allowed: up to {most} bytes, up to {PROBE_S:g} s"
            )
        return result.busy_bytes, seconds

    async def close(self) -> None:
        """Ends all calls."""
        tasks = [link.task for link in self._links.values() if link.task is not None]
        channels = [link.channel for link in self._links.values() if link.channel is not None]
        for rank in list(self._links):
            self._drop(rank)
        await asyncio.gather(*tasks, return_exceptions=True)
        for channel in channels:
            await channel.close()
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _address(self, member: Member) -> str:
        return self._dial(member.identity.rank) or member.measuring_address

    def _server_name(self, peer: WorkerIdentity) -> str:
        name = peer.measuring_dns_name if self._by_gateway else peer.dns_name
        return name(self._job)

    def _add(self, member: Member) -> None:
        rank = member.identity.rank
        link = _Link(member, self._address(member))
        with contextlib.suppress(UnknownAuthorityError):  # said when the peer is told, and retried
            self._connect(link)  # at once: the first probe does not wait
        link.task = asyncio.create_task(self._keep_telling(rank, link), name=f"peer {rank}")
        self._links[rank] = link

    def _connect(self, link: _Link) -> None:
        renewals = self._credentials.renewals
        link.connect(self._channel(link.member, link.address), renewals)

    def _renew(self, link: _Link) -> None:
        """Goes over to a connection by the newest certificate; a call under way on the one before
        comes to its end. Raises: UnknownAuthorityError."""
        before = link.channel
        self._connect(link)
        if before is None:
            return
        closing = asyncio.create_task(before.close(grace=PROBE_S))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def _channel(self, member: Member, address: str) -> grpc.aio.Channel:
        options = [
            ("grpc.enable_http_proxy", 0),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            *self._credentials.target_options(self._server_name(member.identity)),
        ]
        secure = self._credentials.channel(member.identity.site)
        if secure is None:
            return grpc.aio.insecure_channel(address, options=options)
        return grpc.aio.secure_channel(address, secure, options=options)

    def _drop(self, rank: Rank) -> None:
        link = self._links.pop(rank)
        if link.task is not None:
            link.task.cancel()

    async def _keep_telling(self, rank: Rank, link: _Link) -> None:
        retry_s = FIRST_RETRY_S
        try:
            while True:
                link.news.clear()
                try:
                    await self._tell(rank, link)
                    retry_s, link.handshakes = FIRST_RETRY_S, Handshakes()
                    await _until(link.news, _jittered(REGULAR_S))
                except (grpc.aio.AioRpcError, ContractError, UnknownAuthorityError) as error:
                    text = _told(rank, error) if isinstance(error, grpc.aio.AioRpcError) else error
                    self._count(link, error, str(text))
                    _LOG.log(logging.INFO if retry_s < LAST_RETRY_S else logging.DEBUG, "%s", text)
                    await asyncio.sleep(_jittered(retry_s))
                    retry_s = min(LAST_RETRY_S, 2 * retry_s)
        finally:
            if link.channel is not None:
                await link.channel.close()

    def _count(self, link: _Link, error: Exception, words: str) -> None:
        """Counts what no retry alone will mend."""
        match error:
            case grpc.aio.AioRpcError():
                kind = refusal_of(error)
            case UnknownAuthorityError():
                kind = PeerRefusal.UNKNOWN_AUTHORITY
            case _:
                kind = PeerRefusal.MALFORMED
        is_told = link.handshakes.is_told(kind, time.monotonic())
        if kind is not None and is_told:
            self._worker.refused(kind, words, dialled=True)

    async def _tell(self, rank: Rank, link: _Link) -> None:
        if link.channel is None or link.renewals != self._credentials.renewals:
            self._renew(link)
        said = to_wire(self._worker.own(), self._job, self._worker.incarnation())
        answer: measuring_pb2.CapacityShare = await link.stub.Share(said, timeout=ANSWER_S)
        self._worker.heard(from_wire(answer, self._job, rank), answer.incarnation)

    async def _train(self) -> AsyncIterator[measuring_pb2.ProbeChunk]:
        # Random, so that nothing on the way compresses it.
        payload = random.randbytes(PROBE_CHUNK_BYTES)  # noqa: S311 - no secret
        for _ in range(PROBE_CHUNK_COUNT):
            yield measuring_pb2.ProbeChunk(run=str(self._job), rank=self._rank, payload=payload)


async def _until(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return


def _jittered(seconds: float) -> float:
    """So that peers which started together do not call together."""
    return seconds * random.uniform(0.75, 1.25)  # noqa: S311 - no secret


def _told(rank: Rank, error: grpc.aio.AioRpcError) -> str:
    return f"sidecar of worker {rank}: {error.code().name}: {(error.details() or '')[:200]}"
