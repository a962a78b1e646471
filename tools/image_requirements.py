"""Prints the part of requirements.lock that one image installs, line for line with its hashes.

Run by the Dockerfile while an image is built, so it needs nothing but Python: no index is asked and
nothing is resolved. What an extra needs is found by the notes `# via` that the lock keeps beside
each package; markers stay, so that the installer picks what is for its platform.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_NOTE = re.compile(r"\s+#\s+(?:via\s+)?(?!via$)([A-Za-z0-9].*)")
_ROOT = "dlion"


@dataclass(frozen=True)
class Entry:
    """One package at one version; a package may have several, told apart by their markers."""

    name: str
    lines: list[str] = field(default_factory=list)
    needed_by: set[str] = field(default_factory=set)

    @property
    def text(self) -> str:
        """The requirement and its hashes, without the notes."""
        return "\n".join(line for line in self.lines if not line.lstrip().startswith("#"))


def name_of(requirement: str) -> str:
    """The name in its normal form: `PyYAML>=6` is `pyyaml`."""
    found = _NAME.match(requirement.strip())
    if found is None:
        raise ValueError(f"{requirement!r} is no requirement: it has to begin with a name")
    return re.sub(r"[-_.]+", "-", found.group()).lower()


def entries_of(lock: str) -> list[Entry]:
    """Every package that the lock names. Raises: ValueError where one has no hash."""
    entries: list[Entry] = []
    for line in lock.splitlines():
        if line and not line.startswith((" ", "#")):
            entries.append(Entry(name_of(line)))
        if entries and line:
            entries[-1].lines.append(line)
            if note := _NOTE.match(line):
                entries[-1].needed_by.add(name_of(note.group(1)))
    for entry in entries:
        if "--hash=sha256:" not in entry.text:
            raise ValueError(f"the lock has no hash for {entry.name}: `make lock` writes them")
    return entries


def merged(entries: list[Entry], others: list[Entry]) -> list[Entry]:
    """Both, where what `others` names is as they have it (one more note of who needs it apart)."""
    replaced = {entry.name for entry in others}
    for entry in others:
        for same in entries:
            if same.name == entry.name:
                entry.needed_by.update(same.needed_by)
    return [*(entry for entry in entries if entry.name not in replaced), *others]


def roots_of(pyproject: str, extras: list[str]) -> set[str]:
    """What the project and these extras ask for. Raises: ValueError naming the extras there are."""
    project = tomllib.loads(pyproject)["project"]
    known = project["optional-dependencies"]
    if unknown := sorted(set(extras) - set(known)):
        raise ValueError(f"no extra {', '.join(unknown)} in pyproject.toml; it has: "
                         f"{', '.join(sorted(known))}")  # fmt: skip
    asked = [*project["dependencies"], *(line for extra in extras for line in known[extra])]
    return {name_of(line) for line in asked}


def chosen(entries: list[Entry], roots: set[str], omitted: set[str]) -> list[Entry]:
    """The entries of those roots and of all that they need, but for `omitted` and what only they
    need. Raises: ValueError where the lock lacks a root, or has nothing by an omitted name."""
    known = {entry.name for entry in entries}
    if strange := sorted((roots | omitted) - known):
        raise ValueError(f"not in the lock: {', '.join(strange)}; `make lock` brings it up to date")
    wanted = roots - omitted
    while more := {
        entry.name for entry in entries if entry.needed_by & wanted and entry.name != _ROOT
    } - wanted - omitted:  # fmt: skip
        wanted |= more
    return [entry for entry in entries if entry.name in wanted]


def main() -> int:
    """Exit code: 2 with a message where the lock or the options do not fit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--extra", action="append", default=[], help="of pyproject.toml; repeatable"
    )
    parser.add_argument("--omit", action="append", default=[], help="leave out; repeatable")
    parser.add_argument("--project", type=Path, default=Path("pyproject.toml"))
    parser.add_argument(
        "--lock", type=Path, action="append", help="repeatable: a later one goes before an earlier"
    )
    options = parser.parse_args()
    try:
        roots = roots_of(options.project.read_text(), options.extra)
        omitted = {name_of(name) for name in options.omit}
        entries: list[Entry] = []
        for lock in options.lock or [Path("requirements.lock")]:
            entries = merged(entries, entries_of(lock.read_text()))
        picked = chosen(entries, roots, omitted)
    except (OSError, ValueError, KeyError) as error:
        print(f"image_requirements: {error}", file=sys.stderr)
        return 2
    print("\n".join(entry.text for entry in picked))
    return 0


if __name__ == "__main__":
    sys.exit(main())
