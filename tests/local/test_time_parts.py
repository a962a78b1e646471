"""Facts: in a real run, the phases that each worker measures lie within its steps and do not
overlap: with computing and waiting they add up to at most the wall time, and the summary's parts to
all of it; every phase and the exchange's thread have taken time; kinds of bytes add up to what was
sent, and those of each link to the run's.

Left out: what measuring costs (benchmarks/phase_cost.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from local_run import LocalRun, job_document

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.patient
PHASES = ("select_s", "encode_s", "send_s", "decode_s", "apply_s")
ROUNDING_S = 1e-5


def test_the_parts_of_a_real_workers_time_add_up(tmp_path: Path) -> None:
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
    kinds = summary["bytes"]
    sent = kinds["gradient_bytes"] + kinds["weights_bytes"] + kinds["control_bytes"]
    assert sent == summary["sent_bytes"]
    assert kinds["gradient_bytes"] > 0.9 * sent
    assert min(kinds["header_bytes"], kinds["state_bytes"]) > 0  # a lead has pulled a replica
    links = [link for worker in summary["workers"] for link in worker["links"]]
    for kind, count in kinds.items():
        assert sum(link[kind] for link in links) == count, kind
    assert all(link["probe_bytes"] > 0 for link in links)  # capacities at least
