"""Print the size of the sources at several commits: all files, and those that a job executes.

    python benchmarks/source_size.py COMMIT [COMMIT ...]

It counts files, lines and words of docstrings of the product (without the generated wire format),
words of the pages, and tests. Executed files are DLion's modules that any process of a short
`dlion run` of the main example imports, and those that the operator's process imports.
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("api", "operator", "worker", "cli")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

HOOK = """
import os, sys
def note(event, arguments):
    if event == "import" and arguments[0].startswith("dlion_"):
        with open(os.path.join(os.environ["IMPORTED"], str(os.getpid())), "a") as file:
            file.write(arguments[0] + "\\n")
sys.addaudithook(note)
"""
RUN = (
    "run", "examples/digits.yaml", "--set", "trainer.stop={maxSteps: 5}", "--out",
)  # fmt: skip
OPERATOR = "import dlion_operator.__main__, importlib\nimportlib.import_module('{}')"
OPERATOR_PROCESSES = ("dlion_operator.controller.process", "dlion_operator.process")


def sizes(tree: Path) -> dict[str, int]:
    """Return the counts of one tree."""
    found = {"files": 0, "lines": 0, "docstring words": 0}
    for path in (path for source in SOURCES for path in (tree / source).rglob("*.py")):
        if "wire" in path.parts:
            continue
        text = path.read_text()
        found["files"] += 1
        found["lines"] += text.count("\n")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, DOCUMENTED):
                found["docstring words"] += len((ast.get_docstring(node) or "").split())
    pages = [*tree.glob("*.md"), *(tree / "docs").rglob("*.md")]
    found["words of pages"] = sum(len(page.read_text().split()) for page in pages)
    found["test functions"] = sum(
        path.read_text().count("\ndef test_") for path in (tree / "tests").rglob("test_*.py")
    )
    return found


def executed(tree: Path, *command: str) -> int:
    """Return how many of our modules the processes of a command import."""
    with tempfile.TemporaryDirectory() as folder:
        hook, imported = Path(folder, "hook"), Path(folder, "imported")
        hook.mkdir()
        imported.mkdir()
        (hook / "sitecustomize.py").write_text(HOOK)
        paths = [hook, *(tree / source for source in SOURCES)]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "IMPORTED": str(imported),
        }
        subprocess.run(
            [sys.executable, *command], cwd=tree, env=environment, check=False, capture_output=True
        )
        names = {name for file in imported.iterdir() for name in file.read_text().split()}
    return sum(_is_file(tree, name) for name in names)


def _is_file(tree: Path, module: str) -> bool:
    """Report whether a module is one of our files, not a package or a name in one."""
    relative = Path(*module.split(".")).with_suffix(".py")
    return any((tree / source / relative).is_file() for source in SOURCES)


def measure(commit: str) -> dict[str, int]:
    """Return the figures of one commit."""
    done = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True)
    if done.returncode:
        sys.exit(f"{commit}: {done.stderr.decode().strip()}")
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as tar:
            tar.extractall(tree, filter="data")
        found = sizes(tree)
        out = str(tree / "out")
        found["files executed by dlion run"] = executed(tree, "-m", "dlion_cli", *RUN, out)
        found["files executed by the operator"] = max(
            executed(tree, "-c", OPERATOR.format(process)) for process in OPERATOR_PROCESSES
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("commits", nargs="*", default=["HEAD"], metavar="COMMIT")
    commits = parser.parse_args().commits
    columns = [measure(commit) for commit in commits]
    print(f"| {'':32} |" + "".join(f" {commit:>10} |" for commit in commits))
    print("|---|" + "---:|" * len(commits))
    for name in columns[0]:
        print(f"| {name:32} |" + "".join(f" {column[name]:>10,} |" for column in columns))


if __name__ == "__main__":
    main()
