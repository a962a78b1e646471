"""The links between peers: gRPC streams with mutual TLS, and the state machines that run them.

What goes in: everything between a coded message and the peer's coded message. The state machines
do no I/O: `framing` (chunks and checks), `window` (budgets, what gives way), `handshake` (when a
link is up), `deadline` (how long silence is usual). The skin over them knows gRPC: `service`
(incoming streams), `client` (outgoing streams), `exchange` (the thread that holds both).
What stays out: what is in a payload (`codecs`), what a message means (`policies`).
"""

from dlion_worker.exchange.events import (
    ExchangeEvent,
    LinkDown,
    LinkState,
    LinkUp,
    Refused,
    StatePulled,
    StateSnapshot,
    StateWanted,
)
from dlion_worker.exchange.exchange import Exchange, ExchangeConfig
from dlion_worker.exchange.window import QueueRule

__all__ = [
    "Exchange",
    "ExchangeConfig",
    "ExchangeEvent",
    "LinkDown",
    "LinkState",
    "LinkUp",
    "QueueRule",
    "Refused",
    "StatePulled",
    "StateSnapshot",
    "StateWanted",
]
