"""Reasons of the events of a run. They are API: documented in docs/results.md, never renamed.

Written by the workers, the coordinator and the local runner into `EventRecord.reason`; read by
the terminal's view and the report. A reader may meet reasons of a later version: there they are
plain text.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class EventReason(StrEnum):
    """Why there is an event; `meaning` is its line in docs/results.md.

    >>> EventReason("WorkerLost") is EventReason.WORKER_LOST
    True
    """

    meaning: str

    def __new__(cls, value: str, meaning: str) -> Self:
        """A reason, and what it means in one line."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member

    # ---- workers come and go ---------------------------------------------------------------------
    TRAINER_IMPORTED = "TrainerImported", "a trainer process has imported TensorFlow"
    WORKER_READY = (
        "WorkerReady",
        "a worker has joined and is ready to train; a new incarnation says it again",
    )
    RESUMED = "Resumed", "a worker goes on from its own checkpoint"
    WORKER_REJOINED = "WorkerRejoined", "a worker took over a peer's state"
    PEERS_UNREACHED = (
        "PeersUnreached",
        "a worker that waits has not been linked for a minute with others that have joined",
    )
    TRAINING_STARTED = "TrainingStarted", "a worker began to train"
    TRAINING_STOPPED = "TrainingStopped", "a worker stopped, with the condition that was met"
    WORKER_LOST = "WorkerLost", "a worker's stream broke; it may come back"
    WORKER_FAILED = "WorkerFailed", "a worker ended for good"
    TRAINER_ENDED = (
        "TrainerEnded",
        "a trainer's process ended; its supervisor starts it again after a while",
    )
    SIDECAR_ENDED = (
        "SidecarEnded",
        "a sidecar ended; its worker trains on with the last directive while it is started again",
    )
    EVALUATOR_ENDED = (
        "EvaluatorEnded",
        "the evaluator that a local run's workers share ended; it is started again",
    )

    CERTIFICATE_RENEWED = (
        "CertificateRenewed",
        "a worker has a new certificate; its connections are remade with it, and none breaks off",
    )
    CERTIFICATE_NOT_RENEWED = (
        "CertificateNotRenewed",
        "the coordinator is away, or refuses to sign: connections stand, with the old certificate",
    )

    # ---- what workers do -------------------------------------------------------------------------
    KNOWLEDGE_TRANSFERRED = "KnowledgeTransferred", "a worker merged another's weights"
    FOLDED_TOGETHER = (
        "FoldedTogether",
        "a worker met another at the mean of their weights, or took over some that hold all",
    )
    QUORUM_LOST = (
        "QuorumLost",
        "too few sites (`minSites`) are joined with a worker's side: it holds still",
    )
    QUORUM_BACK = "QuorumBack", "enough sites are joined again: the worker trains on"
    MESSAGE_REFUSED = (
        "MessageRefused",
        "a peer sent something that the protocol does not allow, or refuses this worker",
    )
    EVALUATION_FAILED = "EvaluationFailed", "an evaluation raised; training goes on"
    RECORDS_DROPPED = (
        "RecordsDropped",
        "a worker could not report everything: the coordinator was away too long",
    )

    # ---- what is kept ----------------------------------------------------------------------------
    CHECKPOINT_SAVED = "CheckpointSaved", "a worker saved its checkpoint"
    CHECKPOINT_FAILED = (
        "CheckpointFailed",
        "a checkpoint could not be written (full disk); the last one stands, training goes on",
    )
    CHECKPOINT_DAMAGED = (
        "CheckpointDamaged",
        "a checkpoint cannot be read: it is set aside, and the worker takes a peer's state",
    )
    CHECKPOINT_KEPT = "CheckpointKept", "the site's keeper has a worker's newest checkpoint"
    MODEL_KEPT = "ModelKept", "the site's keeper has the site's model"
    KEEPER_AWAY = (
        "KeeperAway",
        "the site's keeper cannot be reached, or its disk is full: files for it wait",
    )
    KEEP_FAILED = (
        "KeepFailed",
        "the site's keeper refused a file, or a worker had to end before the keeper had it",
    )
    MODEL_SAVED = "ModelSaved", "a site's model was saved at the end of training"
    REPLICA_MISSING = (
        "ReplicaMissing",
        "a replica could not be reached for the average at the end",
    )
    MODEL_PUBLISHED = (
        "ModelPublished",
        "a site's model was written while training goes on (`stop.continuous`)",
    )
    PUBLISH_FAILED = (
        "PublishFailed",
        "such a model could not be written; the last one stands, training goes on",
    )

    # ---- data ------------------------------------------------------------------------------------
    NEAR_DUPLICATES_LEFT_OUT = (
        "NearDuplicatesLeftOut",
        "how many of a worker's samples `dropNearDuplicates` leaves out, at each trainer's start",
    )
    DATA_ADDED = "DataAdded", "files of a watched folder were taken in"
    DATA_CHANGED = "DataChanged", "files of a watched folder were taken in anew"
    DATA_REMOVED = "DataRemoved", "files of a watched folder went, and their samples with them"
    DATA_PENDING = "DataPending", "a file that grows, or cannot be read yet, is waited for"
    DATA_SKIPPED = "DataSkipped", "a file that cannot be used was left out, with what is wrong"
    DATA_UNAVAILABLE = (
        "DataUnavailable",
        "the folder itself cannot be read; training goes on with what there is",
    )

    # ---- the environment -------------------------------------------------------------------------
    ENVIRONMENT_CHANGED = (
        "EnvironmentChanged",
        "the environment gave a worker other cores, rates or links, as its file says",
    )
    ENVIRONMENT_FAILED = (
        "EnvironmentFailed",
        "what imposes the environment broke, or a change could not be imposed; the run ends",
    )
