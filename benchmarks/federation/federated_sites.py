"""Three clusters that trust each other, installed as docs/several-sites.md describes, with jobs.

This module owns the testbed, its links, the chart's values, the exchange of bundles and the data at
each site. All of it is removed when `federated` ends. The parts of `three_sites` use it. It
measures nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from chart import CHART, NAMESPACE, Helm
from dlion_api.errors import UnavailableError
from site_files import bring_files
from testbed.project_images import build_images
from testbed.sites import Testbed

if TYPE_CHECKING:
    from testbed.kubectl import Kubectl
    from testbed.sites import Site

JOBS = "ml"
"""Namespace of the jobs at every site."""
FEDERATION_PORT = 30446
MBIT_PER_S = {"site-a": 50.0, "site-b": 35.0, "site-c": 20.0}
"""What each site sends to the others, and what it gets from them."""
CLAIM = "cifar10"
OPERATOR = "app.kubernetes.io/component=operator"
WORKER = "app.kubernetes.io/component=worker"
KEPT_MEMBERSHIP = "/var/lib/dlion/worker/membership.json"
KILL_TRAINER = (
    "import os, signal; [os.kill(int(p), 9) for p in os.listdir('/proc') if p.isdigit()"
    " and b'dlion_worker.trainer' in open(f'/proc/{p}/cmdline','rb').read()"
    " and p != '1' and int(p) != os.getpid()]"
)
_POLL_S, _DLION_S = 0.5, 180.0

Document = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class FederatedSites:
    """The running sites; `folder` has the files of a user."""

    testbed: Testbed
    folder: Path

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all sites in the manifest's order."""
        return tuple(self.testbed.sites)

    @property
    def listed(self) -> Path:
        """Return the list of all sites with their addresses and bundles."""
        return self.folder / "sites.yaml"

    def kubectl(self, site: str) -> Kubectl:
        """Return kubectl for the jobs' namespace there."""
        return replace(self.testbed.site(site).kubectl, namespace=JOBS)

    def dlion(self, *arguments: str) -> str:
        """Return the output of `dlion` with one kubeconfig, which has a context by the name of each
        site.

        Raises: UnavailableError with its error output.
        """
        return _dlion(self.folder, *arguments)

    def submit(self, document: Document) -> None:
        """Submit the same manifest at each site."""
        path = self.folder / f"{document['metadata']['name']}.yaml"
        path.write_text(yaml.safe_dump(document))
        at_each(self.names, lambda site: self._job_command("submit", str(path), site))

    def delete(self, job: str) -> None:
        """Delete the job with its objects at each site."""
        at_each(self.names, lambda site: self._job_command("delete", job, site, "--yes"))

    def fetch(self, job: str, out: Path) -> dict[str, Path]:
        """Fetch the result folder of each site's keeper, also during a run."""
        for site in self.names:
            self._job_command("fetch", job, site, "--all", "--out", str(out / site))
        return {site: out / site for site in self.names}

    def _job_command(self, verb: str, what: str, site: str, *options: str) -> None:
        self.dlion(verb, what, *options, "--context", site, "--namespace", JOBS)

    def pods(self, site: str, job: str) -> list[Document]:
        """Return the pods of the job's workers there that have not ended."""
        chosen = f"{WORKER},dlion.dev/job-name={job}"
        found = self.kubectl(site).get("pods", "-l", chosen)["items"]
        return [pod for pod in found if pod["status"].get("phase") in ("Pending", "Running")
                and "deletionTimestamp" not in pod["metadata"]]  # fmt: skip

    def worker_pod(self, site: str, job: str) -> str:
        """Return the name of the first worker's pod. Raises: UnavailableError if none runs."""
        names = sorted(pod["metadata"]["name"] for pod in self.pods(site, job))
        if not names:
            raise UnavailableError(f"no pod of {job} runs at {site}")
        return str(names[0])

    def in_trainer(self, site: str, job: str, *command: str) -> str:
        """Run a command in the first worker's trainer container and return its output."""
        pod = self.worker_pod(site, job)
        return self.kubectl(site).run("exec", pod, "-c", "trainer", "--", *command)

    def zero_s(self, site: str, job: str) -> float:
        """Return this machine's monotonic time at which that site's records have the time zero."""
        kept = json.loads(self.in_trainer(site, job, "cat", KEPT_MEMBERSHIP))
        return float(kept["start_time_monotonic_s"])

    def operators(self, replicas: int) -> None:
        """Scale the operator at each site; return when this many are ready, or all are gone."""

        def scale(site: str) -> None:
            kubectl = replace(self.testbed.site(site).kubectl, namespace=NAMESPACE)
            kubectl.run("scale", "deployment", "-l", OPERATOR, f"--replicas={replicas}")
            if replicas:
                kubectl.wait("--for=condition=Available", "deployment", "-l", OPERATOR,
                             timeout_s=120)  # fmt: skip
            else:
                wait_until(lambda: not kubectl.get("pods", "-l", OPERATOR)["items"],
                           within_s=60, what=f"no operator at {site}")  # fmt: skip

        at_each(self.names, scale)

    def keep_logs(self, job: str, folder: Path) -> None:
        """Store the state of job, pods, workers and operators at each site for inspection."""
        folder.mkdir(exist_ok=True)
        chosen = f"{WORKER},dlion.dev/job-name={job}"
        for site in self.names:
            own, system = self.kubectl(site), replace(self.kubectl(site), namespace=NAMESPACE)
            for name, kubectl, arguments in (
                ("job", own, ("describe", "dlj", job)),
                ("pods", own, ("get", "pods", "-o", "wide")),
                ("workers", own, ("logs", "-l", chosen, "--all-containers", "--prefix",
                                  "--timestamps", "--tail=-1")),
                ("operator", system, ("logs", "-l", OPERATOR, "--timestamps", "--tail=-1")),
            ):  # fmt: skip
                try:
                    text = kubectl.run(*arguments)
                except UnavailableError as error:
                    text = str(error)
                (folder / f"{site}-{name}.txt").write_text(text)

    def events(self, site: str, job: str) -> list[Document]:
        """Return the Kubernetes events of that job there: reason, message, count and last time."""
        chosen = f"involvedObject.kind=DLionJob,involvedObject.name={job}"
        found = self.kubectl(site).get("events", f"--field-selector={chosen}")["items"]
        return [
            {
                "reason": each["reason"],
                "message": each["message"],
                "count": each.get("count") or 1,
                "last": each.get("lastTimestamp") or each.get("eventTime") or "",
            }
            for each in found
        ]


