"""What was refused at this worker's ports, or to it: counts for metrics, words for the trainer.

Called by the process. Words are told once each: a stranger may go on for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from dlion_api.measurements import MeasuringRefused, StreamRefusals
from dlion_api.refusals import PeerRefusal
from dlion_worker.told_once import ToldOnce

LONGEST_WORDS = 500

Place = tuple[str, str, str]
"""Port (`exchange`, `measuring`), side (`served`, `dialled`) and reason."""


class Refusals:
    """One worker's."""

    def __init__(self, tell: Callable[[MeasuringRefused], None]) -> None:
        """`tell` brings words to the trainer, if there is one."""
        self._tell = tell
        self._own: Counter[tuple[PeerRefusal, bool]] = Counter()
        self._streams = StreamRefusals(())
        self._told = ToldOnce()

    def refused(self, kind: PeerRefusal, words: str, *, dialled: bool) -> None:
        """A peer's sidecar was refused, or (`dialled`) a call to one came to nothing for good."""
        self._own[kind, dialled] += 1
        words = words[:LONGEST_WORDS]
        if self._told.is_new((kind, dialled), words):
            self._tell(MeasuringRefused(words))

    def heard(self, streams: StreamRefusals) -> None:
        """The trainer's own, at the exchange."""
        self._streams = streams

    def counts(self) -> Mapping[Place, int]:
        """All of them."""
        own = {("measuring", _side(d), str(kind)): n for (kind, d), n in dict(self._own).items()}
        streams = {("exchange", _side(c.dialled), c.kind): c.count for c in self._streams.counts}
        return own | streams

    def messages(self) -> int:
        """Of measuring: callers that were refused, and answers that made no sense."""
        return sum(
            count
            for (kind, dialled), count in dict(self._own).items()
            if not dialled or kind is PeerRefusal.MALFORMED
        )


def _side(dialled: bool) -> str:
    return "dialled" if dialled else "served"
