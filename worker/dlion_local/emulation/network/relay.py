"""A process that relays and paces the traffic between workers: link emulation without root.

Run as `python -m dlion_local.emulation.network.relay` by `emulation.network.relay_network`. For
every pair of workers it listens on a port and forwards connections to the target's port. Bytes from
worker i to j pass every pipe of i's uplink that names j and of j's downlink that names i, those
that their sites share included, then wait for the latency. Buffers are small, so that back-pressure
reaches the sender as on a real link.

Requests are JSON lines on standard input, answers go to standard output; the process ends with its
input. The first request names the links, and its answer their ports; others change the conditions.
It paces stream bytes, without headers, and does not parse them.
"""

import asyncio
import contextlib
import errno
import itertools
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NoReturn, Self

from dlion_api.names import Rank
from dlion_api.protocol.port_limits import prepare_process
from dlion_environments.plan import Conditions, Pipe, PipeKey, WorkerConditions

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
MAX_LINE_BYTES = 1 << 28
"""Maximum size of a request: it grows with the square of the number of workers."""
BURST_S = 0.03
"""How much of its rate a pipe may catch up on after a late wake-up of the relay. Over a second it
can exceed its rate by that share, 3 %."""
CHUNK_S = 0.004
"""Duration of a chunk at its link's rate: the granularity of sharing between links."""
BUFFER_S = 0.05
"""Size of each of the relay's kernel buffers, in time at the link's rate (the kernel doubles
it)."""
_CHUNK_BYTES = (1448, 65536)
_BUFFER_BYTES = (16384, 1 << 20)
_SEGMENT_BYTES = 4344
"""Loopback's default 64 KiB segments would not fit into such small buffers."""


