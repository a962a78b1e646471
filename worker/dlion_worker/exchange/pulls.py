"""This worker's state, for peers that ask for it: who may have it, and one at a time for each.

Called by gRPC, on the exchange's loop. A state is gathered in a thread, which may wait for an
update and copies the whole model: a peer has one such thread at most, whatever it asks for and
however often it hangs up. How a state is cut is `transfer`'s business.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import grpc
from google.protobuf.message import DecodeError

from dlion_api.errors import ContractError, UnavailableError
from dlion_api.names import Rank
from dlion_api.refusals import kind_of
from dlion_api.wire.exchange_pb2 import PullStateRequest, StateChunk
from dlion_worker.credentials import WorkerCredentials
from dlion_worker.exchange.callers import Context, certificate_of, told
from dlion_worker.exchange.deadline import HEARTBEAT_S
from dlion_worker.exchange.events import Refused, StatePulled, StateSnapshot, StateWanted
from dlion_worker.exchange.links import Link, Links
from dlion_worker.exchange.transfer import cut

MOST_PULLS = 3
"""Of one peer, the one that is served and those in line: its trainer and its publisher may ask at
once, and a call that broke is over only when its thread is."""

Provider = Callable[[StateWanted], StateSnapshot]


@dataclass
class _Line:
    """One peer's pulls, in the order in which they came."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    length: int = 0


class Pulls:
    """All peers' pulls of this worker's state."""

    def __init__(self, links: Links, credentials: WorkerCredentials, provider: Provider) -> None:
        self._links = links
        self._credentials = credentials
        self._provider = provider
        self._lines: dict[Rank, _Line] = {}

    async def serve(self, data: bytes, context: Context) -> AsyncIterator[bytes]:
        """The chunks of the state that is asked for; empty ones while it is waited for."""
        try:
            request = PullStateRequest.FromString(data)
            puller = self._admitted(request, context).rank
        except (ContractError, DecodeError) as error:
            kind = kind_of(error)
            self._links.shared.emit(Refused(None, f"pull of state: {error}", kind=kind))
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error), told(kind))
        except UnavailableError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        line = self._lines.setdefault(puller, _Line())
        if line.length >= MOST_PULLS:
            words = f"rank {puller} pulls {line.length} states already; allowed: {MOST_PULLS}"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, words)
        line.length += 1
        acquiring = asyncio.create_task(line.turn.acquire())
        gathering: asyncio.Future[StateSnapshot] | None = None
        try:
            while not (await asyncio.wait({acquiring}, timeout=HEARTBEAT_S))[0]:
                yield StateChunk().SerializeToString()
            wanted = StateWanted(request.weights_only, request.at_least)
            gathering = _in_thread(self._provider, wanted)
            while not (await asyncio.wait({gathering}, timeout=HEARTBEAT_S))[0]:
                yield StateChunk().SerializeToString()
            for chunk in cut(gathering.result()):
                yield chunk
            self._links.shared.emit(StatePulled(puller, weights_only=request.weights_only))
        except UnavailableError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        finally:
            line.length -= 1
            _leave(line, acquiring, gathering)

    def _admitted(self, request: PullStateRequest, context: Context) -> Link:
        """The link of a caller that may have the state.

        Raises:
            ContractError: It may not.
            UnavailableError: It is not known here, or not yet.
        """
        link = self._links.claimed(request.run, request.rank)
        job = self._links.shared.me.job
        self._credentials.check_peer(certificate_of(context), link.peer, job)
        link.check_caller(request.incarnation)
        return link


def _leave(
    line: _Line, acquiring: asyncio.Task[bool], gathering: asyncio.Future[StateSnapshot] | None
) -> None:
    """Lets the next one have its turn, once the thread of this one is over too."""
    if not acquiring.done() or acquiring.cancelled():
        acquiring.cancel()
    elif gathering is None or gathering.done():
        line.turn.release()
    else:
        gathering.add_done_callback(lambda _: line.turn.release())


def _in_thread(provider: Provider, wanted: StateWanted) -> asyncio.Future[StateSnapshot]:
    """The state, from a thread of its own: the trainer may take until its step is done. It ends
    when the thread does, whoever has ceased to wait for it.

    Not from the loop's own pool: closing the loop would wait for it, and the trainer for that.
    """
    loop = asyncio.get_running_loop()
    state: asyncio.Future[StateSnapshot] = loop.create_future()

    def fail(error: BaseException) -> None:
        state.set_exception(error)
        state.exception()  # nobody may be left to be told of it

    def gather() -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            try:
                snapshot = provider(wanted)
            except BaseException as error:  # noqa: BLE001 -- handed on whole to whoever waits
                loop.call_soon_threadsafe(fail, error)
            else:
                loop.call_soon_threadsafe(state.set_result, snapshot)

    threading.Thread(target=gather, name="exchange-state", daemon=True).start()
    return state
