"""Test the state of a pod in one word, as in the column STATUS of kubectl.

Left out: the tables of pods (test_describe.py) and what is wrong with a pod (test_pod_findings.py).
"""

from __future__ import annotations

from typing import Any

import pytest

from dlion_cli.views.pod_status import PodStatus


@pytest.mark.parametrize(
    ("terminated", "state"),
    [
        ({"exitCode": 67, "reason": "Error"}, "Error"),
        ({"exitCode": 67}, "ExitCode:67"),
        ({"exitCode": 67, "reason": ""}, "ExitCode:67"),
        ({}, "Failed"),
    ],
)
def test_a_container_that_failed_gives_its_reason_or_exit_code(
    terminated: dict[str, Any], state: str
) -> None:
    containers = [{"name": "trainer", "state": {"terminated": terminated}}]
    status = {"phase": "Failed", "containerStatuses": containers}
    assert PodStatus({"metadata": {"name": "w-0"}, "status": status}).state == state
