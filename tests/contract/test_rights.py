"""Tests of the rights in the chart against the kinds that the operator knows.

Each kind of `dlion_operator.kubernetes.client` has rights. Watched kinds may be listed and watched,
and no other kind may. No rule is about a resource that the operator does not name, except those
listed here with a reason.

Left out: single verbs, which the audit log of a real API server shows (tests/cluster).
"""

from __future__ import annotations

from pathlib import Path

import yaml

from dlion_operator.kubernetes.client import Kind
from dlion_operator.kubernetes.resync import WATCHED

RIGHTS = yaml.safe_load(
    (Path(__file__).parents[2] / "helm" / "dlion" / "files" / "rights.yaml").read_text()
)
BESIDE = {
    ("", "pods/status"),
    ("batch", "jobs/status"),  # a suspended Job's start time
    ("kueue.x-k8s.io", "workloads/status"),
    ("dlion.dev", "dlionjobs/status"),
    ("dlion.dev", "dlionjobs/finalizers"),  # never written: an owner reference requires it
}


def resource(kind: Kind) -> tuple[str, str]:
    """Group and plural, as rights name them."""
    api_version, _, plural = kind.value
    return (api_version.rpartition("/")[0], plural)


def granted(wanted: set[str]) -> set[tuple[str, str]]:
    """The resources for which some rule grants all of these verbs."""
    return {
        (group, plural)
        for right in RIGHTS
        if wanted <= set(right["verbs"])
        for group in right["apiGroups"]
        for plural in right["resources"]
    }


def test_rights_match_the_kinds_that_the_operator_knows() -> None:
    assert granted(set()) == {resource(kind) for kind in Kind} | BESIDE


def test_exactly_the_watched_kinds_may_be_watched() -> None:
    watched = {resource(kind) for kind in WATCHED}
    assert granted({"list", "watch"}) == granted({"list"}) == granted({"watch"}) == watched
