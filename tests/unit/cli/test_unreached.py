"""Proves: what of an environment a run ends before is told in one line, however much it is.
Leaves out: what that is (tests/unit/environments/test_happenings).
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


def test_one_line_names_what_never_comes(capsys: pytest.CaptureFixture[str]) -> None:
    warn_unreached(environment(2), 61)
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == (
        "dlion: environment test: the run ends at 61 s (stop.maxSeconds), before changes[1].at\n"
    )


def test_where_all_comes_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    warn_unreached(environment(2), 62)
    warn_unreached(environment(2), None)
    assert capsys.readouterr().err == ""


def test_of_many_a_few_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    warn_unreached(environment(MAX_NAMED + 3), 5)
    told = capsys.readouterr().err
    assert told.endswith(f"changes[{MAX_NAMED - 1}].at and 3 more\n")
    assert told.count("\n") == 1
