"""HAProxy before a site's workers: TLS goes through as it is, and leads by its server name."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

PROGRAM = shutil.which("haproxy", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
_WITHIN_S = 10.0
_HEAD = """\
global
  maxconn 256
defaults
  mode tcp
  timeout connect 5s
  timeout client 60s
  timeout server 60s
"""


@contextmanager
def gateways(folder: Path, sites: Mapping[int, Mapping[str, str]]) -> Iterator[None]:
    """One on each port of 127.0.0.1; `sites` gives for each port the address behind each name."""
    assert PROGRAM is not None
    config = folder / "haproxy.cfg"
    config.write_text(_HEAD + "".join(_site(port, names) for port, names in sites.items()))
    process = subprocess.Popen([PROGRAM, "-db", "-f", str(config)])
    try:
        deadline_s = time.monotonic() + _WITHIN_S
        while not all(_answers(port) for port in sites):
            assert process.poll() is None, "haproxy has ended"
            assert time.monotonic() < deadline_s, "haproxy does not listen"
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait(_WITHIN_S)


def _site(port: int, names: Mapping[str, str]) -> str:
    lines = [
        f"frontend site-{port}",
        f"  bind 127.0.0.1:{port}",
        "  tcp-request inspect-delay 5s",
        "  tcp-request content accept if { req.ssl_hello_type 1 }",
        "  tcp-request content reject",
        *(f"  use_backend {name} if {{ req.ssl_sni -i {name} }}" for name in names),
    ]
    for name, address in names.items():
        lines += [f"backend {name}", f"  server worker {address}"]
    return "\n".join(lines) + "\n"


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0
