"""Calls to other sidecars: shares capacities and sends probes.

One channel and one task per peer. `process` sets the peers and reports changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from dlion_api.errors import ContractError, UnavailableError
from dlion_api.names import JobKey, Rank
from dlion_api.protocol.membership import Member
from dlion_api.protocol.refusals import PeerRefusal
from dlion_api.wire import measuring_pb2, measuring_pb2_grpc
from dlion_core.resource_control.budgets import PROBE_BYTES
from dlion_worker.call_errors import ClosedHandshakes, refusal_of
from dlion_worker.security.credentials import UnknownAuthorityError, WorkerCredentials
from dlion_worker.sidecar.capacity_messages import (
    PROBE_CHUNK_BYTES,
    PROBE_CHUNK_COUNT,
    from_wire,
    to_wire,
)
from dlion_worker.sidecar.measuring_service import MAX_MESSAGE_BYTES

if TYPE_CHECKING:
    from dlion_worker.sidecar.process import SidecarProcess

_LOG = logging.getLogger(__name__)

SHARE_INTERVAL_S = 5.0
SHARE_TIMEOUT_S = 5.0
PROBE_TIMEOUT_S = 20.0
INITIAL_RETRY_S, MAX_RETRY_S = 0.5, 30.0


class _PeerConnection:
    def __init__(self, member: Member, address: str) -> None:
        self.member = member
        self.address = address
        self.changed = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.channel: grpc.aio.Channel | None = None
        """None while the authority of its site is unknown."""
        self.stub: Any = None
        self.renewals = 0
        """Renewals of the certificate that the channel has."""
        self.handshakes = ClosedHandshakes()


class PeerSidecarClient:
    """Keeps sharing this worker's capacity with every peer; their responses contain theirs."""

    def __init__(
        self,
        *,
        job: JobKey,
        rank: Rank,
        worker: SidecarProcess,
        credentials: WorkerCredentials,
        dial: Callable[[Rank], str | None],
        by_gateway: bool = False,
    ) -> None:
        """`dial`: overrides a peer's announced address, if it returns one.

        `by_gateway`: a peer's two ports may share an address and differ by server name.
        """
        self._job, self._rank, self._worker = job, rank, worker
        self._by_gateway = by_gateway
        self._credentials, self._dial = credentials, dial
        self._links: dict[Rank, _PeerConnection] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def set_peers(self, members: Iterable[Member]) -> None:
        """Call these peers from now on, and no others."""
        wanted = {m.identity.rank: m for m in members if self._address(m)}
        for rank, link in list(self._links.items()):
            if rank not in wanted or self._address(wanted[rank]) != link.address:
                self._drop(rank)
        for rank, member in wanted.items():
            if rank not in self._links:
                self._add(member)

    def notify(self) -> None:
        """Send this worker's capacity to every peer now instead of at the next interval."""
        for link in self._links.values():
            link.changed.set()

    async def probe(self, member: Member) -> tuple[int, float]:
        """Send a short burst; return the bytes and seconds that the peer measured.

        Raises: UnavailableError if the peer does not answer; ContractError if its answer is
        invalid.
        """
        link = self._links.get(member.identity.rank)
        if link is None or link.channel is None:
            raise UnavailableError(f"sidecar of worker {member.identity.rank}: no connection yet")
        try:
            chunks = self._probe_chunks(member.identity.rank)
            result = await link.stub.Probe(chunks, timeout=PROBE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise UnavailableError(_describe(member.identity.rank, error)) from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Not this task was cancelled but the call, with its channel.
            reason = f"sidecar of worker {member.identity.rank}: it left during a probe"
            raise UnavailableError(reason) from error
        seconds = result.receiver_busy_micros / 1e6
        if not 0 < result.busy_bytes <= PROBE_BYTES or not 0 < seconds <= PROBE_TIMEOUT_S:
            raise ContractError(
                f"sidecar of worker {member.identity.rank}: probe of {result.busy_bytes} bytes in"
                f" {seconds} s; allowed: up to {PROBE_BYTES} bytes, up to {PROBE_TIMEOUT_S:g} s"
            )
        return result.busy_bytes, seconds

    async def close(self) -> None:
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

    def _add(self, member: Member) -> None:
        rank = member.identity.rank
        link = _PeerConnection(member, self._address(member))
        with contextlib.suppress(UnknownAuthorityError):  # logged and retried with the first call
            self._connect(link)  # at once: the first probe does not wait
        link.task = asyncio.create_task(self._share_loop(rank, link), name=f"peer {rank}")
        self._links[rank] = link

    def _connect(self, link: _PeerConnection) -> None:
        peer, link.renewals = link.member.identity, self._credentials.renewals
        server_name = peer.measuring_dns_name if self._by_gateway else peer.dns_name
        options = [
            ("grpc.enable_http_proxy", 0),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            *self._credentials.target_options(server_name(self._job)),
        ]
        secure = self._credentials.channel(peer.site)
        if secure is None:
            link.channel = grpc.aio.insecure_channel(link.address, options=options)
        else:
            link.channel = grpc.aio.secure_channel(link.address, secure, options=options)
        link.stub = measuring_pb2_grpc.MeasuringStub(link.channel)  # type: ignore[no-untyped-call]

    def _renew(self, link: _PeerConnection) -> None:
        """Use a connection with the newest certificate; a current call on the old one may finish.

        Raises: UnknownAuthorityError.
        """
        before = link.channel
        self._connect(link)
        if before is None:
            return
        closing = asyncio.create_task(before.close(grace=PROBE_TIMEOUT_S))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def _drop(self, rank: Rank) -> None:
        link = self._links.pop(rank)
        if link.task is not None:
            link.task.cancel()

    async def _share_loop(self, rank: Rank, link: _PeerConnection) -> None:
        retry_s = INITIAL_RETRY_S
        try:
            while True:
                link.changed.clear()
                try:
                    await self._share_capacity(rank, link)
                    retry_s, link.handshakes = INITIAL_RETRY_S, ClosedHandshakes()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_jittered(SHARE_INTERVAL_S)):
                            await link.changed.wait()
                except (grpc.aio.AioRpcError, ContractError, UnknownAuthorityError) as error:
                    text = _describe(rank, error)
                    self._count_refusal(link, error, text)
                    _LOG.log(logging.INFO if retry_s < MAX_RETRY_S else logging.DEBUG, "%s", text)
                    await asyncio.sleep(_jittered(retry_s))
                    retry_s = min(MAX_RETRY_S, 2 * retry_s)
        finally:
            if link.channel is not None:
                await link.channel.close()

    def _count_refusal(self, link: _PeerConnection, error: Exception, text: str) -> None:
        """Count failures that a retry alone does not solve."""
        match error:
            case grpc.aio.AioRpcError():
                kind = refusal_of(error)
            case UnknownAuthorityError():
                kind = PeerRefusal.UNKNOWN_AUTHORITY
            case _:
                kind = PeerRefusal.MALFORMED
        should_report = link.handshakes.should_report(kind, time.monotonic())
        if kind is not None and should_report:
            self._worker.refused(kind, text, dialled=True)

    async def _share_capacity(self, rank: Rank, link: _PeerConnection) -> None:
        if link.channel is None or link.renewals != self._credentials.renewals:
            self._renew(link)
        own = to_wire(self._worker.own(), self._job, self._worker.incarnation())
        self._worker.count_sent(rank, own.ByteSize())
        answer: measuring_pb2.CapacityShare = await link.stub.Share(own, timeout=SHARE_TIMEOUT_S)
        self._worker.handle_capacity(from_wire(answer, self._job, rank), answer.incarnation)

    async def _probe_chunks(self, peer: Rank) -> AsyncIterator[measuring_pb2.ProbeChunk]:
        # Random, so that nothing on the path compresses it.
        payload = random.randbytes(PROBE_CHUNK_BYTES)  # noqa: S311 - no secret
        chunk = measuring_pb2.ProbeChunk(run=str(self._job), rank=self._rank, payload=payload)
        sent_bytes = 0
        try:
            for _ in range(PROBE_CHUNK_COUNT):
                yield chunk
                sent_bytes += chunk.ByteSize()
        finally:
            self._worker.count_sent(peer, sent_bytes)


def _jittered(seconds: float) -> float:
    """Add jitter, so that peers that started together do not call together."""
    return seconds * random.uniform(0.75, 1.25)  # noqa: S311 - no secret


def _describe(rank: Rank, error: Exception) -> str:
    if not isinstance(error, grpc.aio.AioRpcError):
        return str(error)
    return f"sidecar of worker {rank}: {error.code().name}: {(error.details() or '')[:200]}"
