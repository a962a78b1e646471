"""Estimate the memory that another site's reports take, so that it can be bounded. Pure.

Only reports stay in memory. `messages` and the rate limiter bound what is parsed on the way.
"""

from __future__ import annotations

import sys
from typing import Final

from dlion_operator.federation.reports import ReportedWorkers, RunReport, SpecFingerprint

REPORT_BYTES: Final = 4096
FIELD_BYTES: Final = 128
DEFAULT_BYTES: Final = 96
EXPECTED_WORKER_BYTES: Final = 256
MEMBER_BYTES: Final = 384
ACCURACY_BYTES: Final = 128
LEFT_BYTES: Final = 96
LINKS_BYTES: Final = 288
"""Bytes for one of each, without its strings. A test compares them with Python's real sizes."""


def memory_bytes(report: RunReport) -> int:
    """Return the memory of that report in bytes: at least its real size, less than twice that."""
    bundle = sys.getsizeof(report.bundle_pem)
    links = LINKS_BYTES * len(report.figures.links)
    return REPORT_BYTES + _of_spec(report.spec) + _of_workers(report.workers) + bundle + links


def _of_spec(spec: SpecFingerprint) -> int:
    paths = sum(map(sys.getsizeof, spec.fields))
    return paths + FIELD_BYTES * len(spec.fields) + DEFAULT_BYTES * len(spec.defaults)


def _of_workers(workers: ReportedWorkers) -> int:
    addresses = sum(
        sys.getsizeof(member.exchange_address) + sys.getsizeof(member.measuring_address)
        for member in workers.members
    )
    return (
        addresses
        + EXPECTED_WORKER_BYTES * len(workers.wanted)
        + MEMBER_BYTES * len(workers.members)
        + ACCURACY_BYTES * len(workers.accuracies)
        + LEFT_BYTES * len(workers.left)
    )
