"""Limits of names and numbers, and patterns that several parts of the manifest share.

A worker's pod and hostname are `<job>-<group>-<run hash>-<index>`: with 32 + 16 + 6 characters,
three digits and three dashes, 60 of the allowed 63. The DNS name in its certificate
(`names.WorkerIdentity.dns_name`) stays below 253 characters and each of its labels below 63.
"""

from collections.abc import Mapping
from typing import Any, Final

JOB_NAME_LENGTH: Final = 32
GROUP_NAME_LENGTH: Final = 16
SITE_NAME_LENGTH: Final = 40
RUN_ID_LENGTH: Final = 24
MAX_SITES: Final = 64
MAX_GROUPS_PER_SITE: Final = 8
MAX_WORKERS_PER_GROUP: Final = 999
"""The maximum workers of a group, so that an index has at most three digits."""
MAX_CLASSES: Final = 1000
PATH_LENGTH: Final = 1024
IMAGE_LENGTH: Final = 512
MAX_PAIRS: Final = 256
"""The maximum number of pairs of sites in a status: all pairs of up to 16."""
INT32_MAX: Final = 2**31 - 1

LABEL: Final = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
LABEL_DESCRIPTION: Final = "lower-case letters, digits and dashes, no dash at either end"
LABEL_FORM: Final[Mapping[str, Any]] = {"pattern": LABEL, "pattern_description": LABEL_DESCRIPTION}
SERVICE_LABEL_FORM: Final[Mapping[str, Any]] = {
    "pattern": r"[a-z]([-a-z0-9]*[a-z0-9])?",
    "pattern_description": f"{LABEL_DESCRIPTION}, a letter first",
}
"""Names of Services (RFC 1035) start with a letter, and one contains the job's name."""
OBJECT_NAME_FORM: Final[Mapping[str, Any]] = {
    "pattern": rf"{LABEL}(\.{LABEL})*",
    "pattern_description": f"{LABEL_DESCRIPTION}, parts joined by dots",
    "max_length": 253,
}
OPTIONAL_OBJECT_NAME_FORM: Final[Mapping[str, Any]] = {
    **OBJECT_NAME_FORM,
    "pattern": f"({OBJECT_NAME_FORM['pattern']})?",
}
"""The same, or empty."""
