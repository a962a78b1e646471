"""Sums of what the trainer reports, for the sidecar's metrics: bytes sent and times of steps."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict

from dlion_api.names import Rank
from dlion_api.protocol.measurements import LinkDelivery, StepTiming


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


class StepSeconds:
    """Seconds of all steps so far, by part. A part never shrinks."""

    def __init__(self) -> None:
        self._main: defaultdict[str, float] = defaultdict(float)
        self._thread: defaultdict[str, float] = defaultdict(float)

    def add(self, step: StepTiming) -> None:
        """Add one step."""
        phases, waited_s = step.phases, step.waited_s or 0.0
        other_s = step.wall_s - step.compute_s - waited_s - phases.main_s
        for part, seconds in (
            ("compute", step.compute_s),
            ("wait", waited_s),
            ("select", phases.select_s),
            ("encode", phases.encode_s),
            ("send", phases.send_s),
            ("decode", phases.decode_s),
            ("apply", phases.apply_s),
            ("other", max(0.0, other_s)),
        ):
            self._main[part] += seconds
        self._thread["send"] += phases.link_send_s
        self._thread["receive"] += phases.link_receive_s

    @property
    def main(self) -> Mapping[str, float]:
        """Seconds of the trainer's main thread; they add up to the steps' wall time."""
        return dict(self._main)

    @property
    def thread(self) -> Mapping[str, float]:
        """Seconds of the exchange's thread, which runs in parallel."""
        return dict(self._thread)
