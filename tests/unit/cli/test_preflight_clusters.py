"""Test `dlion preflight --contexts` with scripted clusters.

- A correct site passes, whether or not this machine reaches it. Each fault is reported at its site
  with a remedy: a missing operator, another release, an old bundle, another list or port, broken
  streams.
- A check without the right to read is unknown and fails nothing.
- The `Date` of answers bounds the clocks, which are compared. A job is checked against each site's
  cluster.

Left out: the needs of a job in detail (test_site_capacity.py), the chart's own objects
(tests/chart), a real API server (tests/cluster/test_cli.py).
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from dlion_api.document import schema
from dlion_api.exit_codes import ExitCode
from dlion_api.names import SiteName
from dlion_api.spec import Job
from dlion_cli.__main__ import main
from dlion_cli.preflight_checks.checks import CheckOutcome
from dlion_cli.preflight_checks.site_checks import clock_skew_checks
from dlion_cli.preflight_checks.site_cluster import ClockBounds
from dlion_operator.pki.authority import CertificateAuthority
from manifest_table import changed, smallest
from scripted_servers import Server, served

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from scripted_servers import Answer

NAMES = ("plant-a", "plant-b")
MONTH = timedelta(days=30)
AUTHORITIES = {
    name: CertificateAuthority(SiteName(name), now=datetime.now(UTC) - MONTH) for name in NAMES
}
ADDRESSES = {"plant-a": "127.0.0.1:1", "plant-b": "[::1]:2"}
OPERATOR = "dlion-operator"
KINDS = [{"group": "dlion.dev", "kind": "DLionJob", "version": "v1alpha1"}]
SMALL_NODE = {
    "metadata": {"name": "n1", "labels": {"size": "small"}},
    "status": {
        "allocatable": {"cpu": "1900m", "memory": "3900Mi", "pods": "110"},
        "conditions": [{"type": "Ready", "status": "True"}],
    },
}


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Read clocks without pauses, except in the test of their narrowest bounds."""
    if request.node.originalname != "test_clocks_are_compared":
        monkeypatch.setattr(
            "dlion_cli.preflight_checks.site_cluster._CLOCK_READING_INTERVAL_S", 0.0
        )


def pem(site: str) -> str:
    return AUTHORITIES[site].bundle_pem.decode()


def ok(document: object) -> Answer:
    return 200, json.dumps(document)


def definition(*, without: str = "", more: str = "") -> Answer:
    """Return the definition as an API server describes it."""
    spec = schema(Job)["properties"]["spec"]
    fields = {name: each for name, each in spec["properties"].items() if name != without}
    fields |= {more: {"type": "string"}} if more else {}
    served_as = {
        "properties": {"spec": {**spec, "properties": fields}},
        "x-kubernetes-group-version-kind": KINDS,
    }
    return ok({"components": {"schemas": {"other": {}, "dev.dlion.v1alpha1": served_as}}})


def deployment(*, ready: int = 1, release: str = "") -> Answer:
    labels = {"app.kubernetes.io/version": release or version("dlion")}
    unready = {"type": "Available", "status": "False", "message": "no pod is available"}
    status = {"readyReplicas": ready, "conditions": [] if ready else [unready]}
    return ok({"items": [{"metadata": {"name": OPERATOR, "labels": labels}, "status": status}]})


def settings(site: str, *others: str, gateway: object = None, **addresses: str) -> Answer:
    entries = [
        {"name": each, "address": (ADDRESSES | addresses)[each], "bundleFile": f"{each}.pem"}
        for each in others
    ]
    document = {"site": site, "sites": entries, "images": {"worker": "w:1", "sidecar": "s:1"},
                "coordinator": {"address": "dlion-operator.dlion-system.svc:7443"},
                "sidecar": {"resources": {"requests": {"cpu": "50m"}}}}  # fmt: skip
    document |= {"gateway": gateway} if gateway else {}
    return ok({"data": {"config.yaml": yaml.safe_dump(document)}})


def metrics(site: str, *, connected: int = 1, age_s: float = 2.5, bundle: int = 1) -> Answer:
    label = f'{{peer_site="{site}"}}'
    return 200, (
        f"# HELP dlion_federation_connected x\ndlion_federation_connected{label} {connected}.0\n"
        f"dlion_federation_heartbeat_age_seconds{label} {age_s}\nother_total 1.0\n"
        f"dlion_federation_bundle_valid{label} {bundle}.0\n"
        f"dlion_federation_round_trip_seconds{label} 0.0234\n"
    )


