"""Facts: of each site of a run counts what it says of its authority, else what was kept; what is no
authority's, has ended or does not hold yet counts for nothing, and takes no other site's place; nor
does what has the key of another site's, unless both had it in that run before.
What is kept on a Job is read again as it was, within the room that annotations have, and whatever
else stands there is nothing.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlion_api.names import SiteName
from dlion_operator.pki.authority_bundles import MAX_RUN_BUNDLE_BYTES, MAX_RUN_CERTIFICATES
from dlion_operator.pki.run_trust import (
    MAX_STORED_BYTES,
    bundles_from_text,
    bundles_to_text,
    shared_keys,
    trusted_bundles,
)
from given_authorities import GivenAuthority

A, B, C = SiteName("plant-a"), SiteName("plant-b"), SiteName("plant-c")
NOW = datetime.now(UTC)
ONE, OTHER = GivenAuthority("one"), GivenAuthority("other")
ENDED = GivenAuthority("ended", begins=NOW - timedelta(days=100))
EARLY = GivenAuthority("early", begins=NOW + timedelta(days=1))
NO_AUTHORITY = GivenAuthority("worker", is_authority=False)


def test_what_a_site_says_goes_before_what_was_kept() -> None:
    told, kept = {A: ONE.own_pem}, {A: OTHER.own_pem, B: OTHER.own_pem, C: ONE.own_pem}
    assert trusted_bundles([A, B], told, kept, NOW) == {A: ONE.own_pem, B: OTHER.own_pem}


@pytest.mark.parametrize(
    "bundle",
    [
        ENDED.own_pem,
        EARLY.own_pem,
        NO_AUTHORITY.own_pem,
        ONE.own_pem + NO_AUTHORITY.own_pem,
        b"nonsense",
        ONE.key_pem(),
        ONE.own_pem * (MAX_RUN_CERTIFICATES + 1),
        ONE.own_pem + b"#" * MAX_RUN_BUNDLE_BYTES,
    ],
    ids=["ended", "early", "a worker's", "one among", "nonsense", "a key", "many", "long"],
)
def test_what_is_no_authority_that_holds_counts_for_nothing(bundle: bytes) -> None:
    assert trusted_bundles([A, B], {A: bundle, B: ONE.own_pem}, {}, NOW) == {B: ONE.own_pem}


def test_of_a_bundle_what_holds_counts_and_nothing_else_that_stands_there() -> None:
    bundle = ENDED.own_pem + b"a comment\n" + ONE.own_pem + ONE.key_pem()
    assert trusted_bundles([A], {A: bundle}, {}, NOW) == {A: ONE.own_pem}


def test_a_key_is_one_sites_alone() -> None:
    """It could sign for the workers of the other. Certificates are public: who says that it has
    another's does not take its place."""
    renewed = GivenAuthority("renewed", key=ONE.key)  # another certificate for the same key
    assert shared_keys({A: ONE.own_pem, B: OTHER.own_pem}, A, {}) == {}
    assert shared_keys({A: ONE.own_pem, B: ONE.own_pem}, A, {}) == {B: A}
    assert shared_keys({A: ONE.own_pem, B: renewed.own_pem}, B, {}) == {A: B}
    both = {A: OTHER.own_pem, B: ONE.own_pem, C: OTHER.own_pem + renewed.own_pem}
    assert shared_keys(both, A, {}) == {B: C, C: A}
    assert shared_keys(both, A, {B: ONE.own_pem}) == {C: A}
    assert shared_keys({B: ONE.own_pem, C: renewed.own_pem}, A, {C: ONE.own_pem}) == {B: C}


def test_sites_that_had_one_key_when_the_operator_started_keep_it_in_that_run() -> None:
    renewed = GivenAuthority("renewed", key=ONE.key)
    now = {A: ONE.own_pem, B: renewed.own_pem}
    before = {A: ONE.own_pem, B: ONE.own_pem}
    for own in (A, B, C):
        assert shared_keys(now, own, before, before) == {}
    assert shared_keys(now | {C: ONE.own_pem}, A, before, before) == {C: A}
    for one_of_them in ({A: ONE.own_pem, B: OTHER.own_pem}, {A: OTHER.own_pem, B: ONE.own_pem}):
        assert shared_keys(now, A, before, one_of_them) == {B: A}
    more = {A: OTHER.own_pem + ONE.own_pem, B: OTHER.own_pem + ONE.own_pem}
    assert shared_keys(more, A, before, before) == {B: A}


def test_what_is_kept_is_read_again() -> None:
    bundles = {A: ONE.own_pem + OTHER.own_pem, B: OTHER.own_pem}
    assert bundles_from_text(bundles_to_text(bundles, A)) == bundles


def test_there_is_room_for_this_sites_own_and_for_some_others() -> None:
    large = (ONE.own_pem * (MAX_RUN_BUNDLE_BYTES // len(ONE.own_pem)))[:MAX_RUN_BUNDLE_BYTES]
    sites = [SiteName(f"plant-{number:02}") for number in range(64)]
    text = bundles_to_text(dict.fromkeys(sites, large), sites[-1])
    assert len(text) <= MAX_STORED_BYTES
    assert '"plant-63":' in text
    assert '"plant-00":' in text
    assert '"plant-62":' not in text


@given(st.text() | st.sampled_from(['{"plant-a": 1}', "[1]", '[["a"]]', '{"a": "ä"}', "[" * 9999]))
def test_whatever_else_stands_there_is_nothing(text: str) -> None:
    assert bundles_from_text(text) == {}
