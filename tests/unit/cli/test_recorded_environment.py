"""Test what a replay reads from `environment.yaml`, as the runner and the simulator write it.

Left out: replays (tests/local/test_replay.py), and that relays and namespaces apply the stated
values (tests/local/test_network_relay.py, test_network_namespaces.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from dlion_api.document import to_document
from dlion_api.errors import DataError
from dlion_api.spec import Job, load_job
from dlion_cli.comparison.recorded_environment import read_environment, recorded_environment
from dlion_environments.loading import load_environment
from dlion_environments.plan import Plan
from dlion_local.emulation.measurement import unsupported_latencies
from dlion_results.run_folder.environment import (
    LINK_RATE,
    QUOTA,
    EnvironmentFigure,
    EnvironmentReport,
    environment_document,
)
from local_run import job_document

ENVIRONMENT = load_environment("intercontinental")
JOB: Job = load_job(job_document({"a": 2, "b": 2, "c": 2}), source="test")
FAR_S = 0.039
FAR = {(a, b): FAR_S for a in range(6) for b in range(6) if a // 2 != b // 2}


def plan() -> Plan:
    return ENVIRONMENT.plan(JOB.workers(), machine_cores=None)


def written(folder: Path, report: EnvironmentReport) -> Path:
    """Write the file as `ResultFolder.write_environment` does."""
    (folder / "environment.yaml").write_text(yaml.safe_dump(environment_document(report)))
    return folder


def of_run(*figures: EnvironmentFigure) -> EnvironmentReport:
    """Return what `dlion run` records of that environment."""
    return EnvironmentReport(ENVIRONMENT.name, figures, document=to_document(ENVIRONMENT))


def a_link_rate() -> EnvironmentFigure:
    return EnvironmentFigure(0, LINK_RATE, "Mbit/s", 1000.0, 960.0, peer=1)


def test_a_relay_and_a_simulation_used_the_latencies_of_the_file(tmp_path: Path) -> None:
    """Neither of them records its latencies."""
    for report in (of_run(a_link_rate()), of_run()):
        assert read_environment(written(tmp_path, report)).latencies(JOB) == [(0.0, FAR)]


def test_namespaces_had_no_latency(tmp_path: Path) -> None:
    not_imposed = unsupported_latencies(plan())
    assert len(not_imposed) == len(FAR)
    folder = written(tmp_path, of_run(a_link_rate(), *not_imposed))
    assert read_environment(folder).latencies(JOB) == [(0.0, {})]


def test_a_replay_used_its_recorded_values(tmp_path: Path) -> None:
    folder = written(tmp_path, recorded_environment(plan().initial, ("replay of runs/a",)))
    ((_, found),) = read_environment(folder).latencies(JOB)
    assert found == pytest.approx(FAR)


def test_without_a_file_there_is_no_latency_and_no_quota(tmp_path: Path) -> None:
    none = read_environment(tmp_path)
    assert (none.latencies(JOB), none.has_quotas) == ([(0.0, {})], False)
    quota = EnvironmentFigure(0, QUOTA, "cores", 1.0, 0.9)
    assert read_environment(written(tmp_path, of_run(quota))).has_quotas


@pytest.mark.parametrize(
    "text",
    [
        "figures: !!bool x",
        "figures: !!timestamp x",
        "[" * 5000,
        "- 1",
        "figures: [{quantity: 'latency, one way', rank: 0, peer: 1, measured: 1" + "0" * 400 + "}]",
        "figures: [{quantity: 'latency, one way', rank: 0, peer: 1, measured: .nan}]",
        "figures: [{quantity: 'latency, one way', rank: 0, peer: 1, measured: -3}]",
        "figures: [{quantity: 'latency, one way', rank: 0, peer: 1, measured: [1]}]",
    ],
)
def test_a_damaged_file_is_refused_with_a_message(tmp_path: Path, text: str) -> None:
    (tmp_path / "environment.yaml").write_text(text)
    with pytest.raises(DataError, match=r"environment\.yaml") as caught:
        read_environment(tmp_path).latencies(JOB)
    assert len(str(caught.value)) < 1000
