"""Test the job of a log line.

A line that a job's loop logs has that job as its object, also for kopf's JSON formatter and with
many loops at once. A line from outside the loops has none.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging

import kopf
import pytest
from kopf._core.actions.loggers import make_formatter

from dlion_operator.controller.work_queue import WorkQueue
from dlion_operator.kubernetes.log_context import add_job_to_logs
from dlion_operator.kubernetes.store import ObjectName

NAMES = [ObjectName("ml", name) for name in ("first", "second")]
LOG = logging.getLogger("dlion_operator.test")


def test_a_line_has_the_job_of_its_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(make_formatter(log_format=kopf.LogFormat.JSON))
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    monkeypatch.setattr(LOG, "level", logging.INFO)
    add_job_to_logs()
    asyncio.run(_two_loops())
    LOG.info("of no job")
    lines = [json.loads(line) for line in written.getvalue().splitlines()]
    assert len(lines) == 5
    for line in lines[:4]:
        of = line["object"]
        assert (of["kind"], f"{of['namespace']}/{of['name']}") == ("DLionJob", line["message"])
    assert "object" not in lines[4]


async def _two_loops() -> None:
    both, ended = asyncio.Barrier(len(NAMES)), asyncio.Barrier(len(NAMES) + 1)

    async def look(name: ObjectName) -> None:
        LOG.info("/".join(name))
        await both.wait()
        LOG.info("/".join(name))
        await ended.wait()

    loops = WorkQueue(look, lambda _: False, lambda *_: None)
    for name in NAMES:
        loops.trigger(name)
    await ended.wait()
    await loops.close()
