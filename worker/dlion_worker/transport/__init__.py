"""Links between workers: gRPC streams with mutual TLS.

`service` takes incoming streams, `client` opens outgoing ones, and `peer_exchange` is the thread
that runs both. The state machines behind them are in `dlion_core.links`. Payload formats belong to
`codecs`, the meaning of messages to `policies`.
"""

from dlion_worker.transport.connection_facts import CountedLinks
from dlion_worker.transport.peer_exchange import PeerExchange
from dlion_worker.transport.peer_links import PeerExchangeConfig

__all__ = ["CountedLinks", "PeerExchange", "PeerExchangeConfig"]
