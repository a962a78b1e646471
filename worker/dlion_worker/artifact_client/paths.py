"""The files that a keeper stores, and their owners.

A worker owns its checkpoint and its log; a site's workers share its model and the model's metadata.
There are no other paths, so no caller chooses where, or how much, is written. The layout is the
result folder's (docs/results.md).
"""

from dlion_api.names import Rank, SiteName, WorkerIdentity
from dlion_api.protocol.provenance import (
    MAX_STATEMENT_BYTES,
    METADATA_FILE,
    MODEL_FILE,
    PROVENANCE_FILE,
)
from dlion_api.protocol.refusals import CallerError, PeerRefusal
from dlion_worker.rotated_log import MAX_LOG_BYTES

MAX_CHECKPOINT_BYTES = 8 * 2**30
MAX_MODEL_BYTES = 4 * 2**30
MAX_METADATA_BYTES = 2**20


class AccessDeniedError(CallerError):
    """The path does not exist or belongs to another worker, or the caller is unknown."""

    def __init__(self, message: str, kind: PeerRefusal = PeerRefusal.NOT_ITS_OWN) -> None:
        super().__init__(kind, message)


def checkpoint_path(rank: Rank) -> str:
    return f"state/w{rank}/checkpoint.npz"


def log_path(rank: Rank) -> str:
    return f"logs/worker-{rank}.log"


def model_path(site: SiteName) -> str:
    return f"models/{site}/{MODEL_FILE}"


def metadata_path(site: SiteName) -> str:
    return f"models/{site}/{METADATA_FILE}"


def provenance_path(site: SiteName) -> str:
    return f"models/{site}/{PROVENANCE_FILE}"


def max_file_bytes(path: str, worker: WorkerIdentity) -> int:
    """The maximum size in bytes of that worker's file.

    Raises:
        AccessDeniedError: The path is not one of this worker's.
    """
    places = {
        checkpoint_path(worker.rank): MAX_CHECKPOINT_BYTES,
        log_path(worker.rank): MAX_LOG_BYTES,
        model_path(worker.site): MAX_MODEL_BYTES,
        metadata_path(worker.site): MAX_METADATA_BYTES,
        provenance_path(worker.site): MAX_STATEMENT_BYTES,
    }
    if path not in places:
        raise AccessDeniedError(
            f"path {path!r:.200} is not {worker.name}'s (rank {worker.rank}); allowed:"
            f" {', '.join(places)}"
        )
    return places[path]
