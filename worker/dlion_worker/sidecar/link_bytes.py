"""Sums up what a worker has sent on each link, by kind, for the sidecar's metrics."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict

from dlion_api.names import Rank
from dlion_api.protocol.measurements import LinkDelivery


class LinkBytes:
    """Bytes to each peer so far, over all starts of the trainer. A number never shrinks."""

    def __init__(self) -> None:
        self._sent: defaultdict[tuple[Rank, str], int] = defaultdict(int)

    def add(self, delivery: LinkDelivery) -> None:
        """Add one report of the trainer."""
        for name, count in asdict(delivery.sent).items():
            if count:
                self._sent[delivery.peer, name.removesuffix("_bytes")] += count

    def rows(self) -> Iterator[tuple[Rank, str, int]]:
        """Peer, kind and bytes, without kinds that were never sent. From any thread."""
        for (peer, kind), count in sorted(self._sent.copy().items()):
            yield peer, kind, count
