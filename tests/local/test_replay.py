"""Test `dlion replay` of recorded runs, with the same and with other settings.

The replay of a simulated run is close to it. The replay of a real run (processes, sockets) has the
same order of speed and bytes. A changed setting has an effect. What cannot be replayed is refused
with a message. docs/simulating.md states how close a replay is on a quiet machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.simulations import one_process, run_command

from attempts import first_that_holds
from dlion_api.exit_codes import ExitCode
from dlion_api.spec import load_job
from local_run import LocalRun, blobs, job_document

FAR_APART = {
    "name": "far-apart",
    "workers": [{"count": 3, "cores": 24}],
    "sites": [{"name": name, "workers": 1} for name in "abc"],
    "betweenSites": {"mbitPerS": 50, "latencyMs": 39},
}
"""`intercontinental` with half of its workers."""
DIGITS = Path(__file__).resolve().parents[2] / "examples" / "digits.yaml"


@pytest.fixture(scope="module", autouse=True)
def _process_of_commands() -> Iterator[None]:
    """Load TensorFlow once for all commands of this file, whatever ran in the test's process."""
    with one_process():
        yield


def replay(folder: Path, out: Path, *flags: str) -> Any:
    """Return the summary of a replay."""
    done = run_command(
        "replay", str(folder), "--out", str(out), "--no-report", "-o", "json", *flags
    )
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A simulated run of the quick start."""
    out = tmp_path_factory.mktemp("simulated") / "out"
    done = run_command(
        "simulate", str(DIGITS), "-e", "quickstart", "--out", str(out), "--no-report",
        "--set", "trainer.stop={maxSteps: 30}", "--set", "trainer.evaluation.everySamples=2000",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def replayed(simulated: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """The summary and the result folder of its replay without other settings."""
    out = tmp_path_factory.mktemp("replayed") / "out"
    return replay(simulated, out), out


def as_in_a_cluster(run: Path, folder: Path, **resources: Any) -> Path:
    """Return that run's folder with workers numbered by group; one group has grown by a worker."""
    document = yaml.safe_load((run / "job.yaml").read_text())
    for site in document["spec"]["sites"]:
        for group in site["groups"]:
            group["resources"] = resources
    job = load_job(document).with_group_ranks()
    counted = load_job(document).workers()
    ranks = {w.rank: job.worker_at(w.site, w.group, w.index).rank for w in counted}
    assert ranks == {0: 0, 1: 2, 2: 4, 3: 1}
    folder.mkdir()
    (folder / "job.yaml").write_text(yaml.safe_dump(job.to_document()))
    with (folder / "events.jsonl").open("w") as lines:
        for line in (run / "events.jsonl").read_text().splitlines():
            record = json.loads(line)
            for field in ("rank", "peer"):
                if field in record:
                    record[field] = ranks[record[field]]
            for field in ("budget_bytes", "capacities", "bandwidth_bytes_per_s"):
                if isinstance(record.get(field), dict):
                    record[field] = {ranks[int(r)]: value for r, value in record[field].items()}
            lines.write(json.dumps(record) + "\n")
            if record["kind"] == "step" and record["rank"] == 1:
                lines.write(json.dumps({**record, "rank": 6}) + "\n")
    return folder


def test_a_clusters_run_is_replayed_by_counted_ranks(
    simulated: Path, replayed: tuple[Any, Path], tmp_path: Path
) -> None:
    """The result equals that of the same run from one machine."""
    folder = as_in_a_cluster(simulated, tmp_path / "cluster")
    (folder / "environment.yaml").write_bytes((simulated / "environment.yaml").read_bytes())
    once, again = replayed[0], replay(folder, tmp_path / "again")
    assert again["replay"]["figures"] == once["replay"]["figures"]
    assert len(again["replay"]["figures"]) > 10


