"""Test runs in which one worker attacks the others or has wrong data.

The attacker uses its own trainer and its own valid certificate. With `exchange.quarantine` the
other workers quarantine a worker with wrong data. Its process ends, and the run completes without
it. Contributions that claim more samples than the run has are refused. Their sender is reported and
quarantined, and the other workers learn without it. They do not wait for it at the end, and their
model holds both of them. A forged stop in another worker's name at the fifth step has no effect.

Left out: each bound (tests/unit/core, tests/property); undetectable attacks (docs/federation.md).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bad_data import BAD_NAME, BAD_RANK, job_with_bad_data
from dlion_api.exit_codes import ExitCode
from dlion_api.reasons import EventReason
from local_run import LocalRun, blobs, job_document

pytestmark = pytest.mark.patient

MAX_STEPS = 60
ATTACKED = """
_load = load_data


def load_data(split, site, worker_index):
    if worker_index == 2 and not hasattr(attack, "done"):
        attack.done = True
        attack()
    return _load(split, site, worker_index)
"""

MANY_SAMPLES = """

def attack():
    from dlion_core.policies.weights.anchored_rounds import AnchoredRounds

    count = AnchoredRounds.count_step

    def count_step(self, step):
        count(self, step)
        self.samples = 64 * 5000
        self.residual.value_D += self.weights_D  # as if zeros were the best weights

    AnchoredRounds.count_step = count_step
    AnchoredRounds.max_samples = lambda self, end, sender=None: 2**31
"""

EARLY_STOP = """

def attack():
    from dlion_worker.trainer import loop

    rule = loop.stop_reason

    def stop_reason(stop, progress, **samples):
        is_early = progress.iteration >= 5
        return "worker 0: maxSteps 60 reached" if is_early else rule(stop, progress, **samples)

    loop.stop_reason = stop_reason
"""


def finished(tmp_path: Path, attack: str) -> tuple[LocalRun, int]:
    trainer = {
        "program": blobs(tmp_path, more=ATTACKED + attack),
        "stop": {"maxSteps": MAX_STEPS},
    }
    document = job_document({"plant-a": 3}, trainer=trainer)
    document["spec"]["exchange"] = {"policy": "adaptive"}
    with LocalRun(tmp_path, document) as run:
        return run, run.finish()


def refusals(run: LocalRun) -> set[str]:
    return {
        record.message
        for rank in (0, 1)
        for record in run.events(EventReason.MESSAGE_REFUSED, rank)
    }


@pytest.mark.timeout(300)
def test_a_worker_with_wrong_data_is_quarantined_and_the_run_completes(tmp_path: Path) -> None:
    document = job_with_bad_data(tmp_path, max_steps=MAX_STEPS, nap_s=0.05)
    with LocalRun(tmp_path, document) as run:
        code = run.finish()
    assert code == ExitCode.OK, run.terminal()
    (event,) = run.events(EventReason.WORKER_QUARANTINED, BAD_RANK)
    assert event.message.startswith(f"{BAD_NAME} is quarantined (most workers here report it")
    assert event.message in run.terminal()
    summary = run.summary()
    assert (summary["ending"]["reason"], summary["ending"]["missing"]) == ("Completed", [])
    assert [worker["quarantine"] for worker in summary["workers"]] == ["", "", "", event.message]
    assert (summary["accuracy"]["replicas"], summary["accuracy"]["mean"] > 0.8) == (3, True)
    assert summary["workers"][BAD_RANK]["steps"] < MAX_STEPS
    assert run.events(EventReason.WORKER_FAILED, BAD_RANK) == []


@pytest.mark.timeout(300)
def test_a_worker_that_claims_all_samples_is_quarantined(tmp_path: Path) -> None:
    run, code = finished(tmp_path, MANY_SAMPLES)
    assert code == ExitCode.PARTIAL, run.terminal()
    summary = run.summary()
    assert summary["ending"]["missing"] == [2]
    assert summary["ending"]["iteration"] >= MAX_STEPS
    refused = refusals(run)
    assert any("worker 2: round of 320000 samples; allowed: 1 to " in text for text in refused), (
        refused
    )
    assert any("is quarantined" in text for text in refused), refused
    about = json.loads((run.folder / "models" / "plant-a" / "model.json").read_text())
    assert (about["ranks"], about["accuracy"] > 0.8) == ([0, 1], True)


@pytest.mark.timeout(300)
def test_a_forged_stop_has_no_effect(tmp_path: Path) -> None:
    run, _ = finished(tmp_path, EARLY_STOP)
    assert run.summary()["ending"]["iteration"] >= MAX_STEPS, run.terminal()
    texts = {text for text in refusals(run) if "is over" in text}  # each worker names its step
    claim = "worker 2: claims that the run is over (maxSteps 60 reached), but this"
    assert texts
    assert all(text.startswith(claim) for text in texts), texts
