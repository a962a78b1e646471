"""Limits that all gRPC ports share: connections without a call, and open calls of a caller.

gRPC checks them before any handler runs. They hold for outsiders, too, which have no
certificate.
"""

import os
import resource
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Final

HANDSHAKE_WITHIN_S: Final = 10
"""A connection that has not ended its TLS handshake by then, or sent HTTP/2's first frame, is
closed."""
IDLE_WITHIN_S: Final = 60
"""A connection that has had no call for this long is closed. Its caller connects again."""
REQUEST_WITHIN_S: Final = 10.0
"""How long a caller may take to send its request."""


def connection_options(
    max_connections: int, *, max_calls_per_connection: int
) -> tuple[tuple[str, int], ...]:
    """Return a gRPC server's options.

    A connection over `max_connections` is closed before its handshake. gRPC has no such limit for
    an address, and peers behind a gateway share one.
    """
    return (
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.server_handshake_timeout_ms", 1000 * HANDSHAKE_WITHIN_S),
        ("grpc.max_connection_idle_ms", 1000 * IDLE_WITHIN_S),
        ("grpc.max_concurrent_streams", max_calls_per_connection),
    )


def prepare_process() -> None:
    """Prepare a process and its children for these ports. Call it before gRPC is first used.

    Some systems start processes with 1024 descriptors, fewer than a server's connections. So it may
    use as many as the system allows. gRPC prints errors only, as it would print a line whenever a
    server ends an idle connection.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


class OpenCalls:
    """Counts the open calls of each caller. Use it in one event loop."""

    def __init__(self, max_of_one_caller: int) -> None:
        self.max_of_one_caller = max_of_one_caller
        self.by_caller: Counter[Hashable] = Counter()

    @contextmanager
    def counted(self, caller: Hashable) -> Iterator[bool]:
        """Count one call within the block; False, without counting it, if there are too many.

        Args:
            caller: None: not known, and not limited.
        """
        if caller is None:
            yield True
            return
        if self.by_caller[caller] >= self.max_of_one_caller:
            yield False
            return
        self.by_caller[caller] += 1
        try:
            yield True
        finally:
            self.by_caller[caller] -= 1
            self.by_caller += Counter()  # drops those at zero
