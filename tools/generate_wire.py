"""Generate `dlion_api.wire` from `api/proto`; `--check` only compares."""

from __future__ import annotations

import argparse
import filecmp
import shutil
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "api" / "proto"
TARGET = ROOT / "api" / "dlion_api" / "wire"


def generate(out: Path) -> None:
    """Write messages, stubs and type information for every `.proto` below `out`."""
    sources = sorted(str(path) for path in PROTO.rglob("*.proto"))
    # protoc-gen-mypy is beside this interpreter in any virtual environment.
    plugin = Path(sys.executable).parent / "protoc-gen-mypy"
    code = protoc.main(
        ["protoc", f"-I{PROTO}", f"--plugin=protoc-gen-mypy={plugin}", f"--python_out={out}",
         f"--grpc_python_out={out}", f"--mypy_out={out}", *sources]
    )  # fmt: skip
    if code:
        sys.exit(code)
    (out / "dlion_api" / "wire" / "__init__.py").write_text(
        '"""Generated from `api/proto` by `make generate`; do not edit."""\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 on a difference")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        generate(out)
        fresh = sorted((out / "dlion_api" / "wire").iterdir())
        if arguments.check:
            stale = [
                path.name
                for path in fresh
                if not (TARGET / path.name).exists()
                or not filecmp.cmp(path, TARGET / path.name, shallow=False)
            ]
            if stale:
                sys.exit(f"{', '.join(stale)}: out of date: run `make generate`")
            return
        TARGET.mkdir(exist_ok=True)
        for path in fresh:
            shutil.copy(path, TARGET / path.name)


if __name__ == "__main__":
    main()
