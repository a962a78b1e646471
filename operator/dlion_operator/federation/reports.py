"""What one site says of its part in one run, and how the compared part of a manifest is cut up.

Plain data, made by `dlion_operator.site_runs`, told by `telling`, kept by `state`. Pure.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dlion_api.membership import Member
from dlion_api.names import JobKey, Rank, SiteName, WorkerIdentity
from dlion_api.spec import BY_GROUP, RANKS_ANNOTATION, Job
from dlion_api.spec.bounds import MOST_GROUPS, MOST_WORKERS

MAX_FIELDS = 2048
"""More than the largest manifest has; of a larger one the first by name are told apart."""
MAX_WORKERS = MOST_GROUPS * MOST_WORKERS
"""Of one site."""
MAX_PATH_BYTES = 200
RANKS_PATH = f"metadata.annotations[{RANKS_ANNOTATION}]"
"""How workers are numbered, where pods and keeper have it; part of what is compared."""
FIELD_HASH_BYTES = 8
"""Enough to tell two values of one field apart, too little to try values out on."""


@dataclass(frozen=True)
class SpecPrint:
    """The fingerprint of the part of a manifest that must be the same at every site."""

    spec_hash: str
    """As `dlion_api.spec.Job.hash` has it."""
    fields: Mapping[str, bytes]
    """From a field's path to the hash of its value."""
    defaults: frozenset[str] = frozenset()
    """Those of the fields that need not be written: another release may not know them."""

    @classmethod
    def of(cls, job: Job) -> SpecPrint:
        """That job's, with ranks as the job has them."""
        leaves = sorted(_leaves("", job.compared()))[: MAX_FIELDS - 1]
        written = {path for path, _ in _leaves("", job.compared(without_defaults=True))}
        fields = {_bounded(path): _hash(text) for path, text in leaves}
        defaults = {_bounded(path) for path, _ in leaves if path not in written}
        # Nobody writes it; releases may number the workers of one manifest in different ways.
        fields[RANKS_PATH] = _hash(_text(BY_GROUP if job.may_grow else ""))
        return cls(job.hash(), fields, frozenset({*defaults, RANKS_PATH}))

    @property
    def is_whole(self) -> bool:
        """Whether every field is told apart."""
        return len(self.fields) < MAX_FIELDS


@dataclass(frozen=True)
class SiteWorkers:
    """A site's own workers of a run."""

    wanted: tuple[WorkerIdentity, ...]
    """Those that there should be, by that site's manifest."""
    members: tuple[Member, ...]
    """Those that have joined its coordinator since that began."""
    settled: bool
    """Whether its coordinator has heard from every worker there is: a worker that is not among the
    members is not there."""
    accuracies: Mapping[Rank, float] = field(default_factory=dict)
    """Of replicas, at their last evaluation in mid-run."""
    left: frozenset[Rank] = frozenset()
    """Workers of its that will not come again: they have failed for good, or the run is over
    there."""


@dataclass(frozen=True)
class LinksTo:
    """The links of a site's workers to those of another one."""

    site: SiteName
    connected: int
    expected: int
    bytes_per_s: float = 0.0
    """Of the slowest, as its receiver measures it; 0: not known."""


@dataclass(frozen=True)
class Figures:
    """How a site trains."""

    training: bool = False
    iteration: int = 0
    """Of its foremost worker."""
    samples_per_s: float = 0.0
    links: tuple[LinksTo, ...] = ()


@dataclass(frozen=True)
class RunReport:
    """All that a site says of its part in a run."""

    spec: SpecPrint
    workers: SiteWorkers
    figures: Figures
    bundle_pem: bytes = b""
    """By which this site's workers of the run are known, where the job names an authority; empty:
    it names none, or there is none."""


@dataclass(frozen=True)
class Said:
    """Some of that; None: as it was said last on the same stream."""

    run: JobKey
    spec: SpecPrint | None = None
    workers: SiteWorkers | None = None
    figures: Figures | None = None
    bundle_pem: bytes | None = None


@dataclass(frozen=True)
class SaidGone:
    """The site serves that run no more."""

    run: JobKey


@dataclass(frozen=True)
class Beat:
    """There is nothing new."""


Statement = Said | SaidGone | Beat


def _leaves(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Each field's path and its value as text. A list of named things is taken apart by name."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _leaves(f"{path}.{key}" if path else str(key), each)
        return
    if isinstance(value, list):
        names = [each.get("name") for each in value if isinstance(each, dict)]
        if value and len(names) == len(value) and all(names):
            yield path, _text(names)  # their order counts, too
            for name, each in zip(names, value, strict=True):
                yield from _leaves(f"{path}[{name}]", each)
            return
    yield path, _text(value)


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="replace")).digest()[:FIELD_HASH_BYTES]


def _bounded(path: str) -> str:
    """The path, if it is short and can be shown; else as much of it as can be, and its hash."""
    encoded = path.encode(errors="replace")
    if len(encoded) <= MAX_PATH_BYTES and path.isprintable():
        return path
    shown = "".join(each if each.isprintable() else "?" for each in encoded.decode())
    kept = shown.encode()[: MAX_PATH_BYTES - 20].decode(errors="ignore")
    return f"{kept}~{_hash(path).hex()}"
