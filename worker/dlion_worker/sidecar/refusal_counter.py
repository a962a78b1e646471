"""Counts rejected calls, for metrics, and reports their messages to the trainer, each once."""

from collections import Counter
from collections.abc import Callable, Mapping

from dlion_api.protocol.measurements import MeasuringRefused, StreamRefusals
from dlion_api.protocol.refusals import PeerRefusal
from dlion_worker.once_per_key import OncePerKey

MAX_MESSAGE_CHARACTERS = 500

RefusalKey = tuple[str, str, str]
"""Port (`exchange`, `measuring`), side (`served`, `dialled`) and reason."""


class RefusalCounter:
    def __init__(self, send: Callable[[MeasuringRefused], None]) -> None:
        """`send` passes a message to the trainer, if one is connected."""
        self._send = send
        self._own: Counter[tuple[PeerRefusal, bool]] = Counter()
        self._streams = StreamRefusals(())
        self._once = OncePerKey()

    def refused(self, kind: PeerRefusal, text: str, *, dialled: bool) -> None:
        """Count a rejected caller, or (`dialled`) a call that a peer rejected permanently."""
        self._own[kind, dialled] += 1
        text = text[:MAX_MESSAGE_CHARACTERS]
        if self._once.is_new((kind, dialled), text):
            self._send(MeasuringRefused(text))

    def set_stream_refusals(self, streams: StreamRefusals) -> None:
        """Set the counts of the exchange, as the trainer reports them."""
        self._streams = streams

    def counts(self) -> Mapping[RefusalKey, int]:
        own = {("measuring", _side(d), str(kind)): n for (kind, d), n in dict(self._own).items()}
        streams = {("exchange", _side(c.dialled), c.kind): c.count for c in self._streams.counts}
        return own | streams

    def messages(self) -> int:
        """Rejected callers and invalid responses of the measuring service."""
        return sum(
            count
            for (kind, dialled), count in dict(self._own).items()
            if not dialled or kind is PeerRefusal.MALFORMED
        )


def _side(dialled: bool) -> str:
    return "dialled" if dialled else "served"