def service(kind: str = "NodePort", ingress: object = None, **port: int) -> Answer:
    ports = [{"name": "federation", "port": 8446, **port}]
    status = {"loadBalancer": {"ingress": ingress} if ingress else {}}
    return ok({"spec": {"type": kind, "ports": ports}, "status": status})


def server_of(site: str, *, ahead_s: float = 0.0, **changes: Answer) -> Server:
    """Return a server with the answers of a correct site and these changes; `-` is `_` in names."""
    (other,) = set(NAMES) - {site}
    answers: dict[str, Answer] = {
        "version": ok({"gitVersion": "v1.34.0"}),
        "v1alpha1": definition(),
        "deployments": deployment(),
        OPERATOR: settings(site, other),
        f"{OPERATOR}-trust": ok({"data": {f"{other}.pem": pem(other)}}),
        f"{OPERATOR}-federation": service(nodePort=int(ADDRESSES[site].rpartition(":")[2])),
        "metrics": metrics(other),
        "nodes": ok({"items": [SMALL_NODE]}),
    }
    named = {name.replace("_", "-"): answer for name, answer in changes.items()}
    return Server(answers | named, ahead_s=ahead_s)


Found = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture
def looked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., tuple[int, Found]]]:
    """Return exit code and checks, by site and name, of a preflight of these servers."""
    listed = [{"name": n, "address": ADDRESSES[n], "bundle": pem(n)} for n in NAMES]
    file = tmp_path / "sites.yaml"
    file.write_text(yaml.safe_dump({"sites": listed}))
    with ExitStack() as stack:

        def look(*options: str, **servers: Server | None) -> tuple[int, Found]:
            config = stack.enter_context(served(tmp_path / "kubeconfig", servers))
            command = ["preflight", str(file), "--kubeconfig", config, "-o", "json", *options]
            if "--contexts" not in options:
                command += ["--contexts", ",".join(servers)]
            code = main(command)
            checks = json.loads(capsys.readouterr().out)["checks"]
            return code, {(each["site"], each["check"]): each for each in checks}

        yield look


def rate(mbit: float) -> Answer:
    """Return an operator's report about a link."""
    return ok({"site": "", "bytes": 1, "seconds": 1.0, "bytesPerSecond": mbit * 125_000})


def test_links_are_measured_on_request(
    looked: Callable[..., tuple[int, Found]],
) -> None:
    there = {
        "a": server_of("plant-a", plant_b=rate(48.94)),
        "b": server_of("plant-b", plant_a=rate(19.2)),
    }
    code, found = looked(**there)
    assert not [name for _, name in found if name == "bandwidth"]
    assert not [path for each in there.values() for path in each.asked if "bandwidth" in path]
    code, found = looked("--bandwidth", **there)
    assert code == 0
    assert found["plant-a", "bandwidth"] == {
        "site": "plant-a", "check": "bandwidth", "outcome": "ok", "advice": "",
        "observed": "48.9 Mbit/s to plant-b", "figures": {"plant-b_mbit_per_s": 48.94},
    }  # fmt: skip
    code, found = looked("--min-bandwidth", "20", **there)
    assert code == ExitCode.UNAVAILABLE
    assert found["plant-a", "bandwidth"]["outcome"] == "ok"
    assert found["plant-b", "bandwidth"]["outcome"] == "fail"
    assert "Less than 20 Mbit/s to plant-a" in found["plant-b", "bandwidth"]["advice"]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((404, "404: Not Found"), "an earlier release without them"),
        ((503, '{"message": "another site measures just now"}'), "measures just now"),
        (ok({"bytesPerSecond": "many"}), "is invalid"),
        (ok({"bytesPerSecond": -1}), "-1"),
        (ok([]), "is invalid"),
        ((200, "<html>"), "is invalid"),
    ],
)
def test_a_link_that_is_not_measured_is_unknown(
    looked: Callable[..., tuple[int, Found]], answer: Answer, words: str
) -> None:
    code, found = looked(
        "--min-bandwidth", "20", a=server_of("plant-a", plant_b=answer), b=server_of("plant-b")
    )
    assert code == 0
    check = found["plant-a", "bandwidth"]
    assert check["outcome"] == "unknown"
    assert words in check["observed"]


