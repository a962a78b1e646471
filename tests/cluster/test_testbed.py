"""Test the testbed on real clusters.

A pod runs to its end under a hard CPU limit. Names resolve and services answer. `down` removes
everything that a killed `up` leaves. Another cluster is used only if it is marked. `tools/testbed`
lists running testbeds and missing programs.

Slow tests: pods of different sites reach each other at the configured rate, and not past a cut. A
node without power or cable is detected as gone, and returns. Images are loaded on nodes of one
site.

Left out: NetworkPolicy (nothing here enforces it), LoadBalancer, latency and loss (no netem).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from dlion_api.errors import UnavailableError
from testbed.__main__ import main as command
from testbed.existing import CONTEXT, KUBECONFIG, LABEL, existing_cluster
from testbed.groups import groups_of, hierarchies, processes_in
from testbed.images import BUSYBOX_IMAGE, own_images
from testbed.removal import traces
from testbed.requirements import missing
from testbed.sites import Testbed, remove_orphans
from testbed.state import State, exclusive, folder_of, known_names

if TYPE_CHECKING:
    from collections.abc import Callable

    from testbed.kubectl import Kubectl
    from testbed.sites import Site

pytestmark = [pytest.mark.cluster, pytest.mark.root]

RATE_MBIT = 40.0
PAYLOAD_BYTES = 20_000_000
KNOCK = "nc -w 3 {} </dev/null 2>/dev/null && echo through || echo cut"
"""Command by which a pod checks whether it can connect to that address and port."""


def pod(name: str, script: str, *, node: str = "", cpu: str = "", port: int = 0) -> dict[str, Any]:
    """Return a pod that runs a shell script once."""
    container: dict[str, Any] = {
        "name": "main",
        "image": BUSYBOX_IMAGE,
        "args": ["-c", script],
        "imagePullPolicy": "IfNotPresent",
    }
    if cpu:
        container["resources"] = {"limits": {"cpu": cpu, "memory": "64Mi"}}
    if port:
        container["readinessProbe"] = {"tcpSocket": {"port": port}, "periodSeconds": 1}
    spec: dict[str, Any] = {"restartPolicy": "Never", "containers": [container]}
    spec["terminationGracePeriodSeconds"] = 0
    if node:
        spec["nodeSelector"] = {"kubernetes.io/hostname": node}
    metadata = {"name": name, "labels": {"app": name}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def output(kubectl: Kubectl, document: dict[str, Any], timeout_s: float = 60) -> str:
    """Return the output of the pod, which must succeed; delete it afterwards."""
    name = document["metadata"]["name"]
    kubectl.apply(document)
    try:
        kubectl.wait("--for=jsonpath={.status.phase}=Succeeded", f"pod/{name}", timeout_s=timeout_s)
        return kubectl.run("logs", name)
    finally:
        kubectl.run("delete", "pod", name, "--wait=true")


def until(true: Callable[[], bool], timeout_s: float) -> float:
    """Return the seconds until the condition holds; fail if it does not."""
    began_s = time.monotonic()
    while not true():
        assert time.monotonic() - began_s < timeout_s, f"not so after {timeout_s:g} s"
        time.sleep(0.25)
    return time.monotonic() - began_s


@pytest.fixture(scope="module")
def server(testbed: Testbed) -> str:
    """Address of a pod at site-a that serves PAYLOAD_BYTES over HTTP at port 8000."""
    kubectl = testbed.site("site-a").kubectl
    script = (
        f"mkdir /tmp/www && head -c {PAYLOAD_BYTES} /dev/zero >/tmp/www/payload && "
        "exec httpd -f -p 8000 -h /tmp/www"
    )
    kubectl.apply(pod("server", script, port=8000))
    kubectl.wait("--for=condition=Ready", "pod/server")
    address: str = kubectl.get("pod", "server")["status"]["podIP"]
    return address


def test_a_pod_runs_to_its_end_under_a_hard_cpu_limit(cluster: Kubectl, busybox: str) -> None:
    """This is the only test here that any cluster can run."""
    look = "cat /sys/fs/cgroup/cpu/cpu.cfs_quota_us 2>/dev/null || cat /sys/fs/cgroup/cpu.max"
    made = pod("limited", look, cpu="500m")
    made["spec"]["containers"][0]["image"] = busybox
    assert output(cluster, made).strip() in {"50000", "50000 100000"}


def test_a_service_is_found_by_its_name_from_every_node(testbed: Testbed, server: str) -> None:
    assert server
    kubectl = testbed.site("site-a").kubectl
    kubectl.apply({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "payload"},
        "spec": {"selector": {"app": "server"}, "ports": [{"port": 80, "targetPort": 8000}]},
    })  # fmt: skip
    # Nodes apply a new Service a moment after its creation.
    ask = "until wget -q -O - http://payload.default.svc.cluster.local/payload > /tmp/found; do"
    ask += " sleep 1; done 2>/dev/null; wc -c < /tmp/found"
    for node in testbed.site("site-a").nodes:
        name = node.layout.name
        assert int(output(kubectl, pod(f"ask-{name}", ask, node=name))) == PAYLOAD_BYTES


@pytest.mark.slow
def test_pods_of_two_sites_reach_each_other_at_the_rate_that_was_set(
    testbed: Testbed, other_site: Site, server: str
) -> None:
    kubectl = other_site.kubectl
    fetch = (
        "b=$(cut -d' ' -f1 /proc/uptime); "
        f"wget -q -O /dev/null http://{server}:8000/payload && "
        "echo $b $(cut -d' ' -f1 /proc/uptime)"
    )

    def rate_mbit(enough: float) -> float:
        """Return the maximum of three fetches: other load can only slow one down."""
        most = 0.0
        for _ in range(3):
            began_s, ended_s = map(float, output(kubectl, pod("fetch", fetch)).split())
            most = max(most, PAYLOAD_BYTES / 125_000 / (ended_s - began_s))
            if most > enough:
                break
        return most

    testbed.set_rate("site-a", up=RATE_MBIT)
    shaped_up = rate_mbit(0.85 * RATE_MBIT)
    testbed.set_rate("site-a")
    testbed.set_rate("site-b", down=RATE_MBIT)
    shaped_down = rate_mbit(0.85 * RATE_MBIT)
    testbed.set_rate("site-b")
    free = rate_mbit(3 * RATE_MBIT)
    print(f"Mbit/s: up {shaped_up:.1f}, down {shaped_down:.1f} of {RATE_MBIT:g}; free {free:.0f}")
    # Payload is 1448 of a packet's 1514 bytes: 95.6 %.
    assert 0.85 * RATE_MBIT < shaped_up < RATE_MBIT
    assert 0.85 * RATE_MBIT < shaped_down < RATE_MBIT
    assert free > 3 * RATE_MBIT


@pytest.mark.slow
def test_nothing_passes_a_cut_until_it_is_restored(
    testbed: Testbed, other_site: Site, server: str
) -> None:
    kubectl = other_site.kubectl
    ask = KNOCK.format(f"{server} 8000")
    for cut, mend in (
        (lambda: testbed.cut("site-a", "site-b"), lambda: testbed.mend("site-a", "site-b")),
        (lambda: testbed.cut_site("site-b"), lambda: testbed.mend_site("site-b")),
    ):
        cut()
        assert output(kubectl, pod("ask", ask)) == "cut\n"  # the tests still reach site-b
        mend()
        assert output(kubectl, pod("ask", ask)) == "through\n"


def test_a_host_path_belongs_to_one_node(testbed: Testbed) -> None:
    kubectl = testbed.site("site-a").kubectl
    volumes = [{"name": "disk", "hostPath": {"path": "/var/lib/mine", "type": "DirectoryOrCreate"}}]
    outputs = []
    for node in testbed.site("site-a").nodes:
        made = pod(f"disk-{node.layout.name}", "ls /disk | wc -l; touch /disk/a",
                   node=node.layout.name)  # fmt: skip
        made["spec"]["volumes"] = volumes
        made["spec"]["containers"][0]["volumeMounts"] = [{"name": "disk", "mountPath": "/disk"}]
        outputs.append(output(kubectl, made))
    assert outputs == ["0\n", "0\n"]


@pytest.mark.slow
def test_a_node_without_power_is_detected_and_returns(testbed: Testbed, other_site: Site) -> None:
    site, name = other_site, "site-b-n1"
    node = testbed.node(name)
    testbed.kill_node(name)
    assert node.machine.first_process() is None
    gone_s = until(lambda: name not in site.ready_nodes(), 90)
    testbed.start_node(name)
    back_s = until(lambda: name in site.ready_nodes(), 60)
    print(f"NotReady after {gone_s:.1f} s, Ready again after {back_s:.1f} s")
    assert output(site.kubectl, pod("after", "echo well", node=name)) == "well\n"


@pytest.mark.slow
def test_a_node_without_its_cable_keeps_running_and_returns(testbed: Testbed) -> None:
    site, name = testbed.site("site-a"), "site-a-n1"
    before = testbed.node(name).machine.programs()
    testbed.cut_node(name)
    until(lambda: name not in site.ready_nodes(), 90)
    assert testbed.node(name).machine.programs() == before
    testbed.mend_node(name)
    until(lambda: name in site.ready_nodes(), 60)


@pytest.mark.slow
def test_virtual_nodes_accept_pods_that_do_not_run(other_site: Site) -> None:
    other_site.add_virtual_nodes(50)
    assert len(other_site.ready_nodes()) == 50 + len(other_site.nodes)
    made = pod("nowhere", "false", node="virtual-7")
    made["spec"]["tolerations"] = [{"operator": "Exists"}]
    other_site.kubectl.apply(made)
    other_site.kubectl.wait("--for=jsonpath={.status.phase}=Running", "pod/nowhere")
    other_site.kubectl.run("delete", "pod", "nowhere", "--grace-period=0", "--force")
    other_site.kubectl.run("delete", "node", "--selector=kwok.x-k8s.io/node=fake")


def test_another_cluster_is_used_only_if_it_is_marked(testbed: Testbed, tmp_path: Path) -> None:
    site = testbed.site("site-a")
    program = testbed.binaries.path("kubectl")
    environment = {KUBECONFIG: str(site.kubeconfig)}
    assert existing_cluster({}) is None
    with pytest.raises(UnavailableError, match=f"{LABEL}=None"):
        existing_cluster(environment, program=program)
    site.kubectl.run("label", "namespace", "kube-system", f"{LABEL}=true")
    found = existing_cluster(environment, program=program)
    assert found is not None
    assert len(found.get("nodes")["items"]) == 2
    two = tmp_path / "two"
    two.write_text(site.kubeconfig.read_text().replace(
        '"contexts": [', '"contexts": [{"name": "work", "context": {}},'
    ))  # fmt: skip
    with pytest.raises(UnavailableError, match=f"{CONTEXT}='' names no context of"):
        existing_cluster({KUBECONFIG: str(two)}, program=program)
    # A name is not enough: the API server of a cluster of kind or k3d is on this machine.
    named = tmp_path / "named"
    named.write_text(site.kubeconfig.read_text().replace("site-a", "kind-a"))
    site.kubectl.run("label", "namespace", "kube-system", f"{LABEL}-")
    with pytest.raises(UnavailableError, match=f"{LABEL}=None"):
        existing_cluster({KUBECONFIG: str(named)}, program=program)


def stdout_of(testbed: Testbed, *words: str) -> str:
    """Return the output of `tools/testbed` for that testbed."""
    done = CliRunner().invoke(command, ["--name", testbed.layout.name, *words])
    assert done.exit_code == 0, done.output
    return done.output


def test_the_command_lists_running_testbeds(testbed: Testbed) -> None:
    status = json.loads(stdout_of(testbed, "status", "--output", "json"))
    assert [site["name"] for site in status["sites"]] == list(testbed.sites)
    for site in status["sites"]:
        programs = {**site["programs"], **site["nodes"][0]["programs"]}
        assert {"kube-apiserver", "kubelet", "containerd"} <= set(programs)
        assert all(Path(f"/proc/{number}").exists() for number in programs.values())
        assert stdout_of(testbed, "kubeconfig", site["name"]).strip() == site["kubeconfig"]
        assert f"  {site['name']}  {site['apiServer']}" in stdout_of(testbed, "status")
    assert testbed.layout.name in stdout_of(testbed, "list").split()


@pytest.mark.slow
def test_an_image_is_loaded_on_the_nodes_of_one_site(
    testbed: Testbed, other_site: Site, tmp_path: Path
) -> None:
    """A pod that never pulls runs there; at the other site it has no image."""
    (shell,) = [i for i in own_images(testbed.binaries) if i.reference == BUSYBOX_IMAGE]
    brought = replace(shell, reference=f"dlion.test/brought:{os.getpid()}")
    archive = brought.write(tmp_path / "brought.tar")
    stdout_of(testbed, "load-image", str(archive), "--site", "site-a")
    document = pod("brought", "echo here")
    container = document["spec"]["containers"][0]
    container |= {"image": brought.reference, "imagePullPolicy": "Never"}
    assert output(testbed.site("site-a").kubectl, document) == "here\n"
    other = other_site.kubectl
    other.apply(document)
    try:
        waiting = "jsonpath={.status.containerStatuses[0].state.waiting.reason}"
        other.wait(f"--for={waiting}=ErrImageNeverPull", "pod/brought")
    finally:
        other.run("delete", "pod", "brought", "--wait=true")


def test_missing_programs_are_reported_with_how_to_get_them(
    testbed: Testbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert testbed
    assert missing() == []
    monkeypatch.setenv("PATH", "/nowhere")
    lacking = missing()
    assert {line.split()[1] for line in lacking} >= {"containerd", "runc", "buildah", "tc"}
    assert all("make testbed-setup" in line for line in lacking)


def machine_traces() -> set[str]:
    """Return everything that a testbed of any name could have left on this machine.

    Testbeds of other sessions are left out. Of processes only those of this one's testbeds count:
    any other command line, as of a search, may name the folder.
    """
    found = {f"netns {path.name}" for path in Path("/run/netns").iterdir()}
    found |= {f"interface {path.name}" for path in Path("/sys/class/net").iterdir()}
    found |= {f"cgroup {p}" for root in hierarchies() for p in root.iterdir() if p.is_dir()}
    for name in (
        "vm/overcommit_memory",
        "kernel/panic",
        "kernel/panic_on_oops",
        "net/ipv4/ip_forward",
    ):
        found.add(f"sysctl {name} {Path('/proc/sys', name).read_text().strip()}")
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    found |= {f"mount {line.split()[4]}" for line in mounts}
    kept = kept_by_others()
    # As the tests below name them. Pods of the session's testbed, t, start and end meanwhile.
    own = re.compile(rf"dlion-testbed/[a-su-z]{os.getpid()}/".encode())
    for path in Path("/proc").glob("[1-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if own.search((path / "cmdline").read_bytes()):
                found.add(f"process {path.name}")
    others = [r"(netns|cgroup) .*dlion-[0-9]|interface dl[0-9]"]  # of `dlion run`
    for name in kept:
        things = f"netns testbed-{name}-|interface tb-{name}$|cgroup .*/dlion-testbed-{name}$"
        mounts_of_it = f"mount .*/dlion-testbed/{name}/|mount .*/netns/testbed-{name}-"
        others.append(f"{things}|{mounts_of_it}")
    return {each for each in found if not re.match("|".join(others), each)}


def kept_by_others() -> list[str]:
    """Return running testbeds of other sessions."""
    found = []
    for name in known_names():
        with contextlib.suppress(UnavailableError):  # incomplete or removed
            owner = State.load(name).owner
            if owner is not None and owner.pid != os.getpid() and owner.alive():
                found.append(name)
    return found


@pytest.mark.parametrize(
    "after",
    [*(pytest.param(each, marks=pytest.mark.slow) for each in ("wires", "machine")), "kubelet"],
)
def test_down_leaves_nothing_behind_when_up_was_killed(
    testbed: Testbed, after: str, tmp_path: Path
) -> None:
    """`up` is killed once the named object exists, so it cannot clean up."""
    name = f"k{os.getpid()}"
    before = machine_traces()
    with (tmp_path / "log").open("w") as log:
        starting = subprocess.Popen(
            [sys.executable, "-m", "testbed", "--name", name, "up"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=log,
            stderr=log,
        )
    folder = folder_of(name)
    there = {
        "wires": lambda: Path(f"/sys/class/net/tb-{name}").exists(),
        "machine": lambda: bool(processes_in(groups_of(name))),
        "kubelet": lambda: any((folder / "machines").glob("*/lib/.kubelet.pid")),
    }[after]
    until(lambda: there() or starting.poll() is not None, 60)
    starting.send_signal(signal.SIGKILL)
    assert starting.wait(10) == -signal.SIGKILL, (tmp_path / "log").read_text()
    if after == "kubelet":
        time.sleep(1)  # let it create more objects
    assert traces(name, folder)
    began_s = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "testbed", "--name", name, "down"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
        timeout=60,
    )
    print(f"down after {time.monotonic() - began_s:.1f} s")
    assert traces(name, folder) == []
    assert machine_traces() - before == set()


@pytest.mark.slow
def test_pods_of_separate_sites_reach_each_other_by_node_port_only(testbed: Testbed) -> None:
    """Removing that testbed leaves nothing behind, though pods ignore SIGTERM."""
    assert testbed
    before = machine_traces()
    name = f"s{os.getpid()}"
    with Testbed.up(name=name, sites=2, flat=False) as made:
        here, there = made.sites.values()
        script = (
            "trap '' TERM; mkdir /tmp/www; httpd -p 8000 -h /tmp/www; while true; do sleep 1; done"
        )
        here.kubectl.apply(pod("server", script, cpu="100m", port=8000), {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "server"},
            "spec": {
                "type": "NodePort",
                "selector": {"app": "server"},
                "ports": [{"port": 8000, "nodePort": 30080}],
            },
        })  # fmt: skip
        here.kubectl.wait("--for=condition=Ready", "pod/server")
        address = here.kubectl.get("pod", "server")["status"]["podIP"]
        node = here.nodes[0].layout.address
        assert output(there.kubectl, pod("ask", KNOCK.format(f"{node} 30080"))) == "through\n"
        assert output(there.kubectl, pod("ask", KNOCK.format(f"{address} 8000"))) == "cut\n"
    assert traces(name, folder_of(name)) == []
    assert machine_traces() - before == set()


def test_the_next_command_removes_what_a_killed_session_left(
    testbed: Testbed,
) -> None:
    before = machine_traces()
    name = f"o{os.getpid()}"
    owner = subprocess.Popen(
        [sys.executable, "-c", f"from testbed.sites import Testbed; Testbed.up(name={name!r})"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    until(lambda: bool(processes_in(groups_of(name))), 60)
    with exclusive():
        assert remove_orphans() == []  # its owner runs, and so does the session's
    owner.kill()
    owner.wait(10)
    with exclusive():
        assert remove_orphans() == [name]
    assert traces(name, folder_of(name)) == []
    assert machine_traces() - before == set()
    assert len(testbed.site("site-a").ready_nodes()) == 2
