"""Measure the bandwidth to another site: send random bytes for a moment and time their arrival.

Implements both ends of the call `Measure` and its limits; `service` authorises callers. Runs only
on request (`dlion preflight --bandwidth`).
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass

import grpc

from dlion_api.errors import ContractError, UnavailableError
from dlion_api.names import SiteName
from dlion_api.wire import federation_pb2 as wire
from dlion_api.wire import federation_pb2_grpc
from dlion_operator.federation.credentials import Credentials

CHUNK_BYTES = 64 * 1024
MAX_MEASUREMENT_BYTES = 32 * 2**20
"""Per measurement: 1 s at 268 Mbit/s; faster links take less time."""
SEND_DURATION_S = 3.0
MEASUREMENT_TIMEOUT_S = 30.0
"""Includes bytes in flight on a slow link, and the answer."""
ACCEPTED_KEY = "dlion-accepted"
"""Key in the initial metadata of a call whose hello, the first chunk, is accepted."""
MIN_MEASUREMENT_INTERVAL_S = 10.0
"""A request sooner than this gets the last result, so that links are rarely saturated."""


@dataclass(frozen=True)
class LinkBandwidth:
    """Result of one measurement, timed by the receiver."""

    bytes_count: int
    """Bytes after the first chunk, whose arrival starts the timer."""
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        """The link's rate in that direction, minus concurrent traffic."""
        return self.bytes_count / self.seconds


@dataclass
class ChunkTimer:
    """The receiver's side of one measurement. Time is an argument."""

    first_s: float | None = None
    last_s: float = 0.0
    total_bytes: int = 0
    timed_bytes: int = 0

    def take(self, size_bytes: int, now_s: float) -> None:
        """Count a received chunk. Raises: ContractError if the measurement exceeds its limit."""
        self.total_bytes += size_bytes
        if self.total_bytes > MAX_MEASUREMENT_BYTES + CHUNK_BYTES:
            raise ContractError(f"a measurement of more than {MAX_MEASUREMENT_BYTES} bytes")
        if self.first_s is None:
            self.first_s = now_s
        else:
            self.timed_bytes += size_bytes
        self.last_s = now_s

    def result(self) -> wire.LinkTiming:
        took_s = 0.0 if self.first_s is None else self.last_s - self.first_s
        return wire.LinkTiming(
            timed_bytes=self.timed_bytes, receiver_micros=max(0, round(took_s * 1e6))
        )


class BandwidthMeter:
    """The sender's side: measures to other sites, one at a time."""

    def __init__(
        self, own: SiteName, addresses: Mapping[SiteName, str], credentials: Credentials
    ) -> None:
        self._own = own
        self._addresses = addresses
        self._credentials = credentials
        self._measuring = asyncio.Lock()
        self._last: dict[SiteName, tuple[float, LinkBandwidth]] = {}

    async def bandwidth(self, site: SiteName) -> LinkBandwidth:
        """Return the bandwidth from here to that site, measured now or a moment ago.

        Raises:
            LookupError: The site is unknown here.
            UnavailableError: The site is unreachable, or busy with another measurement.
            ContractError: The site refuses, or its answer is invalid.
        """
        address = self._addresses[site]
        async with self._measuring:
            measured_s, last = self._last.get(site, (-MIN_MEASUREMENT_INTERVAL_S, None))
            if last is not None and time.monotonic() - measured_s < MIN_MEASUREMENT_INTERVAL_S:
                return last
            bandwidth = await self._measured(site, address)
            self._last[site] = time.monotonic(), bandwidth
            return bandwidth

    async def _measured(self, site: SiteName, address: str) -> LinkBandwidth:
        made = self._credentials.channel(site, address, [("grpc.enable_retries", 0)])
        try:
            async with asyncio.timeout(MEASUREMENT_TIMEOUT_S), made as channel:
                stub = federation_pb2_grpc.FederationStub(channel)  # type: ignore[no-untyped-call]
                result, sent_bytes = await self._send(site, stub.Measure())
        except grpc.aio.AioRpcError as error:
            raise _refusal(site, error) from error
        except TimeoutError as error:
            raise UnavailableError(f"site {site} has not answered in time") from error
        return _checked(site, result, sent_bytes)

    async def _send(
        self, site: SiteName, call: grpc.aio.StreamUnaryCall[wire.LinkChunk, wire.LinkTiming]
    ) -> tuple[wire.LinkTiming, int]:
        """Send one measurement's chunks; return the answer and the bytes sent."""
        await call.write(wire.LinkChunk(site=self._own, to_site=site))
        sent_bytes = 0
        # No payload may follow a refusal: where a write fails, grpc.aio replaces the site's status
        # with INTERNAL (grpc/grpc#36066).
        if ACCEPTED_KEY in (await call.initial_metadata() or ()):
            # Random, so that nothing on the path compresses it.
            chunk = wire.LinkChunk(payload=os.urandom(CHUNK_BYTES))
            until_s = time.monotonic() + SEND_DURATION_S
            # The site may end the call between two writes. Awaiting it raises its status.
            with contextlib.suppress(asyncio.InvalidStateError):
                while sent_bytes < MAX_MEASUREMENT_BYTES and time.monotonic() < until_s:
                    await call.write(chunk)
                    sent_bytes += CHUNK_BYTES
                await call.done_writing()
        return await call, sent_bytes


def _checked(site: SiteName, result: wire.LinkTiming, sent_bytes: int) -> LinkBandwidth:
    seconds = result.receiver_micros / 1e6
    if result.timed_bytes > sent_bytes or seconds > MEASUREMENT_TIMEOUT_S:
        raise ContractError(
            f"site {site} reports {result.timed_bytes} bytes in {seconds:g} s;"
            f" {sent_bytes} were sent"
        )
    if not result.timed_bytes or not seconds:
        raise UnavailableError(f"site {site} received too little to time it")
    return LinkBandwidth(result.timed_bytes, seconds)


def _refusal(site: SiteName, error: grpc.aio.AioRpcError) -> UnavailableError | ContractError:
    code, text = error.code(), f"site {site}: {error.code().name}: {error.details() or ''}"
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return ContractError(f"site {site} runs a release that cannot measure bandwidth")
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED):
        return UnavailableError(text)
    return ContractError(text)
