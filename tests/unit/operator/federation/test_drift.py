"""Test which differences between the manifests of sites are drift.

- Fields that may differ between sites are not drift. Any other is named by its path, also in lists
  of named items and if only one site has it.
- Every site names the site that differs from most, in the same words.
- A field that one site's release does not know is not drift if it may be omitted; nor is the hash
  of the whole.
- The numbering of workers is compared.

Left out: how hashes travel (test_messages).
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

from dlion_api.names import SiteName
from dlion_api.spec import load_job
from dlion_operator.federation.drift import agree, differences
from dlion_operator.federation.reports import MAX_FIELDS, MAX_PATH_BYTES, SpecFingerprint

A, B, C = SiteName("plant-a"), SiteName("plant-b"), SiteName("plant-c")

MANIFEST: dict[str, Any] = {
    "apiVersion": "dlion.dev/v1alpha1",
    "kind": "DLionJob",
    "metadata": {"name": "digits"},
    "spec": {
        "sites": [
            {"name": A, "groups": [{"name": "small", "workers": 2}]},
            {"name": B, "groups": [{"name": "small", "workers": 1}]},
        ],
        "trainer": {
            "program": {"builtin": "digits"},
            "dataset": {"name": "digits"},
            "stop": {"maxSteps": 10},
        },
    },
}


def printed(*changes: tuple[str, Any]) -> SpecFingerprint:
    """Return the fingerprint of the manifest with these changes; a path counts through lists."""
    document = copy.deepcopy(MANIFEST)
    for path, value in changes:
        *way, last = path.split(".")
        at: Any = document["spec"]
        for step in way:
            at = at[int(step)] if isinstance(at, list) else at.setdefault(step, {})
        at[last] = value
    return SpecFingerprint.of(load_job(document))


@pytest.mark.parametrize(
    "change",
    [
        ("sites.0.groups.0.workers", 5),
        ("sites.0.groups.0.resources", {"limits": {"cpu": "2"}}),
        ("sites.1.groups.0.nodeSelector", {"disk": "fast"}),
        ("trainer.image", "elsewhere/worker:2"),
        ("suspend", True),
        ("activeDeadlineSeconds", 60),
        ("startDeadlineSeconds", 60),
        ("ttlSecondsAfterFinished", 60),
        ("checkpoint.everySeconds", 7),
        ("podTemplate", {"metadata": {"labels": {"a": "b"}}}),
    ],
)
def test_a_field_that_may_differ_is_not_drift(change: tuple[str, Any]) -> None:
    assert differences({A: printed(), B: printed(change)}) == ()


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (("trainer.seed", 7), "trainer.seed"),
        (("minSites", 2), "minSites"),
        (("trainer.optimizer.learningRate", 0.5), "trainer.optimizer.learningRate"),
        (("sites.1.groups.0.name", "large"), "sites[plant-b].groups"),
        (("trainer.startFrom", "earlier.keras"), "trainer.startFrom"),
        (("exchange.policy", "full"), "exchange.policy"),
    ],
)
def test_a_field_that_differs_is_named(change: tuple[str, Any], path: str) -> None:
    (found,) = differences({A: printed(), B: printed(change)})
    assert (found.site, found.reference) == (B, A)
    assert path in found.paths


def test_the_order_of_sites_counts() -> None:
    turned = printed(("sites", MANIFEST["spec"]["sites"][::-1]))
    (found,) = differences({A: printed(), B: turned})
    assert found.paths == ("sites",)


def test_every_site_names_the_site_that_differs_from_most() -> None:
    other = printed(("trainer.seed", 7))
    (found,) = differences({A: other, B: printed(), C: printed()})
    words = "the manifest of plant-a differs from that of plant-b in trainer.seed"
    assert str(found) == words
    assert str(*differences({C: printed(), B: printed(), A: other})) == words


def test_many_fields_are_counted() -> None:
    changes = [(f"trainer.{name}", 9) for name in ("seed",)]
    changes += [("minSites", 2), ("maxRestarts", 3), ("failurePolicy", "Fail")]
    changes += [("batching.globalBatchSize.initial", 77), ("synchronization.maxStaleness", 2)]
    (found,) = differences({A: printed(), B: printed(*changes)})
    assert str(found).endswith(" and 1 more")


def test_paths_are_bounded_and_stay_apart() -> None:
    exchange = {"policy": "mine", "parameters": {f"{'k' * 300}{end}": 1 for end in "ab"}}
    paths = [p for p in printed(("exchange", exchange)).fields if "kkk" in p]
    assert len(paths) == 2
    assert all(len(path.encode()) <= MAX_PATH_BYTES for path in paths)


def test_a_path_that_cannot_be_shown_is_accepted_by_other_sites() -> None:
    exchange = {"policy": "mine", "parameters": {"odd\u00a0key": 1, "odd\u2007key": 1}}
    paths = [p for p in printed(("exchange", exchange)).fields if "odd" in p]
    assert len(paths) == 2
    assert all(path.isprintable() for path in paths)


def known_to(spec_fingerprint: SpecFingerprint, *, without: str) -> SpecFingerprint:
    """Return the fingerprint of a release that does not know that field."""
    fields = {path: value for path, value in spec_fingerprint.fields.items() if path != without}
    whole = f"{int(spec_fingerprint.spec_hash, 16) ^ 1:064x}"
    return SpecFingerprint(whole, fields, spec_fingerprint.defaults - {without})


def test_a_field_unknown_to_one_release_is_not_drift_if_unset() -> None:
    """A written default is equal: an API server adds it."""
    for newer in (printed(), printed(("trainer.seed", printed_seed()))):
        older = known_to(newer, without="trainer.seed")
        assert agree(newer, older)
        assert agree(older, newer)
        assert differences({A: newer, B: older, C: older}) == ()
    other = known_to(printed(("minSites", 2)), without="trainer.seed")
    (found,) = differences({A: printed(), B: other})
    assert found.paths == ("minSites",)


def printed_seed() -> int:
    return load_job(MANIFEST).spec.trainer.seed


def test_a_field_unknown_to_one_release_is_drift_if_set() -> None:
    written = printed(("trainer.seed", 7))
    older = known_to(written, without="trainer.seed")
    for sites in ({A: written, B: older}, {A: older, B: written}):
        (found,) = differences(sites)
        assert found.paths == ("trainer.seed",)


def test_another_default_of_another_release_is_drift() -> None:
    mine = printed()
    theirs = SpecFingerprint("0" * 64, {**mine.fields, "trainer.seed": b"another!"}, mine.defaults)
    assert "trainer.seed" in mine.defaults
    assert not agree(mine, theirs)


def test_the_majority_is_right_whatever_its_release() -> None:
    newer, older = printed(), known_to(printed(), without="trainer.seed")
    (found,) = differences({A: printed(("minSites", 2)), B: newer, C: older})
    assert (found.site, found.reference, found.paths) == (A, B, ("minSites",))


def test_beyond_the_limit_of_fields_the_whole_manifest_is_compared() -> None:
    def large(last: int) -> SpecFingerprint:
        parameters = {f"k{at:05d}": at for at in range(MAX_FIELDS)}
        return printed(("exchange", {"policy": "mine", "parameters": {**parameters, "z": last}}))

    assert agree(large(1), large(1))
    (found,) = differences({A: large(1), B: large(2)})
    assert "a field that is not compared separately" in str(found)


def test_how_workers_are_numbered_is_compared() -> None:
    """A run keeps its first numbering, and another release may number its workers otherwise."""
    job = load_job(MANIFEST)
    counted, by_group = SpecFingerprint.of(job), SpecFingerprint.of(job.with_group_ranks())
    assert counted.spec_hash == by_group.spec_hash
    (found,) = differences({A: by_group, B: counted})
    assert found.paths == ("metadata.annotations[dlion.dev/ranks]",)
    silent = known_to(by_group, without="metadata.annotations[dlion.dev/ranks]")
    assert agree(silent, by_group)
    assert agree(silent, counted)
