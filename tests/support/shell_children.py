"""Children of a process group that become a shell with a script, in place of DLion's programs."""

from __future__ import annotations

import os
from pathlib import Path

from dlion_local.runner.processes import ProcessGroup

SHELL = "shell_child"
"""The module that `ProcessGroup.fork` is to run; its only argument is the script."""

_MAIN = """
import os

def main(arguments):
    os.execvp("sh", ["sh", "-c", *arguments])
"""


def shell_group(folder: Path) -> ProcessGroup:
    """A group in that folder whose children find `SHELL`, and have A=a in their environment."""
    package = folder / SHELL
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(_MAIN)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return ProcessGroup(folder, {"PYTHONPATH": path, "A": "a"})
