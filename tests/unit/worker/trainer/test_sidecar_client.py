"""Tests of the client of the sidecar.

A sidecar with unknown records, as of another release, is called again at growing intervals. The log
has the reason. A record that cannot be encoded keeps no other one from the sidecar.

Left out: a sidecar that restarts (tests/local/test_sidecar.py).
"""

from __future__ import annotations

import logging
import math
import socket
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from dlion_api import VERSION
from dlion_api.protocol.measurements import CpuAllowance, SpeedProbe
from dlion_api.protocol.sidecar_protocol import decode
from dlion_worker.trainer.background.sidecar_client import SidecarClient

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

WATCHED_S = 0.7
MAX_CALLS = 6
"""Enough for pauses of at least 0.05, 0.1, 0.2 and 0.4 s, with a margin."""


def test_a_sidecar_of_another_release_is_called_at_growing_intervals(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls = 0
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        listener.settimeout(0.05)
        client = SidecarClient(tmp_path / "s")
        end_s = time.monotonic() + WATCHED_S
        with caplog.at_level(logging.WARNING):
            while time.monotonic() < end_s or not caplog.records:
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    continue
                calls += 1
                with connection:
                    connection.sendall(b'{"kind":"OfTomorrow"}\n')
                    connection.recv(65536)
        client.close()
    assert 1 <= calls <= MAX_CALLS
    assert "local message of unknown kind (given: 'OfTomorrow')" in caplog.text
    assert f"its image must be of this release ({VERSION})" in caplog.text


def test_a_record_that_cannot_be_encoded_keeps_no_other_from_the_sidecar(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    probe, later = SpeedProbe(8, 1.0, 1.0, 0.0, None, 8), CpuAllowance(1.0, 0.0, 0.0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        client = SidecarClient(tmp_path / "s")
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as lines:
            connection.settimeout(30)
            client.send(replace(probe, cpu_s=math.nan), probe)
            assert decode(lines.readline()) == probe
            client.send(later)
            assert decode(lines.readline()) == later
            client.close()
    assert "SpeedProbe" in caplog.text
    assert "every number must be finite" in caplog.text
