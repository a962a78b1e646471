"""Test twenty real causes of slowness or failure, and the command that names each.

`dlion describe`, `preflight`, `doctor` or `run` names cause and object within 30 s. A cause during
a run is named within 30 s of its start, and not before.

On networks: a resolver without answers, a certificate of another authority, a clock ahead, and a
smaller MTU on the path. Also a firewall that blocks one direction, lost packets, and sites that do
not reach each other.

On machines: a slow and a full disk, a CPU quota, a stopped trainer, too little memory.
In jobs: missing data, infinite numbers, an image that does not exist or needs a Secret, an
exhausted ResourceQuota, an evicted pod, an expired token, a worker of another release. The test
prints a table (`make causes`).

A certificate issued two hours ahead stands for a site's clock, since the machine has one clock. The
path with a smaller MTU has its own TLS server, behind a router of 1,280 bytes without ICMP. A
control group limits the slow disk to 1 MB/s, and iptables drops one packet in twenty. The release
is that of the workers' protocol. The token is signed with the API server's own key. Left out:
network devices, real disk errors, the time until a token expires.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import jwt
import pytest
import yaml

from cause_places import (
    PRIVATE,
    dropping,
    evict,
    narrow_path,
    quota,
    registry,
    silent_resolver,
    small_disk,
    stopped_trainer,
)
from chart import merged
from dlion_api.exit_codes import ExitCode
from dlion_api.names import SiteName
from dlion_operator.pki.authority import CertificateAuthority
from installed_sites import AT_NODES, FEDERATION_PORT, InstalledSites, bundle_of
from local_run import BLOBS, LocalRun, blobs, job_document
from named_causes import LIMIT_S, Causes
from presenting import listening, presents
from throttled_disk import throttled_disk
from trained_jobs import eventually, wait_until_trains

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from testbed.kubectl import Kubectl

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.timeout(900),
]
A, B = SiteName("site-a"), SiteName("site-b")
BOTH = f"--contexts={A},{B}"
STARTS_WITHIN_S = 180.0
"""Time for a pod to start and fail, on a machine that starts ten of them at once."""
WIDE = """
def build_model():
    layers = [keras.layers.Input((8,)), keras.layers.Dense(4000, activation="relu")]
    return keras.Sequential([*layers, Nap(), keras.layers.Dense(3)])
"""
"""A model whose gradients are a hundred packets."""
UNSCALED = """
def load_data(split, site, worker_index):
    return np.full((240, 8), 1e18, np.float32), np.zeros(240, np.int64)
