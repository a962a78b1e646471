"""Generate the definitions in crds/ and the chart's templates from the model; `--check` only
compares.

The template adds the conditions `crds.enabled` and `crds.keep`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml
from generated_files import options, write_or_compare

from dlion_api.document import schema
from dlion_api.names import GROUP, KIND, RUNTIME_KIND, VERSION
from dlion_api.spec import Job, Runtime
from dlion_api.status import INITIAL_STATUS, Status

ROOT = Path(__file__).parent.parent
HEAD = "# Made by tools/generate_crd.py from dlion_api.spec and dlion_api.status; do not edit.\n"
_NAMED = "metadata:\n  name: {name}\n"
_TEMPLATED = """\
metadata:
  name: {name}
  labels:
    {{{{- include "dlion.labels" . | nindent 4 }}}}
  {{{{- if .Values.crds.keep }}}}
  annotations:
    # Jobs outlive the release.
    helm.sh/resource-policy: keep
  {{{{- end }}}}
"""
COLUMNS = (
    ("State", "string", ".status.state"),
    ("Progress", "integer", ".status.trainerStatus.progressPercentage"),
    ("Sites", "string", ".status.readySites"),
    ("Workers", "string", ".status.readyWorkers"),
    ("Steps/s", "string", ".status.stepsPerSecond"),
    ("Age", "date", ".metadata.creationTimestamp"),
)
WIDE_COLUMNS = (
    ("Run", "string", ".spec.runId"),
    ("Policy", "string", ".spec.exchange.policy"),
    ("Loss", "string", '.status.trainerStatus.metrics[?(@.name=="loss")].value'),
    ("Accuracy", "string", '.status.trainerStatus.metrics[?(@.name=="accuracy")].value'),
    ("ETA-Seconds", "integer", ".status.trainerStatus.estimatedRemainingSeconds"),
    ("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason'),
)
"""Shown only by `kubectl get -o wide`. The type `date` shows a future time as `<invalid>`, so the
ETA is in seconds."""
RUNTIME_COLUMNS = (
    ("Image", "string", ".spec.image"),
    ("Workers", "integer", ".spec.limits.maxWorkers"),
    ("Resources", "string", ".spec.limits.maxResources"),
    ("Age", "date", ".metadata.creationTimestamp"),
)


def root_schema() -> dict[str, Any]:
    """Return the schema of the object. A CRD may constrain only the name in the metadata."""
    root = schema(Job)
    name = root["properties"]["metadata"]["properties"]["name"]
    root["description"] = Job.__doc__
    root["properties"] |= {
        "apiVersion": {"type": "string"},
        "kind": {"type": "string"},
        "metadata": {"type": "object", "properties": {"name": without_description(name)}},
        "status": schema(Status) | {"default": INITIAL_STATUS},
    }
    return root


def without_description(node: dict[str, Any]) -> dict[str, Any]:
    """Remove descriptions, which a CRD may not have for metadata."""
    return {key: value for key, value in node.items() if key != "description"}


def runtime_schema() -> dict[str, Any]:
    """Return the same of a DLionRuntime, whose metadata has no limits of its own."""
    root = schema(Runtime)
    root["description"] = Runtime.__doc__
    root["properties"] |= {
        "apiVersion": {"type": "string"},
        "kind": {"type": "string"},
        "metadata": {"type": "object"},
    }
    return root


def job_definition() -> dict[str, Any]:
    """Return the CustomResourceDefinition of DLionJob."""
    version = {
        "subresources": {"status": {}},
        "additionalPrinterColumns": [
            *_columns(COLUMNS),
            *(column | {"priority": 1} for column in _columns(WIDE_COLUMNS)),
        ],
        "schema": {"openAPIV3Schema": root_schema()},
    }
    return _definition(KIND, version, {"shortNames": ["dlj"], "categories": ["all"]})


def runtime_definition() -> dict[str, Any]:
    """Return the CustomResourceDefinition of DLionRuntime."""
    version = {
        "additionalPrinterColumns": _columns(RUNTIME_COLUMNS),
        "schema": {"openAPIV3Schema": runtime_schema()},
    }
    return _definition(RUNTIME_KIND, version, {"shortNames": ["dlr"]})


def _columns(columns: tuple[tuple[str, str, str], ...]) -> list[dict[str, Any]]:
    return [{"name": name, "type": kind, "jsonPath": path} for name, kind, path in columns]


def _definition(kind: str, version: dict[str, Any], names: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{kind.lower()}s.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": f"{kind.lower()}s",
                "singular": kind.lower(),
                **names,
            },
            "versions": [{"name": VERSION, "served": True, "storage": True, **version}],
        },
    }


class _Plain(yaml.SafeDumper):
    """YAML without anchors, for readability."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - PyYAML's signature
        return True


def text(definition: dict[str, Any]) -> str:
    """Return the content of the definition."""
    return HEAD + yaml.dump(definition, Dumper=_Plain, sort_keys=False, width=100)


def template(definition: dict[str, Any]) -> str:
    """Return the content of the chart's template. Raises: ValueError if Helm would interpret a
    part.
    """
    plain = text(definition)
    if "{{" in plain:
        raise ValueError("the definition contains '{{', which Helm interprets as code: escape it")
    name = definition["metadata"]["name"]
    before, named, after = plain.partition(_NAMED.format(name=name))
    assert named, "the definition has more metadata than a name"
    begin, end = "{{- if .Values.crds.enabled }}\n", "{{- end }}\n"
    return begin + before + _TEMPLATED.format(name=name) + after + end


def main() -> int:
    """Write or compare; return 1 if a file is out of date."""
    files: dict[Path, str] = {}
    made = {
        ("dlionjob", "crd"): job_definition(),
        ("dlionruntime", "crd-runtime"): runtime_definition(),
    }
    for (name, in_chart), definition in made.items():
        files[ROOT / "crds" / f"{name}.yaml"] = text(definition)
        files[ROOT / "helm" / "dlion" / "templates" / f"{in_chart}.yaml"] = template(definition)
    return write_or_compare(files, check=options(__doc__).parse_args().check)


if __name__ == "__main__":
    sys.exit(main())
