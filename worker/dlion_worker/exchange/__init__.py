"""Links between workers: gRPC streams with mutual TLS, and the state machines behind them.

Without I/O: `framing` (chunks and checks), `send_queue`, `handshake` (when a link is up),
`deadline` (adaptive timeouts). With gRPC: `service` (incoming streams), `client` (outgoing
streams), `exchange` (the thread that runs both). Payload formats belong to `codecs`, the meaning of
messages to `policies`.
"""

from dlion_worker.exchange.events import (
    ExchangeEvent,
    LinkCounters,
    LinkDown,
    LinkUp,
    Refused,
    StatePulled,
    StateRequest,
    StateSnapshot,
)
from dlion_worker.exchange.exchange import PeerExchange, PeerExchangeConfig
from dlion_worker.exchange.send_queue import QueueRule

__all__ = [
    "ExchangeEvent",
    "LinkCounters",
    "LinkDown",
    "LinkUp",
    "PeerExchange",
    "PeerExchangeConfig",
    "QueueRule",
    "Refused",
    "StatePulled",
    "StateRequest",
    "StateSnapshot",
]
