"""What decisions need to know of the authority that a job names for its workers.

Imports no `cryptography`, which `dlion render` does without. `job_authority` parses keys and
certificates and signs with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dlion_api.spec import Job
    from dlion_operator.pki.certificate_issuer import Issuer

NAMED_MODES = ("Secret", "CertManager")
"""Values of `tls.mode` for which the job names an authority at each site."""


def names_authority(job: Job) -> bool:
    """Whether the job names the authority that signs for its workers."""
    return job.spec.tls.mode in NAMED_MODES


@dataclass(frozen=True)
class NamedAuthority:
    """The state of the authority that a job names."""

    issuer: Issuer | None
    problem: str = ""
    """Why there is no issuer, and what to do; empty: there is one."""
    missing_s: float = 0.0
    """How long there has been no issuer."""
