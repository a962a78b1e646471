"""What the operator remembers of one job between two looks; nothing depends on it after a restart.

Made and read by `reconcile`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from dlion_operator.carrying_out import Children
from dlion_operator.cluster import Document, RefusedError
from dlion_operator.decisions import Notice
from dlion_operator.job_authority import NamedAuthority
from dlion_operator.named_secret import NamedSecret
from dlion_operator.node_states import NodeState
from dlion_operator.observed import Missing, Refusal, Unready
from dlion_operator.sightings import Sightings

FIRST_RETRY_S: Final = 10.0
MAX_RETRY_S: Final = 600.0
"""A refused object is tried again after this, doubling from the first: a policy, a quota or a right
may change, and nobody tells the operator."""

Asked = tuple[object, tuple[tuple[str, str], ...]]
"""Generation of a manifest and its labels, which change no generation."""


@dataclass
class LastRefusal:
    """An object that the API server refused last, and when to try again."""

    found: Refusal | None = None
    """None: nothing is refused."""
    retry_at_s: float = 0.0
    _asked: Asked | None = None
    _count: int = 0
    """In a row."""

    def is_due(self, now_s: float) -> bool:
        """Whether objects are to be made now."""
        return self.found is None or now_s >= self.retry_at_s

    def note(self, document: Document, error: RefusedError, now_s: float) -> None:
        """Takes a refusal; the next try is later than the last one was."""
        self.found = Refusal(str(error), error.code)
        self._asked = _asked(document)
        self.retry_at_s = now_s + min(MAX_RETRY_S, FIRST_RETRY_S * 2.0 ** min(self._count, 16))
        self._count += 1

    def forget(self) -> bool:
        """Nothing is refused any more; whether something was."""
        was_refused, self.found, self._count = self.found is not None, None, 0
        return was_refused

    def hold_against(self, document: Document) -> None:
        """Forgets a refusal of another manifest: this one is tried at once."""
        if self._asked != _asked(document):
            self.forget()


@dataclass
class JobMemory:
    """One job's."""

    uid: str
    children: Children
    secret: NamedSecret
    authority: NamedAuthority | None = None
    refusal: LastRefusal = field(default_factory=LastRefusal)
    failing_since_s: float | None = None
    hindrance: str = ""
    status_written_s: float = field(default=float("-inf"))
    nodes: Mapping[str, NodeState] = field(default_factory=dict)
    kept: frozenset[str] = frozenset()
    """Pods on nodes that work and do not let them go, as they were told of last."""
    missing: Sightings[Missing] = field(default_factory=Sightings)
    unready: Sightings[Unready] = field(default_factory=Sightings)
    untold: list[Notice] = field(default_factory=list)


def _asked(document: Document) -> Asked:
    metadata = document["metadata"]
    return metadata.get("generation"), tuple(sorted((metadata.get("labels") or {}).items()))
