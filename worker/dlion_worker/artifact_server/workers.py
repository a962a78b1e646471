"""The workers that a keeper knows, and the rank of each.

`workers.json` starts with this site's workers in the manifest. A group may grow during the run: a
later worker is known by its certificate from the site's coordinator and keeps its first rank. The
manifest is not read again, because it would number the workers differently.
"""

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

from dlion_api.errors import UnavailableError
from dlion_api.names import Rank, SiteName, WorkerIdentity
from dlion_api.protocol.refusals import PeerRefusal
from dlion_api.spec import Job
from dlion_results.run_folder.storage import StorageError, write_whole
from dlion_worker.artifact_client.paths import AccessDeniedError

_LOG = logging.getLogger(__name__)

WORKERS_FILE = "workers.json"
REVOKED_FILE = "revoked.json"


class RevokedWorkers:
    """Workers whose files are refused. The record stream's thread sets them, the service reads.

    No worker is served before the coordinator has named them: a keeper that starts again would take
    files of a revoked worker until then. After the end of a run no coordinator may answer, so the
    last names are in `revoked.json`, with the reasons that a statement repeats.
    """

    def __init__(self, folder: Path, *, is_over: bool) -> None:
        self._path = folder / REVOKED_FILE
        self._saved = _load_revoked(self._path)
        self._names: frozenset[str] | None = None
        self.reasons: Mapping[str, str] = {}
        """Reasons by the name of a worker or site, as it was revoked; the first few hundred."""
        if is_over and self._saved is not None:
            names, self.reasons = self._saved
            self._names = frozenset(names)

    def set(self, names: Iterable[str], reasons: Mapping[str, str] | None = None) -> None:
        """Set the revoked workers. Raises: StorageError; they are refused all the same."""
        self._names, self.reasons = frozenset(names), dict(reasons or {})
        found = sorted(self._names), self.reasons
        if found != self._saved:
            document = {"names": found[0], "reasons": found[1]}
            write_whole(self._path, json.dumps(document, sort_keys=True).encode())
            self._saved = found

    def check(self, worker: WorkerIdentity) -> None:
        """Raises: AccessDeniedError (it is revoked), UnavailableError (they are not known yet)."""
        if self._names is None:
            raise UnavailableError("the coordinator has not named the revoked workers yet; retry")
        if worker.name in self._names:
            raise AccessDeniedError(f"{worker.name} is revoked", PeerRefusal.REVOKED)


class SiteWorkerRegistry:
    def __init__(self, folder: Path, job: Job, site: SiteName) -> None:
        self._path = folder / WORKERS_FILE
        self._site = site
        of_manifest = {worker for worker in job.workers() if worker.site == site}
        self._workers = _load_workers(self._path, site) or of_manifest
        self._save()

    def check(self, claimed: WorkerIdentity) -> None:
        """Check that no other worker has that rank, and that this worker has no other rank.

        Raises: AccessDeniedError.
        """
        others = [
            known
            for known in self._workers
            if known != claimed and (known.rank == claimed.rank or known.name == claimed.name)
        ]
        if claimed.site != self._site or others:
            named = ", ".join(f"{known.name} is rank {known.rank}" for known in others)
            raise AccessDeniedError(
                f"a caller claims to be {claimed.name}, rank {claimed.rank}; known here: workers of"
                f" site {self._site}{', ' if named else ''}{named}",
                PeerRefusal.UNKNOWN_WORKER,
            )

    def register(self, worker: WorkerIdentity) -> None:
        """Record the rank of a worker, after its certificate has been verified."""
        if worker not in self._workers:
            self.check(worker)
            self._workers.add(worker)
            _LOG.info("%s joined the run as rank %d", worker.name, worker.rank)
            self._save()

    def _save(self) -> None:
        rows = sorted((worker.rank, worker.group, worker.index) for worker in self._workers)
        try:
            write_whole(self._path, json.dumps(rows).encode())
        except StorageError as error:  # it stays known until this keeper ends
            _LOG.warning("%s", error)


def _load_workers(path: Path, site: SiteName) -> set[WorkerIdentity]:
    try:
        rows = json.loads(path.read_bytes())
        return {
            WorkerIdentity(Rank(int(rank)), site, str(group), int(index))
            for rank, group, index in rows
        }
    except FileNotFoundError:
        return set()
    except (ValueError, TypeError, RecursionError) as error:
        _LOG.warning("%s is damaged, using the manifest's ranks: %r", path, error)
        return set()


def _load_revoked(path: Path) -> tuple[list[str], dict[str, str]] | None:
    """The names and reasons in that file. None: it is missing or damaged: no worker is served."""
    try:
        document = json.loads(path.read_bytes())
        reasons = {str(name): str(reason) for name, reason in document["reasons"].items()}
        return [str(name) for name in document["names"]], reasons
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        _LOG.warning("%s is damaged, refusing all files: %r", path, error)
        return None
