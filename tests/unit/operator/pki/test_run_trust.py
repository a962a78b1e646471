"""Test which authorities of its sites a run trusts.

- The reported bundle of a site counts, else the kept one. Certificates that are not an authority's,
  have expired or are not yet valid do not count. They do not displace those of another site.
- A key that another site has does not count, unless both had it in that run before.
- A bundle kept on a Job is read again unchanged, within the size of annotations. Any other content
  is ignored.
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


def test_a_reported_bundle_takes_precedence_over_a_kept_one() -> None:
    reported, kept = {A: ONE.own_pem}, {A: OTHER.own_pem, B: OTHER.own_pem, C: ONE.own_pem}
    assert trusted_bundles([A, B], reported, kept, NOW) == {A: ONE.own_pem, B: OTHER.own_pem}


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
def test_an_invalid_bundle_does_not_count(bundle: bytes) -> None:
    assert trusted_bundles([A, B], {A: bundle, B: ONE.own_pem}, {}, NOW) == {B: ONE.own_pem}


def test_only_the_valid_certificates_of_a_bundle_count() -> None:
    bundle = ENDED.own_pem + b"a comment\n" + ONE.own_pem + ONE.key_pem()
    assert trusted_bundles([A], {A: bundle}, {}, NOW) == {A: ONE.own_pem}


def test_a_key_belongs_to_one_site() -> None:
    """The site could sign for the workers of the other.

    Certificates are public: a site that presents that of another does not displace it.
    """
    renewed = GivenAuthority("renewed", key=ONE.key)  # another certificate of the same key
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


def test_kept_bundles_are_read_again() -> None:
    bundles = {A: ONE.own_pem + OTHER.own_pem, B: OTHER.own_pem}
    assert bundles_from_text(bundles_to_text(bundles, A)) == bundles


def test_the_annotation_has_room_for_this_site_and_some_others() -> None:
    large = (ONE.own_pem * (MAX_RUN_BUNDLE_BYTES // len(ONE.own_pem)))[:MAX_RUN_BUNDLE_BYTES]
    sites = [SiteName(f"plant-{number:02}") for number in range(64)]
    text = bundles_to_text(dict.fromkeys(sites, large), sites[-1])
    assert len(text) <= MAX_STORED_BYTES
    assert '"plant-63":' in text
    assert '"plant-00":' in text
    assert '"plant-62":' not in text


@given(st.text() | st.sampled_from(['{"plant-a": 1}', "[1]", '[["a"]]', '{"a": "ä"}', "[" * 9999]))
def test_any_other_content_is_ignored(text: str) -> None:
    assert bundles_from_text(text) == {}
