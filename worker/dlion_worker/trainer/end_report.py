"""A trainer's end report: its pod's termination message after an orderly end.

Kubernetes keeps the termination message, so an operator that was unavailable still finds it. Called
by `__main__`; local runs need none.
"""

import logging
import os
from collections.abc import Collection
from pathlib import Path

from dlion_api.endings import EndReport, own_reason
from dlion_api.names import Rank
from dlion_api.protocol.membership import Membership, MemberState

_LOG = logging.getLogger(__name__)


def end_report(
    stop_reason: str,
    iteration: int,
    *,
    saved_ranks: Collection[Rank],
    membership: Membership | None,
) -> EndReport:
    """Build a worker's report. `saved_ranks`: the ranks in its saved model, if any."""
    missing = _expected_ranks(membership) - set(saved_ranks) if saved_ranks else set()
    return EndReport(
        own_reason(stop_reason),
        iteration,
        ranks=tuple(sorted(saved_ranks)),
        missing=tuple(sorted(missing)),
    )


def _expected_ranks(membership: Membership | None) -> set[Rank]:
    """Workers that joined the run and are still in the manifest.

    Scaled-down workers count as finished, as do workers that ended earlier. If more workers joined
    than are expected, no finished worker is reported as missing.
    """
    if membership is None:
        return set()
    joined = membership.members
    has_shrunk = len(joined) > membership.expected_count
    return {
        member.identity.rank
        for member in joined
        if not (has_shrunk and member.state is MemberState.FINISHED)
    }


def write_end_report(path: Path, report: EndReport) -> None:
    """Write the report to the existing file. A failure does not change the outcome."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_TRUNC)
        try:
            os.write(file, report.to_json().encode())
        finally:
            os.close(file)
    except OSError as error:
        _LOG.warning("the end report was not written to %s: %s", path, error)
