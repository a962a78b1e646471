"""What a trainer in a pod leaves behind when it has ended in order: its container's last word.

Kubernetes keeps what stands in the container's termination message, so that an operator that was
away finds it. Called by `__main__`; a local run needs none.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from pathlib import Path

from dlion_api.endings import EndReport, own_reason
from dlion_api.membership import Member, Membership, MemberState
from dlion_api.names import Rank

_LOG = logging.getLogger(__name__)


def end_report(
    stop_reason: str, iteration: int, *, held: Collection[Rank], membership: Membership | None
) -> EndReport:
    """What a worker reports. `held`: replicas in the model that it has saved for its site; empty:
    it has saved none."""
    missing = _wanted(membership) - set(held) if held else set()
    return EndReport(
        own_reason(stop_reason),
        iteration,
        ranks=tuple(sorted(held)),
        missing=tuple(sorted(missing)),
    )


def _wanted(membership: Membership | None) -> set[Rank]:
    """Workers that have joined the run and that the manifest still has.

    Who was scaled down counts as finished, as does who ended before this worker: where more have
    joined than are expected, nobody who has finished is taken to be missing.
    """
    if membership is None:
        return set()
    joined = membership.members
    has_shrunk = len(joined) > membership.expected_count
    return {member.identity.rank for member in joined if not (has_shrunk and _is_over(member))}


def _is_over(member: Member) -> bool:
    return member.state is MemberState.FINISHED


def write_end_report(path: Path, report: EndReport) -> None:
    """Writes it into the file, which Kubernetes has made. Where that fails the worker has ended in
    order all the same."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_TRUNC)
        try:
            os.write(file, report.to_json().encode())
        finally:
            os.close(file)
    except OSError as error:
        _LOG.warning("the end report was not written to %s: %s", path, error)
