"""What a site's words take up here while they are kept, so that it can be bounded. Pure.

Of what other sites send only this stays: what is read in passing is bounded by `messages` and by
the callers' allowance.
"""

from __future__ import annotations

import sys
from typing import Final

from dlion_operator.federation.reports import RunReport, SiteWorkers, SpecPrint

REPORT_BYTES: Final = 4096
FIELD_BYTES: Final = 128
DEFAULT_BYTES: Final = 96
WANTED_BYTES: Final = 256
MEMBER_BYTES: Final = 384
ACCURACY_BYTES: Final = 128
LEFT_BYTES: Final = 96
LINKS_BYTES: Final = 288
"""Of one each, without texts of any length; a test holds them against what Python really takes."""


def kept_bytes(report: RunReport) -> int:
    """What that report takes in memory: no less than it really does, and not twice as much."""
    bundle = sys.getsizeof(report.bundle_pem)
    links = LINKS_BYTES * len(report.figures.links)
    return REPORT_BYTES + _of_spec(report.spec) + _of_workers(report.workers) + bundle + links


def _of_spec(spec: SpecPrint) -> int:
    paths = sum(map(sys.getsizeof, spec.fields))
    return paths + FIELD_BYTES * len(spec.fields) + DEFAULT_BYTES * len(spec.defaults)


def _of_workers(workers: SiteWorkers) -> int:
    addresses = sum(
        sys.getsizeof(member.exchange_address) + sys.getsizeof(member.measuring_address)
        for member in workers.members
    )
    return (
        addresses
        + WANTED_BYTES * len(workers.wanted)
        + MEMBER_BYTES * len(workers.members)
        + ACCURACY_BYTES * len(workers.accuracies)
        + LEFT_BYTES * len(workers.left)
    )
