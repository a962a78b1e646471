"""Tests of a pod's environment.

Site, group and index give the rank of the manifest. A pod's address determines the family to listen
on, also IPv6. Mounts become the paths of the configuration, which loads. A missing or invalid
variable is reported with its name, its value and the allowed values.

Left out: becoming a process (tests/local/test_pods).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dlion_api import cluster_names as names
from dlion_api.errors import SpecError
from dlion_api.protocol.pod_config import PodConfig
from dlion_api.protocol.worker_config import WorkerConfig
from dlion_worker.pod.pod_environment import Pod

ENVIRONMENT = {
    names.GROUP_VARIABLE: "big",
    names.INDEX_VARIABLE: "1",
    names.POD_IP_VARIABLE: "10.1.2.3",
}


def document(**spec: Any) -> dict[str, Any]:
    groups = [{"name": "small", "workers": 3}, {"name": "big", "workers": 2}]
    sites = [{"name": name, "groups": groups} for name in ("plant-a", "plant-b")]
    trainer = {
        "program": {"builtin": "digits"},
        "dataset": {"name": "digits"},
        "stop": {"maxSteps": 1},
        **spec.pop("trainer", {}),
    }
    return {
        "apiVersion": "dlion.dev/v1alpha1",
        "kind": "DLionJob",
        "metadata": {"name": "test"},
        "spec": {"sites": sites, "trainer": trainer, **spec},
    }


def pod(
    root: Path, *, site: str = "plant-b", spec: dict[str, Any] | None = None, **env: str
) -> Pod:
    """Make a pod with its mounts; keywords replace or (empty) remove variables."""
    folder = root / "etc/dlion"
    folder.mkdir(parents=True, exist_ok=True)
    config = PodConfig(document(**(spec or {})), site, "dlion.example:7443", "keeper:7442")
    (folder / "pod.json").write_text(config.to_json())
    (folder / "ca.pem").write_text("a certificate")
    given = {key: value for key, value in {**ENVIRONMENT, **env}.items() if value}
    return Pod.read(root, given)


@pytest.mark.parametrize(
    ("site", "group", "index", "rank"),
    [("plant-a", "small", "0", 0), ("plant-a", "big", "1", 4), ("plant-b", "small", "2", 7),
     ("plant-b", "big", "1", 9)],
)  # fmt: skip
def test_the_manifest_gives_the_rank(
    tmp_path: Path, site: str, group: str, index: str, rank: int
) -> None:
    it = pod(tmp_path, site=site, DLION_GROUP=group, JOB_COMPLETION_INDEX=index)
    assert it.worker().rank == rank
    assert it.worker().name == f"{site}/{group}-{index}"


@pytest.mark.parametrize(
    ("address", "wildcard_host"), [("10.1.2.3", "0.0.0.0"), ("fd00::12", "::"), ("", "::")]
)
def test_the_pods_address_gives_the_family_to_listen_on(
    tmp_path: Path, address: str, wildcard_host: str
) -> None:
    assert pod(tmp_path, DLION_POD_IP=address).wildcard_host() == wildcard_host


def test_the_configuration_has_the_paths_of_the_mounts_and_loads(tmp_path: Path) -> None:
    it = pod(tmp_path, DLION_POD_IP="fd00::12")
    config = it.worker_config(listen_host=it.wildcard_host(), state_dir=tmp_path / "state")
    config.save(tmp_path / "config.json")
    loaded = WorkerConfig.load(tmp_path / "config.json")
    assert loaded == config
    assert loaded.keeper_address == "keeper:7442"
    assert (loaded.exchange_port, loaded.measuring_port) == (7440, 7441)
    assert (loaded.listen_host, loaded.advertise_host) == ("::", "fd00::12")
    assert loaded.authority_pem_path == str(tmp_path / "etc/dlion/ca.pem")
    assert loaded.token_path == str(tmp_path / "var/run/secrets/dlion/token")
    assert loaded.program_root == ""


def test_a_program_in_a_config_map_is_found_at_its_mount(tmp_path: Path) -> None:
    program = {"program": {"configMap": {"name": "net", "key": "net"}}}
    it = pod(tmp_path, spec={"trainer": program})
    config = it.worker_config(listen_host="::", state_dir=tmp_path)
    assert config.program_root == str(tmp_path / "etc/dlion-program")


def test_without_tls_no_authority_is_required(tmp_path: Path) -> None:
    it = pod(tmp_path, spec={"tls": {"mode": "Disabled"}})
    (tmp_path / "etc/dlion/ca.pem").unlink()
    assert it.authority_path() == ""


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"JOB_COMPLETION_INDEX": "2"}, "the manifest has 2 workers in group big of site plant-b"),
        ({"JOB_COMPLETION_INDEX": "-1"}, "completion index of an Indexed Job"),
        ({"JOB_COMPLETION_INDEX": "9" * 40}, "completion index of an Indexed Job"),
        ({"JOB_COMPLETION_INDEX": "²"}, "completion index of an Indexed Job"),
        ({"JOB_COMPLETION_INDEX": ""}, "JOB_COMPLETION_INDEX: wrong value"),
        ({"DLION_GROUP": "huge"}, "allowed: of plant-b: big, small"),
        ({"DLION_GROUP": ""}, "DLION_GROUP: wrong value"),
        ({"DLION_POD_IP": "plant-a.example"}, "an IPv4 or IPv6 address"),
        ({"DLION_POD_IP": ""}, "DLION_POD_IP: wrong value"),
    ],
)
def test_a_wrong_variable_is_named(tmp_path: Path, variables: dict[str, str], words: str) -> None:
    with pytest.raises(SpecError) as caught:
        pod(tmp_path, **variables).worker_config(listen_host="::", state_dir=tmp_path)
    assert words in str(caught.value)


def test_a_site_that_the_manifest_does_not_have_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="allowed: plant-a, plant-b"):
        pod(tmp_path, site="plant-c").worker()


def test_a_missing_authority_is_named(tmp_path: Path) -> None:
    it = pod(tmp_path)
    (tmp_path / "etc/dlion/ca.pem").unlink()
    with pytest.raises(SpecError, match=r"ca\.pem: is missing"):
        it.authority_path()


@pytest.mark.parametrize("content", ["", "{", "[]", json.dumps({"site": 3})])
def test_an_invalid_config_map_is_refused(tmp_path: Path, content: str) -> None:
    pod(tmp_path)
    (tmp_path / "etc/dlion/pod.json").write_text(content)
    with pytest.raises(SpecError, match=r"pod\.json"):
        Pod.read(tmp_path, ENVIRONMENT)