class Pacer:
    """A pipe with a rate; reservations are served in order."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at_s = 0.0

    def reserve(self, size_bytes: int, now_s: float) -> float:
        """Reserve the pipe for these bytes. Return the time at which they may pass.

        >>> pacer = Pacer(1000.0)
        >>> pacer.reserve(500, now_s=10.0) <= 10.0
        True
        >>> round(pacer.reserve(500, now_s=10.0), 3)
        10.47
        """
        start_s = max(self._free_at_s, now_s - BURST_S)
        self._free_at_s = start_s + size_bytes / self.bytes_per_s
        return start_s

    def set_rate(self, bytes_per_s: float, now_s: float) -> None:
        """Change the rate; reserved bytes that still wait pass at the new rate."""
        waiting_bytes = max(0.0, self._free_at_s - now_s) * self.bytes_per_s
        self.bytes_per_s = bytes_per_s
        if waiting_bytes > 0:
            self._free_at_s = now_s + waiting_bytes / bytes_per_s


class LinkDirection:
    """Traffic from one worker to another: pacers, latency, and whether it is cut."""

    def __init__(self, pacers: list[Pacer]) -> None:
        self.pacers = pacers
        self.latency_s = 0.0
        self.chunk_bytes = _CHUNK_BYTES[1]
        self.open = asyncio.Event()
        self.open.set()

    @property
    def bytes_per_s(self) -> float:
        return min((pacer.bytes_per_s for pacer in self.pacers), default=float("inf"))

    @property
    def buffer_bytes(self) -> int:
        low, high = _BUFFER_BYTES
        return int(min(high, max(low, self.bytes_per_s * BUFFER_S)))

    async def pace(self, size_bytes: int) -> None:
        """Wait until that many bytes may pass.

        Pipes are reserved one by one: waiting for a busy downlink must not block the uplink's next
        turn.
        """
        now_s = asyncio.get_running_loop().time
        for pacer in self.pacers:
            wait_s = pacer.reserve(size_bytes, now_s()) - now_s()
            if wait_s > 0:
                await asyncio.sleep(wait_s)


class Relay:
    """All links of a run."""

    def __init__(self, conditions: Conditions) -> None:
        links = _pipes_of_links(conditions)
        self._pacers = {
            key: Pacer(pipe.bytes_per_s) for pipes in links.values() for key, pipe in pipes.items()
        }
        self.directions = {
            link: LinkDirection([self._pacers[key] for key in pipes])
            for link, pipes in links.items()
        }
        self._connections: set[asyncio.Task[None]] = set()
        self.apply(conditions)

    def apply(self, conditions: Conditions) -> None:
        """Apply these rates, latencies and cuts; connections stay open."""
        now_s = asyncio.get_running_loop().time()
        pipes = {
            key: pipe
            for of_link in _pipes_of_links(conditions).values()
            for key, pipe in of_link.items()
        }
        if pipes.keys() != self._pacers.keys():
            raise ValueError("the shape of the pipes may not change during a run")
        for key, pacer in self._pacers.items():
            pacer.set_rate(pipes[key].bytes_per_s, now_s)
        self._choose_chunks()
        for (sender, receiver), direction in self.directions.items():
            direction.latency_s = conditions.worker(sender).latency_s.get(receiver, 0.0)
            if receiver in conditions.worker(sender).cut_peers:
                direction.open.clear()
            else:
                direction.open.set()

    def _choose_chunks(self) -> None:
        """Choose one chunk size for all links that share a pipe, directly or through others.

        A pipe alternates between links: unequal chunks would give unequal shares.
        """
        slowest = {direction: direction.bytes_per_s for direction in self.directions.values()}
        sharing: dict[Pacer, list[LinkDirection]] = {}
        for direction in slowest:
            for pacer in direction.pacers:
                sharing.setdefault(pacer, []).append(direction)
        changed = True
        while changed:
            changed = False
            for directions in sharing.values():
                least = min(slowest[direction] for direction in directions)
                for direction in directions:
                    changed |= slowest[direction] > least
                    slowest[direction] = least
        low, high = _CHUNK_BYTES
        for direction, rate in slowest.items():
            direction.chunk_bytes = int(min(high, max(low, rate * CHUNK_S)))

    async def listen(self, dialler: Rank, target: Rank, target_port: int) -> int:
        """Accept the dialler's connections to the target's port. Return the port to dial."""
        listener = _new_socket(self.directions[dialler, target].buffer_bytes)
        listener.bind((HOST, 0))
        listener.listen(16)
        task = asyncio.create_task(self._accept(listener, dialler, target, target_port))
        self._connections.add(task)
        return int(listener.getsockname()[1])

    async def _accept(
        self, listener: socket.socket, dialler: Rank, target: Rank, target_port: int
    ) -> None:
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                try:
                    dialled, _ = await loop.sock_accept(listener)
                except ConnectionAbortedError:  # the dialler has given up already
                    continue
                except OSError as error:
                    _end(error)
                task = asyncio.create_task(self._connect(dialled, dialler, target, target_port))
                self._connections.add(task)
                task.add_done_callback(self._connections.discard)

    async def _connect(
        self, dialled: socket.socket, dialler: Rank, target: Rank, target_port: int
    ) -> None:
        there, back = self.directions[dialler, target], self.directions[target, dialler]
        with dialled, _new_socket(back.buffer_bytes) as forwarded:
            dialled.setblocking(False)
            await there.open.wait()  # a cut link does not answer
            try:
                await asyncio.get_running_loop().sock_connect(forwarded, (HOST, target_port))
            except OSError:  # the target does not listen yet: the dialler gets a reset
                return
            _set_buffers(dialled, sending=back.buffer_bytes)
            _set_buffers(forwarded, sending=there.buffer_bytes)
            pumps = [
                asyncio.create_task(_pump(dialled, forwarded, there)),
                asyncio.create_task(_pump(forwarded, dialled, back)),
            ]
            try:
                await asyncio.gather(*pumps)
            except OSError as error:  # one side has reset: end the other too
                log.debug("link %d-%d ended: %s", dialler, target, error)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)

    async def close(self) -> None:
        tasks = list(self._connections)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(source: socket.socket, sink: socket.socket, direction: LinkDirection) -> None:
    """Copy bytes one way until the source ends, then shut down the sink's sending side."""
    loop = asyncio.get_running_loop()
    async with _DelayLine(direction, sink) as delay_line:
        while data := await loop.sock_recv(source, direction.chunk_bytes):
            await direction.open.wait()
            await direction.pace(len(data))
            await delay_line.send(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


class _DelayLine:
    """Delays chunks by the latency on their way to the sink."""

    def __init__(self, direction: LinkDirection, sink: socket.socket) -> None:
        self._direction = direction
        self._sink = sink
        self._due: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        self._held = 0
        """Chunks that have not reached the sink, the current one included."""
        self._fewer = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._deliver())
        return self

    async def send(self, data: bytes) -> None:
        loop = asyncio.get_running_loop()
        if not self._direction.latency_s and not self._held:
            await loop.sock_sendall(self._sink, data)
            return
        assert self._task is not None
        while self._held > self._direction.latency_s / CHUNK_S + 1 and not self._task.done():
            self._fewer.clear()
            await self._fewer.wait()
        if self._task.done():
            self._task.result()  # raises its exception
        self._held += 1
        self._due.put_nowait((loop.time() + self._direction.latency_s, data))

    async def _deliver(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                due_s, data = await self._due.get()
                if not data:
                    return
                await asyncio.sleep(max(0.0, due_s - loop.time()))
                await loop.sock_sendall(self._sink, data)
                self._held -= 1
                self._fewer.set()
        finally:
            self._fewer.set()

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        assert self._task is not None
        if kind is None and not self._task.done():
            await self._due.put((0.0, b""))
            await self._task
        self._task.cancel()


def _pipes_of_links(conditions: Conditions) -> dict[tuple[Rank, Rank], dict[PipeKey, Pipe]]:
    """The pipes of each link, by (sender, receiver)."""
    ranks = [worker.rank for worker in conditions.workers]
    return {link: dict(conditions.pipes(*link)) for link in itertools.permutations(ranks, 2)}


def _new_socket(receive_bytes: int) -> socket.socket:
    try:
        made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        _end(error)
    made.setblocking(False)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SEGMENT_BYTES)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    return made