"""
"""Inputs whose gradients become infinite after several steps."""
OTHER_RELEASE = "import dlion_core.links.framing as framing; framing.PROTOCOL = 99\n"
"""A line of a `.pth` file, which Python executes at its start."""
SITE_PACKAGES = "/opt/dlion/lib/python3.11/site-packages"


@pytest.fixture(scope="module")
def causes() -> Iterator[Causes]:
    made = Causes()
    yield made
    now = f"{datetime.now(UTC):%Y-%m-%d}"
    print(f"\n{len(made.rows)} causes, {now}\n\n{made.table()}")


# ---- jobs ----------------------------------------------------------------------------------------


def job(name: str, sites: dict[str, dict[str, int]], **spec: Any) -> dict[str, Any]:
    """Return a job of that program whose workers mostly wait, with workers by site and group.

    `trainer`, `limits` and the other fields of `spec` replace defaults.
    """
    trainer = {
        "program": {"configMap": {"name": "wide", "key": "job.py"}},
        "optimizer": {"name": "sgd", "learningRate": 0.01},
        "stop": {"maxSeconds": 3000},
        "evaluation": {"everySamples": 1_000_000},
    } | spec.pop("trainer", {})
    resources = {"requests": {"cpu": "20m"}, "limits": spec.pop("limits", {"memory": "2Gi"})}
    return {
        "apiVersion": "dlion.dev/v1alpha1",
        "kind": "DLionJob",
        "metadata": {"name": name},
        "spec": {
            "sites": [
                {
                    "name": site,
                    "groups": [
                        {"name": group, "workers": count, "resources": resources}
                        for group, count in groups.items()
                    ],
                }
                for site, groups in sites.items()
            ],
            "trainer": trainer,
            "batching": {"policy": "even", "globalBatchSize": {"initial": 32, "max": 32}},
            "exchange": {"policy": "full", "codec": "float32"},
            "synchronization": {"mode": "synchronous"},
            "checkpoint": {"everySeconds": 600},
            **spec,
        },
    }


def config_map(name: str, text: str, key: str = "job.py") -> dict[str, Any]:
    metadata = {"name": name}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {key: text}}


PULLS = {"images": {"pullPolicy": "IfNotPresent"}}
"""Values of the chart; elsewhere nodes do not use a registry."""
ALONE = {str(A): {"a": 1}}
ONCE = {"maxRestarts": 0}
NO_SECRET = {"spec": {"imagePullSecrets": [{"name": "no-such-secret"}]}}
AS_ANOTHER_RELEASE = {
    "spec": {
        "volumes": [{"name": "other", "configMap": {"name": "other-release"}}],
        "containers": [
            {
                "name": "trainer",
                "volumeMounts": [
                    {
                        "name": "other",
                        "mountPath": f"{SITE_PACKAGES}/other-release.pth",
                        "subPath": "other-release.pth",
                    }
                ],
            }
        ],
    }
}


def broken_jobs(registry: str) -> list[dict[str, Any]]:
    """Return jobs of site-a that fail or do not start, by name."""
    return [
        job("no-data", ALONE, **ONCE, trainer={
            "program": {"builtin": "digits"},
            "dataset": {"path": "data/none.tfrecord", "format": "tfrecord"},
        }),
        job("diverges", ALONE, **ONCE, trainer={
            "program": {"configMap": {"name": "unscaled", "key": "job.py"}},
        }),
        job("no-memory", ALONE, **ONCE, limits={"memory": "200Mi"}),
        job("no-image", ALONE, trainer={"image": f"{registry}/dlion-worker:9.9"}),
        job("no-secret", ALONE, podTemplate=NO_SECRET, trainer={
            "image": f"{registry}/{PRIVATE}/dlion-worker:1",
        }),
    ]  # fmt: skip


QUOTA = {
    "apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "team"},
    "spec": {"hard": {"pods": "0"}},
}  # fmt: skip
NO_PODS = "no-pods"
"""A namespace whose quota is exhausted."""


@dataclass
class Scene:
    """Two sites, one job of both that trains, and broken jobs."""

    sites: InstalledSites
    listed: dict[str, dict[str, str]]
    """Entries of the list of sites."""

    @property
    def kubeconfig(self) -> str:
        return f"--kubeconfig={self.sites.folder / 'several-contexts.yaml'}"

    def kubectl(self, site: SiteName) -> Kubectl:
        """Return kubectl for the jobs' namespace there."""
        return self.sites.jobs[[A, B].index(site)]

    def list_file(self, folder: Path, **changed: dict[str, str]) -> str:
        """Write a list of both sites; `changed` replaces fields of some, by name with `_`."""
        entries = [
            entry | changed.get(name.replace("-", "_"), {}) for name, entry in self.listed.items()
        ]
        file = folder / "sites.yaml"
        file.write_text(yaml.safe_dump({"sites": entries}))
        return str(file)

    def pod(self, site: SiteName, index: int) -> dict[str, Any]:
        """Return the running pod of the worker of that index there, of the job that trains."""
        chosen = f"dlion.dev/job-name=trains,batch.kubernetes.io/job-completion-index={index}"
        pods = self.kubectl(site).get("pods", "-l", chosen)["items"]
        (found,) = (
            each
            for each in pods
            if each["status"]["phase"] == "Running" and "deletionTimestamp" not in each["metadata"]
        )
        return dict(found)

    def describe(self, name: str, *more: str) -> tuple[str, ...]:
        return "describe", name, self.kubeconfig, *more


