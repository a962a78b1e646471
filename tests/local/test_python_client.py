"""Test `dlion.Client` and `dlion.train` on this machine and in virtual time.

The client trains a job. It reports and draws the job's states, figures, logs, records and model.
Another process lists the same jobs. Deleting a job in training ends every process and removes only
its folder. `dlion.train` returns the ended job or raises its failure with the reason, and Ctrl-C
ends its run in order. A compiled Keras model and arrays are trained at two sites. Their run is
resumed, listed and deleted as any other. The cells of examples/notebook.ipynb run in order.

Left out: refused models and data, damaged folders, and processes at the end of their interpreter
(tests/unit/cli), clusters (tests/cluster).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dlion
from local_run import LONG_S, blobs, job_document, run_command
from process_starter import RUN_MARK

pytestmark = [pytest.mark.patient, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """Put a mark in the environment of every process that the test starts."""
    made = uuid.uuid4().hex
    monkeypatch.setenv(RUN_MARK, made)
    return made


def left_behind(mark: str) -> list[int]:
    """Return other processes with the mark; some need a moment to end."""
    deadline_s = time.monotonic() + 10
    while found := [*_marked(mark)]:
        if time.monotonic() > deadline_s:
            return found
        time.sleep(0.05)
    return []


def _marked(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"{RUN_MARK}={mark}".encode() in words:
                found.append(int(entry.name))
    return found


def test_a_job_is_trained_and_read_by_two_processes(
    tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    document = job_document(
        {"plant-a": 1, "plant-b": 1},
        trainer={"program": blobs(tmp_path, nap_s=0.0), "stop": {"maxSteps": 10_000}},
    )
    client = dlion.Client("local", root=tmp_path / "runs")
    job = client.train(document, set={"trainer.stop.maxSteps": 20})
    assert not job.has_ended, "it returns before the run has ended"
    assert job.backend == "local"
    assert [worker.site for worker in job.workers] == ["plant-a", "plant-b"]
    states: list[str] = []
    ended = client.wait_for_job_status(
        job.name, timeout_s=LONG_S, callback=lambda job: states.append(job.state)
    )
    assert states[-1] == "Succeeded"
    assert set(states) <= {"Pending", "Waiting", "Training", "Succeeded"}
    assert (ended.reason, ended.progress) == ("Completed", 1.0)
    assert {worker.state for worker in ended.workers} == {"finished"}
    assert ended.result_folder == tmp_path / "runs" / job.name
    frame = client.get_job_metrics(job.name)
    assert frame[frame["loss"].notna()].groupby("worker")["iteration"].max().tolist() == [20, 20]
    monkeypatch.setenv("MPLBACKEND", "agg")
    axes = frame[frame["worker"] == 0].dropna(subset="loss").plot("time_s", "loss")
    assert len(axes.lines[0].get_xydata()) == 20
    axes.figure.savefig(tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    assert client.plot(job.name) == ended
    assert f"{job.name}: Succeeded, 100 %, loss " in capsys.readouterr().err
    assert f"<td style='text-align:left'>{ended.loss:.4g}</td>" in ended._repr_html_()
    lines = [*client.get_job_logs(job.name, worker=1)]
    assert any('"supervisor": "started"' in line for line in lines)
    assert [*client.get_job_logs(job.name, worker=1, follow=True)] == lines
    code = f"""
import dlion
for job in dlion.Client(root={str(tmp_path / "runs")!r}).list_jobs():
    print(job.name, job.backend, job.state, job.accuracy)
"""
    printed = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    assert printed.stdout.split() == [job.name, "local", "Succeeded", str(ended.accuracy)]
    assert not left_behind(mark)
    client.delete_job(job.name)
    assert client.list_jobs() == []
    assert not (tmp_path / "runs" / job.name).exists()


def test_a_job_deleted_in_training_leaves_nothing(tmp_path: Path, mark: str) -> None:
    document = job_document(2, trainer={"program": blobs(tmp_path), "stop": {"maxSteps": 10_000}})
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    client = dlion.Client("local", root=tmp_path / "runs")
    job = client.train(document)
    follower = client.get_job_logs(job.name, worker=0, follow=True)
    # The worker and its supervisor write the log: either may write the first line.
    assert any("INFO dlion_worker." in line for line in follower), "it waits for the log"
    training = client.wait_for_job_status(job.name, {"Training"}, timeout_s=LONG_S)
    assert training.progress is None or training.progress < 0.5
    client.delete_job(job.name)
    assert not left_behind(mark)
    assert [each.name for each in (tmp_path / "runs").iterdir()] == ["mine"]
    assert sum(1 for _ in follower) < 1000, "it ends"


def test_a_failed_job_raises_its_reason(tmp_path: Path, mark: str) -> None:
    program = blobs(
        tmp_path, more="\n\ndef load_data(*_):\n    raise RuntimeError('no such blobs')"
    )
    with pytest.raises(
        dlion.JobEndedError, match=r"Failed \((Program|Data)Failed\).*no such blobs"
    ):
        dlion.train(
            job_document({"plant-a": 3, "plant-b": 1}, trainer={"program": program}),
            environment="quickstart",
            backend="simulated",
            root=tmp_path / "runs",
        )
    assert not left_behind(mark)


def test_ctrl_c_ends_the_run_of_the_foreground(tmp_path: Path, mark: str) -> None:
    document = job_document(1, trainer={"program": blobs(tmp_path), "stop": {"maxSteps": 10_000}})
    code = f"""
