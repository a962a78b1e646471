"""Test `dlion top` with metrics of real sidecars and a scripted API server.

- Figures of the sidecar's own metrics appear in their columns. Rates are differences of two
  readings; after a restart there is none. Links are summed by site.
- A worker that does not answer has a row with the reason, and hides no other. Without the right to
  pods/proxy the message names it. Invalid, overlong or hostile text is an error of that worker.
- Several contexts have a column. A watch prints each reading. `-o wide` has all columns on any
  terminal, and those of heat and groups by links.

The oracle of the format is the sidecar's own exporter.

Left out: a real pod proxy (tests/cluster/test_cli_pods.py).
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from io import StringIO
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from rich.console import Console

from dlion_api.errors import DataError
from dlion_api.exit_codes import ExitCode
from dlion_api.names import JobKey, Rank, SiteName, WorkerIdentity
from dlion_api.protocol.measurements import (
    Capacity,
    CapacitySource,
    CpuAllowance,
    Directive,
    Grouping,
)
from dlion_cli.__main__ import main
from dlion_cli.cluster.worker_metrics import MAX_METRICS_BYTES, WorkerMetrics, parse_metrics
from dlion_cli.commands.cluster.top import LoadView
from dlion_cli.views.load_tables import load_tables
from dlion_cli.views.worker_load import JobLoad, WorkerLoad, site_loads, worker_load
from dlion_core.demand.demand_predictor import DemandDecision, DemandState
from dlion_core.heat.heat_controller import HeatDecision, HeatState
from dlion_results.summary.link_use import KINDS
from dlion_worker.sidecar.link_connections import SiteConnections
from dlion_worker.sidecar.metrics import MetricsReading, SidecarMetrics
from dlion_worker.sidecar.node_facts import NodeFacts
from manifest_table import changed, smallest
from scripted_servers import Server, served

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from scripted_servers import Answer

MAY_NOT: Answer = (
    403,
    json.dumps({"message": 'pods "w-0:9440" is forbidden: User "jane" cannot get resource '
                           '"pods/proxy" in API group "" in the namespace "ml"'}),
)  # fmt: skip
DOCUMENT = changed(smallest(), {"spec.runId": "1", "metadata.name": "digits"})
JOB: Answer = (200, json.dumps(DOCUMENT | {"status": {"state": "Training", "runId": "1"}}))


def exported(
    *, steps: int = 0, cpu_s: float = 0.0, throttled_s: float = 0.0, waited_s: float = 0.0,
) -> str:  # fmt: skip
    """Return the metrics of a sidecar of plant-a with peers 1 and 2 at plant-a and 3 at plant-b."""
    reading = MetricsReading(
        capacity=Capacity(Rank(0), 813.25, 10.0, CapacitySource.RATE, 3),
        directive=Directive(
            version=3, local_batch_size=48, global_batch_size=192,
            budget_bytes={Rank(1): 1000, Rank(2): 500, Rank(3): 2_000_000},
            bandwidth_bytes_per_s={Rank(3): 1.25e6},
            grouping=Grouping(2, Rank(1), ((Rank(0), Rank(1)), (Rank(2), Rank(3))), (0, 3)),
        ),
        allowance=CpuAllowance(quota_cores=1.5, cpu_s=cpu_s, throttled_s=throttled_s),
        steps=steps, samples=0, iteration_s=0.125, trainer_connected=True, trainer_silent_s=0.5,
        refused=0, refusals={}, renewals=0,
        heat=HeatDecision(0.625, HeatState.LIMITED, 0.625, 61.7, 73.0),
        demand=DemandDecision(813.25, DemandState.PREDICTED, 0.25, 2.0, 4.0, "level"),
        step_seconds={"compute": steps / 40, "wait": waited_s, "select": steps / 80},
        exchange_thread_seconds={"send": 99.0 * steps},
        connections={SiteName("plant-b"): SiteConnections(steps * 20, steps, 0.18, 0.041)},
        link_bytes=((Rank(3), "gradient", 40_000 * steps), (Rank(3), "state", 500_000)),
        node=NodeFacts(
            cpu_pressure_ratio=0.25, memory_pressure_ratio=0.5, io_pressure_ratio=0.75,
            temperature_celsius=61.7, tcp_sent_segments=steps * 10,
            tcp_retransmitted_segments=steps,
        ),
    )  # fmt: skip
    registry = CollectorRegistry()
    registry.register(
        SidecarMetrics(
            job=JobKey("ml", "digits", "1"), site=SiteName("plant-a"),
            peer=lambda rank: WorkerIdentity(
                rank, SiteName("plant-b" if rank == 3 else "plant-a"), "small", int(rank)
            ),
            read=lambda: reading,
        )
    )  # fmt: skip
    return generate_latest(registry).decode()


def pod(index: int, phase: str = "Running", run: str = "1") -> dict[str, Any]:
    labels = {
        "dlion.dev/run-id": run, "dlion.dev/group": "small", "dlion.dev/site": "plant-a",
        "app.kubernetes.io/component": "worker",
        "batch.kubernetes.io/job-completion-index": f"{index}",
    }  # fmt: skip
    made = {"name": f"w-{index}", "creationTimestamp": "2026-01-31T12:00:00Z", "labels": labels}
    return {"metadata": made, "spec": {}, "status": {"phase": phase}}


def server(*pods: dict[str, Any], metrics: Any = None) -> Server:
    count = iter(range(10**6))

    def growing() -> Answer:
        place = next(count)
        return 200, exported(
            steps=place * 20, cpu_s=place * 2.0, throttled_s=place * 0.2, waited_s=place * 0.25
        )

    listed = (200, json.dumps({"items": pods or [pod(0)]}))
    return Server({"digits": JOB, "pods": listed, "metrics": metrics or growing})


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Return a file with a context for each given server."""
    with ExitStack() as stack:
        yield lambda **servers: stack.enter_context(served(tmp_path / "kubeconfig", servers))


