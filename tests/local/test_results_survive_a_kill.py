"""Test a result folder whose writer was killed by SIGKILL while it was writing.

Every record that was appended before can be read, and the folder can be used again.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from datetime import UTC, datetime

import numpy as np
import pytest

from dlion_api.protocol.progress import EventRecord
from dlion_results.run_folder.events import read_events
from dlion_results.run_folder.folder import ResultFolder
from dlion_results.summary.summary import Ending
from synthetic_run import Story, description

pytestmark = pytest.mark.patient

STORY = Story(workers=2, killed=None)
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)

WRITER = """
import itertools, sys
from datetime import UTC, datetime
from pathlib import Path
sys.path.insert(0, {support!r})
from dlion_api.names import Rank
from dlion_api.protocol.progress import EventRecord
from dlion_results.run_folder.folder import ResultFolder
from synthetic_run import Story, description

folder = ResultFolder.create(
    Path(sys.argv[1]), description(Story(workers=2)), now=datetime.now(UTC)
)
for number in itertools.count(1):
    folder.append(EventRecord(float(number), Rank(0), number, "Reason", "x" * 500))
    if number % 100 == 0:
        print(number, flush=True)
"""


def test_all_records_appended_before_a_sigkill_are_readable(tmp_path, request):
    support = str(request.config.rootpath / "tests" / "support")
    run = tmp_path / "run"
    command = [sys.executable, "-c", WRITER.format(support=support), str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        appended = [int(writer.stdout.readline()) for _ in range(20)]
        writer.send_signal(signal.SIGKILL)
    bad: list[str] = []
    found = list(read_events(run / "events.jsonl", bad.append))
    assert not bad
    assert len(found) >= appended[-1]
    assert [record.iteration for record in found] == list(range(1, len(found) + 1))
    (run / "state" / "w0").mkdir(parents=True)
    np.savez(run / "state" / "w0" / "checkpoint.npz", weights=np.zeros(2))
    with ResultFolder.create(run, description(STORY), now=NOW, resume=True) as folder:
        folder.append(EventRecord(1e6, found[0].rank, 0, "Resumed", ""))
        summary = folder.finish(Ending("maxSeconds"))
    assert summary["events"]["reasons"] == {"Reason": len(found), "Resumed": 1}
