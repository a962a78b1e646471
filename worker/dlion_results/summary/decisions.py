"""The sidecars' decisions on heat, other work and groups, with their reasons.

Directives have all of a sidecar's reasons, most of them about rates and batches. These few explain
why a worker became slower, or changed its links.
"""

from typing import Final, NamedTuple

from dlion_api.names import Rank
from dlion_api.protocol.progress import DirectiveRecord

MAX_DECISIONS: Final = 500
"""The first ones are kept."""
_MAX_CHARACTERS: Final = 600
_SUBJECTS: Final = ("made groups", "the heat budget", "other work")
"""What reasons of these decisions contain (`dlion_core.resource_control.directive_reasons`)."""
_OF_ALL: Final = "made groups"
"""Every worker reports such a decision when it adopts it."""


class SidecarDecision(NamedTuple):
    """One decision; `rank` is the worker whose sidecar made or adopted it first."""

    time_s: float
    rank: Rank
    reason: str


class DecisionLog:
    """The decisions of one run, in order of their records."""

    def __init__(self) -> None:
        self.decisions: list[SidecarDecision] = []
        self.left_out = 0
        self._groups: set[str] = set()

    def add(self, record: DirectiveRecord) -> None:
        """Add the reasons of a directive on heat, other work and groups."""
        for reason in record.reason.split("; "):
            if not any(subject in reason for subject in _SUBJECTS) or reason in self._groups:
                continue
            if _OF_ALL in reason:
                self._groups.add(reason)
            if len(self.decisions) >= MAX_DECISIONS:
                self.left_out += 1
                continue
            decision = SidecarDecision(record.time_s, record.rank, reason[:_MAX_CHARACTERS])
            self.decisions.append(decision)
