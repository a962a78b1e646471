"""Any cluster in place of a testbed, named by the user and marked for tests.

With $DLION_TEST_KUBECONFIG the tests that need only one cluster use that one. Three rules protect a
cluster in use:

- The user's own configuration (~/.kube/config, $KUBECONFIG) is never a default.
- A file with several contexts is refused unless $DLION_TEST_CONTEXT names one, because the
  *current* context may change at any time. Tests get a copy of the file with that context alone. A
  program that gets only a file (the operator, `dlion`, a proxy) uses its current context.
- The cluster itself must allow tests, by the label below on its kube-system namespace. A cluster of
  kind or k3d needs no label if its API server listens on this machine's loopback.

Tests of the project's own images need these on that cluster's nodes: $DLION_TEST_LOAD_IMAGES is the
command that loads an archive there.

The cluster must not have DLion (`occupation`): tests create and delete the definition of DLionJob,
and with it all jobs. Otherwise tests work in namespaces that they create and delete.
"""

from __future__ import annotations

import atexit
import functools
import ipaddress
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import yaml

from dlion_api.errors import UnavailableError
from testbed.kubectl import Kubectl

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

LABEL = "dlion.dev/tests-allowed"
KUBECONFIG, CONTEXT = "DLION_TEST_KUBECONFIG", "DLION_TEST_CONTEXT"
LOAD_IMAGES = "DLION_TEST_LOAD_IMAGES"
_FILES = ("certificate-authority", "client-certificate", "client-key", "tokenFile")
_THROW_AWAY = ("kind-", "k3d-")
_OPERATOR = "app.kubernetes.io/name=dlion,app.kubernetes.io/component=operator"


def existing_cluster(
    environment: Mapping[str, str] = os.environ, *, program: Path | None = None
) -> Kubectl | None:
    """kubectl for the cluster that the environment names; None if it names none.

    Raises: UnavailableError if tests may not use the cluster; it states how to allow it.
    """
    if not environment.get(KUBECONFIG):
        return None
    path = Path(environment[KUBECONFIG])
    try:
        config = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise UnavailableError(f"{KUBECONFIG}={path} cannot be read: {error}") from None
    context = _context(config, environment.get(CONTEXT, ""), path)
    kubectl = Kubectl(program or _kubectl(), _alone(config, context, path), context)
    if context.startswith(_THROW_AWAY) and _is_loopback(_server(config, context)):
        return kubectl
    labels = kubectl.get("namespace", "kube-system")["metadata"].get("labels", {})
    if labels.get(LABEL) != "true":
        raise UnavailableError(
            f"context {context!r} of {path} is not marked for tests: its kube-system namespace has "
            f"{LABEL}={labels.get(LABEL)!r}; allowed: 'true'. If the cluster is not in use: "
            f"kubectl --kubeconfig={path} --context={context} label namespace kube-system "
            f"{LABEL}=true"
        )
    return kubectl


def occupation(kubectl: Kubectl) -> str:
    """DLion's objects in that cluster that tests would delete; empty if there are none."""
    found = []
    if kubectl.knows("dlionjobs.dlion.dev"):
        found += kubectl.get("dlionjobs.dlion.dev", "-A")["items"]
    kinds = "deployments,services,configmaps,serviceaccounts"
    found += kubectl.get(kinds, "-A", "-l", _OPERATOR)["items"]
    return ", ".join(
        f"{each['kind']} {each['metadata']['namespace']}/{each['metadata']['name']}"
        for each in found
    )


@functools.cache
def vacant_cluster() -> Kubectl | None:
    """`existing_cluster`, checked once that it has no DLion before tests create jobs there.

    Raises: UnavailableError that names DLion's objects.
    """
    kubectl = existing_cluster()
    if kubectl is not None and (there := occupation(kubectl)):
        raise UnavailableError(
            f"the cluster of {KUBECONFIG} is in use, and tests would delete its objects: "
            f"{there}. Name another cluster, or delete them"
        )
    return kubectl


def load_images(archives: Iterable[Path], environment: Mapping[str, str] = os.environ) -> None:
    """Load these archives on the nodes of the cluster, with the command that the environment names.

    Raises: UnavailableError if it names none, or with the command's output.
    """
    command = shlex.split(environment.get(LOAD_IMAGES, ""))
    if not command:
        raise UnavailableError(
            f"{LOAD_IMAGES} is not set: the command by which the nodes of the cluster of "
            f"{KUBECONFIG} get an image from an archive, whose path is put at its end, such as "
            "'kind load image-archive' or 'k3d image import -c NAME'"
        )
    for archive in archives:
        try:
            done = subprocess.run(
                [*command, str(archive)], capture_output=True, text=True, check=False
            )
        except OSError as error:
            raise UnavailableError(f"{LOAD_IMAGES}: {error}") from None
        if done.returncode != 0:
            output = (done.stderr or done.stdout).strip()[-2000:]
            raise UnavailableError(
                f"{LOAD_IMAGES}, {archive.name}: exit code {done.returncode}: {output}"
            )


def _context(config: Mapping[str, Any], chosen: str, path: Path) -> str:
    names = [str(context["name"]) for context in config.get("contexts") or []]
    if not chosen and len(names) == 1:
        return names[0]
    if chosen in names:
        return chosen
    raise UnavailableError(
        f"{CONTEXT}={chosen!r} names no context of {path}; it has: {', '.join(names) or 'none'}"
    )


def _alone(config: Mapping[str, Any], context: str, path: Path) -> Path:
    """Write a file with that context alone, as its current one, for the lifetime of this
    process."""
    chosen = _named(config, "contexts", context)
    alone: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": context,
        "contexts": [chosen],
        "clusters": [_named(config, "clusters", chosen["context"]["cluster"])],
        "users": [_named(config, "users", chosen["context"]["user"])],
    }
    for part, field in ((alone["clusters"][0], "cluster"), (alone["users"][0], "user")):
        part[field] = {
            name: str(path.parent.resolve() / value) if name in _FILES else value
            for name, value in part[field].items()
        }
    folder = Path(tempfile.mkdtemp(prefix="dlion-context-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    made = folder / "kubeconfig"
    made.touch(mode=0o600)
    made.write_text(yaml.safe_dump(alone))
    return made


def _named(config: Mapping[str, Any], kind: str, name: str) -> dict[str, Any]:
    return dict(next(each for each in config[kind] if each["name"] == name))


def _server(config: Mapping[str, Any], context: str) -> str:
    cluster = next(c["context"]["cluster"] for c in config["contexts"] if c["name"] == context)
    return str(next(c["cluster"]["server"] for c in config["clusters"] if c["name"] == cluster))


def _is_loopback(server: str) -> bool:
    host = urlsplit(server).hostname or ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address == ipaddress.ip_address("0.0.0.0")  # k3d writes that


def _kubectl() -> Path:
    found = shutil.which("kubectl")
    if found is None:
        raise UnavailableError(f"{KUBECONFIG} is set, but there is no kubectl command: install it")
    return Path(found)