def _end(error: OSError) -> NoReturn:
    """End the process: without the link, workers would wait for each other."""
    is_limit = error.errno == errno.EMFILE
    advice = ". Raise the hard limit (ulimit -H -n), or use fewer workers" if is_limit else ""
    sys.stderr.write(f"no connection can be made: {error.strerror}{advice}\n")
    sys.stderr.flush()
    os._exit(1)  # an exception would add the traceback of its task


def _set_buffers(connection: socket.socket, *, sending: int) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, sending)


async def serve() -> None:
    """Relay from the first line of standard input to its end."""
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    config = json.loads(await reader.readline())
    relay = Relay(links_from_json(config["conditions"]))
    _write_answer({"ports": [await relay.listen(*link) for link in config["links"]]})
    while line := await reader.readline():
        relay.apply(links_from_json(json.loads(line)["conditions"]))
        _write_answer({})
    await relay.close()


def links_to_json(conditions: Conditions) -> list[dict[str, Any]]:
    """Links of the conditions, by rank."""
    document: dict[str, Any] = json.loads(json.dumps(asdict(conditions), default=sorted))
    return list(document["workers"])


def links_from_json(document: Sequence[Mapping[str, Any]]) -> Conditions:
    """Parse conditions, without quotas."""
    return Conditions(
        tuple(
            WorkerConditions(
                rank=Rank(worker["rank"]),
                uplink=_pipes_from_json(worker["uplink"]),
                downlink=_pipes_from_json(worker["downlink"]),
                latency_s={Rank(int(peer)): s for peer, s in worker["latency_s"].items()},
                cut_peers=frozenset(map(Rank, worker["cut_peers"])),
            )
            for worker in document
        )
    )


def _pipes_from_json(pipes: Sequence[Mapping[str, Any]]) -> tuple[Pipe, ...]:
    return tuple(
        Pipe(
            frozenset(map(Rank, pipe["peers"])),
            pipe["bytes_per_s"],
            frozenset(map(Rank, pipe["sharers"])),
        )
        for pipe in pipes
    )


def _write_answer(answer: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prepare_process()  # a pair of workers takes a dozen descriptors
    asyncio.run(serve())


if __name__ == "__main__":
    main()
