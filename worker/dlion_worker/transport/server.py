"""The server port for peers: options, limits and address."""

from __future__ import annotations

import grpc
import grpc.aio

from dlion_api.addresses import join_host_port
from dlion_api.errors import UnavailableError
from dlion_core.links.framing import MAX_FRAME_BYTES
from dlion_worker.security.credentials import WorkerCredentials
from dlion_worker.transport.client import CHANNEL_OPTIONS

MAX_CALLS = 4096
"""Concurrent calls of all peers: a link, its successor and a pull each. Callers retry when
rejected. For limits per caller see `service` and `state_server`."""
MAX_CALLS_PER_CONNECTION = 8
"""A conforming peer makes one call per connection; further ones wait."""

_OPTIONS = [
    *(option for option in CHANNEL_OPTIONS if option[0] != "grpc.max_receive_message_length"),
    # Somewhat above the protocol's limit, so that our own check reports such a frame.
    ("grpc.max_receive_message_length", 2 * MAX_FRAME_BYTES),
    ("grpc.max_concurrent_streams", MAX_CALLS_PER_CONNECTION),
    ("grpc.so_reuseport", 0),
]


def bounded_server(handler: grpc.GenericRpcHandler) -> grpc.aio.Server:
    server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=MAX_CALLS)
    server.add_generic_rpc_handlers((handler,))
    return server


def listen(server: grpc.aio.Server, host: str, port: int, credentials: WorkerCredentials) -> int:
    """Open that port (0: any free one) and return its number.

    Raises:
        UnavailableError: It cannot be listened on.
    """
    address, secure = join_host_port(host, port), credentials.server()
    try:
        if secure is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, secure)
    except RuntimeError as error:
        raise UnavailableError(f"cannot listen on {address}: {error}") from error
