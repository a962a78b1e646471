"""Test the parts of a testbed, without root.

Addresses never overlap. Names fit the limits of the kernel. Images are well-formed and
reproducible. Certificates name their users and rights. No cluster is used that was not named for
the tests.

Left out: all that runs (tests/cluster).
"""

from __future__ import annotations

import hashlib
import io
import json
import stat
import tarfile
import threading
import time
from ipaddress import ip_address, ip_network
from itertools import combinations
from typing import TYPE_CHECKING

import pytest
import yaml
from cryptography import x509

from dlion_api.errors import UnavailableError
from testbed.certificates import Authority
from testbed.existing import CONTEXT, KUBECONFIG, LOAD_IMAGES, existing_cluster, load_images
from testbed.groups import processes_in
from testbed.images import Image
from testbed.layout import MAX_NODES, MAX_SITES, Layout

if TYPE_CHECKING:
    from pathlib import Path

INTERFACE_NAME_LENGTH = 15


def test_no_two_networks_of_a_testbed_overlap() -> None:
    layout = Layout("a" * 10, MAX_SITES, MAX_NODES, base_octet=96)
    networks = [ip_network("10.96.0.0/24"), *(ip_network(s.network) for s in layout.sites)]
    assert not any(one.overlaps(other) for one, other in combinations(networks, 2))
    site = layout.sites[-1]
    inside = [ip_network(site.machine_network), ip_network(site.service_network)]
    inside += [ip_network(node.pod_network) for node in site.nodes]
    assert not any(one.overlaps(other) for one, other in combinations(inside, 2))
    assert all(network.subnet_of(ip_network(site.network)) for network in inside)
    assert all(
        ip_network(n.pod_network).subnet_of(ip_network(site.pod_network)) for n in site.nodes
    )
    addresses = [site.address, *(node.address for node in site.nodes)]
    assert len(set(addresses)) == len(addresses)
    assert all(ip_address(address) in ip_network(site.machine_network) for address in addresses)
    assert len({site.name for site in layout.sites}) == MAX_SITES
    assert len(layout.host_interface) <= INTERFACE_NAME_LENGTH


@pytest.mark.parametrize("name", ["", "A", "a-b", "../x", "a" * 11, "1a"])
def test_a_name_that_other_objects_may_have_is_refused(name: str) -> None:
    with pytest.raises(UnavailableError, match="allowed: a letter"):
        Layout(name, 1, 1, 96)


@pytest.mark.parametrize(
    ("sites", "nodes"), [(0, 1), (MAX_SITES + 1, 1), (1, -1), (1, MAX_NODES + 1)]
)
def test_a_testbed_of_no_site_or_too_many_machines_is_refused(sites: int, nodes: int) -> None:
    with pytest.raises(UnavailableError, match=r"allowed: [01] to"):
        Layout("a", sites, nodes, 96)
    assert Layout("a", 1, 0, 96).sites[0].nodes == ()


def test_an_image_has_the_form_of_docker_save_and_is_reproducible(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF")
    image = Image("dlion.test/x:1", {"bin/x": program}, ["/bin/x"], {"bin/y": "/bin/x"})
    archive = image.write(tmp_path / "image.tar")
    with tarfile.open(archive) as found:
        read = {m.name: found.extractfile(m).read() for m in found.getmembers()}  # type: ignore[union-attr]
    (entry,) = json.loads(read["manifest.json"])
    assert entry["RepoTags"] == ["dlion.test/x:1"]
    layer = read[entry["Layers"][0]]
    config = json.loads(read[entry["Config"]])
    assert config["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(layer).hexdigest()}"]
    with tarfile.open(fileobj=io.BytesIO(layer)) as files:
        assert files.getmember("bin/x").mode == 0o755
        assert files.getmember("bin/y").linkname == "/bin/x"
        assert files.getmember("tmp").mode == 0o1777
    assert archive.read_bytes() == image.write(tmp_path / "again.tar").read_bytes()


def test_a_certificate_names_user_groups_and_hosts_and_its_key_is_private(tmp_path: Path) -> None:
    authority = Authority.make(tmp_path, "ca")
    authority.issue("node", "system:node:a", ["system:nodes"], ["a", "10.97.0.11"])
    made = x509.load_pem_x509_certificate((tmp_path / "node.crt").read_bytes())
    made.verify_directly_issued_by(authority.certificate)
    assert made.subject.rfc4514_string() == "CN=system:node:a,O=system:nodes"
    names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["a"]
    assert names.get_values_for_type(x509.IPAddress) == [ip_address("10.97.0.11")]
    assert stat.S_IMODE((tmp_path / "node.key").stat().st_mode) == 0o600


def kubeconfig(tmp_path: Path, *contexts: str, server: str = "https://127.0.0.1:1") -> Path:
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps({
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": n, "context": {"cluster": "c", "user": "u"}} for n in contexts],
        "current-context": contexts[0],
    }))  # fmt: skip
    return path


