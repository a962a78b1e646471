"""Functions shared by the generators of this folder: write or compare their files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path


def options(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of a generator, with the option `--check`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="compare only")
    return parser


def write_or_compare(files: Mapping[Path, str], *, check: bool) -> int:
    """Write the files; with `check` compare only, and return 1 if one is out of date."""
    if not check:
        for path, content in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
        return 0
    stale = [
        path
        for path, content in files.items()
        if not path.is_file() or path.read_text(encoding="utf-8") != content
    ]
    for path in stale:
        print(f"{path} is out of date: run tools/{Path(sys.argv[0]).name}", file=sys.stderr)
    return int(bool(stale))
