"""Test how the scale benchmark reads an audit log (benchmarks/scaling).

Requests of operator and benchmark are distinguished, others are omitted. An incomplete line, and a
log rotated between two reads, lose no request. A lag is the time from a change to the next status
write of that job. It is infinite without one, and a refused change has none.

Left out: the lines of a real API server (tests/cluster/test_scale.py).
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "scaling"))

from audit_log import Asked, AuditLog, by_kind, lags_s

BENCHMARK, OPERATOR = "dlion-scale", "dlion-operator"


def line(agent: str, name: str, second: float, *, status: bool = False, code: int = 200) -> str:
    """Return a patch of a job as a line of the audit log."""
    time = f"2026-01-31T12:00:{second:09.6f}Z"
    about = {"resource": "dlionjobs", "name": name} | ({"subresource": "status"} if status else {})
    event = {
        "stage": "ResponseComplete",
        "userAgent": agent,
        "verb": "patch",
        "objectRef": about,
        "requestURI": "/apis/dlion.dev/v1alpha1",
        "requestReceivedTimestamp": time,
        "stageTimestamp": time,
        "responseStatus": {"code": code},
    }
    return json.dumps(event, separators=(",", ":")) + "\n"


def test_no_request_is_lost_when_the_log_is_rotated(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    log = AuditLog(path)
    with contextlib.closing(log):
        found = read_while_it_grows(log, path)
    assert [each.by_operator for each in found] == [False, True, False]
    assert by_kind(found) == {"patch dlionjobs/status": 1}


def read_while_it_grows(log: AuditLog, path: Path) -> list[Asked]:
    """Return all requests that it has read at the end."""
    assert log.read() == []
    first = line(BENCHMARK, "a", 1.0)
    path.write_text(first[:40])
    assert log.read() == []
    with path.open("a") as file:
        file.write(first[40:] + line("kubectl", "a", 1.1))
    assert len(log.read()) == 1
    with path.open("a") as file:
        file.write(line(OPERATOR, "a", 1.5, status=True))
    path.rename(path.with_name("audit-1.log"))
    path.write_text(line(BENCHMARK, "b", 2.0))
    return log.read()


def test_a_lag_ends_with_the_next_status_write_of_that_job(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    path.write_text(
        line(BENCHMARK, "a", 1.0)
        + line(BENCHMARK, "b", 1.0)
        + line(BENCHMARK, "refused", 1.0, code=422)
        + line(OPERATOR, "c", 1.1, status=True)
        + line(OPERATOR, "a", 1.25, status=True, code=409)
        + line(OPERATOR, "a", 1.5, status=True)
        + line(OPERATOR, "a", 9.0, status=True)
    )
    with contextlib.closing(AuditLog(path)) as log:
        assert lags_s(log.read(), verb="patch") == [0.5, math.inf]
