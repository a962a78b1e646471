"""Test scheduled events: loss, changing latencies, stragglers and absences.

They have the values of the file. Impossible values are refused with the allowed ones and the line.
Real processes refuse events of virtual time. A job that would wait for a late worker is refused.

Left out: their effect in the simulator (tests/unit/simulator, tests/local).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest

from dlion_api.document import parse
from dlion_api.errors import SpecError
from dlion_api.names import Rank, SiteName, WorkerIdentity
from dlion_api.spec import load_job
from dlion_environments.change_description import describe_change
from dlion_environments.loading import load_environment
from dlion_environments.model import Environment
from dlion_environments.plan import Absence, Straggler, combined_fraction, tcp_bytes_per_s
from dlion_local.emulation.emulation import LinkBackend, choose_link_backend
from dlion_local.emulation.measurement import unsupported_latencies
from dlion_local.emulation.network.relay import links_from_json, links_to_json

if TYPE_CHECKING:
    from pathlib import Path

    from dlion_environments.plan import Plan

SITES = [{"name": "a", "workers": 3}, {"name": "b", "workers": 1}]


def workers() -> tuple[WorkerIdentity, ...]:
    return tuple(
        WorkerIdentity(Rank(rank), SiteName("b" if rank == 3 else "a"), "g", rank % 3)
        for rank in range(4)
    )


def environment(**fields: Any) -> Environment:
    return parse(
        Environment,
        {"name": "test", "workers": [{"count": 4, "cores": 1}], "sites": SITES, **fields},
    )


def plan(duration_s: float | None = None, **fields: Any) -> Plan:
    return environment(**fields).plan(workers(), None, duration_s=duration_s)


def problems(**fields: Any) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        plan(**fields)
    return {problem.path: str(problem) for problem in caught.value.problems}


def test_the_rate_is_that_of_the_published_formula() -> None:
    # 1 % lost at a round trip of 100 ms: 1448 B / 0.1 s x sqrt(3/4) / 0.1.
    assert tcp_bytes_per_s(0.01, 0.1) == pytest.approx(1448 / 0.1 * math.sqrt(0.75) / 0.1)
    assert tcp_bytes_per_s(0.04, 0.1) == pytest.approx(tcp_bytes_per_s(0.01, 0.1) / 2)
    assert tcp_bytes_per_s(0.01, 0.2) == pytest.approx(tcp_bytes_per_s(0.01, 0.1) / 2)
    assert tcp_bytes_per_s(0.0, 0.1) == math.inf
    assert tcp_bytes_per_s(0.01, 0.0) == tcp_bytes_per_s(0.01, 0.001)


def test_losses_of_both_ends_and_of_the_link_combine_as_probabilities() -> None:
    made = plan(
        workers=[{"count": 3, "cores": 1}, {"cores": 1, "lossPercent": 10}],
        betweenSites={"lossPercent": 50, "latencyMs": 20},
    ).initial
    assert made.worker(Rank(0)).loss_fraction == {3: pytest.approx(1 - 0.9 * 0.5)}
    assert made.worker(Rank(3)).loss_fraction == dict.fromkeys(
        (0, 1, 2), pytest.approx(combined_fraction([10, 50]))
    )
    expected = tcp_bytes_per_s(1 - 0.9 * 0.5, 0.04)
    assert made.link_bytes_per_s(Rank(0), Rank(3)) == pytest.approx(expected)
    assert made.link_bytes_per_s(Rank(0), Rank(1)) == math.inf


def test_loss_and_latency_change_and_other_values_stay() -> None:
    made = plan(
        betweenSites={"latencyMs": 20, "lossPercent": 1},
        changes=[
            {"at": {"seconds": 1}, "betweenSitesLatencyMs": 50, "insideSitesLatencyMs": 2},
            {"at": {"seconds": 2}, "lossPercent": [0, 0, 0, 4], "betweenSitesLossPercent": 0},
        ],
    )
    assert made.initial.worker(Rank(0)).latency_s == {3: 0.02}
    assert made.at(1).worker(Rank(0)).latency_s == {1: 0.002, 2: 0.002, 3: 0.05}
    assert made.at(1).worker(Rank(0)).loss_fraction == {3: pytest.approx(0.01)}
    assert made.at(2).worker(Rank(0)).latency_s == made.at(1).worker(Rank(0)).latency_s
    assert made.at(2).worker(Rank(0)).loss_fraction == {3: pytest.approx(0.04)}
    words = describe_change(made.initial, made.at(2))
    assert words[Rank(0)] == (
        "latency for workers 1, 2 0 to 2 ms; latency for worker 3 20 to 50 ms; "
        "loss for worker 3 1 to 4 %"
    )


def test_a_later_latency_is_applied_by_the_relay_or_marked_as_missing() -> None:
    made = environment(
        coreScale=0.1, changes=[{"at": {"seconds": 1}, "betweenSitesLatencyMs": 30}]
    ).plan(workers(), 8)
    assert choose_link_backend(made, None)[0] is LinkBackend.RELAY
    read_back = links_from_json(links_to_json(made.at(1)))
    assert read_back.worker(Rank(0)).latency_s == {3: 0.03}
    missing = {(c.rank, c.peer): c.requested for c in unsupported_latencies(made)}
    assert missing[Rank(0), Rank(3)] == 30
    assert (Rank(0), Rank(1)) not in missing


def test_stragglers_and_absences_have_times_in_seconds_and_in_order() -> None:
    made = plan(
        duration_s=100,
        stragglers=[
            {"slowdown": 6, "chance": 0.25},
            {"workers": [2], "slowdown": 3, "begins": {"fraction": 0.5}, "ends": {"seconds": 60}},
        ],
        absences=[
            {"worker": 2, "leaves": {"seconds": 10}, "comes": {"fraction": 0.2}},
            {"worker": 2, "leaves": {"seconds": 80}},
            {"worker": 1, "comes": {"seconds": 5}},
        ],
    )  # fmt: skip
    assert made.stragglers == (
        Straggler(frozenset(map(Rank, range(4))), 6, 0.25),
        Straggler(frozenset({Rank(2)}), 3, 1.0, 50.0, 60.0),
    )
    assert made.absences == (
        Absence(Rank(1), None, 5.0), Absence(Rank(2), 10.0, 20.0), Absence(Rank(2), 80.0, None),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "path", "message"),
    [
        ({"stragglers": [{"slowdown": 2, "workers": [4]}]}, "stragglers[0].workers", "0 to 3"),
        (
            {"stragglers": [
                {"slowdown": 2, "begins": {"seconds": 9}, "ends": {"seconds": 9}}
            ]},
            "stragglers[0].ends", "after begins",
        ),
        ({"absences": [{"worker": 7, "leaves": {"seconds": 1}}]}, "absences[0].worker", "0 to 3"),
        (
            {"absences": [{"worker": 1, "leaves": {"seconds": 5}, "comes": {"seconds": 4}}]},
            "absences[0].comes", "after leaves",
        ),
        (
            {"absences": [
                {"worker": 1, "leaves": {"seconds": 5}},
                {"worker": 1, "leaves": {"seconds": 9}, "comes": {"seconds": 10}},
            ]},
            "absences[1]", "it stays away",
        ),
        (
            {"absences": [
                {"worker": 1, "leaves": {"seconds": 5}, "comes": {"seconds": 9}},
                {"worker": 1, "leaves": {"seconds": 8}},
            ]},
            "absences[1].leaves", "after 9 s",
        ),
        (
            {"absences": [{"worker": 1, "comes": {"fraction": 0.5}}]},
            "absences[0].comes.fraction", "stop.maxSeconds",
        ),
        (
            {"absences": [{"worker": k, "comes": {"seconds": 5}} for k in range(4)]},
            "absences", "no worker is present",
        ),
        (
            {"changes": [{"at": {"seconds": 1}, "lossPercent": [1]}]},
            "changes[0].lossPercent", "4 values",
        ),
    ],
)  # fmt: skip
def test_an_impossible_value_is_refused_with_the_allowed_ones(
    fields: dict[str, Any], path: str, message: str
) -> None:
    found = problems(**fields)
    assert list(found) == [path]
    assert message in found[path]


def test_an_empty_list_of_stragglers_is_refused_and_does_not_mean_all() -> None:
    with pytest.raises(SpecError, match=r"stragglers\[0\]\.workers"):
        environment(stragglers=[{"workers": [], "slowdown": 2}])


def test_events_after_the_end_of_a_run_are_named() -> None:
    made = environment(
        changes=[{"at": {"fraction": 0.9}, "cutSites": ["a"]}, {"at": {"seconds": 60}}],
        stragglers=[
            {"slowdown": 2, "ends": {"seconds": 600}},
            {"slowdown": 2, "begins": {"seconds": 61}},
        ],
        absences=[{"worker": 1, "leaves": {"seconds": 59}, "comes": {"seconds": 70}}],
    )
    assert made.unreached(60) == ["changes[1].at", "stragglers[1].begins", "absences[0].comes"]
    assert made.unreached(71) == []
    assert made.unreached(None) == []


def test_a_files_problems_name_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(
        "name: bad\n"
        "workers: [{count: 4, cores: 1}]\n"
        "stragglers:\n"
        "  - {slowdown: 0.5}\n"
        "absences:\n"
        "  - worker: 1\n"
    )
    with pytest.raises(SpecError) as caught:
        load_environment(path)
    problems_by_path = {
        problem.path: (problem.line, problem.allowed) for problem in caught.value.problems
    }
    assert problems_by_path["stragglers[0].slowdown"][0] == 4
    assert "1" in problems_by_path["stragglers[0].slowdown"][1]
    assert [line for at, (line, _) in problems_by_path.items() if at.startswith("absences[0]")] == [
        6
    ]
    path.write_text(
        "name: bad\nworkers: [{count: 4, cores: 1}]\n\nchanges:\n"
        "  - at: {seconds: 1}\n    cores: [1, 2]\n"
    )
    with pytest.raises(SpecError, match=r"line 6: changes\[0\]\.cores"):
        load_environment(path)
    path.write_text(
        "name: bad\nworkers: [{count: 4, cores: 1}]\n\nchanges:\n"
        "  - at: {seconds: 5}\n  - at:\n      fraction: 0.5\n"
    )
    with pytest.raises(SpecError, match=r"bad\.yaml: 1 problem:\n  line 6: changes\[1\]\.at"):
        load_environment(path).plan(workers(), None, duration_s=8)


def test_real_processes_refuse_events_of_virtual_time() -> None:
    made = environment(
        coreScale=0.1,
        workers=[{"count": 4, "cores": 1, "lossPercent": 1}],
        betweenSites={"lossPercent": 1},
        stragglers=[{"slowdown": 2}],
        absences=[{"worker": 1, "leaves": {"seconds": 1}}],
        changes=[{"at": {"seconds": 1}, "betweenSitesLossPercent": 2}],
    )
    with pytest.raises(SpecError) as caught:
        made.plan(workers(), 8)
    assert {problem.path for problem in caught.value.problems} == {
        "workers[0].lossPercent", "betweenSites.lossPercent", "stragglers[0]", "absences[0]",
        "changes[0].betweenSitesLossPercent",
    }  # fmt: skip
    assert all("`dlion simulate` only" in p.message for p in caught.value.problems)
    made.plan(workers(), None)


def test_a_job_that_waits_for_all_contradicts_a_late_worker() -> None:
    made = environment(absences=[{"worker": 3, "comes": {"seconds": 5}}])

    def job(**spec: Any) -> Any:
        sites = [
            {"name": "a", "groups": [{"name": "g", "workers": 3}]},
            {"name": "b", "groups": [{"name": "g", "workers": 1}]},
        ]
        trainer = {"program": {"builtin": "digits"}, "dataset": {"name": "digits"}}
        return load_job({
            "apiVersion": "dlion.dev/v1alpha1", "kind": "DLionJob", "metadata": {"name": "test"},
            "spec": {"sites": sites, "trainer": {**trainer, "stop": {"maxSteps": 5}}, **spec},
        })  # fmt: skip

    with pytest.raises(SpecError, match="no startDeadlineSeconds"):
        made.check(job())
    made.check(job(startDeadlineSeconds=5))
    with pytest.raises(SpecError, match="minSites"):
        made.check(job(startDeadlineSeconds=5, minSites=2))