def test_a_cpu_limit_of_containers_is_replayed_as_a_quota(simulated: Path, tmp_path: Path) -> None:
    few = ("--set", "trainer.stop={maxSteps: 2}")
    free = as_in_a_cluster(simulated, tmp_path / "free")
    assert not replay(free, tmp_path / "a", *few)["replay"]["exchangeCoreSPerByte"]
    held = as_in_a_cluster(simulated, tmp_path / "held", limits={"cpu": "2"})
    assert set(replay(held, tmp_path / "b", *few)["replay"]["exchangeCoreSPerByte"]) == set("0123")


def test_the_records_of_one_site_of_several_are_refused(simulated: Path, tmp_path: Path) -> None:
    folder = as_in_a_cluster(simulated, tmp_path / "keeper")
    path = folder / "events.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if json.loads(line).get("rank") != 1))
    done = run_command("replay", str(folder), "--out", str(tmp_path / "out"))
    words = " ".join(done.stderr.split())
    assert done.exit_code == ExitCode.DATA
    assert "no step of worker 3 is recorded" in words
    assert "each site's keeper records that site's workers alone: replay jobs of one site" in words
    assert not (tmp_path / "out").exists()


def figures(summary: Any) -> dict[str, Any]:
    return {figure["name"]: figure for figure in summary["replay"]["figures"]}


def test_the_replay_of_a_simulated_run_is_close_to_it(replayed: tuple[Any, Path]) -> None:
    summary, out = replayed
    found = figures(summary)
    assert abs(found["iterations/s"]["difference"]) < 0.1
    assert {f"batch of worker {rank}" for rank in range(4)} <= found.keys()
    for rank in range(4):
        assert abs(found[f"batch of worker {rank}"]["difference"]) < 0.1
    assert summary["replay"]["unknownLinks"] == []
    kept = json.loads((out / "replay.json").read_text())
    assert kept["figures"] == summary["replay"]["figures"]
    assert (out / "simulation.json").is_file()


def test_latency_of_links_is_replayed(tmp_path: Path) -> None:
    """Between continents a step of few samples takes about as long as its gradients travel. A
    replay has the latency, and so has a replay of the replay.
    """
    job, environment = tmp_path / "job.yaml", tmp_path / "far-apart.yaml"
    environment.write_text(yaml.safe_dump(FAR_APART))
    sites = {"a": 1, "b": 1, "c": 1}
    job.write_text(yaml.safe_dump(job_document(sites, trainer={"stop": {"maxSteps": 20}})))
    run, again = tmp_path / "run", tmp_path / "again"
    flags = ("-e", str(environment), "--no-report", "--out", str(run))
    done = run_command("simulate", str(job), *flags)
    assert done.exit_code == 0, done.stderr
    found = figures(replay(run, again))["iterations/s"]
    assert 4 < found["recorded"] < 1 / 0.039
    assert abs(found["difference"]) < 0.1, found
    twice = figures(replay(again, tmp_path / "twice"))["iterations/s"]
    assert abs(twice["difference"]) < 0.1, twice


def test_a_changed_setting_has_an_effect(simulated: Path, tmp_path: Path) -> None:
    few = ("--set", "trainer.stop={maxSteps: 5}")
    summary = replay(simulated, tmp_path / "out", "--set", "exchange.policy=none", *few)
    found = figures(summary)
    assert found["sent per iteration, 0 to 1"]["recorded"] > 0
    assert found["sent per iteration, 0 to 1"]["replayed"] < 1
    assert summary["replay"]["settings"] == ["exchange.policy=none", few[1]]


