"""Which manifest a run's objects were made from. Pure."""

import hashlib
import json

from dlion_api.document import to_document
from dlion_api.spec import Job

_NOT_IN_OBJECTS = (
    "runId", "suspend", "managedBy", "activeDeadlineSeconds", "ttlSecondsAfterFinished",
    "checkpoint", "maxRetries",
)  # fmt: skip
"""Fields that act on a run without new objects; so does the number of a group's workers."""


def manifest_digest(job: Job) -> str:
    """Digest of the fields that a run's objects are made from.

    Fields with their default value are left out. So a newer CRD or operator with more fields does
    not restart a waiting run.
    """
    spec = to_document(job.spec, without_defaults=True)
    for name in _NOT_IN_OBJECTS:
        spec.pop(name, None)
    for site in spec["sites"]:
        for group in site["groups"]:
            group.pop("workers", None)
    text = json.dumps(spec, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