@pytest.fixture(scope="module")
def scene(testbed_possible: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """All jobs are applied; the next fixture waits for the one that trains."""
    assert testbed_possible is None
    began_s = time.monotonic()
    folder = tmp_path_factory.mktemp("sites")
    with InstalledSites.up(f"c{os.getpid()}", folder, flat=True) as sites:
        addresses = sites.trust_each_other(merged(AT_NODES, PULLS), FEDERATION_PORT)
        print(f"two sites after {time.monotonic() - began_s:.0f} s")
        listed = {
            site.name: {
                "name": site.name,
                "address": f"{addresses[site.name]}:{FEDERATION_PORT}",
                "bundle": bundle_of(site),
            }
            for site in sites.sites
        }
        node = sites.sites[0].nodes[0].layout
        with registry(node.netns) as images:
            at_a, at_b = sites.jobs
            program = config_map("wide", BLOBS.format(nap_s=0.1, evaluation_nap_s=0, more=WIDE))
            trains = job("trains", {str(A): {"a": 2}, str(B): {"b": 1}})
            skewed = job("skewed", {str(A): {"a": 1}, str(B): {"b": 1}})
            for kubectl in sites.jobs:
                kubectl.apply(program, trains)
            at_a.run("create", "namespace", NO_PODS)
            full = replace(at_a, namespace=NO_PODS)
            full.apply(QUOTA)
            full.wait("--for=jsonpath={.status.hard.pods}=0", "resourcequota/team")
            at_b.apply(config_map("other-release", OTHER_RELEASE, "other-release.pth"))
            unscaled = BLOBS.format(nap_s=0.1, evaluation_nap_s=0, more=UNSCALED)
            at_a.apply(config_map("unscaled", unscaled), *broken_jobs(images), skewed)
            full.apply(program, job("no-quota", ALONE))
            skewed["spec"]["podTemplate"] = AS_ANOTHER_RELEASE
            at_b.apply(skewed)
            yield Scene(sites, listed)
        sites.check_rights()


@pytest.fixture(scope="module")
def training(scene: Scene) -> Scene:
    """The job of both sites trains; the failing jobs are removed."""
    for site in (A, B):
        wait_until_trains(scene.kubectl(site), "trains")
        scene.kubectl(site).run("delete", "dlj", "--wait=false", "--ignore-not-found",
                                "skewed", "no-image", "no-secret")  # fmt: skip
    return scene


# ---- on this machine, and on the way to a site ---------------------------------------------------


def entry(authority: CertificateAuthority, address: str) -> dict[str, str]:
    bundle = authority.bundle_pem.decode()
    return {"name": str(authority.site), "address": address, "bundle": bundle}


def site_list(folder: Path, *entries: dict[str, str]) -> str:
    file = folder / "sites.yaml"
    file.write_text(yaml.safe_dump({"sites": list(entries)}))
    return str(file)


def test_dns(causes: Causes, tmp_path: Path) -> None:
    file = site_list(tmp_path, entry(CertificateAuthority(A), "operator.site-a.example:30446"))
    with silent_resolver(tmp_path) as wrapper:
        causes.named(
            "DNS",
            "preflight",
            file,
            wrapper=wrapper,
            kind="dns",
            about=A,
            text="operator.site-a.example: (no answer in time|.*name resolution)",
        )


def test_clock_skew(causes: Causes, tmp_path: Path) -> None:
    ahead = datetime.now(UTC) + timedelta(hours=2)
    authority = CertificateAuthority(A)
    identity = authority.operator_identity(now=ahead)
    with listening(presents(tmp_path, identity)) as port:
        file = site_list(tmp_path, entry(authority, f"127.0.0.1:{port}"))
        causes.named(
            "clock skew",
            "preflight",
            file,
            kind="clock",
            about=A,
            text=r"at least (1:59:\d\d|2:00:00) ahead of this machine's",
        )


def test_mtu(causes: Causes, tmp_path: Path) -> None:
    authority = CertificateAuthority(A)
    with narrow_path() as (wrapper, server):
        talk = presents(tmp_path, authority.operator_identity())

        def talk_in_time(connection: socket.socket) -> None:
            connection.settimeout(LIMIT_S / 2)  # lost packets never arrive
            talk(connection)

        with listening(talk_in_time, server):
            file = site_list(tmp_path, entry(authority, "10.255.2.2:8446"))
            causes.named(
                "MTU",
                "preflight",
                file,
                wrapper=wrapper,
                kind="mtu",
                about=A,
                text="packets of full size are lost on the way to 10.255.2.2:8446",
            )


def test_a_slow_disk(causes: Causes, tmp_path: Path) -> None:
    with throttled_disk(tmp_path, 1_000_000) as wrapper:
        began_s = time.monotonic()
        go = ["sh", "-c", f'cd {tmp_path} && exec "$@"', "sh"]
        causes.named(
            "slow disk",
            "doctor",
            "--timeout=15",
            wrapper=[*go, *wrapper],
            began_s=began_s,
            within_s=LIMIT_S,
            kind="disk",
            about="machine disk",
            text=rf"{tmp_path}: .*, which is slow",
        )


def test_a_full_disk(causes: Causes, tmp_path: Path) -> None:
    document = job_document(
        1, trainer={"program": blobs(tmp_path), "stop": {"maxSteps": 100_000}},
        checkpoint={"everySeconds": 1},
    )  # fmt: skip
    with small_disk(tmp_path / "out", "8m") as out, LocalRun(tmp_path, document) as run:
        run.wait_for_step(5)
        began_s = time.monotonic()
        with contextlib.suppress(OSError), (out / "somebody-elses").open("wb", 0) as file:
            while True:
                file.write(bytes(1 << 16))
        assert run.finish() == ExitCode.STORAGE
        took_s = time.monotonic() - began_s
        *_, error = (line for line in run.terminal().splitlines() if "No space left" in line)
        assert str(out) in error
        causes.add("full disk", "dlion run", took_s, took_s, ExitCode.STORAGE.name, error.strip())


# ---- sites ---------------------------------------------------------------------------------------


def test_tls(causes: Causes, scene: Scene, tmp_path: Path) -> None:
    """The list has the bundle of an earlier authority of the site."""
    before = {"bundle": CertificateAuthority(A).bundle_pem.decode()}
    file = scene.list_file(tmp_path, site_a=before)
    causes.named(
        "TLS",
        "preflight",
        file,
        kind="tls",
        about=A,
        text="operator.site-a.dlion by another authority than the listed one",
    )


def test_an_expired_token(causes: Causes, scene: Scene, tmp_path: Path) -> None:
    """The API server's own key has signed it."""
    plane = scene.sites.sites[0].control_plane
    ended = int(time.time()) - 120
    claims = {
        "iss": "https://kubernetes.default.svc.cluster.local", "exp": ended, "nbf": ended - 600,
        "aud": ["https://kubernetes.default.svc.cluster.local"],
        "sub": "system:serviceaccount:ml:default",
        "kubernetes.io": {"namespace": "ml", "serviceaccount": {"name": "default", "uid": "u"}},
    }  # fmt: skip
    token = jwt.encode(claims, (plane.folder / "service-account.key").read_bytes(), "ES256")
    known = yaml.safe_load(plane.kubeconfig.read_text())
    known["users"][0]["user"] = {"token": token}
    file = tmp_path / "kubeconfig"
    file.write_text(yaml.safe_dump(known))
    causes.named(
        "expired token",
        "doctor",
        "--timeout=15",
        f"--kubeconfig={file}",
        kind="credentials",
        about="cluster credentials",
        text=r"the token expired on .* UTC, \d+:\d\d ago",
    )


@dataclass(frozen=True)
class Broken:
    """What describe prints about a broken job: patterns of kind, object and sentence."""

    cause: str
    name: str
    kind: str
    about: str
    text: str
    more: tuple[str, ...] = (f"--context={A}",)


BROKEN = [
    Broken("quota", "no-quota", "QuotaExceeded", "job/no-quota-", "exceeded quota: team",
           (f"--context={A}", "-n", NO_PODS)),
    Broken("wrong image", "no-image", "ImageNotFound", "pod/no-image-",
           r"dlion-worker:9\.9.*not found"),
    Broken("missing pull Secret", "no-secret", "ImageAccessDenied", "pod/no-secret-",
           f"{PRIVATE}/dlion-worker:1"),
    Broken("missing pull Secret, its name", "no-secret", "PullSecretMissing", "pod/no-secret-",
           "no-such-secret"),
    Broken("wrong data", "no-data", ".*", "(pod|dlionjob)/no-data", r"DATA.*none\.tfrecord"),
    Broken("NaN", "diverges", ".*", "(pod|dlionjob)/diverges", r"DIVERGED.*not finite"),
    Broken("out of memory", "no-memory", ".*", "(pod|dlionjob)/no-memory",
           "needs more memory|killed, often for memory"),
    Broken("version skew", "skewed", "MessageRefused", "dlionjob/skewed",
           "protocol (99; allowed: 2|2; allowed: 99).*same release", (BOTH,)),
]  # fmt: skip


@pytest.mark.parametrize("broken", BROKEN, ids=lambda each: each.cause)
def test_a_broken_job(causes: Causes, scene: Scene, broken: Broken) -> None:
    causes.named(
        broken.cause, *scene.describe(broken.name, *broken.more), kind=broken.kind,
        about=broken.about, text=broken.text, within_s=STARTS_WITHIN_S,
    )  # fmt: skip


# ---- what happens to a job that trains -----------------------------------------------------------


def named_in_training(
    causes: Causes, scene: Scene, cause: str, began_s: float, *, kind: str, about: str, text: str,
    more: tuple[str, ...] = (BOTH,),
) -> None:  # fmt: skip
    causes.named(
        cause,
        *scene.describe("trains", *more),
        kind=kind,
        about=about,
        text=text,
        began_s=began_s,
        within_s=LIMIT_S,
    )


def test_a_hung_peer(causes: Causes, training: Scene) -> None:
    pod = training.pod(A, 0)
    name = pod["metadata"]["name"]
    causes.not_named(*training.describe("trains", BOTH), kind="TrainerHung")
    with stopped_trainer(pod):
        named_in_training(
            causes,
            training,
            "hung peer",
            time.monotonic(),
            kind="TrainerHung",
            about=f"pod/{name}",
            text=r"has not answered for \d+ s",
        )


def test_a_throttled_cpu(causes: Causes, training: Scene) -> None:
    wait_until_trains(training.kubectl(A), "trains")
    pod = training.pod(A, 1)
    name = pod["metadata"]["name"]
    causes.not_named(*training.describe("trains", BOTH), kind="CpuThrottled")
    with quota(pod, 0.02):
        named_in_training(
            causes,
            training,
            "throttled CPU",
            time.monotonic(),
            kind="CpuThrottled",
            about=f"pod/{name}",
            text="CPU quota of 0.02 cores withholds",
        )


def test_a_lossy_link(causes: Causes, training: Scene) -> None:
    wait_until_trains(training.kubectl(A), "trains")
    pod = training.pod(B, 0)
    name, address = pod["metadata"]["name"], pod["status"]["podIP"]
    causes.not_named(*training.describe("trains", BOTH), kind="PacketsLost")
    node = training.sites.sites[1].nodes[0].layout
    lost = "-m statistic --mode random --probability 0.05"
    with dropping(node.netns, f"FORWARD -s {address} {lost}", f"FORWARD -d {address} {lost}"):
        named_in_training(
            causes,
            training,
            "lossy link",
            time.monotonic(),
            kind="PacketsLost",
            about=f"pod/{name}",
            text="its links lose packets: ",
        )


def test_an_evicted_pod(causes: Causes, training: Scene) -> None:
    name = training.pod(A, 1)["metadata"]["name"]
    kubectl = training.kubectl(A)
    began_s = time.monotonic()
    evict(kubectl, name)
    named_in_training(
        causes,
        training,
        "evicted pod",
        began_s,
        kind="EvictionByEvictionAPI|PodEvicted",
        about="(pod|dlionjob)/trains",
        text="Eviction API: evicting",
    )
    eventually(
        lambda: not kubectl.get("pods", f"--field-selector=metadata.name={name}")["items"],
        within_s=90,
        what="the evicted pod is gone",
    )
    # Only the operator's event still reports it.
    named = causes.named(
        "evicted pod, gone",
        *training.describe("trains", BOTH),
        kind="PodEvicted",
        about="dlionjob/trains",
        text=f"pod {name} was evicted: EvictionByEvictionAPI",
    )
    assert name in named.text


# ---- links between sites -------------------------------------------------------------------------


def test_a_one_way_firewall(causes: Causes, scene: Scene, tmp_path: Path) -> None:
    file = scene.list_file(tmp_path)
    words = "preflight", file, scene.kubeconfig, BOTH, "-n", "dlion-system"
    causes.not_named(*words, kind="streams")
    first, second = (site.layout for site in scene.sites.sites)
    closed = f"FORWARD -s {first.network} -p tcp --dport {FEDERATION_PORT}"
    with dropping(second.netns, closed):
        causes.named(
            "one-way firewall",
            *words,
            began_s=time.monotonic(),
            kind="streams",
            about=A,
            text=rf"connections from site-a to {scene.listed[B]['address']} fail, while "
            "those of site-b arrive: a one-way firewall",
            within_s=2 * LIMIT_S,
        )


def test_a_partition(causes: Causes, scene: Scene) -> None:
    testbed = scene.sites.testbed
    testbed.cut(A, B)
    try:
        causes.named(
            "partition",
            *scene.describe("trains", BOTH),
            began_s=time.monotonic(),
            within_s=LIMIT_S,
            kind="SiteUnreachable",
            about=f"site/({A}|{B})",
            text=".",
        )
    finally:
        testbed.mend(A, B)


def test_all_causes_are_named(causes: Causes, request: pytest.FixtureRequest) -> None:
    """It runs last, and needs a run of the whole module."""
    named = {row.cause.partition(",")[0] for row in causes.rows}
    if len(named) < 20 and request.config.option.keyword:
        pytest.skip("not all causes ran")
    assert len(named) == 20, sorted(named)
