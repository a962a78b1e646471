"""Print the part of requirements.lock that an image installs, with hashes.

The Dockerfile runs it, so it needs only Python and no package index. It finds the packages of an
extra by the `# via` comments in the lock. Environment markers are kept.
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
    """One package at one version; a package may have several entries with different markers."""

    name: str
    lines: list[str] = field(default_factory=list)
    needed_by: set[str] = field(default_factory=set)

    @property
    def text(self) -> str:
        """Return the requirement and its hashes, without comments."""
        return "\n".join(line for line in self.lines if not line.lstrip().startswith("#"))


def name_of(requirement: str) -> str:
    """Return the normalized name: `PyYAML>=6` is `pyyaml`."""
    match = _NAME.match(requirement.strip())
    if match is None:
        raise ValueError(f"{requirement!r} is not a requirement: it must begin with a name")
    return re.sub(r"[-_.]+", "-", match.group()).lower()


def entries_of(lock: str) -> list[Entry]:
    """Return every package of the lock. Raises: ValueError for one without a hash."""
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
    """Merge both; entries of `others` replace those of the same name and keep their `needed_by`."""
    replaced = {entry.name for entry in others}
    for entry in others:
        for same in entries:
            if same.name == entry.name:
                entry.needed_by.update(same.needed_by)
    return [*(entry for entry in entries if entry.name not in replaced), *others]


def roots_of(pyproject: str, extras: list[str]) -> set[str]:
    """Return direct requirements of project and extras. Raises: ValueError for unknown extras."""
    project = tomllib.loads(pyproject)["project"]
    known = project["optional-dependencies"]
    if unknown := sorted(set(extras) - set(known)):
        raise ValueError(f"no extra {', '.join(unknown)} in pyproject.toml; it has: "
                         f"{', '.join(sorted(known))}")  # fmt: skip
    requirements = [*project["dependencies"], *(line for extra in extras for line in known[extra])]
    return {name_of(line) for line in requirements}


def chosen(entries: list[Entry], roots: set[str], omitted: set[str]) -> list[Entry]:
    """Return the entries of the roots and their dependencies, without `omitted` and theirs.

    Raises: ValueError if the lock lacks a root or an omitted package.
    """
    known = {entry.name for entry in entries}
    if missing := sorted((roots | omitted) - known):
        raise ValueError(f"not in the lock: {', '.join(missing)}; run `make lock`")
    wanted = roots - omitted
    while more := {
        entry.name for entry in entries if entry.needed_by & wanted and entry.name != _ROOT
    } - wanted - omitted:  # fmt: skip
        wanted |= more
    return [entry for entry in entries if entry.name in wanted]


def main() -> int:
    """Print the requirements. The exit code is 2 if lock and options do not match."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--extra", action="append", default=[], help="extra of pyproject.toml; repeatable"
    )
    parser.add_argument("--omit", action="append", default=[], help="package to omit; repeatable")
    parser.add_argument("--project", type=Path, default=Path("pyproject.toml"))
    parser.add_argument(
        "--lock",
        type=Path,
        action="append",
        help="repeatable; a later lock overrides an earlier one",
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
