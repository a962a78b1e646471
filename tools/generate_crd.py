"""Writes crds/dlionjob.yaml from the manifest's and the status' model; `--check` only compares."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

from dlion_api.document import schema
from dlion_api.names import GROUP, KIND, VERSION
from dlion_api.spec import Job
from dlion_api.status import FRESH, Status

TARGET = Path(__file__).parent.parent / "crds" / "dlionjob.yaml"
HEAD = "# Made by tools/generate_crd.py from dlion_api.spec and dlion_api.status; do not edit.\n"
COLUMNS = (
    ("State", "string", ".status.state"),
    ("Progress", "integer", ".status.trainerStatus.progressPercentage"),
    ("Sites", "string", ".status.readySites"),
    ("Workers", "string", ".status.readyWorkers"),
    ("Steps/s", "string", ".status.stepsPerSecond"),
    ("Age", "date", ".metadata.creationTimestamp"),
)


def root_schema() -> dict[str, Any]:
    """The schema of a whole object: of its metadata a CRD may bound the name only."""
    root = schema(Job)
    name = root["properties"]["metadata"]["properties"]["name"]
    root["description"] = Job.__doc__
    root["properties"] |= {
        "apiVersion": {"type": "string"},
        "kind": {"type": "string"},
        "metadata": {"type": "object", "properties": {"name": without_description(name)}},
        "status": schema(Status) | {"default": FRESH},
    }
    return root


def without_description(node: dict[str, Any]) -> dict[str, Any]:
    """The same schema; metadata may not be described in a CRD."""
    return {key: value for key, value in node.items() if key != "description"}


def definition() -> dict[str, Any]:
    """The CustomResourceDefinition."""
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path} for name, kind, path in COLUMNS
        ],
        "schema": {"openAPIV3Schema": root_schema()},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{KIND.lower()}s.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": f"{KIND.lower()}s",
                "singular": KIND.lower(),
                "shortNames": ["dlj"],
                "categories": ["all"],
            },
            "versions": [version],
        },
    }


class _Plain(yaml.SafeDumper):
    """YAML without anchors, which `kubectl` reads but people do not."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - PyYAML's signature
        return True


def text() -> str:
    """The file's contents."""
    return HEAD + yaml.dump(definition(), Dumper=_Plain, sort_keys=False, width=100)


def main() -> int:
    """Writes or compares; 1 when the file is not what the model says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only")
    if not parser.parse_args().check:
        TARGET.write_text(text(), encoding="utf-8")
        return 0
    if TARGET.is_file() and TARGET.read_text(encoding="utf-8") == text():
        return 0
    print(f"{TARGET.name} is not what the model says: run tools/generate_crd.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
