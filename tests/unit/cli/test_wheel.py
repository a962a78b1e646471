"""Test the content of the wheel.

It has every module and data file of the packages, and nothing else. Its metadata name both
commands.

Left out: its installation (tests/local/test_installed_wheel, in `make slow`).
"""

from __future__ import annotations

import zipfile
from pathlib import Path

from built_wheel import ROOT, build_wheel

FOLDERS = ("api", "operator", "worker", "cli")
DATA = (
    ".py", ".pyi", ".html", ".css", ".js", ".txt", ".yaml", ".json", ".tmpl", ".typed",
)  # fmt: skip


def test_the_wheel_has_the_files_of_the_packages(tmp_path: Path) -> None:
    with zipfile.ZipFile(build_wheel(tmp_path)) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (entries,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        text = archive.read(entries).decode()
    expected = {
        str(path.relative_to(ROOT / folder))
        for folder in FOLDERS
        for path in (ROOT / folder).glob("dlion*/**/*")
        if (path.is_file() and path.suffix in DATA) or path.name == "py.typed"
    }
    assert names == expected
    assert "\ndlion = dlion_cli.__main__:main" in text
    assert "\nkubectl-dlion = dlion_cli.__main__:main" in text
