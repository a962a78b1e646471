"""The port that peers dial: its options, its bounds, its address. Called by `exchange`."""

from __future__ import annotations

import grpc
import grpc.aio

from dlion_api.addresses import joined
from dlion_api.errors import UnavailableError
from dlion_worker.credentials import WorkerCredentials
from dlion_worker.exchange.client import CHANNEL_OPTIONS
from dlion_worker.exchange.framing import MAX_FRAME_BYTES

MAX_CALLS = 4096
"""Under way at once, of all peers: of each a link, its successor and a pull. More are refused, and
tried again by whoever dials. How many of one caller's: `service`, `pulls`."""
MAX_CALLS_OF_CONNECTION = 8
"""Whoever keeps to the protocol makes one call on each; more of them wait."""

_OPTIONS = [
    *(option for option in CHANNEL_OPTIONS if option[0] != "grpc.max_receive_message_length"),
    # A little more than the protocol allows, so that such a frame is refused by name.
    ("grpc.max_receive_message_length", 2 * MAX_FRAME_BYTES),
    ("grpc.max_concurrent_streams", MAX_CALLS_OF_CONNECTION),
    ("grpc.so_reuseport", 0),
]


def bounded_server(handler: grpc.GenericRpcHandler) -> grpc.aio.Server:
    """A server of these calls, of no port yet."""
    server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=MAX_CALLS)
    server.add_generic_rpc_handlers((handler,))
    return server


def listen(server: grpc.aio.Server, host: str, port: int, credentials: WorkerCredentials) -> int:
    """Opens that port, or any free one (0), and yields it.

    Raises:
        UnavailableError: it cannot be listened on.
    """
    address, secure = joined(host, port), credentials.server()
    try:
        if secure is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, secure)
    except RuntimeError as error:
        raise UnavailableError(f"cannot listen on {address}: {error}") from error
