"""A site's report of its part in a run, and fingerprints of manifests. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dlion_api.bounds import MAX_GROUPS_PER_SITE, MAX_WORKERS_PER_GROUP
from dlion_api.names import JobKey, Rank, SiteName, WorkerIdentity
from dlion_api.protocol.membership import Member
from dlion_api.protocol.revocation import Revocation
from dlion_api.spec import BY_GROUP, RANKS_ANNOTATION, Job

MAX_FIELDS = 2048
"""More than any manifest should have; beyond it, only the first by name are compared."""
MAX_WORKERS = MAX_GROUPS_PER_SITE * MAX_WORKERS_PER_GROUP
"""Per site."""
MAX_PATH_BYTES = 200
RANKS_PATH = f"metadata.annotations[{RANKS_ANNOTATION}]"
"""How workers are numbered; part of the compared fields."""
FIELD_HASH_BYTES = 8
"""Enough to distinguish two values, too short to recover a value by brute force."""


@dataclass(frozen=True)
class SpecFingerprint:
    """Fingerprint of the part of a manifest that must be equal at every site."""

    spec_hash: str
    """The manifest's hash, from `dlion_api.spec.Job.hash`."""
    fields: Mapping[str, bytes]
    """Hash of each field's value, by the field's path."""
    defaults: frozenset[str] = frozenset()
    """Fields that have their default: another release may not know them."""

    @classmethod
    def of(cls, job: Job) -> SpecFingerprint:
        leaves = sorted(_leaves("", job.compared()))[: MAX_FIELDS - 1]
        written = {path for path, _ in _leaves("", job.compared(without_defaults=True))}
        fields = {_bounded(path): _hash(text) for path, text in leaves}
        defaults = {_bounded(path) for path, _ in leaves if path not in written}
        # Not from the manifest: releases may number the workers of one manifest differently.
        fields[RANKS_PATH] = _hash(_text(BY_GROUP if job.may_grow else ""))
        return cls(job.hash(), fields, frozenset({*defaults, RANKS_PATH}))

    @property
    def is_whole(self) -> bool:
        """Whether `fields` covers every field."""
        return len(self.fields) < MAX_FIELDS


@dataclass(frozen=True)
class ReportedWorkers:
    """A site's own workers in a run."""

    wanted: tuple[WorkerIdentity, ...]
    """The workers in that site's manifest."""
    members: tuple[Member, ...]
    """Workers that have joined its coordinator since the coordinator started."""
    settled: bool
    """Whether every existing worker has joined its coordinator: one not in `members` is absent."""
    accuracies: Mapping[Rank, float] = field(default_factory=dict)
    """Each replica's accuracy at its last evaluation during the run."""
    left: frozenset[Rank] = frozenset()
    """Workers that will not return: they failed permanently, or the run is over there."""


@dataclass(frozen=True)
class LinksTo:
    """The links of a site's workers to those of another site."""

    site: SiteName
    connected: int
    expected: int
    bytes_per_s: float = 0.0
    """Rate of the slowest link, measured by its receiver; 0: unknown."""


@dataclass(frozen=True)
class TrainingFigures:
    """A site's training progress."""

    training: bool = False
    iteration: int = 0
    """The highest iteration of its workers."""
    samples_per_s: float = 0.0
    links: tuple[LinksTo, ...] = ()


@dataclass(frozen=True)
class RunReport:
    """A site's complete report of its part in a run."""

    spec: SpecFingerprint
    workers: ReportedWorkers
    figures: TrainingFigures
    bundle_pem: bytes = b""
    """CA bundle of this site's workers, if the job names an authority; empty: none."""
    revocations: tuple[Revocation, ...] = ()
    """What was revoked at this site, also of other sites' workers."""


@dataclass(frozen=True)
class RunReported:
    """A partial report; None: unchanged since the last one on the same stream."""

    run: JobKey
    spec: SpecFingerprint | None = None
    workers: ReportedWorkers | None = None
    figures: TrainingFigures | None = None
    bundle_pem: bytes | None = None
    revocations: tuple[Revocation, ...] | None = None


@dataclass(frozen=True)
class RunRemoved:
    """The site no longer serves that run."""

    run: JobKey


@dataclass(frozen=True)
class Heartbeat:
    """Nothing has changed."""


Statement = RunReported | RunRemoved | Heartbeat


def _leaves(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield each field's path and value as text. A list of named objects is split by name."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _leaves(f"{path}.{key}" if path else str(key), each)
        return
    if isinstance(value, list):
        names = [each.get("name") for each in value if isinstance(each, dict)]
        if value and len(names) == len(value) and all(names):
            yield path, _text(names)  # their order is compared, too
            for name, each in zip(names, value, strict=True):
                yield from _leaves(f"{path}[{name}]", each)
            return
    yield path, _text(value)


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="replace")).digest()[:FIELD_HASH_BYTES]


def _bounded(path: str) -> str:
    """Return the path if short and printable, else a printable prefix of it and its hash."""
    encoded = path.encode(errors="replace")
    if len(encoded) <= MAX_PATH_BYTES and path.isprintable():
        return path
    shown = "".join(each if each.isprintable() else "?" for each in encoded.decode())
    kept = shown.encode()[: MAX_PATH_BYTES - 20].decode(errors="ignore")
    return f"{kept}~{_hash(path).hex()}"
