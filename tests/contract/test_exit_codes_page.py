"""docs/errors-and-exit-codes.md has each exit code, its name, and whether a restart can help.

Left out: that each is given where the page says; the tests of the programs show that.
"""

from __future__ import annotations

import re
from pathlib import Path

from dlion_api.exit_codes import ExitCode

PAGE = (Path(__file__).parents[2] / "docs/errors-and-exit-codes.md").read_text(encoding="utf-8")


def test_every_exit_code_is_on_the_page_and_no_other() -> None:
    rows = re.findall(r"^\| (\d+) \| (\w+) \| (yes|no) \| (.+) \| (.*)\|$", PAGE, re.MULTILINE)
    told = [(int(code), name, fatal) for code, name, fatal, _, _ in rows]
    assert told == [(code.value, code.name, "yes" if code.fatal else "no") for code in ExitCode]


def test_every_failure_says_what_to_do() -> None:
    rows = re.findall(r"^\| (\d+) \| .+ \| (.*)\|$", PAGE, re.MULTILINE)
    assert [code for code, advice in rows if not advice.strip()] == [str(ExitCode.OK.value)]
