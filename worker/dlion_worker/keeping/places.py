"""Which files a keeper keeps, and whose they are.

A worker has its checkpoint; the workers of a site have its model and what is said of it. There is
no other path, so that no caller decides where on the claim something is written, nor how often.
Called by both sides. The layout is the result folder's (docs/results.md).
"""

from __future__ import annotations

from dlion_api.names import Rank, SiteName, WorkerIdentity
from dlion_api.refusals import CallerError, PeerRefusal

MAX_CHECKPOINT_BYTES = 8 * 2**30
MAX_MODEL_BYTES = 4 * 2**30
MAX_ABOUT_BYTES = 2**20


class NotYoursError(CallerError):
    """A path that is not the caller's, or that does not exist at all; a caller who is nobody."""

    def __init__(self, message: str, kind: PeerRefusal = PeerRefusal.NOT_ITS_OWN) -> None:
        super().__init__(kind, message)


def checkpoint_path(rank: Rank) -> str:
    """Where that worker's checkpoint is."""
    return f"state/w{rank}/checkpoint.npz"


def model_path(site: SiteName) -> str:
    """Where that site's model is."""
    return f"models/{site}/model.keras"


def about_path(site: SiteName) -> str:
    """Where it stands what that model is."""
    return f"models/{site}/model.json"


def most_bytes(path: str, worker: WorkerIdentity) -> int:
    """How long that file of that worker may be.

    Raises:
        NotYoursError: the path is another's, or nobody's.
    """
    places = {
        checkpoint_path(worker.rank): MAX_CHECKPOINT_BYTES,
        model_path(worker.site): MAX_MODEL_BYTES,
        about_path(worker.site): MAX_ABOUT_BYTES,
    }
    if path not in places:
        raise NotYoursError(
            f"path {path!r:.200} is not {worker.name}'s (rank {worker.rank}); allowed:"
            f" {', '.join(places)}"
        )
    return places[path]
