"""Test which requests of an operator the chart grants, judged from audit logs.

A right in one namespace, mode or name is not a right in another. A right that no request of a mode
used is reported with its scope. The lines are as an API server writes them.

Left out: a real API server (tests/cluster/test_rights_in_use.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from audit import (
    granted_but_unused,
    not_granted,
    refused,
    requests_of_operators,
    used_in_modes,
)

ACCOUNT = "system:serviceaccount:dlion-system:dlion-operator"
EVERYWHERE = ("list", "dlion.dev/dlionjobs", "", "")
IN_ML = ("list", "dlion.dev/dlionjobs", "ml", "")
OWN_SECRET = ("get", "/secrets", "dlion-system", "dlion-authority")


def line(verb: str, resource: str, namespace: str, name: str, user: str) -> dict[str, Any]:
    group, _, plural = resource.rpartition("/")
    about = {"resource": plural, "namespace": namespace, "name": name}
    return {
        "verb": verb,
        "requestURI": "/",
        "userAgent": "dlion-operator",
        "user": {"username": user},
        "objectRef": about | ({"apiGroup": group} if group else {}),
        "responseStatus": {"code": 200},
    }


def beyond(folder: Path, *asked: tuple[str, str, str, str], user: str = ACCOUNT) -> list[str]:
    """Return those of the requests that are not granted."""
    log = folder / "audit.log"
    log.write_text("".join(json.dumps(line(*each, user)) + "\n" for each in asked))
    return not_granted(requests_of_operators(log))


@pytest.mark.parametrize("mode", [EVERYWHERE, IN_ML], ids=["cluster", "namespaced"])
def test_a_right_is_valid_only_in_its_scope(
    tmp_path: Path, mode: tuple[str, str, str, str]
) -> None:
    granted = [
        OWN_SECRET,
        ("get", "/secrets", "ml", "plant-ca"),
        ("get", "/secrets", "ml", "digits-authority"),
        ("get", "/services", "dlion-system", "dlion-operator"),
        ("create", "batch/jobs", "ml", "digits"),
    ]
    assert beyond(tmp_path, mode, *granted) == []
    for verb, resource, namespace, name in (
        ("get", "/secrets", "ml", "password"),
        ("get", "/secrets", "dlion-system", "password"),
        ("create", "/secrets", "ml", "dlion-authority"),
        ("list", "/secrets", "ml", ""),
        ("patch", "/configmaps", "dlion-system", "dlion-operator"),
    ):
        is_only_where_watched = mode is EVERYWHERE and resource == "/configmaps"
        found = beyond(tmp_path, mode, (verb, resource, namespace, name))
        assert len(found) == (not is_only_where_watched), (verb, resource, namespace, name)


def test_roles_grant_nothing_elsewhere(tmp_path: Path) -> None:
    there, elsewhere = (("create", "batch/jobs", name, "digits") for name in ("ml", "other"))
    assert beyond(tmp_path, EVERYWHERE, there, elsewhere) == []
    (request,) = beyond(tmp_path, IN_ML, there, elsewhere)
    assert request == f"create batch/jobs other/digits by {ACCOUNT} (namespaced)"
    for before in ([], [EVERYWHERE]):  # an upgrade changes the mode
        assert len(beyond(tmp_path, *before, IN_ML, ("list", "/pods", "", ""))) == 1
    assert beyond(tmp_path, IN_ML, elsewhere, user="admin") == []


def test_requests_before_the_first_list_of_jobs_count_for_the_mode(tmp_path: Path) -> None:
    log = tmp_path / "audit.log"
    made = ("create", "/secrets", "dlion-system", "dlion-authority")
    log.write_text("".join(json.dumps(line(*each, ACCOUNT)) + "\n" for each in (made, IN_ML)))
    (first, _) = requests_of_operators(log)
    assert (first.mode, first.watched) == ("namespaced", {"ml"})
    assert (
        "operator: create secrets"
        not in granted_but_unused(used_in_modes([first]), "Secret")["namespaced"]
    )


def test_a_mode_without_requests_is_reported_with_its_rights(tmp_path: Path) -> None:
    log = tmp_path / "audit.log"
    log.write_text(json.dumps(line(*IN_ML, ACCOUNT)) + "\n")
    never = granted_but_unused(used_in_modes(requests_of_operators(log)))
    assert set(never) == {"cluster", "namespaced", "routes"}
    assert "jobs: list dlionjobs.dlion.dev" in never["cluster"]
    assert "jobs: list dlionjobs.dlion.dev" not in never["namespaced"]
    assert "operator: get secrets" in never["namespaced"]


def test_a_lease_is_refused_only_to_an_operator_that_outlives_its_rights(tmp_path: Path) -> None:
    log = tmp_path / "audit.log"
    renewal = line("patch", "coordination.k8s.io/leases", "ml", "dlion-operator", ACCOUNT)
    forbidden = renewal | {"responseStatus": {"code": 403, "message": "cannot patch"}}
    for lines, expected in (([renewal, forbidden], []), ([forbidden], ["patch /: cannot patch"])):
        log.write_text("".join(json.dumps(each) + "\n" for each in lines))
        assert refused(requests_of_operators(log)) == expected
