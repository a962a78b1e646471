"""Loss and round trips of a trainer's links, for its last report of them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from dlion_api.addresses import split_host_port
from dlion_api.names import Rank
from dlion_core.links.events import ConnectionFacts, LinkCounters
from dlion_worker.host_names import HostNames
from dlion_worker.tcp_connections import Endpoint, TcpConnection, own_connections


@dataclass
class CountedLinks:
    """Reads the counters of all links."""

    _counters: Callable[[], dict[Rank, LinkCounters]]
    _names: HostNames = field(default_factory=HostNames)

    def read(self, *, is_last: bool) -> dict[Rank, LinkCounters]:
        """Return the counters; the last ones with what the kernel knows of this process's
        connections.

        Peers lack it that are reached at one address with others, or by a host name that is not
        known yet: every call begins to look them up.
        """
        links = self._counters()
        self._names.look_up({split_host_port(link.address)[0] for link in links.values()})
        return self._with_connections(links) if is_last else links

    def _with_connections(self, links: dict[Rank, LinkCounters]) -> dict[Rank, LinkCounters]:
        try:
            connections = own_connections()
        except OSError:  # this kernel does not list them
            return links
        reached: dict[Endpoint, list[Rank]] = {}
        for rank, link in links.items():
            for endpoint in self._endpoints(link.address):
                reached.setdefault(endpoint, []).append(rank)
        found: dict[Rank, list[TcpConnection]] = {}
        for each in connections:
            ranks = reached.get(each.remote, [])
            if len(ranks) == 1:
                found.setdefault(ranks[0], []).append(each)
        facts = {rank: _facts(own) for rank, own in found.items()}
        return {rank: replace(link, connection=facts.get(rank)) for rank, link in links.items()}

    def _endpoints(self, address: str) -> list[Endpoint]:
        host, port = split_host_port(address)
        return [(own, int(port)) for own in self._names.addresses(host) if port.isdecimal()]


def _facts(connections: Iterable[TcpConnection]) -> ConnectionFacts:
    own = list(connections)
    shortest_s = [each.min_round_trip_s for each in own if each.min_round_trip_s is not None]
    return ConnectionFacts(
        sum(each.sent_segments for each in own),
        sum(each.retransmitted_segments for each in own),
        max(each.round_trip_s for each in own),
        min(shortest_s, default=None),
    )
