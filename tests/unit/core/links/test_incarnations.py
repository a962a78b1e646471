"""Tests of incarnations: a peer's number is accepted within what its coordinator or a clock shows.

2^63 is refused and locks no worker out. A start that no coordinator has confirmed may link. It
takes over the violations and the quarantine of the start before it. A confirmed start begins
without them, until the third quarantine.
"""

from __future__ import annotations

import pytest

from dlion_api.protocol.refusals import CallerError, PeerRefusal
from dlion_core.links.incarnations import (
    MAX_CLOCK_LEAD_S,
    MAX_QUARANTINES,
    MAX_UNCONFIRMED_STARTS,
    MAX_VIOLATIONS,
    PeerIncarnations,
)

NOW_S = 1_800_000_000.5
START = 1_799_000_000


def known(*confirmed: int) -> PeerIncarnations:
    peer = PeerIncarnations()
    for incarnation in confirmed:
        peer.confirm(incarnation)
    return peer


def refusal(peer: PeerIncarnations, incarnation: int) -> PeerRefusal | None:
    try:
        peer.check(incarnation, wall_clock_s=NOW_S)
    except CallerError as error:
        return error.kind
    return None


@pytest.mark.parametrize("incarnation", [2**63, 2**64 - 1, int(NOW_S) + MAX_CLOCK_LEAD_S + 1])
def test_an_incarnation_beyond_the_clock_is_refused(incarnation: int) -> None:
    peer = known(START)
    assert refusal(peer, incarnation) is PeerRefusal.IMPLAUSIBLE
    assert refusal(peer, START) is None


@pytest.mark.parametrize("incarnation", [START, START + 1, int(NOW_S), int(NOW_S) + 3600])
def test_without_a_coordinator_a_new_start_may_link(incarnation: int) -> None:
    assert refusal(known(START), incarnation) is None


def test_a_clock_far_ahead_is_accepted_if_the_membership_has_it() -> None:
    ahead = 2**39
    assert refusal(known(START), ahead) is PeerRefusal.IMPLAUSIBLE
    assert refusal(known(ahead), ahead + MAX_UNCONFIRMED_STARTS) is None


def test_only_a_confirmed_start_ends_a_quarantine() -> None:
    peer = known(START)
    peer.quarantine(START)
    for incarnation in (START - 1, START, START + 1, int(NOW_S)):
        assert refusal(peer, incarnation) is PeerRefusal.QUARANTINED
    peer.confirm(START + 9)
    assert refusal(peer, START + 9) is None
    assert refusal(peer, START + 10) is PeerRefusal.QUARANTINED


def test_violations_of_several_incarnations_add_up() -> None:
    peer = known(START)
    assert peer.add_violation(START) == 1
    counts = [peer.add_violation(START + number) for number in range(1, MAX_VIOLATIONS + 1)]
    assert counts == [1, 2, MAX_VIOLATIONS]


def test_after_some_quarantines_a_restart_does_not_help() -> None:
    peer = PeerIncarnations()
    for number in range(MAX_QUARANTINES):
        peer.confirm(START + number)
        assert refusal(peer, START + number) is None
        peer.quarantine(START + number)
    peer.confirm(START + MAX_QUARANTINES)
    assert refusal(peer, START + MAX_QUARANTINES) is PeerRefusal.QUARANTINED
