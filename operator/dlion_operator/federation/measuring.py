"""How much the link to another site carries: bytes without a meaning, sent on demand for a moment
and timed where they arrive.

Owns both ends of the call `Measure` and its bounds. `service` says who may call, `node` whom this
site asks. Nothing is measured unless somebody asks (`dlion preflight --bandwidth`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass

import grpc

from dlion_api.errors import ContractError, UnavailableError
from dlion_api.names import OperatorIdentity, SiteName
from dlion_api.wire import federation_pb2 as wire
from dlion_api.wire import federation_pb2_grpc
from dlion_operator.federation.credentials import Credentials

CHUNK_BYTES = 64 * 1024
MOST_BYTES = 32 * 2**20
"""Of one measurement; a second's worth at 268 Mbit/s, and of faster links a shorter time."""
SENT_FOR_S = 3.0
TAKES_AT_MOST_S = 30.0
"""With what is still on its way on a slow link, and the answer."""
ASKED_AGAIN_S = 10.0
"""Who asks sooner is told what was measured last: so seldom may a link be filled."""

_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
)


@dataclass(frozen=True)
class Bandwidth:
    """What one measurement came to, as the receiver saw it."""

    bytes_count: int
    """After the first chunk, whose arrival begins the time."""
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        """The link's rate in that direction, less what others sent on it meanwhile."""
        return self.bytes_count / self.seconds


@dataclass
class Arrivals:
    """The receiver's half of one measurement. Time is an argument."""

    first_s: float | None = None
    last_s: float = 0.0
    total_bytes: int = 0
    timed_bytes: int = 0

    def take(self, size_bytes: int, now_s: float) -> None:
        """A chunk has come.

        Raises:
            ContractError: more has come than one measurement may bring.
        """
        self.total_bytes += size_bytes
        if self.total_bytes > MOST_BYTES + CHUNK_BYTES:
            raise ContractError(f"a measurement of more than {MOST_BYTES} bytes")
        if self.first_s is None:
            self.first_s = now_s
        else:
            self.timed_bytes += size_bytes
        self.last_s = now_s

    def result(self) -> wire.LinkTiming:
        """What the sender is told."""
        took_s = 0.0 if self.first_s is None else self.last_s - self.first_s
        return wire.LinkTiming(
            timed_bytes=self.timed_bytes, receiver_micros=max(0, round(took_s * 1e6))
        )


class Meter:
    """The sender's half: measures to other sites, one after the other."""

    def __init__(
        self, own: SiteName, addresses: Mapping[SiteName, str], credentials: Credentials
    ) -> None:
        self._own = own
        self._addresses = addresses
        self._credentials = credentials
        self._measuring = asyncio.Lock()
        self._last: dict[SiteName, tuple[float, Bandwidth]] = {}

    async def bandwidth(self, site: SiteName) -> Bandwidth:
        """From here to that site, measured now or a moment ago.

        Raises:
            LookupError: no such site is known here.
            UnavailableError: that site is not reached, or measures with another one just now.
            ContractError: it refuses, or what it answers makes no sense.
        """
        address = self._addresses[site]
        async with self._measuring:
            measured_s, last = self._last.get(site, (-ASKED_AGAIN_S, None))
            if last is not None and time.monotonic() - measured_s < ASKED_AGAIN_S:
                return last
            found = await self._measured(site, address)
            self._last[site] = time.monotonic(), found
            return found

    async def _measured(self, site: SiteName, address: str) -> Bandwidth:
        name = OperatorIdentity(site).dns_name
        options = (*_OPTIONS, ("grpc.ssl_target_name_override", name))
        channel_credentials = self._credentials.channel(site)
        try:
            async with (
                asyncio.timeout(TAKES_AT_MOST_S),
                grpc.aio.secure_channel(address, channel_credentials, options=options) as channel,
            ):
                stub = federation_pb2_grpc.FederationStub(channel)  # type: ignore[no-untyped-call]
                sent = _Sent(self._own, site)
                result: wire.LinkTiming = await stub.Measure(sent.chunks())
        except grpc.aio.AioRpcError as error:
            raise _refusal(site, error) from error
        except TimeoutError as error:
            raise UnavailableError(f"site {site} has not answered in time") from error
        return _checked(site, result, sent.total_bytes)


class _Sent:
    """One measurement's chunks, as they are handed to the network."""

    def __init__(self, own: SiteName, site: SiteName) -> None:
        self._first = wire.LinkChunk(site=own, to_site=site, payload=os.urandom(CHUNK_BYTES))
        self.total_bytes = 0

    async def chunks(self) -> AsyncIterator[wire.LinkChunk]:
        # Random, so that nothing on the way compresses it.
        began_s = time.monotonic()
        chunk = self._first
        while self.total_bytes < MOST_BYTES and time.monotonic() - began_s < SENT_FOR_S:
            self.total_bytes += CHUNK_BYTES
            yield chunk
            chunk = wire.LinkChunk(payload=self._first.payload)


class Turns:
    """Whose measurement is taken: one site's at a time."""

    def __init__(self) -> None:
        self._busy = False
        self.received_bytes = 0
        """Of all measurements so far."""

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """The one turn that there is.

        Raises:
            UnavailableError: another has it.
        """
        if self._busy:
            raise UnavailableError("another site measures just now; try again")
        self._busy = True
        try:
            yield
        finally:
            self._busy = False


def _checked(site: SiteName, result: wire.LinkTiming, sent_bytes: int) -> Bandwidth:
    seconds = result.receiver_micros / 1e6
    if result.timed_bytes > sent_bytes or seconds > TAKES_AT_MOST_S:
        raise ContractError(
            f"site {site} says that {result.timed_bytes} bytes came in {seconds:g} s;"
            f" {sent_bytes} were sent"
        )
    if not result.timed_bytes or not seconds:
        raise UnavailableError(f"too little has come to site {site} to be timed")
    return Bandwidth(result.timed_bytes, seconds)


def _refusal(site: SiteName, error: grpc.aio.AioRpcError) -> UnavailableError | ContractError:
    code, words = error.code(), f"site {site}: {error.code().name}: {error.details() or ''}"
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return ContractError(f"site {site} runs a release that does not measure")
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED):
        return UnavailableError(words)
    return ContractError(words)
