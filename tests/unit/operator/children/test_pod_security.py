"""Test which parts of a pod violate pod security `restricted`.

Rendered pods have no violation. Each violation is named with its path.

Left out: that an API server with `restricted` refuses the same
(tests/cluster/test_pod_security.py).
"""

from __future__ import annotations

from typing import Any

import pytest

from dlion_api.spec import load_job
from dlion_operator.children.keeper import keeper_objects
from dlion_operator.pki.pod_security import restricted_violations
from forbidden_pods import FORBIDDEN, allowed, forbidden
from operator_world import SETTINGS, dlion_job


def test_a_workers_pod_complies() -> None:
    assert restricted_violations(allowed()) == ()


def test_a_keepers_pod_complies() -> None:
    *_, deployment = keeper_objects(load_job(dlion_job()), SETTINGS, {"uid": "u"})
    assert restricted_violations(deployment["spec"]["template"]["spec"]) == ()


@pytest.mark.parametrize("name", FORBIDDEN)
def test_each_violation_is_named(name: str) -> None:
    *_, words = FORBIDDEN[name]
    assert any(words in each for each in restricted_violations(forbidden(name)))


def test_probes_of_the_pod_itself_are_allowed() -> None:
    spec = allowed()
    spec["containers"][0] |= {
        "livenessProbe": {"httpGet": {"host": "", "port": 1}},
        "lifecycle": {"preStop": {"httpGet": {"port": 1}}, "postStart": None},
    }
    assert restricted_violations(spec) == ()


@pytest.mark.parametrize(
    "nonsense", [{"containers": 3}, {"volumes": [None]}, {"containers": ["x"]}]
)
def test_malformed_pods_cause_no_crash(nonsense: dict[str, Any]) -> None:
    restricted_violations(nonsense)
