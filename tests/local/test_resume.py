"""Facts: a run that got Ctrl-C in the middle and is resumed makes, from its last iteration on, the
very same steps as a run without a break: the same batches, and bit-identical weights after each. No
iteration is made twice or left out, and its clock goes on.

Left out: modes without a barrier (what arrives when differs from run to run).
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from local_run import LocalRun, blobs, hashes, job_document

STEPS, BREAK = 60, 20


def document(folder: Path) -> dict[str, Any]:
    trainer = {"program": blobs(folder, nap_s=0.03), "stop": {"maxSteps": STEPS}}
    return job_document(3, trainer=trainer)


@pytest.mark.timeout(300)
def test_a_resumed_run_goes_on_as_if_there_had_been_no_break(tmp_path: Path) -> None:
    with LocalRun(tmp_path, document(tmp_path)) as whole:
        assert whole.finish() == 0, whole.terminal()
    broken_folder = tmp_path / "broken"
    broken_folder.mkdir()
    with LocalRun(broken_folder, document(tmp_path)) as broken:
        broken.wait_for_step(BREAK)
        broken.end(signal.SIGINT)
    before = broken.steps()
    assert before[-1].iteration < STEPS
    with LocalRun(broken_folder, document(tmp_path), "--resume", str(broken.folder)) as resumed:
        assert resumed.finish() == 0, resumed.terminal()

    for rank in range(3):
        expected = {s.iteration: (s.samples, s.weights_hash) for s in whole.steps(rank)}
        made = [(s.iteration, (s.samples, s.weights_hash)) for s in resumed.steps(rank)]
        assert made == [(iteration, expected[iteration]) for iteration, _ in made]
        # Of the iteration under way a peer may have made the update, and this worker not.
        assert len(expected) - len({iteration for iteration, _ in made}) <= 1
        assert len(made) == len({iteration for iteration, _ in made})
    assert all(len(set(known.values())) == 1 for known in hashes(resumed.steps()).values())
    ended_s = max(step.time_s for step in before)
    assert all(step.time_s > ended_s for step in resumed.steps()[len(before) :])