import dlion
dlion.train({document!r}, root={str(tmp_path / "runs")!r})
"""
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    shown: list[str] = []
    while ": Training" not in "".join(shown[-1:]):
        shown.append(process.stderr.readline())
        assert shown[-1], f"it has ended: {shown}"
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode not in (0, None)
    assert "KeyboardInterrupt" in stderr
    assert not left_behind(mark)
    (job,) = dlion.Client(root=tmp_path / "runs").list_jobs()
    assert (job.state, job.reason) == ("Failed", "Interrupted")


def test_a_compiled_model_and_arrays_learn_at_two_sites(tmp_path: Path, mark: str) -> None:
    from dlion_worker.training.framework import keras

    rng = np.random.default_rng(1)
    y = rng.integers(0, 3, 900)
    x = (rng.normal(0, 1, (900, 8)) + 2 * y[:, None]).astype(np.float32)
    layers = [keras.layers.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(3)]
    model = keras.Sequential(layers, name="three_blobs")
    model.compile(
        optimizer=keras.optimizers.Adam(0.01),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    sites, root = ["plant-a", "plant-b"], tmp_path / "runs"
    job = dlion.train(model, (x, y), sites=sites, stop={"maxSteps": 100}, root=root)
    assert job.name.startswith("three-blobs-")
    assert job.result_folder == root / job.name
    client = dlion.Client("local", root=root)
    rates = client.get_job_metrics(job.name)["learning_rate"].dropna()
    assert {round(rate, 6) for rate in rates} == {0.01}, "the loss of compile()"
    trained = dlion.load_model(job)
    assert np.mean(trained.predict(x, verbose=0).argmax(1) == y) > 0.85
    for name in ("model-and-data/plant-a-0.npz", "model-and-data/plant-b-0.npz"):
        assert len(np.load(job.result_folder / name)["y"]) == 405, "half of nine tenths"
    resume = ["run", f"{job.result_folder}/job.yaml", "--resume", f"{job.result_folder}"]
    for arguments in (
        [*resume, "--set", "trainer.stop.maxSteps=110"],
        ["logs", f"{job.result_folder}", "--worker", "0"],
        ["ls", f"{root}", "-o", "json"],
    ):
        ended = run_command(tmp_path, *arguments)
        assert ended.returncode == 0, ended.stderr
    (listed,) = json.loads(ended.stdout)["runs"]
    assert (listed["name"], listed["state"]) == (job.name, "succeeded")
    assert client.get_job_metrics(job.name)["iteration"].max() == 110
    client.delete_job(job.name)
    assert not list(root.iterdir())
    assert not left_behind(mark)


def cells(**parameters: Any) -> list[str]:
    """Return the notebook's code, with these parameters after the cell of that tag."""
    # Without nbclient, which needs Jupyter's kernel: with IPython, ZeroMQ and Tornado some 35
    # packages. Its kernel is another process, whose variables the test could not read.
    document = json.loads((ROOT / "examples" / "notebook.ipynb").read_text())
    found = []
    for cell in document["cells"]:
        if cell["cell_type"] == "code":
            found.append("".join(cell["source"]))
            if "parameters" in cell["metadata"].get("tags", ()):
                found += [f"{name} = {value!r}" for name, value in parameters.items()]
    return found


@pytest.mark.parametrize(
    ("backend", "seconds"), [("simulated", 28), pytest.param("local", 8, marks=pytest.mark.slow)]
)
def test_the_notebook_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str, backend: str, seconds: int
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for cell in cells(backend=backend, seconds=seconds):
        exec(compile(cell, "notebook", "exec"), namespace)
    assert namespace["first"].accuracy > 0.4  # few seconds of training; chance is 0.1
    assert namespace["trained"].output_shape == (None, 10)
    assert namespace["together"].state == namespace["alone"].state == "Succeeded"
    assert namespace["together"].accuracy > namespace["alone"].accuracy
    assert {each.backend for each in namespace["client"].list_jobs()} == {backend}
    assert "\n".join(namespace["client"].get_job_logs(namespace["alone"].name, worker=None))
    assert (tmp_path / "digits.keras").stat().st_size > 10_000
    assert not left_behind(mark)
