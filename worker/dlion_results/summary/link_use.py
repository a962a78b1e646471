"""What each link of a run carried, by kind of bytes, from the content of `summary.json`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

MESSAGE_KINDS: Final = ("gradient", "weights", "control")
"""Kinds of bytes in messages, which add up to `sent_bytes`; the fields of the summary have the
suffix `_bytes`."""
KINDS: Final = (*MESSAGE_KINDS, "header", "state", "probe")


@dataclass(frozen=True)
class CarriedBytes:
    """One link in one direction."""

    sender: str
    receiver: str
    by_kind: Mapping[str, int]
    used_fraction: float | None
    """Mean rate of messages while the sender trained, over the link's rate as it was measured last;
    None: unknown."""

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self.by_kind.values())


def carried_bytes(summary: Mapping[str, Any]) -> list[CarriedBytes]:
    """The links, the one that carried most first. Names are as in the summary, unescaped."""
    names = {worker["rank"]: worker["name"] for worker in summary["workers"]}
    links = [
        _link(worker, link, names) for worker in summary["workers"] for link in worker["links"]
    ]
    return sorted(links, key=lambda link: -link.total)


def bytes_by_kind(figures: Mapping[str, Any]) -> dict[str, int]:
    """The bytes of one link, or of all; what an older release did not count is 0."""
    return {kind: figures.get(f"{kind}_bytes") or 0 for kind in KINDS}


def _link(
    worker: Mapping[str, Any], link: Mapping[str, Any], names: Mapping[int, str]
) -> CarriedBytes:
    wall_s, rate = worker.get("wall_s"), link["last_bandwidth_bytes_per_s"]
    used = link["sent_bytes"] / (wall_s * rate) if wall_s and rate else None
    receiver = names.get(link["peer"], f"worker {link['peer']}")
    return CarriedBytes(worker["name"], receiver, bytes_by_kind(link), used)
