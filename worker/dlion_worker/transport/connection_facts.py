"""Loss and round trips of a trainer's links, for its last report of them."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from dlion_api.addresses import split_host_port
from dlion_api.names import Rank
from dlion_core.links.events import ConnectionFacts, LinkCounters
from dlion_worker.tcp_connections import (
    Endpoint,
    TcpConnection,
    address_of,
    own_connections,
)


def with_connections(links: Mapping[Rank, LinkCounters]) -> dict[Rank, LinkCounters]:
    """The same counters, with what the kernel knows of this process's connections.

    Peers lack it that are reached by a host name, or at one address with others.
    """
    try:
        connections = own_connections()
    except OSError:  # this kernel does not list them
        return dict(links)
    reached: dict[Endpoint, list[Rank]] = {}
    for rank, link in links.items():
        if (endpoint := _endpoint(link.address)) is not None:
            reached.setdefault(endpoint, []).append(rank)
    found: dict[Endpoint, list[TcpConnection]] = {}
    for each in connections:
        found.setdefault(each.remote, []).append(each)
    facts = {
        ranks[0]: _facts(found[endpoint])
        for endpoint, ranks in reached.items()
        if endpoint in found and len(ranks) == 1
    }
    return {rank: replace(link, connection=facts.get(rank)) for rank, link in links.items()}


def _facts(connections: Iterable[TcpConnection]) -> ConnectionFacts:
    own = list(connections)
    shortest_s = [each.min_round_trip_s for each in own if each.min_round_trip_s is not None]
    return ConnectionFacts(
        sum(each.sent_segments for each in own),
        sum(each.retransmitted_segments for each in own),
        max(each.round_trip_s for each in own),
        min(shortest_s, default=None),
    )


def _endpoint(address: str) -> Endpoint | None:
    host, port = split_host_port(address)
    own = address_of(host)
    return None if own is None or not port.isdecimal() else (own, int(port))