@pytest.fixture
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlion_cli.commands.cluster.top.INTERVAL_S", 0.01)


def test_a_worker_has_the_figures_of_its_sidecar(
    kubeconfig: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    scripted = server()
    file = kubeconfig(a=scripted)
    assert main(["top", "digits", "-o", "json", "--kubeconfig", file]) == 0
    found = json.loads(capsys.readouterr().out)
    (worker,) = found["workers"]
    rates = {name: worker.pop(name) for name in ("stepsPerSecond", "cpuCores", "throttledFraction")}
    assert worker == {
        "pod": "w-0", "worker": "small-0", "rank": 0, "samplesPerSecond": 813.25,
        "batchSamples": 48.0, "shareFraction": 0.25, "iterationSeconds": 0.125, "quotaCores": 1.5,
        "waitFraction": 0.25, "exchangeFraction": 0.25,
        "cpuPressureFraction": 0.25, "memoryPressureFraction": 0.5, "ioPressureFraction": 0.75,
        "temperatureCelsius": 61.7, "silentSeconds": 0.5, "sentSegments": 220.0,
        "retransmittedFraction": pytest.approx(1 / 11), "problem": "",
        "otherWorkCores": 0.25, "expectedOtherWorkCores": 2.0, "followsForecast": True,
        "heatComputeShareFraction": 0.625, "heatTargetCelsius": 73.0, "heatIsBlind": False,
        "linkGroup": 1, "linkGroups": 2, "linkGroupingVersion": 2, "isGateway": True,
    }  # fmt: skip
    assert rates["stepsPerSecond"] / rates["cpuCores"] == pytest.approx(10)
    assert rates["throttledFraction"] == pytest.approx(1 / 11)
    assert 5 < rates["stepsPerSecond"] <= 10  # 20 steps in 2 s or slightly more
    near, far = found["sites"]
    assert near == {
        "site": "plant-a", "budgetBytesPerIteration": 1500.0, "bandwidthBytesPerSecond": None,
        "sentBytesPerSecond": None, "usedFraction": None, "sentBytes": {}, "sentSegments": None,
        "roundTripSeconds": None, "minRoundTripSeconds": None, "retransmittedFraction": None,
    }  # fmt: skip
    sent_rate, used = far.pop("sentBytesPerSecond"), far.pop("usedFraction")
    assert far == {
        "site": "plant-b", "budgetBytesPerIteration": 2e6, "bandwidthBytesPerSecond": 1.25e6,
        "sentBytes": dict.fromkeys(KINDS, 0.0) | {"gradient": 800_000.0, "state": 500_000.0},
        "roundTripSeconds": 0.18, "minRoundTripSeconds": 0.041, "sentSegments": 400.0,
        "retransmittedFraction": 0.05,
    }  # fmt: skip
    assert sent_rate == pytest.approx(40_000 * rates["stepsPerSecond"])
    assert used == pytest.approx(sent_rate / 1.25e6)
    assert "/api/v1/namespaces/ml/pods/w-0%3A9440/proxy/metrics" in scripted.asked


@pytest.mark.parametrize("waited_s", [3.0, 0.0], ids=["no step ended", "restarted"])
def test_time_shares_are_unknown_without_steps_in_between(waited_s: float) -> None:
    before = parse_metrics(exported(steps=20, waited_s=3.0), 1.0)
    load = worker_load(
        "w-0", "small-0", 0, before, parse_metrics(exported(steps=20, waited_s=waited_s), 3.0)
    )
    assert (load.wait_fraction, load.exchange_fraction) == (None, None)


@pytest.mark.usefixtures("without_pauses")
def test_the_tables_have_rows_for_workers_and_sites(
    kubeconfig: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = kubeconfig(a=server(pod(0), pod(1, "Pending"), pod(2, run="0"), pod(3, "Failed")))
    assert main(["top", "digits", "--kubeconfig", file]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0][:4] == ["WORKER", "RANK", "SAMPLES/S", "BATCH"]
    assert lines[1][:6] == ["small-0", "0", "813", "48", "25.0", "%"]
    assert lines[1][-5:] == ["62", "°C", "0.2", "→", "2.0"]
    assert lines[2][:3] == ["small-1", "2", "—"]
    assert lines[2][-6:] == ["Pending:", "the", "pod", "does", "not", "run"]
    assert " ".join(lines[4]) == "LINKS TO BUDGET/ITERATION MBIT/S SENT MBIT/S USED ROUND TRIP LOST"
    assert lines[5] == ["plant-a", "1.5", "kB", "—", "—", "—", "—", "—"]
    assert lines[6][:4] == ["plant-b", "2", "MB", "10"]
    assert lines[6][-6:] == ["41", "to", "180", "ms", "5.0", "%"]
    assert float(lines[6][4]) == pytest.approx(float(lines[6][5]) / 10, rel=0.01, abs=0.06)


@pytest.mark.usefixtures("without_pauses")
def test_a_wide_table_has_all_columns_on_a_narrow_terminal(
    kubeconfig: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    command = ["top", "digits", "--kubeconfig", kubeconfig(a=server())]
    assert main(command) == 0
    narrow = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, narrow)) <= 80
    assert "TEMP" not in narrow[0]
    assert main([*command, "-o", "wide"]) == 0
    lines = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()
    assert re.split(r" {2,}", lines[0].strip())[-5:] == ["TEMP", "OTHERS", "HEAT", "GROUP", "NOTE"]
    assert re.split(r" {2,}", lines[1].strip())[-4:] == [
        "62 °C", "0.2 → 2.0", "62.5 % for 73 °C", "1 of 2 by links, gateway",
    ]  # fmt: skip
    assert "ROUND TRIP" in lines[3]


def test_a_wide_watch_has_all_columns_on_a_narrow_terminal() -> None:
    """It counts the lines that it redraws, so none is longer than the terminal."""
    figures = {"heat_compute_share_ratio": 0.1, "heat_blind_count": 1.0}
    load = worker_load("w-0", "small-0", 0, None, WorkerMetrics(1.0, figures))
    console = Console(force_terminal=True, width=80, color_system=None, file=StringIO())
    for wide in (True, False):
        view = LoadView(console, "digits", wide=wide)
        view.update({"": JobLoad([load], [])}, "")
        lines = ["".join(each.text for each in line)
                 for line in console.render_lines(view.render(), pad=False)]  # fmt: skip
        assert max(map(len, lines)) <= 80
        shown = "".join(lines[1:])
        assert [word in shown for word in ("HEAT", "GROUP", "TEMP")] == [wide] * 3
        assert ("10.0 % without a sensor" in shown) == wide


@pytest.mark.parametrize(
    ("figures", "heat", "group"),
    [
        ({}, "—", "—"),
        ({"heat_compute_share_ratio": 0.1, "heat_blind_count": 1.0},
         "10.0 % without a sensor", "—"),
        ({"link_group_number": 2.0, "link_groups_count": 3.0, "link_grouping_version": 0.0},
         "—", "2 of 3 by site"),
    ],
    ids=["neither", "no temperature", "at the start"],
)  # fmt: skip
def test_a_wide_row_has_the_reasons(figures: dict[str, float], heat: str, group: str) -> None:
    load = worker_load("w-0", "w", 0, None, WorkerMetrics(1.0, figures))
    (table,) = load_tables({"": JobLoad([load], [])}, wide=True)
    cells = {str(each.header): str(next(iter(each.cells))) for each in table.columns}
    assert (cells["HEAT"], cells["GROUP"]) == (heat, group)


@pytest.mark.parametrize(
    ("state", "shown"), [(DemandState.PREDICTED, "1.5 → 2.0"), (DemandState.MEASURED, "1.5")]
)
def test_the_forecast_of_other_work_is_shown_while_it_applies(
    state: DemandState, shown: str
) -> None:
    follows = state is DemandState.PREDICTED
    load = WorkerLoad("w-0", "w", 0, None, 48.0, other_work_cores=1.5,
                      expected_other_work_cores=2.0, follows_forecast=follows)  # fmt: skip
    (table,) = load_tables({"": JobLoad([load], [])})
    (column,) = (each for each in table.columns if str(each.header) == "OTHERS")
    assert [str(cell) for cell in column.cells] == [shown]


@pytest.mark.usefixtures("without_pauses")
def test_several_contexts_have_a_column_and_one_may_fail(
    kubeconfig: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = kubeconfig(a=server(), b=server(metrics=MAY_NOT))
    command = ["top", "digits", "--contexts", "a,b", "--kubeconfig", file]
    assert main(command) == ExitCode.DENIED
    captured = capsys.readouterr()
    assert captured.out.splitlines()[1].split()[:2] == ["a", "small-0"]
    assert "context b: user 'jane' may not get pods/proxy" in captured.err
    assert main([*command, "-o", "json"]) == ExitCode.DENIED
    (only,) = json.loads(capsys.readouterr().out)
    assert only["context"] == "a"


def test_a_missing_right_is_named(
    kubeconfig: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = kubeconfig(a=server(metrics=MAY_NOT))
    assert main(["top", "digits", "--kubeconfig", file]) == ExitCode.DENIED
    captured = capsys.readouterr().err
    assert "kubectl create role NAME --verb=get --resource=pods/proxy -n ml" in captured


@pytest.mark.parametrize(
    ("pods", "metrics", "words"),
    [
        ([pod(0)], (503, json.dumps({"message": "error trying to reach service: refused"})),
         "error trying to reach service"),
        ([pod(0)], (404, "404 page not found"), "serves no /metrics"),
        ([pod(0)], (418, "{}"), "no worker's sidecar answers"),
        ([pod(0)], (200, "<html>"), "not in Prometheus' format"),
        ([pod(0)], (200, "#" * (MAX_METRICS_BYTES + 1)), "did not end within"),
        ([pod(0, "Pending")], None, "the pod does not run"),
        ([pod(0, run="2")], None, "run 1 of digits has no workers at this site; its state: Train"),
    ],
)  # fmt: skip
def test_a_missing_answer_is_an_error(
    kubeconfig: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    pods: list[dict[str, Any]],
    metrics: Any,
    words: str,
) -> None:
    file = kubeconfig(a=server(*pods, metrics=metrics))
    assert main(["top", "digits", "--kubeconfig", file]) == ExitCode.UNAVAILABLE
    assert words in capsys.readouterr().err


def test_a_watch_prints_each_reading_until_ctrl_c(kubeconfig: Callable[..., str]) -> None:
    command = [sys.executable, "-m", "dlion_cli", "top", "digits", "--watch", "-o", "json"]
    with subprocess.Popen(
        [*command, "--kubeconfig", kubeconfig(a=server())],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # A background process of a shell ignores SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as watching:  # fmt: skip
        assert watching.stdout is not None
        readings = [json.loads(watching.stdout.readline()) for _ in range(2)]
        watching.send_signal(signal.SIGINT)
        _, errors = watching.communicate()
    assert watching.returncode == ExitCode.INTERRUPTED
    assert all(each["workers"][0]["stepsPerSecond"] > 0 for each in readings)
    assert not errors


def test_a_watch_prints_why_a_reading_is_missing_and_no_line_for_it(
    kubeconfig: Callable[..., str],
) -> None:
    count = iter(range(10**6))

    def once_missing() -> Answer:
        place = next(count)
        return (503, "{}") if place == 1 else (200, exported(steps=place * 20))

    command = [sys.executable, "-m", "dlion_cli", "top", "digits", "--watch", "-o", "json"]
    with subprocess.Popen(
        [*command, "--kubeconfig", kubeconfig(a=server(metrics=once_missing))],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as watching:  # fmt: skip
        assert watching.stdout is not None
        first = json.loads(watching.stdout.readline())
        watching.send_signal(signal.SIGINT)
        _, errors = watching.communicate()
    assert first["workers"][0]["worker"] == "small-0"
    assert errors.startswith("dlion: retrying: no worker's sidecar answers: ")


def test_counters_that_were_reset_have_no_rate() -> None:
    before = WorkerMetrics(10.0, {"steps_total": 100})
    for now, rate in (
        (WorkerMetrics(12.0, {"steps_total": 110}), 5.0),
        (WorkerMetrics(12.0, {"steps_total": 3}), None),
        (WorkerMetrics(10.0, {"steps_total": 110}), None),
        (WorkerMetrics(12.0, {}), None),
    ):
        assert worker_load("p", "w", 0, before, now).steps_per_second == rate
    assert worker_load("p", "w", 0, None, before).steps_per_second is None


def test_the_used_fraction_counts_workers_with_both_figures() -> None:
    """One worker was read once, and one has no rate yet. All count for sent and possible bytes."""

    def reading(time_s: float, sent: float, rate: float | None) -> WorkerMetrics:
        links = {} if rate is None else {"link_bandwidth_bytes_per_second": rate}
        return WorkerMetrics(time_s, by_site={"b": links}, sent={"b": {"gradient": sent}})

    before = {"w-0": reading(0.0, 0.0, 100.0), "w-2": reading(0.0, 0.0, None)}
    now = {
        "w-0": reading(2.0, 100.0, 100.0),
        "w-1": reading(2.0, 900.0, 900.0),
        "w-2": reading(2.0, 600.0, None),
    }
    (load,) = site_loads(before, now)
    assert (load.sent_bytes_per_second, load.bandwidth_bytes_per_second) == (350.0, 1000.0)
    assert load.used_fraction == 0.5
    (alone,) = site_loads(before, {"w-2": now["w-2"]})
    assert (alone.sent_bytes_per_second, alone.used_fraction) == (300.0, None)


def test_a_worker_without_its_trainer_is_marked() -> None:
    alone = WorkerMetrics(0.0, {"trainer_connected_count": 0.0, "global_batch_samples": 0.0,
                                "local_batch_samples": 5.0})  # fmt: skip
    load = worker_load("p", "w", None, None, alone)
    assert (load.problem, load.share_fraction) == ("its trainer is away", None)


def test_a_silent_trainer_is_marked_and_its_quota_counts_from_the_start() -> None:
    values = {"trainer_connected_count": 1.0, "trainer_silent_seconds": 34.4,
              "trainer_cpu_seconds_total": 3.0, "trainer_throttled_seconds_total": 9.0}  # fmt: skip
    load = worker_load("p", "w", 0, WorkerMetrics(10.0, values), WorkerMetrics(12.0, values))
    assert load.problem == "its trainer is silent for 34 s"
    assert load.throttled_fraction == 0.75
    more = values | {"trainer_cpu_seconds_total": 3.5, "trainer_silent_seconds": 1.0}
    load = worker_load("p", "w", 0, WorkerMetrics(10.0, values), WorkerMetrics(12.0, more))
    assert (load.problem, load.throttled_fraction) == ("", 0.0)


def test_a_quota_withholds_at_most_the_demand_of_all_threads() -> None:
    """A quota of eight cores holds sixteen threads for 1 %, then for half of the time."""
    readings = [
        WorkerMetrics(2.0 * place, {"trainer_cpu_seconds_total": ran_s,
                                    "trainer_throttled_seconds_total": held_s})
        for place, (ran_s, held_s) in enumerate([(0.0, 0.0), (16.0, 0.5), (24.0, 8.5)])
    ]  # fmt: skip
    for before, now, withheld in zip(readings, readings[1:], (0.5 / 16.5, 0.5), strict=False):
        found = worker_load("p", "w", 0, before, now).throttled_fraction
        assert found == pytest.approx(withheld)


def test_loss_and_round_trips_are_those_of_all_workers_links() -> None:
    def reading(time_s: float, sent: float, again: float, round_trip_s: float) -> WorkerMetrics:
        values = {
            "link_sent_segments_total": sent, "link_retransmitted_segments_total": again,
            "link_round_trip_seconds": round_trip_s,
            "link_min_round_trip_seconds": 0.5 * round_trip_s,
        }  # fmt: skip
        return WorkerMetrics(time_s, by_site={"b": values})

    before = {"w-0": reading(0, 100, 10, 9.0), "w-1": reading(0, 500, 0, 9.0)}
    now = {
        "w-0": reading(2, 200, 40, 0.1),
        "w-1": reading(2, 700, 0, 0.4),
        "w-2": reading(2, 9000, 9000, 0.2),  # was not read before
    }
    (load,) = site_loads(before, now)
    assert (load.sent_segments, load.retransmitted_fraction) == (300.0, 0.1)
    assert (load.min_round_trip_seconds, load.round_trip_seconds) == (0.05, 0.4)
    restarted = {**now, "w-1": reading(2, 10, 0, 0.4)}
    (load,) = site_loads(before, restarted)
    assert (load.sent_segments, load.retransmitted_fraction) == (None, None)
    (load,) = site_loads({}, {"w-2": WorkerMetrics(2, by_site={"b": {"link_budget_bytes": 1.0}})})
    assert (load.min_round_trip_seconds, load.round_trip_seconds) == (None, None)


def test_the_fraction_of_resent_segments_is_at_most_one() -> None:
    names = "tcp_sent_segments_total", "tcp_retransmitted_segments_total"
    before, now = (
        WorkerMetrics(time_s, dict(zip(names, values, strict=True)))
        for time_s, values in ((0.0, (100.0, 7.0)), (2.0, (100.0, 57.0)))
    )
    load = worker_load("p", "w", 0, before, now)
    assert (load.retransmitted_fraction, load.sent_segments) == (1.0, 50.0)


@pytest.mark.parametrize(
    "text",
    ["dlion_steps_total", 'dlion_steps_total{a="', "dlion_steps_total x", "{}{}{} 1 2 3 4",
     'dlion_x{peer_site="a" 1', "\x00\x01", "# TYPE dlion_x bogus\ndlion_x 1 1 1 1"],
)  # fmt: skip
def test_invalid_prometheus_text_is_refused(text: str) -> None:
    with pytest.raises(DataError, match="not in Prometheus' format"):
        parse_metrics(text, 0.0)


def test_invalid_numbers_are_omitted() -> None:
    last = (
        'dlion_link_bandwidth_bytes_per_second{peer_site="s255"} 2\n'
        'dlion_link_sent_bytes_total{peer_site="s255",peer="p",kind="state"} 3\n'
    )
    many = "".join(
        f'dlion_link_budget_bytes{{peer_site="s{n}"}} 1\n'
        f'dlion_link_sent_bytes_total{{peer_site="s{n}",peer="p",kind="gradient"}} 1\n'
        f'dlion_link_sent_bytes_total{{peer_site="s0",peer="q",kind="x{n}"}} 1\n'
        for n in range(1000)
    )
    text = f"dlion_a NaN\ndlion_b +Inf\ndlion_d 1e300\ndlion_c 3\nother 4\n{many}{last}"
    found = parse_metrics(text, 0.0)
    assert found.values == {"c": 3.0}
    assert len(found.by_site) == len(found.sent) == 256
    assert found.sent["s0"] == {"gradient": 1.0}
    assert found.sent["s255"] == {"gradient": 1.0, "state": 3.0}
    rate = {"link_bandwidth_bytes_per_second": 2.0}
    assert found.by_site["s255"] == {"link_budget_bytes": 1.0, **rate}
