"""Generates docs/manifest.md from the manifest's model; `--check` only compares."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from generated_files import options, write_or_compare

from dlion_api.document import Explanation, explain
from dlion_api.names import API_VERSION, KIND
from dlion_api.spec import Job

TARGET = Path(__file__).parent.parent / "docs" / "manifest.md"
HEAD = f"""<!-- Made by tools/generate_manifest_reference.py from dlion_api.spec; do not edit. -->
# The manifest: `{KIND}` ({API_VERSION})

A job trains one model over several sites. Each field has its type, allowed values and default; an
object's fields are in a section of its own. `dlion explain [FIELD]` and, on a cluster, `kubectl
explain dlionjob.spec` print the same text. `dlion validate FILE` reports all problems of a file at
once. Apply the same manifest at every site; the hash by which sites compare their manifests
excludes fields marked *may differ*.

"""


def sections(explanation: Explanation) -> list[str]:
    """One section for each object, in the manifest's order."""
    own = [section(explanation)] if explanation.children else []
    return own + [text for child in explanation.children for text in sections(child)]


def section(explanation: Explanation) -> str:
    """A table of one object's fields, with its rules."""
    title = f"## `{explanation.path}`" if explanation.path else "## The document"
    rows = "\n".join(row(child) for child in explanation.children)
    rules = "".join(f"- {rule}.\n" for rule in merged(explanation.rules))
    head = "| field | type | default | what it is |\n|---|---|---|---|"
    return f"{title}\n\n{head}\n{rows}\n" + (f"\nRules:\n\n{rules}" if rules else "")


def merged(rules: Sequence[str]) -> list[str]:
    """The rules, with those in one that differ only in the name of a field."""
    prefix, suffix = "once its workers train, ", " may change only together with runId"
    names = [
        rule.removeprefix(prefix).removesuffix(suffix)
        for rule in rules
        if rule.startswith(prefix) and rule.endswith(suffix)
    ]
    others = [rule for rule in rules if not (rule.startswith(prefix) and rule.endswith(suffix))]
    return [f"{prefix}{', '.join(names)}{suffix}", *others] if names else others


def row(field: Explanation) -> str:
    """One row of a table."""
    differ = "" if field.hashed else " *May differ.*"
    values = ", ".join(field.allowed.split(" | "))
    kind = f"{field.type}: {values}" if values else field.type
    cells = [f"`{field.name}`", kind, default(field), field.doc + differ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def default(field: Explanation) -> str:
    """The default; an object's is shown with its fields."""
    if field.required:
        return "**required**"
    if field.default is None or isinstance(field.default, dict):
        return ""
    return f"`{json.dumps(field.default)}`"


def main() -> int:
    """Write or compare; return 1 if the file is out of date."""
    page = HEAD + "\n".join(sections(explain(Job)))
    return write_or_compare({TARGET: page}, check=options(__doc__).parse_args().check)


if __name__ == "__main__":
    sys.exit(main())
