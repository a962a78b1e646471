"""Test the reports of a trainer that ends at its start, by a code or by a signal.

Each end is reported at once, in events.jsonl and on the terminal. The report has the cause, the
last line, the count and the wait. A `FailRun` rule for that end fails the run without a restart.

Left out: the reading of logs (tests/unit/local/test_restart_watcher.py), the back-off
(tests/unit/worker/supervisor).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dlion_api.exit_codes import ExitCode
from local_run import LocalRun, blobs, job_document

pytestmark = pytest.mark.patient

ENDS = """
import os, sys

_load = load_data


def load_data(split, site, worker_index):
    if worker_index == 0:
        print("terminate called after throwing an instance of 'std::bad_alloc'", file=sys.stderr)
        sys.stderr.flush()
        {how}
    return _load(split, site, worker_index)
"""


@pytest.mark.timeout(200)
def test_a_failure_rule_fails_the_run_at_the_first_match(tmp_path: Path) -> None:
    """Without the rule signals cause restarts, and the other worker trains on."""
    more = ENDS.format(how="os.abort()")
    trainer = {"program": blobs(tmp_path, more=more), "stop": {"maxSteps": 100_000}}
    rules = [
        {"onEnds": ["Killed", "ProgramFailed"], "action": "Ignore"},
        {"onEnds": ["Crashed"], "groups": ["g"], "action": "FailRun"},
    ]
    job = job_document(2, trainer=trainer, failureRules=rules, startDeadlineSeconds=600)
    with LocalRun(tmp_path, job) as run:
        assert run.finish() == ExitCode.FAILED, run.terminal()
    assert not run.events("TrainerEnded"), "no restart"
    (failed,) = run.events("WorkerFailed")
    assert failed.rank == 0
    assert failed.message.endswith("; failureRules[1] is FailRun for Crashed")
    assert "failureRules[1] is FailRun for Crashed" in " ".join(run.terminal().split())


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("how", "words", "code"),
    [
        ("os.abort()", "signal SIGABRT", ExitCode.FAILED),
        pytest.param("os._exit(9)", "exit code 9", ExitCode.PROGRAM, marks=pytest.mark.slow),
    ],
    ids=["signal", "code"],
)
def test_each_restart_is_reported_at_once(
    tmp_path: Path, how: str, words: str, code: ExitCode
) -> None:
    trainer = {"program": blobs(tmp_path, more=ENDS.format(how=how)), "stop": {"maxSteps": 60}}
    with LocalRun(tmp_path, job_document(1, trainer=trainer, maxRestarts=2)) as run:
        run.wait_until(lambda: run.events("TrainerEnded"), "the first restart is reported")
        run.wait_until(lambda: "TrainerEnded" in run.terminal(), "and on the terminal")
        assert run.process.poll() is None, "during the run"
        assert run.finish() == code, run.terminal()
    (failed,) = run.events("WorkerFailed")
    how = words.removeprefix("signal ")
    assert failed.message.startswith(
        f"ended for good with {code.name} ({int(code)}): {how}: terminate called after throwing"
    )
    first, second = run.events("TrainerEnded")
    assert (first.rank, first.warning) == (0, True)
    message = f"its trainer ended with {words}: terminate called after throwing"
    assert first.message.startswith(message)
    assert first.message.endswith("; restart 1 of 2 in 1.0 s")
    assert second.message.endswith("; restart 2 of 2 in 2.0 s")
