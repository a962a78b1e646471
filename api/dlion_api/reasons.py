"""Reasons of a run's events. They are API: documented in docs/results.md, never renamed.

Workers, the coordinator and the local runner write them to `EventRecord.reason`; the terminal view
and the report read them. A reader treats a later version's reasons as plain text.
"""

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
    TRAINER_IMPORTED = "TrainerImported", "TensorFlow is imported"
    WORKER_READY = "WorkerReady", "a worker has joined and is ready to train"
    RESUMED = "Resumed", "a worker continues from its own checkpoint"
    WORKER_REJOINED = "WorkerRejoined", "a worker took over a peer's state"
    PEERS_UNREACHED = (
        "PeersUnreached",
        "for a minute a waiting worker has had no link to joined peers",
    )
    PEERS_AWAITED = (
        "PeersAwaited",
        "for a minute a step has waited for peers that are linked and silent",
    )
    TRAINING_STARTED = "TrainingStarted", "a worker started to train"
    TRAINING_STOPPED = "TrainingStopped", "a worker stopped, and by which condition"
    WORKER_LOST = "WorkerLost", "a worker's stream broke; it may return"
    WORKER_FAILED = "WorkerFailed", "a worker failed permanently"
    TRAINER_ENDED = "TrainerEnded", "a trainer ended; it is restarted after a delay"
    SIDECAR_ENDED = (
        "SidecarEnded",
        "a sidecar ended and is restarted; until then the last directive holds",
    )
    EVALUATOR_ENDED = "EvaluatorEnded", "a local run's evaluator ended; it is restarted"
    CERTIFICATE_RENEWED = "CertificateRenewed", "a worker has a new certificate"
    CERTIFICATE_NOT_RENEWED = (
        "CertificateNotRenewed",
        "the coordinator is unavailable or refuses to sign; the old certificate stays",
    )

    # ---- what workers do -------------------------------------------------------------------------
    KNOWLEDGE_TRANSFERRED = "KnowledgeTransferred", "a worker merged another's weights"
    FOLDED_TOGETHER = (
        "FoldedTogether",
        "sides that trained apart merged, or one took over the other's weights",
    )
    ROUNDS_PLANNED = "RoundsPlanned", "the number of local steps changed (`adaptive`)"
    FEATURES_AWAITED = (
        "FeaturesAwaited",
        "training starts without enough features of the named workers (`staged`)",
    )
    FEATURES_COLLECTED = "FeaturesCollected", "the decoder has all features of a worker (`staged`)"
    QUORUM_LOST = "QuorumLost", "a worker reaches fewer than `minSites` sites, and pauses"
    QUORUM_BACK = "QuorumBack", "it reaches enough sites again"
    MESSAGE_REFUSED = ("MessageRefused", "a peer violated the protocol, or refuses this worker")
    UNUSUAL_VALUES = (
        "UnusualValues",
        "a peer's contributions are too large, opposed, one-sided, biased, repeated or empty",
    )
    WORKER_QUARANTINED = (
        "WorkerQuarantined",
        "the others agree that a worker sends wrong values, and quarantine it",
    )
    EXCHANGE_TOO_LONG = (
        "ExchangeTooLong",
        "an exchange over the slowest link takes longer than the run",
    )
    EVALUATION_FAILED = "EvaluationFailed", "an evaluation failed; training continues"
    PROGRAM_PART_UNUSED = "ProgramPartUnused", "a part of the program has no effect in this run"
    RECORDS_DROPPED = (
        "RecordsDropped",
        "a worker dropped records: the coordinator was unavailable too long",
    )

    # ---- what is kept ----------------------------------------------------------------------------
    CHECKPOINT_SAVED = "CheckpointSaved", "a worker saved its checkpoint"
    CHECKPOINT_FAILED = "CheckpointFailed", "a checkpoint could not be written; the last one stays"
    CHECKPOINT_DAMAGED = (
        "CheckpointDamaged",
        "a checkpoint, unreadable or not the worker's, is moved aside",
    )
    CHECKPOINT_KEPT = "CheckpointKept", "the keeper has a worker's newest checkpoint"
    MODEL_KEPT = "ModelKept", "the keeper has the site's model"
    KEEPER_AWAY = "KeeperAway", "the keeper is unreachable, or its disk is full: files for it wait"
    KEEP_FAILED = "KeepFailed", "the keeper refused a file, or a worker ended before its upload did"
    MODEL_SAVED = "ModelSaved", "a site's model was saved at the end"
    REPLICA_MISSING = "ReplicaMissing", "a replica was unreachable for the average at the end"
    MODEL_PUBLISHED = (
        "ModelPublished",
        "a site's model was written during training (`stop.continuous`)",
    )
    PUBLISH_FAILED = "PublishFailed", "such a model could not be written; the last one stays"

    # ---- data ------------------------------------------------------------------------------------
    NEAR_DUPLICATES_LEFT_OUT = (
        "NearDuplicatesLeftOut",
        "how many samples of a worker `dropNearDuplicates` leaves out",
    )
    DATA_ADDED = "DataAdded", "new files of a watched folder were loaded"
    DATA_CHANGED = "DataChanged", "changed files were reloaded"
    DATA_REMOVED = "DataRemoved", "files were removed, with their samples"
    DATA_PENDING = "DataPending", "a file grows or is not readable yet"
    DATA_SKIPPED = "DataSkipped", "an unusable file was skipped"
    DATA_UNAVAILABLE = "DataUnavailable", "the folder cannot be read; training continues"

    # ---- the environment -------------------------------------------------------------------------
    ENVIRONMENT_CHANGED = (
        "EnvironmentChanged",
        "the environment changed a worker's cores, rates or links",
    )
    MACHINE_TEMPERATURE = "MachineTemperature", "how hot a worker's machine became (simulated runs)"
    OTHER_WORK = "OtherWork", "what other work took from a worker's machine (simulated runs)"
    ENVIRONMENT_FAILED = "EnvironmentFailed", "the environment cannot be imposed; the run ends"


RECORDS_MISSED = "RecordsMissed"
"""The keeper's event where the coordinator dropped records before the keeper had them. It is of no
worker (`EventRecord.is_of_worker`)."""
