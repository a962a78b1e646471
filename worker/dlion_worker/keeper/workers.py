"""Which workers a keeper knows, and which rank each has.

Owns `workers.json`: at the run's first start those of this site in the manifest. A group may grow
in mid-run, and nobody's rank moves then: who comes later is known by the certificate that the
site's coordinator gave it, and keeps the rank with which it first came. The manifest is not asked
again: it would count anew. Called by `service`.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from dlion_api.names import Rank, SiteName, WorkerIdentity
from dlion_api.refusals import PeerRefusal
from dlion_api.spec import Job
from dlion_worker.keeping.places import NotYoursError
from dlion_worker.results.storage import StorageError, write_whole

_LOG = logging.getLogger(__name__)

WORKERS_FILE = "workers.json"


class SiteWorkers:
    """One site's workers of one run, each with one rank."""

    def __init__(self, folder: Path, job: Job, site: SiteName) -> None:
        self._path = folder / WORKERS_FILE
        self._site = site
        of_manifest = {worker for worker in job.workers() if worker.site == site}
        self._workers = _kept(self._path, site) or of_manifest
        self._keep()

    def check(self, claimed: WorkerIdentity) -> None:
        """Passes if nobody else has that rank, and that worker no other.

        Raises: NotYoursError.
        """
        others = [
            known
            for known in self._workers
            if known != claimed and (known.rank == claimed.rank or known.name == claimed.name)
        ]
        if claimed.site != self._site or others:
            named = ", ".join(f"{known.name} is rank {known.rank}" for known in others)
            raise NotYoursError(
                f"a caller says it is {claimed.name}, rank {claimed.rank}; known here: workers of"
                f" site {self._site}{', ' if named else ''}{named}",
                PeerRefusal.UNKNOWN_WORKER,
            )

    def admit(self, worker: WorkerIdentity) -> None:
        """Keeps in mind that this worker, whose certificate was seen, has that rank."""
        if worker not in self._workers:
            self.check(worker)
            self._workers.add(worker)
            _LOG.info("%s has come to the run, rank %d", worker.name, worker.rank)
            self._keep()

    def _keep(self) -> None:
        rows = sorted((worker.rank, worker.group, worker.index) for worker in self._workers)
        try:
            write_whole(self._path, json.dumps(rows).encode())
        except StorageError as error:  # known until this keeper ends, at least
            _LOG.warning("%s", error)


def _kept(path: Path, site: SiteName) -> set[WorkerIdentity]:
    try:
        rows = json.loads(path.read_bytes())
        return {
            WorkerIdentity(Rank(int(rank)), site, str(group), int(index))
            for rank, group, index in rows
        }
    except FileNotFoundError:
        return set()
    except (ValueError, TypeError, RecursionError) as error:
        _LOG.warning("%s is damaged, the manifest's ranks are taken: %r", path, error)
        return set()
