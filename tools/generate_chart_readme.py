"""Generate helm/dlion/README.md from the comments in values.yaml; `--check` only compares.

A value's text is the comment directly above it. A mapping without comments on its parts has one
row.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from generated_files import options, write_or_compare

if TYPE_CHECKING:
    from collections.abc import Iterator

CHART = Path(__file__).parent.parent / "helm" / "dlion"
TARGET = CHART / "README.md"
HEAD = """<!-- Made by tools/generate_chart_readme.py from values.yaml; do not edit. -->
# The chart `dlion`

One site's operator with its rights, its settings and the definitions of `DLionJob` and
`DLionRuntime`. Installing,
upgrading, uninstalling, several sites: [docs/installing.md](../../docs/installing.md).

```
helm install dlion helm/dlion --namespace dlion-system --create-namespace \\
  --set site.name=plant-a --set images.registry=registry.example
```

Unknown values are refused (`values.schema.json`).

| value | default | what it is |
|---|---|---|
"""


@dataclass(frozen=True)
class Value:
    """One row of the table."""

    path: str
    default: str
    text: str


def values(source: str) -> list[Value]:
    """Return every value with a comment. Raises: ValueError for a value without one."""
    root = yaml.compose(source, Loader=yaml.SafeLoader)
    assert root is not None
    return list(_below(root, "", source.splitlines()))


def _below(node: yaml.Node, path: str, lines: list[str]) -> Iterator[Value]:
    assert isinstance(node, yaml.MappingNode)
    for key, value in node.value:
        full = f"{path}.{key.value}".lstrip(".")
        comment = _comment(lines, key.start_mark.line)
        if _is_divided(value, lines):
            yield from _below(value, full, lines)
        elif comment:
            default = json.dumps(yaml.safe_load(yaml.serialize(value)))
            yield Value(full, default, comment)
        else:
            raise ValueError(f"values.yaml: {full} has no comment on the line above it")


def _is_divided(node: yaml.Node, lines: list[str]) -> bool:
    """Report whether parts of a mapping have their own comments."""
    return (
        isinstance(node, yaml.MappingNode)
        and not node.flow_style
        and any(_comment(lines, key.start_mark.line) for key, _ in node.value)
    )


def _comment(lines: list[str], line: int) -> str:
    parts: list[str] = []
    while line > 0 and lines[line - 1].lstrip().startswith("#"):
        line -= 1
        parts.insert(0, lines[line].lstrip().removeprefix("#").strip())
    return " ".join(parts)


def text() -> str:
    rows = (
        [f"`{each.path}`", f"`{each.default}`", each.text]
        for each in values((CHART / "values.yaml").read_text(encoding="utf-8"))
    )
    table = ("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)
    return HEAD + "\n".join(table) + "\n"


def main() -> int:
    """Write or compare; return 1 if the file is out of date."""
    return write_or_compare({TARGET: text()}, check=options(__doc__).parse_args().check)


if __name__ == "__main__":
    sys.exit(main())
