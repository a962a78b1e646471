"""Test the line about parts of an environment that a run ends before.

It is one line for any number of parts.

Left out: which parts these are (tests/unit/environments/test_happenings).
"""

from __future__ import annotations

import pytest

from dlion_api.document import parse
from dlion_cli.inputs.unreached import MAX_NAMED, warn_unreached
from dlion_environments.model import Environment


def environment(count: int) -> Environment:
    changes = [{"at": {"seconds": 60 + k}, "cores": [2]} for k in range(count)]
    document = {"name": "test", "workers": [{"cores": 1}], "changes": changes}
    return parse(Environment, document)


def test_one_line_names_the_unreached_parts(capsys: pytest.CaptureFixture[str]) -> None:
    warn_unreached(environment(2), 61)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "dlion: environment test: the run ends at 61 s (stop.maxSeconds), before changes[1].at\n"
    )


def test_nothing_is_printed_if_all_parts_are_reached(capsys: pytest.CaptureFixture[str]) -> None:
    warn_unreached(environment(2), 62)
    warn_unreached(environment(2), None)
    assert capsys.readouterr().err == ""


def test_a_few_of_many_parts_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    warn_unreached(environment(MAX_NAMED + 3), 5)
    message = capsys.readouterr().err
    assert message.endswith(f"changes[{MAX_NAMED - 1}].at and 3 more\n")
    assert message.count("\n") == 1
