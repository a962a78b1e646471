"""Measure the bytes between the operators of sites, by link, as the kernel counts them.

They are those of each connection from one operator process to another's federation port: the bytes
of the TCP stream in both directions (with TLS and HTTP/2), and the headers of IPv4 and TCP of each
segment.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping

HEADERS_BYTES = 20 + 32
"""Headers of a segment: IPv4, and TCP with time stamps."""

_COUNT = re.compile(r"\b(bytes_sent|bytes_received|segs_out|segs_in):(\d+)")
_PEER = re.compile(r"^\S+\s+\S+\s+\S+\s+\S+:(\d+)\s.*?pid=(\d+)")

Link = tuple[str, str]
"""Two sites, sorted by name."""


def link_bytes(ports: Mapping[int, str], pids: Mapping[int, str]) -> dict[Link, int]:
    """Return the bytes so far on every link.

    `ports` gives the site that listens on each, `pids` the site of each operator process.
    """
    listed = subprocess.run(
        ["ss", "-tinpHO", "state", "established"], capture_output=True, text=True, check=True
    )
    found: dict[Link, int] = {}
    for line in listed.stdout.splitlines():
        match = _PEER.match(line)
        if match is None:
            continue
        site, caller = ports.get(int(match[1])), pids.get(int(match[2]))
        if site is None or caller is None:
            continue
        counts = {name: int(number) for name, number in _COUNT.findall(line)}
        segments = counts.get("segs_out", 0) + counts.get("segs_in", 0)
        stream = counts.get("bytes_sent", 0) + counts.get("bytes_received", 0)
        one, other = sorted((site, caller))
        found[one, other] = found.get((one, other), 0) + stream + HEADERS_BYTES * segments
    return found
