"""Any cluster in a testbed's place, named by the user and marked for it: never one by accident.

With $DLION_TEST_KUBECONFIG the tests that need no more than one cluster use that one. Three things
stand between it and a cluster that somebody works with:

- the user's own configuration (~/.kube/config, $KUBECONFIG) is never looked at for a default;
- a file with several contexts is refused unless $DLION_TEST_CONTEXT names one: a *current* context
  changes under its user's feet. Tests get a copy of the file with that one alone, as whoever is
  given a file only (the operator, `dlion`, a proxy) goes by its current context;
- the cluster itself must say that tests may use it: by the label below on its kube-system
  namespace; one of kind or k3d need not, if its API server listens on this machine's loopback.

Tests of the project's own images need these on that cluster's nodes: $DLION_TEST_LOAD_IMAGES is the
command that brings an archive there.

And it must be vacant (`occupation`): tests make and delete the definition of DLionJob, and with it
all jobs. Else tests work in namespaces that they make and delete.
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
    """kubectl for the cluster that the environment names; None where it names none.

    Raises: UnavailableError where the cluster is not to be used, saying how to allow it.
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
            f"{LABEL}={labels.get(LABEL)!r}; allowed: 'true'. If nobody works with that cluster: "
            f"kubectl --kubeconfig={path} --context={context} label namespace kube-system "
            f"{LABEL}=true"
        )
    return kubectl


def occupation(kubectl: Kubectl) -> str:
    """What of somebody's DLion is in that cluster, which tests would take away; empty: nothing."""
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
    """`existing_cluster`, where nobody uses DLion: looked at once, before tests put jobs there.

    Raises: UnavailableError, with what is there.
    """
    kubectl = existing_cluster()
    if kubectl is not None and (there := occupation(kubectl)):
        raise UnavailableError(
            f"the cluster of {KUBECONFIG} is in use, and tests would take away what is there: "
            f"{there}. Name another cluster, or delete them"
        )
    return kubectl


def load_images(archives: Iterable[Path], environment: Mapping[str, str] = os.environ) -> None:
    """Brings these archives to the nodes of the cluster, by the command that the environment names.

    Raises: UnavailableError where it names none, or with what the command said.
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
            said = (done.stderr or done.stdout).strip()[-2000:]
            raise UnavailableError(
                f"{LOAD_IMAGES}, {archive.name}: exit code {done.returncode}: {said}"
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
    """A file of that context alone, its current one, for as long as this process lives."""
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
