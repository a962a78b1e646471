"""Environments with a fault: a silent resolver, a path that drops full packets, a full disk, an
image registry that refuses, a stopped or limited process of a pod.

All is real: sockets, network namespaces, mounts and control groups. It needs root.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import uuid
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlion_local.emulation.network.in_namespace import in_namespace, run_tool

if TYPE_CHECKING:
    from collections.abc import Iterator

    from testbed.kubectl import Kubectl

# ---- names and paths -----------------------------------------------------------------------------


@contextmanager
def silent_resolver(folder: Path) -> Iterator[list[str]]:
    """Return a command prefix under which the name server never answers."""
    address = f"127.{1 + os.getpid() % 250}.53.53"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((address, 53))
        file = folder / "resolv.conf"
        file.write_text(f"nameserver {address}\n")
        mount = f'mount --bind {file} /etc/resolv.conf && exec "$@"'
        yield ["unshare", "--mount", "sh", "-c", mount, "sh"]


NARROW_BYTES = 1280


@contextmanager
def narrow_path() -> Iterator[tuple[list[str], socket.socket]]:
    """Return a command prefix and a listening socket. The path between them has a smaller MTU, and
    a filter drops the router's ICMP messages."""
    mark = uuid.uuid4().hex[:6]
    near, router, far = (f"dlc{mark}{place}" for place in ("n", "r", "f"))
    try:
        for name in (near, router, far):
            run_tool("ip", "netns", "add", name)
        for host, number in ((near, 1), (far, 2)):
            network = f"10.255.{number}"
            run_tool("ip", "-n", router, "link", "add", f"to{number}", "type", "veth",
                     "peer", "name", "eth0", "netns", host)  # fmt: skip
            for where, device, last in ((router, f"to{number}", 1), (host, "eth0", 2)):
                run_tool("ip", "-n", where, "addr", "add", f"{network}.{last}/24", "dev", device)
                run_tool("ip", "-n", where, "link", "set", device, "up")
            run_tool("ip", "-n", host, "route", "add", "default", "via", f"{network}.1")
        run_tool("ip", "-n", router, "link", "set", "to1", "mtu", f"{NARROW_BYTES}")
        run_tool("ip", "-n", router, "link", "set", "to2", "mtu", f"{NARROW_BYTES}")
        enter = ["nsenter", f"--net=/run/netns/{router}"]
        run_tool(*enter, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        run_tool(*enter, "iptables", "-A", "OUTPUT", "-p", "icmp", "-j", "DROP")
        with in_namespace(far, lambda: socket.create_server(("10.255.2.2", 8446))) as server:
            yield ["nsenter", f"--net=/run/netns/{near}"], server
    finally:
        for name in (near, router, far):
            run_tool("ip", "netns", "del", name, check=False)


@contextmanager
def dropping(netns: str, *rules: str) -> Iterator[None]:
    """Drop packets that match any of these iptables rules in that namespace, inside the context.

    A rule begins with its chain.
    """
    enter = ["nsenter", f"--net=/run/netns/{netns}", "iptables"]
    split = [(rule.partition(" ")[0], rule.partition(" ")[2].split()) for rule in rules]
    try:
        for chain, words in split:
            run_tool(*enter, "-I", chain, *words, "-j", "DROP")
        yield
    finally:
        for chain, words in split:
            run_tool(*enter, "-D", chain, *words, "-j", "DROP", check=False)


# ---- disks ---------------------------------------------------------------------------------------


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a separate disk of that size at the folder."""
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


# ---- images --------------------------------------------------------------------------------------

PRIVATE = "private"
"""Repositories below this path require a user."""


@contextmanager
def registry(netns: str) -> Iterator[str]:
    """Return the address of an image registry without images, on that node's loopback.

    containerd speaks HTTP with a registry there.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path == "/v2/":
                self._answer(200, {})
            elif f"/{PRIVATE}/" in self.path:
                errors = [{"code": "UNAUTHORIZED", "message": "authentication required"}]
                self._answer(401, {"errors": errors})
            else:
                errors = [{"code": "MANIFEST_UNKNOWN", "message": "manifest unknown"}]
                self._answer(404, {"errors": errors})

        do_HEAD = do_GET

        def _answer(self, code: int, document: dict[str, Any]) -> None:
            body = json.dumps(document).encode()
            self.send_response(code)
            if code == 401:
                self.send_header("WWW-Authenticate", 'Basic realm="registry"')
            self.send_header("Docker-Distribution-Api-Version", "registry/2.0")
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = in_namespace(netns, lambda: ThreadingHTTPServer(("127.0.0.1", 0), Handler))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


# ---- pods ----------------------------------------------------------------------------------------


def container_id(pod: dict[str, Any], container: str = "trainer") -> str:
    """Return the container's id in the node's runtime."""
    (found,) = (
        each["containerID"].partition("://")[2]
        for each in pod["status"]["containerStatuses"]
        if each["name"] == container
    )
    return str(found)


def cpu_group(pod: dict[str, Any]) -> Path:
    """Return the control group that limits the CPU of the pod's trainer (version 1)."""
    wanted = container_id(pod)
    return next(
        Path(folder) for folder, _, _ in os.walk("/sys/fs/cgroup/cpu/") if folder.endswith(wanted)
    )


@contextmanager
def quota(pod: dict[str, Any], cores: float) -> Iterator[None]:
    """Limit the CPU of the pod's trainer to that number of cores, inside the context."""
    file = cpu_group(pod) / "cpu.cfs_quota_us"
    before = file.read_text()
    file.write_text(f"{cores * 100_000:.0f}")
    try:
        yield
    finally:
        file.write_text(before)


@contextmanager
def stopped_trainer(pod: dict[str, Any]) -> Iterator[None]:
    """Stop the trainer's process, but not its supervisor, inside the context."""
    pids = [int(line) for line in (cpu_group(pod) / "cgroup.procs").read_text().split()]
    (trainer,) = (pid for pid in pids if _is_trainer(pid))
    os.kill(trainer, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(trainer, signal.SIGCONT)


def _is_trainer(pid: int) -> bool:
    """Whether that process, by its id on this machine, trains. The supervisor is the first of its
    pod."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    (numbers,) = (line.split() for line in status.splitlines() if line.startswith("NSpid:"))
    return b"dlion_worker.trainer" in words and numbers[-1] != "1"


def evict(kubectl: Kubectl, name: str) -> None:
    """Evict a pod with the request that a drain of its node sends."""
    eviction = {
        "apiVersion": "policy/v1", "kind": "Eviction",
        "metadata": {"name": name, "namespace": kubectl.namespace},
    }  # fmt: skip
    path = f"/api/v1/namespaces/{kubectl.namespace}/pods/{name}/eviction"
    kubectl.run("create", "--raw", path, "-f", "-", text=json.dumps(eviction))