@contextmanager
def federated(data: Path, folder: Path, *, exposure: str) -> Iterator[FederatedSites]:
    """Start three sites with this tree's chart and images; remove them at the end in any case.

    `data` has train.tfrecord and test.tfrecord. Raises: UnavailableError with the failed step.
    """
    images = build_images()
    shared: Document = {
        "images": {"pullPolicy": "Never"},
        "federation": {
            "service": {"type": "NodePort", "nodePort": FEDERATION_PORT},
            "measureOnDemand": True,
        },
    }
    for image in images:
        repository, _, tag = image.reference.partition(":")
        shared["images"][image.target.value] = {"repository": repository, "tag": tag}
    flat = exposure == "PodNetwork"
    with Testbed.up(name=f"f{os.getpid()}", sites=3, nodes=1, flat=flat) as testbed:
        sites = list(testbed.sites.values())
        for site in sites:
            rate = MBIT_PER_S[site.name]
            testbed.set_rate(site.name, up=rate, down=rate)
        at_each(sites, lambda site: site.nodes[0].load_missing(images))
        for site in sites:
            _bring_data(site, data)
        made = FederatedSites(testbed, folder)
        _write_files(sites, folder, shared)
        _federate(made)
        yield made


def at_each(of: Iterable[T], action: Callable[[T], None]) -> None:
    """Call the function for all sites at the same time. Raises: the first error."""
    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(action, each) for each in of]:
            done.result()


