"""Serves this worker's state to authorised peers, one pull per peer at a time.

A thread gathers each state, because it may wait for an update and copies the whole model. A peer
has one such thread at most, however often it disconnects.
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from google.protobuf.message import DecodeError

from dlion_api.errors import ContractError, UnavailableError
from dlion_api.names import Rank
from dlion_api.protocol.refusals import REASON_KEY, PeerRefusal, refusal_kind
from dlion_api.wire.exchange_pb2 import PullStateRequest, StateChunk
from dlion_core.links.deadline import HEARTBEAT_S
from dlion_core.links.events import Refused, StatePulled, StateRequest, StateSnapshot
from dlion_core.links.state_transfer import state_chunks
from dlion_worker.transport.peer_links import PeerLink, PeerLinks

MAX_PULLS_PER_PEER = 3
"""Pulls of one peer, running and queued.

Its trainer and its publisher may pull at once, and a broken call ends only when its thread does.
"""

StateProvider = Callable[[StateRequest], StateSnapshot]
CallContext = grpc.aio.ServicerContext[Any, Any]


def certificate_of(context: CallContext) -> bytes | None:
    """The certificate that the caller presented, as PEM; None without one."""
    return next(iter(context.auth_context().get("x509_pem_cert", ())), None)


def refusal_metadata(kind: PeerRefusal | None) -> tuple[tuple[str, str], ...]:
    """Trailing metadata with the reason why a call is rejected."""
    return () if kind is None else ((REASON_KEY, str(kind)),)


@dataclass
class _PullQueue:
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    length: int = 0


class StateServer:
    def __init__(self, links: PeerLinks, provider: StateProvider) -> None:
        self._links = links
        self._provider = provider
        self._queues: dict[Rank, _PullQueue] = {}

    async def serve(self, data: bytes, context: CallContext) -> AsyncGenerator[bytes]:
        """Yield the chunks of the requested state; empty chunks while it is being gathered."""
        try:
            request = PullStateRequest.FromString(data)
            link = self._authorize(request, context)
            puller = link.rank
        except (ContractError, DecodeError) as error:
            kind = refusal_kind(error)
            self._links.emit(Refused(None, f"pull of state: {error}", kind=kind))
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, str(error), refusal_metadata(kind)
            )
        except UnavailableError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        queue = self._queues.setdefault(puller, _PullQueue())
        if queue.length >= MAX_PULLS_PER_PEER:
            text = (
                f"rank {puller} pulls {queue.length} states already; allowed: {MAX_PULLS_PER_PEER}"
            )
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        queue.length += 1
        acquiring = asyncio.create_task(queue.turn.acquire())
        gathering: asyncio.Future[StateSnapshot] | None = None
        try:
            while not (await asyncio.wait({acquiring}, timeout=HEARTBEAT_S))[0]:
                yield StateChunk().SerializeToString()
            wanted = StateRequest(request.weights_only, request.at_least, request.unless_hash)
            gathering = _in_thread(self._provider, wanted)
            while not (await asyncio.wait({gathering}, timeout=HEARTBEAT_S))[0]:
                yield StateChunk().SerializeToString()
            for chunk in state_chunks(gathering.result()):
                link.check_caller(request.incarnation)  # it may have been revoked meanwhile
                link.state_bytes += len(chunk)
                yield chunk
            self._links.emit(StatePulled(puller, weights_only=request.weights_only))
        except UnavailableError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        except ContractError as error:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                str(error),
                refusal_metadata(refusal_kind(error)),
            )
        finally:
            queue.length -= 1
            _release_turn(queue, acquiring, gathering)

    def _authorize(self, request: PullStateRequest, context: CallContext) -> PeerLink:
        """The link of a caller that may have the state.

        Raises: ContractError (the caller is not authorised), UnavailableError (the caller is not
        known yet).
        """
        link = self._links.find_caller(request.run, request.rank)
        local = self._links.local
        local.credentials.check_peer(certificate_of(context), link.peer, local.job)
        link.check_caller(request.incarnation)
        return link


def _release_turn(
    queue: _PullQueue,
    acquiring: asyncio.Task[bool],
    gathering: asyncio.Future[StateSnapshot] | None,
) -> None:
    """Start the next pull as soon as this one's thread has ended."""
    if not acquiring.done() or acquiring.cancelled():
        acquiring.cancel()
    elif gathering is None or gathering.done():
        queue.turn.release()
    else:
        gathering.add_done_callback(lambda _: queue.turn.release())


def _in_thread(provider: StateProvider, wanted: StateRequest) -> asyncio.Future[StateSnapshot]:
    """Gather the state in a separate thread: the trainer may finish its step first.

    The future ends with the thread, even if its caller is gone. The loop's own pool would deadlock
    `close`, which waits for it while the trainer waits for the loop.
    """
    loop = asyncio.get_running_loop()
    state: asyncio.Future[StateSnapshot] = loop.create_future()

    def fail(error: BaseException) -> None:
        state.set_exception(error)
        state.exception()  # there may be no caller left to retrieve it

    def gather() -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            try:
                snapshot = provider(wanted)
            except BaseException as error:  # noqa: BLE001 -- passed on to the waiting caller
                loop.call_soon_threadsafe(fail, error)
            else:
                loop.call_soon_threadsafe(state.set_result, snapshot)

    threading.Thread(target=gather, name="exchange-state", daemon=True).start()
    return state
