"""How long names may be, and why; patterns that several parts of the manifest share.

A worker's pod is called `<job>-<group>-<run hash>-<index>` and that is its hostname: with
32 + 16 + 6 characters, three digits and three dashes it stays at 60 of 63. The DNS name in its
certificate (`names.WorkerIdentity.dns_name`) stays under 253 and each of its labels under 63.
"""

from __future__ import annotations

from typing import Annotated, Final

from dlion_api.document import Limits

JOB_NAME_LENGTH: Final = 32
GROUP_NAME_LENGTH: Final = 16
SITE_NAME_LENGTH: Final = 40
RUN_ID_LENGTH: Final = 24
MOST_SITES: Final = 64
MOST_GROUPS: Final = 8
MOST_WORKERS: Final = 999
"""Of one group, so that an index has three digits."""
MOST_CLASSES: Final = 1000
PATH_LENGTH: Final = 1024
INT32_MAX: Final = 2**31 - 1

LABEL: Final = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
LABEL_WORDS: Final = "lower-case letters, digits and dashes, no dash at either end"
SERVICE_LABEL: Final = r"[a-z]([-a-z0-9]*[a-z0-9])?"
SERVICE_LABEL_WORDS: Final = f"{LABEL_WORDS}, a letter first"
"""Names of Services (RFC 1035) begin with a letter, and one is made from the job's name."""

ClassLabel = Annotated[int, Limits(minimum=0, maximum=MOST_CLASSES - 1)]
LabelValue = Annotated[str, Limits(max_length=63)]
AnnotationValue = Annotated[str, Limits(max_length=256 * 1024)]
"""What API servers take of all of an object's annotations together; `kubectl apply` keeps the whole
manifest in one of them."""
VariablePattern = Annotated[str, Limits(min_length=1, max_length=256)]
