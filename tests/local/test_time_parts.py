"""Test the phases that workers measure in a real run.

Phases lie within the steps and do not overlap. With computing and waiting they add up to at most
the wall time, and the parts of the summary to all of it. Every phase and the exchange's thread take
time. Kinds of bytes add up to the sent bytes, and equal those of the links' records. The phases of
each trainer's process add up to its wall time at the supervisor, but for start and end.

Left out: the cost of measuring (benchmarks/phase_cost.py).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from dlion_api.protocol.progress import LinkRecord
from local_run import LocalRun, job_document

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.patient
PHASES = ("select_s", "encode_s", "send_s", "decode_s", "apply_s")
ROUNDING_S = 1e-5
PROCESS = (
    "import", "data", "model", "join", "speed", "train", "final_wait", "gather", "evaluate",
    "save", "close",
)  # fmt: skip
EXIT_S, EXIT_FRACTION = 1.0, 0.2
"""Allowed for start and end of a process outside its phases: the fraction on a busy machine, where
all of it takes longer."""


def test_the_phases_of_a_real_worker_add_up(tmp_path: Path) -> None:
    run = LocalRun(tmp_path, job_document(2, exchange={"policy": "dlion", "codec": "float16"}))
    with run:
        assert run.finish() == 0, run.terminal()
        steps, summary = run.steps(), run.summary()
    assert len(steps) == 40
    for record in steps:
        phases = [getattr(record, name) for name in PHASES]
        assert min(phases) >= 0.0
        within_s = record.compute_s + record.waited_s + sum(phases)
        assert within_s <= record.wall_s + ROUNDING_S, record
    for name in (*PHASES, "link_send_s", "link_receive_s"):
        assert sum(getattr(record, name) for record in steps) > 0.0, name
    for worker in summary["workers"]:
        parts = ("compute_s", "waited_s", *PHASES, "other_s")
        assert sum(worker[part] for part in parts) == pytest.approx(worker["wall_s"], abs=1e-3)
    for worker in summary["workers"]:
        process, rank = worker["process"], worker["rank"]
        parts_s = sum(process[f"{name}_s"] for name in PROCESS)
        assert parts_s == pytest.approx(process["process_s"])
        (lived_s,) = map(float, re.findall(r'"lived_s": ?([\d.]+)', run.worker_log(rank)))
        assert parts_s == pytest.approx(lived_s, abs=EXIT_S, rel=EXIT_FRACTION)
        assert process["train_s"] == pytest.approx(worker["wall_s"], abs=0.2, rel=0.1)
        assert min(process["model_s"], process["join_s"], process["close_s"]) > 0
    assert summary["ending"]["command_s"] > 0
    # The lead gathers and saves; the other waits.
    (lead,) = (each["process"] for each in summary["workers"] if each["process"]["gather_s"])
    assert lead["save_s"] > 0
    assert any(each["process"]["final_wait_s"] for each in summary["workers"])
    kinds = summary["bytes"]
    sent = kinds["gradient_bytes"] + kinds["weights_bytes"] + kinds["control_bytes"]
    assert sent == summary["sent_bytes"]
    assert kinds["gradient_bytes"] > 0.9 * sent
    assert min(kinds["header_bytes"], kinds["state_bytes"]) > 0  # a lead has pulled a replica
    links = [link for worker in summary["workers"] for link in worker["links"]]
    records = [record for record in run.records() if isinstance(record, LinkRecord)]
    for kind in ("weights_bytes", "control_bytes", "header_bytes", "state_bytes", "probe_bytes"):
        recorded = sum(getattr(record, kind) for record in records)
        assert recorded == kinds[kind] == sum(link[kind] for link in links), kind
    assert all(link["probe_bytes"] > 0 for link in links)  # capacities at least
