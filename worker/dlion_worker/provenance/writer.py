"""Writes the statement beside each model that a worker saves for its site.

Whose updates the model holds is what this worker knows: replicas in the model, peers' steps that
have arrived, and members of the run. Called by `trainer.shutdown` and `background.publishing`.
"""

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from dlion_api import VERSION
from dlion_api.atomic_file import write_atomically
from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_api.protocol.membership import Membership
from dlion_api.protocol.provenance import (
    MAX_COUNT,
    MAX_STATED_WORKERS,
    PROVENANCE_FILE,
    Evidence,
    ModelProvenance,
    ProvenanceStatement,
    StatedRun,
    WorkerUpdates,
    file_sha256,
    stated_digests,
)
from dlion_api.spec import Job
from dlion_core.lifecycle.inbox import EventInbox, PeerSteps
from dlion_core.policies.claims.samples import max_batch_at
from dlion_core.policies.iteration_guard import MAX_ITERATION
from dlion_worker.initializers.folders import model_root
from dlion_worker.training.site_model import SavedModel, start_file

_LOG = logging.getLogger(__name__)


class ProvenanceWriter:
    """The statements of one worker. `write` may be called from any thread."""

    def __init__(
        self,
        job: Job,
        rank: Rank,
        *,
        inbox: EventInbox,
        membership: Callable[[], Membership | None],
        data_root: Path,
    ) -> None:
        """Create it when the model is loaded: the file of `trainer.startFrom` may be replaced
        during the run. Raises: OSError."""
        self._job, self._own = job, job.worker(rank)
        self._inbox, self._membership = inbox, membership
        trainer = job.spec.trainer
        start = model_root(trainer, data_root) / trainer.start_from
        self._start_sha256 = file_sha256(start_file(start)) if trainer.start_from else ""

    def then(self, upload: Callable[[Path], None]) -> Callable[[SavedModel], None]:
        """Return a function that writes the statement, then passes the folder to `upload`.

        A model whose statement cannot be made is uploaded without one: peers' figures are in it.
        """

        def written(saved: SavedModel) -> None:
            try:
                self.write(saved)
            except ContractError as error:
                _LOG.warning("the model in %s has no statement: %s", saved.folder, error)
                (saved.folder / PROVENANCE_FILE).unlink(missing_ok=True)
            upload(saved.folder)

        return written

    def write(self, saved: SavedModel) -> None:
        """Write the statement into the model's folder.

        Raises: OSError; ContractError: what this worker knows makes no valid statement.
        """
        key = self._job.key
        provenance = ModelProvenance(
            run=StatedRun(key.namespace, key.name, key.run_id),
            site=self._own.site,
            saved_by=self._own.name,
            saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
            model=saved.about.model,
            policy=self._job.spec.exchange.policy,
            dlion_version=VERSION,
            start_model_sha256=self._start_sha256,
            workers=self._updates(saved),
        )
        statement = ProvenanceStatement(stated_digests(saved.folder), provenance)
        write_atomically(saved.folder / PROVENANCE_FILE, statement.to_json(), mode=0o644)

    def _updates(self, saved: SavedModel) -> tuple[WorkerUpdates, ...]:
        """Updates by rank. If there are too many, the least known are left out."""
        membership, steps = self._membership(), self._inbox.peer_steps()
        members = () if membership is None else membership.members
        known = {worker.rank: worker.name for worker in self._job.workers()}
        known |= {member.identity.rank: member.identity.name for member in members}

        def name_of(rank: Rank) -> str:
            """The worker's name, or its rank if it has left the membership since its steps."""
            return known.get(rank, f"rank {rank}")

        revoked = {member.identity.rank for member in members if member.revoked}
        found = {
            rank: _of_steps(self._job, rank, name_of(rank), given) for rank, given in steps.items()
        }
        for member in members:
            joined = WorkerUpdates(
                member.identity.rank, member.identity.name, Evidence.JOINED, 0, 0
            )
            found.setdefault(member.identity.rank, joined)
        averaged = saved.about.model == "averaged"
        for replica in saved.replicas:
            is_in = averaged or saved.about.model == f"replica {replica.rank}"
            evidence = Evidence.REPLICA if is_in else Evidence.STEPS
            last = min(replica.iteration, MAX_ITERATION)
            samples = _possible_samples(self._job, replica.samples, last)
            found[replica.rank] = WorkerUpdates(
                replica.rank, name_of(replica.rank), evidence, samples, last
            )
        order = list(Evidence)
        best = sorted(found.values(), key=lambda each: (order.index(each.evidence), each.rank))
        stated = sorted(best[:MAX_STATED_WORKERS], key=lambda each: each.rank)
        return tuple(
            WorkerUpdates(**{**vars(each), "revoked": each.rank in revoked}) for each in stated
        )


def _of_steps(job: Job, rank: Rank, name: str, steps: PeerSteps) -> WorkerUpdates:
    last = steps.last_iteration
    samples = _possible_samples(job, steps.samples, last)
    return WorkerUpdates(rank, name, Evidence.STEPS, samples, last)


def _possible_samples(job: Job, claimed: int, last_iteration: int) -> int:
    """The claim, limited to what the run can have had: the peer itself has given the figure."""
    possible = max(1, last_iteration) * max_batch_at(job.spec, last_iteration)
    return min(claimed, possible, MAX_COUNT)