def test_only_operators_measure_links(
    looked: Callable[..., tuple[int, Found]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    looked(a=server_of("plant-a"))
    assert main(["preflight", str(tmp_path / "sites.yaml"), "--bandwidth"]) == ExitCode.USAGE
    assert "--contexts" in capsys.readouterr().err


def test_correct_sites_pass(looked: Callable[..., tuple[int, Found]]) -> None:
    """Nothing listens at their addresses here, and the result does not depend on it."""
    code, found = looked(a=server_of("plant-a"), b=server_of("plant-b"))
    assert code == 0
    for site in NAMES:
        outcomes = {name: each["outcome"] for (of, name), each in found.items() if of == site}
        assert outcomes == {
            "bundle": "ok", "dns": "ok", "port": "warn", "api": "ok", "clock": "ok",
            "definition": "ok", "operator": "ok", "service": "ok", "list": "ok", "trust": "ok",
            "streams": "ok",
        }  # fmt: skip
        assert "`streams`" in found[site, "port"]["advice"]
    assert found["plant-a", "streams"]["observed"].endswith("to plant-b (23 ms round trip)")
    assert found["plant-a", "streams"]["figures"] == {"plant-b_round_trip_s": 0.0234}
    assert found["all", "clocks"]["outcome"] == "ok"


LOAD_BALANCER = [{"ip": "192.0.2.7"}]
OLD = CertificateAuthority(SiteName("plant-b"), now=datetime.now(UTC) - 3 * MONTH)
RENEWED = AUTHORITIES["plant-b"].renewed()
MAY_NOT = (403, json.dumps({"message": 'User "jane" cannot get resource "x" in API group ""'}))
GONE = (404, json.dumps({"message": 'x "y" not found', "details": {"kind": "x", "name": "y"}}))


def trust(**bundles: str) -> Answer:
    return ok({"data": {f"{name.replace('_', '-')}.pem": text for name, text in bundles.items()}})


@pytest.mark.parametrize(
    ("part", "answer", "check", "outcome", "words"),
    [
        ("v1alpha1", definition(without="runId"), "definition", "fail", "without spec.runId"),
        ("v1alpha1", definition(more="next"), "definition", "warn", "with spec.next"),
        ("v1alpha1", (404, "404 page not found"), "definition", "fail", "does not know DLionJobs"),
        ("v1alpha1", ok({}), "definition", "fail", "does not know DLionJobs"),
        ("v1alpha1", ok({"components": 7}), "definition", "fail", "does not know DLionJobs"),
        ("deployments", ok({"items": []}), "operator", "fail", "there is no operator in"),
        ("deployments", ok({"items": [{}, {}]}), "operator", "fail", "there are 2 operators"),
        ("deployments", deployment(ready=0), "operator", "fail", "no pod is available"),
        ("deployments", deployment(release="0.0.9"), "operator", "warn", "of release 0.0.9"),
        ("deployments", MAY_NOT, "operator", "unknown", "may not get"),
        (OPERATOR, settings("plant-x"), "listed", "fail", "is 'plant-x', which is not"),
        (OPERATOR, settings("plant-a"), "list", "fail", "no plant-b"),
        (
            OPERATOR, settings("plant-a", "plant-b", **{"plant-b": "old:1"}), "list", "fail",
            "plant-b at old:1 instead of [::1]:2",
        ),
        (OPERATOR, ok({"data": {"config.yaml": "["}}), "operator", "unknown", "is not YAML"),
        ("trust", trust(), "trust", "fail", "no bundle of plant-b"),
        ("trust", GONE, "trust", "fail", "has no bundles"),
        ("trust", MAY_NOT, "trust", "unknown", "may not get"),
        (
            "trust", trust(plant_b=OLD.bundle_pem.decode()), "trust", "fail",
            "another authority's bundle of plant-b",
        ),
        (
            "trust", trust(plant_b=RENEWED.bundle_pem.decode()), "trust", "warn",
            "another bundle of plant-b, for the same key",
        ),
        ("trust", trust(plant_b="x"), "trust", "fail", "the bundle of plant-b is not PEM"),
        (
            "trust", trust(plant_b=pem("plant-b"), plant_z="x"), "trust", "warn",
            "also trusts plant-z",
        ),
        ("federation", GONE, "service", "fail", "there is no federation Service"),
        ("federation", MAY_NOT, "service", "unknown", "may not get"),
        ("federation", service(nodePort=7), "service", "warn", "NodePort, port 7; the list has"),
        ("federation", service("ClusterIP", port=1), "service", "ok", "ClusterIP, port 1"),
        ("federation", service("LoadBalancer"), "service", "fail", "no address yet"),
        (
            "federation", service("LoadBalancer", LOAD_BALANCER, port=1), "service", "warn",
            "LoadBalancer at 192.0.2.7, port 1",
        ),
        (
            "federation", service("LoadBalancer", [{"ip": "127.0.0.1"}], port=1), "service", "ok",
            "LoadBalancer at 127.0.0.1, port 1",
        ),
        (
            "metrics", metrics("plant-b", connected=0), "streams", "fail",
            "connections from plant-a to [::1]:2 fail, while those of plant-b arrive: a one-way",
        ),
        (
            "metrics", metrics("plant-b", connected=0, age_s=61), "streams", "fail",
            "plant-b is not connected to it, the last heartbeat of plant-b was 61 s ago",
        ),
        ("metrics", metrics("plant-b", age_s=61), "streams", "fail", "plant-b was 61 s ago"),
        ("metrics", metrics("plant-b", bundle=0), "streams", "fail", "of plant-b is invalid"),
        ("metrics", metrics("plant-c"), "streams", "fail", "no heartbeat of plant-b"),
        ("metrics", (200, 'dlion_federation_connected{peer_site="plant-b"} 1e\n'), "streams",
         "fail", "no heartbeat of plant-b"),
        ("metrics", (200, "x" * 5_000_000), "streams", "unknown", "did not end within"),
        ("metrics", (503, "{}"), "streams", "unknown", "cannot be read through the API server"),
        ("metrics", MAY_NOT, "streams", "unknown", "may not get"),
    ],
)  # fmt: skip
def test_each_fault_of_a_site_is_reported(
    looked: Callable[..., tuple[int, Found]],
    part: str,
    answer: Answer,
    check: str,
    outcome: str,
    words: str,
) -> None:
    part = f"{OPERATOR}-{part}" if part in ("trust", "federation") else part
    code, found = looked(a=server_of("plant-a", **{part: answer}), b=server_of("plant-b"))
    (result,) = (each for (of, name), each in found.items() if name == check and of != "plant-b")
    assert (result["outcome"], words in result["observed"]) == (outcome, True), result
    assert code == (ExitCode.UNAVAILABLE if outcome == "fail" else 0)
    if outcome in ("warn", "fail"):
        assert result["advice"] or "install" in result["observed"].lower()


@pytest.mark.parametrize(
    ("address", "outcome", "words"),
    [
        (ADDRESSES["plant-a"], "ok", "ClusterIP, port 8446, behind its gateway 127.0.0.1:1"),
        ("edge.example:443", "warn", "the list has 127.0.0.1:1; its gateway is edge.example:443"),
    ],
)
def test_the_port_of_a_site_behind_a_gateway_may_differ(
    looked: Callable[..., tuple[int, Found]], address: str, outcome: str, words: str
) -> None:
    """Its Service has another port than the list, which names the gateway."""
    with_gateway = settings("plant-a", "plant-b", gateway={"address": address})
    answers = {OPERATOR: with_gateway, f"{OPERATOR}-federation": service("ClusterIP")}
    code, found = looked(a=server_of("plant-a", **answers), b=server_of("plant-b"))
    assert code == 0
    result = found["plant-a", "service"]
    assert (result["outcome"], words in result["observed"]) == (outcome, True), result
    assert ("gateway.address" in result["advice"]) == (outcome == "warn")


def test_clusters_that_do_not_answer_are_reported(looked: Callable[..., tuple[int, Found]]) -> None:
    contexts = ("--contexts", "a,nowhere,b,c")
    code, found = looked(*contexts, a=None, b=server_of("plant-b"), c=server_of("plant-b"))
    assert code == ExitCode.UNAVAILABLE
    assert "no API server answers" in found["context a", "api"]["observed"]
    assert "there is no context 'nowhere'" in found["context nowhere", "api"]["observed"]
    assert "contexts b and c both lead" in found["plant-b", "api"]["observed"]


# ---- clocks --------------------------------------------------------------------------------------


def test_clocks_are_compared(looked: Callable[..., tuple[int, Found]]) -> None:
    code, found = looked(
        a=server_of("plant-a", ahead_s=400.0), b=server_of("plant-b", ahead_s=-300.0)
    )
    assert code == ExitCode.UNAVAILABLE
    for site, ahead_s in (("plant-a", 400.0), ("plant-b", -300.0)):
        figures = found[site, "clock"]["figures"]
        min_s, max_s = figures["clock_ahead_at_least_s"], figures["clock_ahead_at_most_s"]
        assert min_s <= ahead_s <= max_s
        assert max_s - min_s <= 1.5
        assert found[site, "clock"]["outcome"] == "warn"
    apart = found["all", "clocks"]
    assert apart["outcome"] == "fail"
    assert "plant-a ahead of plant-b" in apart["observed"]
    assert apart["figures"]["apart_at_least_s"] <= 700 <= apart["figures"]["apart_at_most_s"]


@pytest.mark.parametrize(
    ("a", "b", "outcome"),
    [
        ((0.0, 0.3), (5.0, 5.3), CheckOutcome.OK),
        ((0.0, 0.3), (-70.0, -69.0), CheckOutcome.WARN),
        (
            (-300.0, -299.0),
            (300.0, 302.0),
            CheckOutcome.WARN,
        ),  # the difference is between 599 s and 602 s
        ((-300.0, -299.0), (301.0, 302.0), CheckOutcome.FAIL),
    ],
)
def test_only_a_certain_difference_fails(
    a: tuple[float, float], b: tuple[float, float], outcome: CheckOutcome
) -> None:
    (check,) = clock_skew_checks({"a": ClockBounds(*a), "b": ClockBounds(*b)})
    assert check.outcome is outcome
    assert not list(clock_skew_checks({"a": ClockBounds(*a)}))


# ---- a job ---------------------------------------------------------------------------------------


def test_a_job_is_checked_against_its_runtime(
    looked: Callable[..., tuple[int, Found]], tmp_path: Path
) -> None:
    file = tmp_path / "job.yaml"
    sites = [{"name": name, "groups": [{"name": "g", "workers": 2}]} for name in NAMES]
    given = {"spec.sites": sites, "spec.runtime": "edge"}
    file.write_text(yaml.safe_dump(changed(smallest(), given)))
    strict = ok({"metadata": {"name": "edge"}, "spec": {"limits": {"maxWorkers": 1}}})
    servers = {"a": server_of("plant-a", edge=strict), "b": server_of("plant-b", edge=MAY_NOT)}
    code, found = looked("-f", str(file), **servers)
    assert code == ExitCode.UNAVAILABLE
    assert found["plant-a", "runtime"]["outcome"] == "fail"
    assert "DLionRuntime edge allows 1" in found["plant-a", "runtime"]["observed"]
    assert found["plant-b", "runtime"]["outcome"] == "unknown"


def test_a_job_is_checked_against_the_nodes(
    looked: Callable[..., tuple[int, Found]], tmp_path: Path
) -> None:
    file = tmp_path / "job.yaml"
    groups = [{"name": "g", "workers": 2, "resources": {"requests": {"cpu": "1"}}}]
    sites = [{"name": name, "groups": groups} for name in NAMES]
    file.write_text(yaml.safe_dump(changed(smallest(), {"spec.sites": sites})))
    servers = {"a": server_of("plant-a", nodes=MAY_NOT), "b": server_of("plant-b")}
    code, found = looked("-f", str(file), **servers)
    assert code == 0
    assert found["plant-a", "listed"]["outcome"] == "ok"
    assert found["plant-a", "exposure"]["outcome"] == "unknown"
    assert found["plant-a", "capacity"]["outcome"] == "unknown"
    assert found["plant-b", "capacity"]["outcome"] == "warn"
    assert "g 1 of 2 workers" in found["plant-b", "capacity"]["observed"]
    assert found["plant-b", "capacity"]["advice"].startswith(
        "Workers without capacity stay Pending"
    )
    assert found["plant-b", "images"]["outcome"] == "unknown"
    assert "w:1" in found["plant-b", "images"]["observed"]
