"""What a saved model holds: a statement beside it, as its worker writes it and `dlion fetch` reads.

The form is an in-toto Statement v1 with a predicate of our own (docs/provenance.md). In a cluster
the site's keeper signs it (`dlion_worker.provenance.envelope`). Statements are untrusted.
"""

import hashlib
import json
import operator
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Self

from dlion_api.errors import ContractError
from dlion_api.protocol.json_fields import Conversion, fields_converter, read_flag, read_text
from dlion_api.protocol.revocation import MAX_REVOCATIONS

PROVENANCE_FILE: Final = "model.provenance.json"
MODEL_FILE: Final = "model.keras"
METADATA_FILE: Final = "model.json"
STATED_FILES: Final = (MODEL_FILE, METADATA_FILE)
"""What a statement vouches for: the model, and its description."""
STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE: Final = "https://dlion.dev/provenance/v1"
MAX_STATEMENT_BYTES: Final = 1024 * 1024
MAX_STATED_WORKERS: Final = 2048
"""Maximum workers in a statement: with the longest names and reasons they fit into
`MAX_STATEMENT_BYTES`."""
MAX_STATED_TEXT: Final = 256
MAX_COUNT: Final = 2**53
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


class Evidence(StrEnum):
    """How the worker that saved the model knows that it may hold another one's updates."""

    REPLICA = "replica"
    """The worker's weights are in the model. Its figures are its own."""
    STEPS = "steps"
    """Steps of that worker have arrived. The figures are those of the steps."""
    JOINED = "joined"
    """It took part in the run. Its updates may have come by other workers."""


@dataclass(frozen=True)
class WorkerUpdates:
    """One worker whose updates the model holds, or may hold."""

    rank: int
    worker: str
    """`site/group-index`."""
    evidence: Evidence
    samples: int
    last_iteration: int
    revoked: bool = False
    """Whether it was quarantined when the model was saved."""


@dataclass(frozen=True)
class RevokedEntry:
    """A worker or site that was revoked or quarantined, with the reason given."""

    name: str
    reason: str


@dataclass(frozen=True)
class StatedRun:
    """The run that saved a model."""

    namespace: str
    name: str
    run_id: str
    uid: str = ""
    """UID of the DLionJob at the site; empty: not run in a cluster."""


@dataclass(frozen=True)
class ModelProvenance:
    """The predicate: where a model comes from."""

    run: StatedRun
    site: str
    saved_by: str
    """The worker that saved it: `site/group-index`."""
    saved_at: str
    """RFC 3339 with an offset. In a signed statement the keeper's clock."""
    model: str
    """As in `model.json`: `averaged`, or `replica <rank>`."""
    policy: str
    dlion_version: str
    start_model_sha256: str
    """Hash of the file of `trainer.startFrom`; empty: training began without one."""
    workers: tuple[WorkerUpdates, ...]
    revoked: tuple[RevokedEntry, ...] = ()


@dataclass(frozen=True)
class ProvenanceStatement:
    """The digests of a model and of its description, and where they come from."""

    sha256: Mapping[str, str]
    """The hash of each of `STATED_FILES`."""
    provenance: ModelProvenance

    @property
    def saved_at(self) -> datetime:
        return datetime.fromisoformat(self.provenance.saved_at)

    def to_json(self) -> bytes:
        """Return the in-toto Statement. Raises: ContractError, as `from_json` would."""
        document = {
            "_type": STATEMENT_TYPE,
            "subject": [
                {"name": name, "digest": {"sha256": self.sha256[name]}} for name in STATED_FILES
            ],
            "predicateType": PREDICATE_TYPE,
            "predicate": asdict(self.provenance),
        }
        content = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
        self.from_json(content)
        return content

    @classmethod
    def from_json(cls, content: bytes) -> Self:
        """Read a statement. Raises: ContractError: too long, not JSON, or of a wrong form."""
        document = read_object(content, "statement", max_bytes=MAX_STATEMENT_BYTES)
        try:
            digests = _subject_digests(document)
            provenance = ModelProvenance(**_PREDICATE(document["predicate"]))
            _check(provenance)
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise ContractError(f"statement: {error!s:.300}") from error
        return cls(digests, provenance)


def stated_digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each of `STATED_FILES` in that folder. Raises: OSError."""
    return {name: file_sha256(folder / name) for name in STATED_FILES}


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits. Raises: OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_object(content: bytes, what: str, *, max_bytes: int) -> dict[str, Any]:
    """Return the JSON object. Raises: ContractError: too long, or not an object."""
    if len(content) > max_bytes:
        raise ContractError(f"{what} of {len(content)} bytes; allowed: at most {max_bytes}")
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ContractError(f"{what} is not JSON: {error!s:.200}") from error
    if not isinstance(document, dict):
        raise ContractError(f"{what} is not an object (given: {type(document).__name__})")
    return document


def _subject_digests(document: dict[str, Any]) -> dict[str, str]:
    given = document.get("_type"), document.get("predicateType")
    if given != (STATEMENT_TYPE, PREDICATE_TYPE):
        allowed = f"{STATEMENT_TYPE} with {PREDICATE_TYPE}"
        raise ValueError(f"of type {given!r:.200}; allowed: {allowed}")
    subject = document.get("subject")
    if not isinstance(subject, list) or not all(isinstance(each, dict) for each in subject):
        raise ValueError("subject is not a list of files")
    if [each.get("name") for each in subject] != [*STATED_FILES]:
        raise ValueError(f"subject is not {' and '.join(STATED_FILES)}, in this order")
    return {each["name"]: _digest(_sha256_of(each.get("digest"))) for each in subject}


def _sha256_of(digest: object) -> object:
    if not isinstance(digest, dict):
        raise TypeError("digest of a file is not an object")
    return digest.get("sha256")


def _digest(value: object) -> str:
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise ValueError("sha256 is not 64 hexadecimal digits")
    return value


def _check(provenance: ModelProvenance) -> None:
    if provenance.start_model_sha256:
        _digest(provenance.start_model_sha256)
    if datetime.fromisoformat(provenance.saved_at).tzinfo is None:
        raise ValueError("saved_at has no offset from UTC")
    ranks = {each.rank for each in provenance.workers}
    if len(ranks) != len(provenance.workers):
        raise ValueError("workers has a rank twice")
    if len(provenance.revoked) > MAX_REVOCATIONS:
        raise ValueError(f"revoked has more than {MAX_REVOCATIONS} entries")


def _text(value: object) -> str:
    text = read_text(value, max_characters=MAX_STATED_TEXT)
    text.encode()  # a lone surrogate is a ValueError
    return text


def _count(value: object) -> int:
    if isinstance(value, bool):
        raise TypeError("not an integer")
    number = operator.index(value)  # type: ignore[arg-type]
    if not 0 <= number <= MAX_COUNT:
        raise ValueError(f"not within 0 to {MAX_COUNT}")
    return number


_CONVERSION = Conversion(
    {int: _count, str: _text, bool: read_flag}, key=_text, max_entries=MAX_STATED_WORKERS
)
_PREDICATE = fields_converter(ModelProvenance, lambda _name: _CONVERSION)
