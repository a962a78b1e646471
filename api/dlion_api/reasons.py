"""Reasons of a run's events. They are API: documented in docs/results.md, never renamed.

Workers, the coordinator and the local runner write them to `EventRecord.reason`; the terminal view
and the report read them. A reader treats a later version's reasons as plain text.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class EventReason(StrEnum):
    """Reason of an event; `meaning` is its description in docs/results.md.

    >>> EventReason("WorkerLost") is EventReason.WORKER_LOST
    True
    """

    meaning: str

    def __new__(cls, value: str, meaning: str) -> Self:
        """Make a reason with its one-line description."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member

    # ---- workers come and go ---------------------------------------------------------------------
    TRAINER_IMPORTED = "TrainerImported", "a trainer process has imported TensorFlow"
    WORKER_READY = (
        "WorkerReady",
        "a worker has joined and is ready to train; once per incarnation",
    )
    RESUMED = "Resumed", "a worker continues from its own checkpoint"
    WORKER_REJOINED = "WorkerRejoined", "a worker took over a peer's state"
    PEERS_UNREACHED = (
        "PeersUnreached",
        "a waiting worker has had no link to joined peers for a minute",
    )
    TRAINING_STARTED = "TrainingStarted", "a worker started to train"
    TRAINING_STOPPED = "TrainingStopped", "a worker stopped, with the condition that was met"
    WORKER_LOST = "WorkerLost", "a worker's stream broke; it may return"
    WORKER_FAILED = "WorkerFailed", "a worker failed permanently"
    TRAINER_ENDED = (
        "TrainerEnded",
        "a trainer's process ended; its supervisor restarts it after a delay",
    )
    SIDECAR_ENDED = (
        "SidecarEnded",
        "a sidecar ended; its worker continues with the last directive until it is restarted",
    )
    EVALUATOR_ENDED = (
        "EvaluatorEnded",
        "the evaluator that a local run's workers share ended; it is restarted",
    )

    CERTIFICATE_RENEWED = (
        "CertificateRenewed",
        "a worker has a new certificate; its connections are renewed without interruption",
    )
    CERTIFICATE_NOT_RENEWED = (
        "CertificateNotRenewed",
        "the coordinator is unavailable or refuses to sign: the old certificate stays in use",
    )

    # ---- what workers do -------------------------------------------------------------------------
    KNOWLEDGE_TRANSFERRED = "KnowledgeTransferred", "a worker merged another's weights"
    FOLDED_TOGETHER = (
        "FoldedTogether",
        "two workers averaged their weights, or one took over weights that include all",
    )
    ROUNDS_PLANNED = (
        "RoundsPlanned",
        "the links of a worker set another number of local steps for all (policy `adaptive`)",
    )
    QUORUM_LOST = (
        "QuorumLost",
        "too few sites (`minSites`) are connected with a worker: it pauses",
    )
    QUORUM_BACK = "QuorumBack", "enough sites are connected again: the worker continues"
    MESSAGE_REFUSED = (
        "MessageRefused",
        "a peer violated the protocol, or refuses this worker",
    )
    EVALUATION_FAILED = "EvaluationFailed", "an evaluation failed; training continues"
    RECORDS_DROPPED = (
        "RecordsDropped",
        "a worker dropped records: the coordinator was unavailable for too long",
    )

    # ---- what is kept ----------------------------------------------------------------------------
    CHECKPOINT_SAVED = "CheckpointSaved", "a worker saved its checkpoint"
    CHECKPOINT_FAILED = (
        "CheckpointFailed",
        "a checkpoint could not be written (full disk); the last one stays, training continues",
    )
    CHECKPOINT_DAMAGED = (
        "CheckpointDamaged",
        "a checkpoint cannot be read: it is moved aside, and the worker takes a peer's state",
    )
    CHECKPOINT_KEPT = "CheckpointKept", "the site's keeper has a worker's newest checkpoint"
    MODEL_KEPT = "ModelKept", "the site's keeper has the site's model"
    KEEPER_AWAY = (
        "KeeperAway",
        "the site's keeper cannot be reached, or its disk is full: files for it wait",
    )
    KEEP_FAILED = (
        "KeepFailed",
        "the site's keeper refused a file, or a worker had to end before the upload was complete",
    )
    MODEL_SAVED = "ModelSaved", "a site's model was saved at the end of training"
    REPLICA_MISSING = (
        "ReplicaMissing",
        "a replica could not be reached for the average at the end",
    )
    MODEL_PUBLISHED = (
        "ModelPublished",
        "a site's model was written during training (`stop.continuous`)",
    )
    PUBLISH_FAILED = (
        "PublishFailed",
        "such a model could not be written; the last one stays, training continues",
    )

    # ---- data ------------------------------------------------------------------------------------
    NEAR_DUPLICATES_LEFT_OUT = (
        "NearDuplicatesLeftOut",
        "how many of a worker's samples `dropNearDuplicates` leaves out, at each trainer's start",
    )
    DATA_ADDED = "DataAdded", "new files of a watched folder were loaded"
    DATA_CHANGED = "DataChanged", "changed files of a watched folder were reloaded"
    DATA_REMOVED = "DataRemoved", "files of a watched folder and their samples were removed"
    DATA_PENDING = "DataPending", "the worker waits for a file that grows or is not readable yet"
    DATA_SKIPPED = "DataSkipped", "an unusable file was skipped; the message gives the reason"
    DATA_UNAVAILABLE = (
        "DataUnavailable",
        "the folder itself cannot be read; training continues with the loaded data",
    )

    # ---- the environment -------------------------------------------------------------------------
    ENVIRONMENT_CHANGED = (
        "EnvironmentChanged",
        "the environment changed a worker's cores, rates or links, as its file specifies",
    )
    ENVIRONMENT_FAILED = (
        "EnvironmentFailed",
        "emulation of the environment failed, or a change could not be applied; the run ends",
    )
