"""How long commands without TensorFlow take to start: the bar is 0.3 s for each.

    python benchmarks/command_start.py [--runs 15]

Each command runs to its end with nothing to wait for: cluster commands have a server that refuses
every request at once. A row has the median and the longest of the runs, in seconds of wall clock
and of CPU, and the median's ratio to that of an empty Python program in the same minute. The exit
code is 1 if the median of a command's wall clock is above the bar, as on a machine that is busy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from local_runs import commit

BAR_S = 0.3
ROOT = Path(__file__).parents[1]
COMMANDS = (
    "--help", "explain trainer.stop", "completion bash", "ls .", "init NEW",
    "validate --no-run JOB", "submit BAD", "render JOB --site plant-a", "submit JOB", "get",
    "get digits", "describe digits", "top digits", "events digits", "wait digits", "logs digits",
    "fetch digits", "suspend digits", "delete digits --yes",
    "scale digits --site plant-a --group small --workers 3",
)  # fmt: skip


class _Refusing(BaseHTTPRequestHandler):
    """Answers every request at once."""

    def do_GET(self) -> None:
        content = json.dumps({"message": "no", "details": {}}).encode()
        self.send_response(403)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_POST = do_PATCH = do_DELETE = do_PUT = do_GET

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def cluster(folder: Path) -> Iterator[Path]:
    """The kubeconfig of an API server that refuses everything."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        config = {
            "current-context": "x",
            "clusters": [{"name": "c", "cluster": {"server": address}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "namespace": "ml"}}],
        }
        (folder / "config").write_text(json.dumps(config))
        yield folder / "config"
        server.shutdown()


def timed(command: Sequence[str], folder: Path, config: Path) -> tuple[float, float, int]:
    """Wall clock and CPU seconds of a process, and its exit code."""
    began_s = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={**os.environ, "KUBECONFIG": str(config)},
    )  # fmt: skip
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - began_s
    process.returncode = os.waitstatus_to_exitcode(status)
    return wall_s, usage.ru_utime + usage.ru_stime, process.returncode


def main() -> int:
    """Print the table; 1 if a command is above the bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=15)
    runs = parser.parse_args().runs
    late = []
    with tempfile.TemporaryDirectory() as name, cluster(Path(name)) as config:
        folder = Path(name)
        job = (ROOT / "examples" / "digits.yaml").read_text()
        (folder / "job.yaml").write_text(job)
        (folder / "bad.yaml").write_text(job.replace("maxSeconds", "maxSecond"))
        empty = [timed([sys.executable, "-c", ""], folder, config)[0] for _ in range(runs)]
        base_s = statistics.median(empty)
        print(f"commit {commit()}; an empty Python program: {base_s:.3f} s; bar {BAR_S} s\n")
        print(f"{'command':45} {'wall':>7} {'longest':>8} {'CPU':>7} {'ratio':>6} {'code':>5}")
        for text in COMMANDS:
            found = []
            for run in range(runs):
                files = {"NEW": f"new-{run}-{len(text)}", "JOB": "job.yaml", "BAD": "bad.yaml"}
                words = [files.get(word, word) for word in text.split()]
                found.append(timed([sys.executable, "-m", "dlion_cli", *words], folder, config))
            walls, cpus, codes = zip(*found, strict=True)
            wall_s = statistics.median(walls)
            print(
                f"{text:45} {wall_s:7.3f} {max(walls):8.3f} {statistics.median(cpus):7.3f} "
                f"{wall_s / base_s:6.1f} {codes[0]:5}"
            )
            if wall_s > BAR_S:
                late.append(text)
    if late:
        print(f"\nabove {BAR_S} s: {', '.join(late)}")
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
