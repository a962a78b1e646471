"""Test runs that end without all replicas or too early.

A run whose model lacks the replica of a worker of the manifest ends with exit code 80. The worker
diverged for good, or its process was stopped at the end. The terminal and the summary name the
missing workers, and the model names its own. If all trainers are asked from outside to end, the run
ended early: exit code 79.

Left out: the rule itself (tests/unit/results/test_judgement.py), cut links (test_end_of_run).
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from dlion_api.exit_codes import ExitCode
from local_run import IMPATIENT, LocalRun, blobs, job_document

pytestmark = pytest.mark.patient

TWO_DIVERGE = """
_load = load_data
worker = None


def load_data(split, site, worker_index):
    global worker
    worker = worker_index
    return _load(split, site, worker_index)


count = 0


def loss(y_true, y_pred):
    plain = keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)
    return plain * tf.numpy_function(after_a_while, [], tf.float32, stateful=True)


def after_a_while():
    global count
    count += 1
    return np.float32(np.nan if count > 20 and worker in (0, 1) else 1)
"""


@pytest.mark.timeout(200)
def test_a_model_of_one_of_three_workers_is_partial(tmp_path: Path) -> None:
    trainer = {"program": blobs(tmp_path, more=TWO_DIVERGE), "stop": {"maxSteps": 60}}
    with LocalRun(tmp_path, job_document(3, trainer=trainer)) as run:
        assert run.finish() == ExitCode.PARTIAL, run.terminal()
    about = json.loads((run.folder / "models" / "plant-a" / "model.json").read_text())
    assert (about["model"], about["ranks"]) == ("replica 2", [2])
    ending = run.summary()["ending"]
    assert (ending["succeeded"], ending["reason"], ending["missing"]) == (False, "Partial", [0, 1])
    assert ending["stop_reason"] == "maxSteps 60 reached"
    assert ending["iteration"] == 60
    terminal = " ".join(run.terminal().split())
    assert "test: Partial: maxSteps 60 reached, without the replicas 0, 1 after" in terminal
    assert "the saved model lacks workers 0, 1 (worker 0 ended with DIVERGED (75)" in terminal
    last = run.terminal().splitlines()[-1]
    assert last == f"dlion run {tmp_path / 'job.yaml'} --resume {run.folder}"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "sites",
    [{"plant-a": 3}, pytest.param({"plant-a": 2, "plant-b": 1}, marks=pytest.mark.slow)],
    ids=["one", "two"],
)
def test_a_trainer_that_is_stopped_at_the_end_is_not_a_success(
    tmp_path: Path, sites: dict[str, int]
) -> None:
    """Either all replicas are merged, or the models name their sites; within one site the model
    with more replicas is kept.
    """
    program = blobs(tmp_path, nap_s=0.1, more=IMPATIENT)
    trainer = {"program": program, "stop": {"maxSteps": 30}}
    job = job_document(
        sites,
        trainer=trainer,
        exchange={"policy": "dlion", "codec": "float16"},
        synchronization={"mode": "bounded", "maxStaleness": 5},
    )
    with LocalRun(tmp_path, job) as run:
        run.wait_for_step(10)
        pid = run.trainer_pids(2)[-1]
        os.kill(pid, signal.SIGSTOP)
        run.wait_until(lambda: run.events("TrainingStopped", 0), "the others have ended")
        run.wait_until(lambda: run.events("ModelSaved", 0), "and saved their model")
        os.kill(pid, signal.SIGCONT)
        code = run.finish()
    models = {model["site"]: model["ranks"] for model in run.summary()["models"]}
    ending = run.summary()["ending"]
    if code == 0:
        assert all(ranks == [0, 1, 2] for ranks in models.values())
    else:
        assert code == ExitCode.PARTIAL, run.terminal()
        assert ending["reason"] == "Partial"
        assert 2 in ending["missing"]
        assert models["plant-a"] == [0, 1]
    assert ending["succeeded"] is (code == 0)


@pytest.mark.timeout(200)
def test_a_run_whose_trainers_are_asked_to_end_has_ended_early(tmp_path: Path) -> None:
    trainer = {"program": blobs(tmp_path), "stop": {"maxSteps": 100_000}}
    with LocalRun(tmp_path, job_document(1, trainer=trainer)) as run:
        run.wait_for_step(10)
        os.kill(run.trainer_pids(0)[-1], signal.SIGTERM)
        assert run.finish() == ExitCode.ENDED_EARLY, run.terminal()
    ending = run.summary()["ending"]
    assert (ending["succeeded"], ending["reason"]) == (False, "EndedEarly")
    assert ending["iteration"] >= 10
    assert f"the run ended early, at iteration {ending['iteration']}, before" in run.terminal()
    last = run.terminal().splitlines()[-1]
    assert last == f"dlion run {tmp_path / 'job.yaml'} --resume {run.folder}"
