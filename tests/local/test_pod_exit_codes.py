"""Test the exit code of a trainer's container after too many crashes.

A program that crashes, or is killed, more often than `maxRestarts` allows ends with the exit code
RESTARTS after that number of restarts. Its sidecar ends in order.

Processes are those of a worker's pod. Left out: what the operator makes of it (tests/cluster), the
codes of single ends (tests/unit/worker/supervisor), programs that raise (test_kept_logs).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dlion_api.exit_codes import ExitCode
from local_run import blobs, job_document
from pod_run import pod_run

pytestmark = pytest.mark.patient

CRASHES = """
import os, signal

def build_model():
    {how}
"""


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("how", "subnet", "limit"),
    [("os.abort()", 48, 1), ("os.kill(os.getpid(), signal.SIGKILL)", 49, 0)],
)
def test_a_trainer_that_crashes_too_often_exits_with_restarts(
    tmp_path: Path, how: str, subnet: int, limit: int
) -> None:
    program = blobs(tmp_path, more=CRASHES.format(how=how))
    document = job_document(1, trainer={"program": program}, runId="r1", maxRestarts=limit)
    with pod_run(tmp_path, document, subnet=subnet) as run:
        run.start_keeper()
        run.start_worker(0)
        assert run.wait("trainer-0") == ExitCode.RESTARTS, run.story()
        assert run.end("sidecar-0") == {"sidecar-0": ExitCode.OK}
    assert f'"supervisor": "giving up", "restarts": {limit}' in run.story()