def wait_until(look: Callable[[], T | None], *, within_s: float, what: str) -> T:
    """Return the result of `look` once it is true. Raises: UnavailableError if it never is."""
    deadline_s = time.monotonic() + within_s
    while not (found := look()):
        if time.monotonic() > deadline_s:
            raise UnavailableError(f"{what}: not within {within_s:g} s")
        time.sleep(_POLL_S)
    return found


def _write_files(sites: Iterable[Site], folder: Path, shared: Mapping[str, Any]) -> None:
    """Write one kubeconfig, one file of values for all sites, and one of a line for each."""
    joined: Document = {"apiVersion": "v1", "kind": "Config"}
    for site in sites:
        own = yaml.safe_load(site.kubeconfig.read_text())
        cluster, user = own["clusters"][0]["cluster"], own["users"][0]["user"]
        context = {"cluster": site.name, "user": site.name}
        joined.setdefault("clusters", []).append({"name": site.name, "cluster": cluster})
        joined.setdefault("users", []).append({"name": site.name, "user": user})
        joined.setdefault("contexts", []).append({"name": site.name, "context": context})
        (folder / f"{site.name}.yaml").write_text(yaml.safe_dump({"site": {"name": site.name}}))
    kubeconfig = folder / "kubeconfig"
    kubeconfig.touch(mode=0o600)
    kubeconfig.write_text(yaml.safe_dump(joined))
    (folder / "all-sites.yaml").write_text(yaml.safe_dump(dict(shared)))


def _federate(made: FederatedSites) -> None:
    """Install, exchange the bundles, upgrade, and check before a run: steps 1 to 5 of the page."""
    folder, contexts = made.folder, ",".join(made.names)
    at_each(made.names, lambda site: _chart(made, site, "all-sites.yaml", f"{site}.yaml"))
    listed = yaml.safe_load(made.dlion("trust", "show", "--contexts", contexts))
    for entry in listed["sites"]:
        address = made.testbed.site(entry["name"]).nodes[0].layout.address
        entry["address"] = f"{address}:{FEDERATION_PORT}"
    made.listed.write_text(yaml.safe_dump(listed))
    made.dlion("trust", "verify", str(made.listed))
    values = ("all-sites.yaml", "sites.yaml")
    at_each(made.names, lambda site: _chart(made, site, *values, f"{site}.yaml"))
    check = ("preflight", str(made.listed), "--contexts", contexts)

    def passes() -> bool:
        try:
            (folder / "preflight.txt").write_text(made.dlion(*check))
        except UnavailableError as error:
            (folder / "preflight.txt").write_text(str(error))
            return False
        return True

    # Streams between new operators are open after a few seconds.
    wait_until(passes, within_s=60, what=f"`dlion preflight` ({folder / 'preflight.txt'})")


def _chart(made: FederatedSites, site: str, *values: str) -> None:
    kubectl = made.testbed.site(site).kubectl
    helm = Helm(made.testbed.binaries.path("helm"), made.folder / f"helm-{site}", kubectl)
    files = [word for name in values for word in ("-f", str(made.folder / name))]
    helm.run(
        "upgrade", "--install", "dlion", str(CHART), "--namespace", NAMESPACE, "--create-namespace",
        "--wait", "--timeout", "110s", *files,
    )  # fmt: skip


def _bring_data(site: Site, data: Path) -> None:
    """Copy the data to the node's disk, with a claim in the jobs' namespace, which this creates."""
    site.kubectl.run("create", "namespace", JOBS)
    files = (data / name for name in ("train.tfrecord", "test.tfrecord"))
    bring_files(site, files, claim=CLAIM, namespace=JOBS)


def _dlion(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "dlion_cli", *arguments]
    environment = {**os.environ, "KUBECONFIG": str(folder / "kubeconfig")}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=_DLION_S
        )
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"dlion {' '.join(arguments)}: no end in {_DLION_S:g} s") from None
    if done.returncode != 0:
        output = done.stderr.strip() or done.stdout.strip()
        raise UnavailableError(
            f"dlion {' '.join(arguments)} ended with {done.returncode}: {output}"
        )
    return done.stdout