@pytest.mark.timeout(300)
def test_a_real_run_is_replayed_at_its_own_speed(tmp_path: Path) -> None:
    """Steps take a tenth of a second: the records lack what links and scheduling add to shorter
    ones.
    """
    program = blobs(tmp_path, nap_s=0.1)
    document = job_document(2, trainer={"program": program, "stop": {"maxSteps": 30}})

    def recorded_and_replayed() -> tuple[Path, dict[str, Any]]:
        folder = tmp_path / str(len([*tmp_path.iterdir()]))
        folder.mkdir()
        with LocalRun(folder, document) as run:
            assert run.finish() == 0
        return run.folder, figures(replay(run.folder, folder / "replayed"))

    # A second without a core is in the record, and is not a cost of a step.
    folder, found = first_that_holds(
        recorded_and_replayed,
        lambda they: abs(they[1]["iterations/s"]["difference"]) < 0.3,
        attempts=3,
    )
    lines = (folder / "events.jsonl").read_text().splitlines()
    own = [one for one in map(json.loads, lines) if one["rank"] == 0]
    (stopped,) = [one for one in own if one.get("reason") == "TrainingStopped"]
    links = [one for one in own if one["kind"] == "link"]
    assert links[-1]["time_s"] > stopped["time_s"], "bytes sent in the last second are recorded"
    sent = found["sent per iteration, 0 to 1"]
    assert abs(sent["difference"]) < 0.05, sent
    free = figures(replay(folder, tmp_path / "free", "--exchange-cost", "0"))
    # Not less: if half of the steps only compute, the median is 0.
    assert free["iterations/s"]["replayed"] >= found["iterations/s"]["replayed"]


@pytest.mark.parametrize(("clock_rate", "is_warned"), [(0.1, True), (1.0, False)])
def test_a_replay_of_a_short_run_warns(
    simulated: Path, tmp_path: Path, clock_rate: float, is_warned: bool
) -> None:
    """The same records on a slower clock are those of a short run."""
    run = tmp_path / "run"
    run.mkdir()
    for name in ("job.yaml", "environment.yaml"):
        (run / name).write_bytes((simulated / name).read_bytes())
    with (run / "events.jsonl").open("w") as lines:
        for record in map(json.loads, (simulated / "events.jsonl").read_text().splitlines()):
            lines.write(json.dumps({**record, "time_s": clock_rate * record["time_s"]}) + "\n")
    few = ("--set", "trainer.stop={maxSteps: 2}", "--no-report")
    done = run_command("replay", str(run), "--out", str(tmp_path / "out"), *few)
    assert done.exit_code == 0, done.stderr
    assert ("the replay may be tens of percent off" in done.stderr) == is_warned


def test_what_cannot_be_replayed_is_refused(simulated: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def refused(folder: Path, *flags: str) -> tuple[int, str]:
        done = run_command("replay", str(folder), "--out", str(out), *flags)
        assert not out.exists()
        return done.exit_code, " ".join(done.stderr.split())

    code, words = refused(tmp_path)
    assert code == ExitCode.DATA
    assert "is not a readable job" in words
    fewer = "sites=[{name: plant-a, groups: [{name: small, workers: 2}]}]"
    settings = ("--set", fewer, "--set", "trainer.dataset={name: digits}")
    code, words = refused(simulated, *settings)
    assert code == ExitCode.USAGE
    assert "2 workers of the 4" in words
    code, words = refused(simulated, "--set", "exchange.policy=nonsense")
    assert code == ExitCode.SPEC
    assert "there is no exchange policy of that name" in words

    code, words = refused(simulated, "--exchange-cost", "nan")
    assert (code, "not a finite number" in words) == (ExitCode.USAGE, True)

    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "job.yaml").write_bytes((simulated / "job.yaml").read_bytes())
    code, words = refused(copy)
    assert (code, "cannot be read" in words) == (ExitCode.DATA, True)
    (copy / "environment.yaml").write_text("figures: !!bool x")
    code, words = refused(copy)
    assert (code, "environment.yaml: cannot be read" in words) == (ExitCode.DATA, True)
    (copy / "environment.yaml").unlink()
    (copy / "events.jsonl").write_bytes(b"")
    code, words = refused(copy)
    assert (code, "no step of worker 0, 1, 2, 3" in words) == (ExitCode.DATA, True)
    (copy / "summary.json").write_text('{"schema_version": 99}')
    code, words = refused(copy)
    assert (code, "is of version 99" in words) == (ExitCode.DATA, True)
    (copy / "summary.json").write_text("[")
    code, words = refused(copy)
    assert (code, "cannot be read" in words) == (ExitCode.DATA, True)
