"""Generate docs/manifest.md from the manifest's model; `--check` only compares."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from generated_files import options, write_or_compare

from dlion_api.document import Explanation, explain
from dlion_api.names import API_VERSION, KIND
from dlion_api.spec import Job

TARGET = Path(__file__).parent.parent / "docs" / "manifest.md"
HEAD = f"""<!-- Made by tools/generate_manifest_reference.py from dlion_api.spec; do not edit. -->
# The manifest: `{KIND}` ({API_VERSION})

A job trains one model over several sites; apply the same manifest at every site. In brackets: type
or values, limits and default. `dlion explain [FIELD]`, also with the rules between fields, and on a
cluster `kubectl explain dlionjob.spec` print the same.

- *May differ*: the hash by which sites compare their manifests excludes the field.
- *Next run*: a change takes effect in the next run.
- DNS label: lower-case letters, digits and dashes, no dash at either end. DNS name: labels, joined
  by dots, up to 253 characters. "Up to 40": characters of a text.

"""
LABEL = "lower-case letters, digits and dashes, no dash at either end"
NAMES = {f"{LABEL}, parts joined by dots": "DNS name", LABEL: "DNS label"}
UNIT = re.compile(r" In (\w+)\.$")
RANGE = re.compile(r"(?<=\d) to (?=\d)")
LENGTH = re.compile(r"(up to \d+) characters")
NEXT_RUN = " A change takes effect in the next run."


def sections(explanation: Explanation) -> list[str]:
    """Return one section for each object, in the manifest's order; equal ones have one."""
    titles = dict[str, list[str]]()
    for each in objects(explanation):
        title = f"`{each.path}`" if each.path else "The document"
        titles.setdefault(fields(each), []).append(title)
    return [f"## {', '.join(each)}\n\n{text}" for text, each in titles.items()]


def objects(explanation: Explanation) -> Iterator[Explanation]:
    """Return the object and those below it."""
    if explanation.children:
        yield explanation
        for child in explanation.children:
            yield from objects(child)


def fields(explanation: Explanation) -> str:
    """Return the fields of one object; the document also has its rules."""
    rows = "".join(f"{row(child)}\n" for child in explanation.children)
    rules = (
        ""
        if explanation.path
        else "".join(f"- {r[0].upper()}{r[1:]}.\n" for r in merged(explanation.rules))
    )
    return rows + (f"\nChanges:\n\n{rules}" if rules else "")


def merged(rules: Sequence[str]) -> list[str]:
    """Return the rules; those that differ only in the name of a field are merged."""
    prefix, suffix = "once its workers train, ", " may change only together with runId"
    names = [
        rule.removeprefix(prefix).removesuffix(suffix)
        for rule in rules
        if rule.startswith(prefix) and rule.endswith(suffix)
    ]
    others = [rule for rule in rules if not (rule.startswith(prefix) and rule.endswith(suffix))]
    return [f"{prefix}{', '.join(names)}{suffix}", *others] if names else others


def row(field: Explanation) -> str:
    """Return the item of one field."""
    doc = field.doc.replace(NEXT_RUN, "")
    marks = ["may differ"] * (not field.hashed) + ["next run"] * (doc != field.doc)
    doc = re.sub(r"docs/([\w-]+)\.md", r"[\1](\1.md)", doc)
    if (unit := UNIT.search(doc)) and field.name.lower().endswith(unit[1]):
        doc = doc.removesuffix(unit[0])
    mark = f" *{', '.join(marks).capitalize()}.*" if marks else ""
    return f"- `{field.name}` ({'; '.join(facts(field))}): {doc}{mark}"


def facts(field: Explanation) -> list[str]:
    """Return type or values, with limits; then the default or that it is required."""
    values = ", ".join(field.allowed.split(" | "))
    for long, short in NAMES.items():
        values = values.replace(long, short)
    values = values.replace("DNS name, up to 253 characters", "DNS name")
    values = LENGTH.sub(r"\1", RANGE.sub("-", values))
    is_text = field.type == "string" and not values.startswith("up to")
    kind = values if values and is_text else ", ".join(filter(None, (field.type, values)))
    if field.required:
        return [kind, "required"]
    if field.default in (None, "", []) or isinstance(field.default, dict):
        return [kind]
    return [kind, f"default `{json.dumps(field.default)}`".replace('"', "")]


def main() -> int:
    """Write or compare; return 1 if the file is out of date."""
    page = HEAD + "\n".join(sections(explain(Job)))
    return write_or_compare({TARGET: page}, check=options(__doc__).parse_args().check)


if __name__ == "__main__":
    sys.exit(main())