def test_a_current_context_never_replaces_a_named_one(tmp_path: Path) -> None:
    path = kubeconfig(tmp_path, "kind-a", "production")
    with pytest.raises(UnavailableError, match=r"names no context of .*: kind-a, production"):
        existing_cluster({KUBECONFIG: str(path)}, program=tmp_path)
    with pytest.raises(UnavailableError, match="'kind-b' names no context"):
        existing_cluster({KUBECONFIG: str(path), CONTEXT: "kind-b"}, program=tmp_path)
    found = existing_cluster({KUBECONFIG: str(path), CONTEXT: "kind-a"}, program=tmp_path)
    assert found is not None
    assert found.context == "kind-a"


def test_a_written_file_has_the_named_context_as_its_current_one(tmp_path: Path) -> None:
    """The operator and `dlion` use the current context of a file."""
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps({
        "clusters": [
            {"name": "p", "cluster": {"server": "https://production.invalid"}},
            {"name": "t", "cluster": {
                "server": "https://127.0.0.1:1", "certificate-authority": "ca",
            }},
        ],
        "users": [{"name": "p", "user": {"token": "p"}}, {"name": "t", "user": {"token": "t"}}],
        "contexts": [
            {"name": "production", "context": {"cluster": "p", "user": "p"}},
            {"name": "kind-t", "context": {"cluster": "t", "user": "t"}},
        ],
        "current-context": "production",
    }))  # fmt: skip
    found = existing_cluster({KUBECONFIG: str(path), CONTEXT: "kind-t"}, program=tmp_path)
    assert found is not None
    text = found.kubeconfig.read_text()
    assert stat.S_IMODE(found.kubeconfig.stat().st_mode) == 0o600
    assert "production" not in text
    written = yaml.safe_load(text)
    assert written["current-context"] == "kind-t"
    assert written["users"] == [{"name": "t", "user": {"token": "t"}}]
    assert written["clusters"][0]["cluster"]["certificate-authority"] == str(tmp_path / "ca")


def test_no_variable_means_no_cluster_whatever_other_settings_exist(tmp_path: Path) -> None:
    path = kubeconfig(tmp_path, "kind-a")
    assert existing_cluster({"KUBECONFIG": str(path), "HOME": str(tmp_path)}) is None


def test_groups_removed_during_the_search_are_skipped(tmp_path: Path) -> None:
    """A kubelet in termination still removes the groups of pods."""
    enough = threading.Event()

    def come_and_go() -> None:
        while not enough.is_set():
            for pod in ("a", "b", "c"):
                (tmp_path / "pods" / pod / "container").mkdir(parents=True)
                (tmp_path / "pods" / pod / "container" / "cgroup.procs").write_text("7\n")
            for pod in ("a", "b", "c"):
                (tmp_path / "pods" / pod / "container" / "cgroup.procs").unlink()
                (tmp_path / "pods" / pod / "container").rmdir()
                (tmp_path / "pods" / pod).rmdir()

    (tmp_path / "cgroup.procs").write_text("5\n")
    kubelet = threading.Thread(target=come_and_go)
    kubelet.start()
    found: list[set[int]] = []
    deadline_s = time.monotonic() + 10
    try:
        while len(found) < 2_000 and time.monotonic() < deadline_s:
            found.append(processes_in([tmp_path]))
    finally:
        enough.set()
        kubelet.join()
    assert all({5} <= each <= {5, 7} for each in found)
    assert {5, 7} in found


def test_the_named_command_loads_images_into_another_cluster(tmp_path: Path) -> None:
    archives = [tmp_path / "one image.tar", tmp_path / "two.tar"]
    for each in archives:
        each.touch()
    folder = tmp_path / "node"
    folder.mkdir()
    load_images(archives, {LOAD_IMAGES: f"cp -t '{folder}'"})
    assert {each.name for each in folder.iterdir()} == {"one image.tar", "two.tar"}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("", "is not set: the command"),
        ("sh -c 'echo no such node >&2; exit 3' --", "exit code 3: no such node"),
        ("/nowhere/kind load", "/nowhere/kind"),
    ],
)
def test_a_failed_load_of_images_is_reported_with_the_reason(
    tmp_path: Path, command: str, message: str
) -> None:
    with pytest.raises(UnavailableError, match=LOAD_IMAGES) as caught:
        load_images([tmp_path / "one.tar"], {LOAD_IMAGES: command})
    assert message in str(caught.value)
