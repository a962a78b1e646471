"""Generate the kustomize bases in config/ from the chart with helm; `--check` only compares.

One base watches all namespaces, the other only its own. Kustomize turns the settings file into a
ConfigMap with a hash in its name. So an overlay with other settings restarts the operator.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from generated_files import options, write_or_compare

ROOT = Path(__file__).parent.parent
HEAD = "# Made by tools/generate_kustomize_bases.py from helm/dlion; do not edit.\n"
NAMESPACE = "dlion-system"
CONFIG = "dlion-operator"
BASES: dict[str, tuple[str, ...]] = {
    "cluster": (),
    "namespaced": (
        "--set",
        f"namespaces={{{NAMESPACE}}}",
    ),  # without the CRD, which needs a ClusterRole
}
CHOSEN = ("--set", "site.name=site-a", "--set", "crds.enabled=false", "--kube-version", "1.34.0")
# Objects have their namespace: kustomize would add one to every object of an unknown kind.
KUSTOMIZATION = f"""\
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources:
- operator.yaml
configMapGenerator:
- name: {CONFIG}
  namespace: {NAMESPACE}
  files:
  - config.yaml
"""
WITH_CRD = KUSTOMIZATION.replace("resources:\n", "resources:\n- ../../crds\n")


def files(helm: str, base: str) -> dict[str, str]:
    """Return the content of a base by file name. Raises: CalledProcessError if helm fails."""
    with tempfile.TemporaryDirectory() as home:
        done = subprocess.run(
            [helm, "template", "dlion", str(ROOT / "helm" / "dlion"), "--namespace", NAMESPACE,
             *CHOSEN, *BASES[base]],
            env={**os.environ, "HELM_CACHE_HOME": home, "HELM_CONFIG_HOME": home,
                 "HELM_DATA_HOME": home, "KUBECONFIG": os.devnull},
            stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
    objects = [each for each in yaml.safe_load_all(done.stdout) if each]
    kept = [_plain(each) for each in objects if not _is_helms(each)]
    (settings,) = (
        each["data"]["config.yaml"]
        for each in objects
        if each["kind"] == "ConfigMap" and each["metadata"]["name"] == CONFIG
    )
    return {
        "kustomization.yaml": HEAD + (WITH_CRD if base == "cluster" else KUSTOMIZATION),
        "operator.yaml": HEAD + yaml.safe_dump_all(kept, sort_keys=False, width=100),
        "config.yaml": HEAD + settings,
    }


def _is_helms(document: dict[str, Any]) -> bool:
    """Report whether it is Helm's test, or the ConfigMap that kustomize generates."""
    if document["kind"] == "ConfigMap":
        return bool(document["metadata"]["name"] == CONFIG)
    return "helm.sh/hook" in document["metadata"].get("annotations", {})


def _plain(document: dict[str, Any]) -> dict[str, Any]:
    """Return the object without Helm's labels and annotations."""
    for metadata in (document["metadata"], *_template(document)):
        labels = metadata["labels"]
        labels.pop("helm.sh/chart")
        labels["app.kubernetes.io/managed-by"] = "kustomize"
        annotations = metadata.get("annotations", {})
        annotations.pop("checksum/config", None)
    return document


def _template(document: dict[str, Any]) -> list[dict[str, Any]]:
    template = document.get("spec", {}).get("template")
    return [template["metadata"]] if template else []


def main() -> int:
    """Write or compare; return 1 if a file is out of date."""
    parser = options(__doc__)
    parser.add_argument("--helm", default=shutil.which("helm"), help="path of helm")
    arguments = parser.parse_args()
    if arguments.helm is None:
        parser.error("no helm command on the PATH: give one with --helm")
    generated = {
        ROOT / "config" / base / name: contents
        for base in BASES
        for name, contents in files(arguments.helm, base).items()
    }
    return write_or_compare(generated, check=arguments.check)


if __name__ == "__main__":
    sys.exit(main())
