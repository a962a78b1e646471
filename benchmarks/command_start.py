"""Measure the start of commands without TensorFlow: the bar is 0.3 s for each.

    python benchmarks/command_start.py [--runs 15] [--against REV] [--only WORD ...]

Each command runs to its end without waits: cluster commands have a server that refuses every
request at once. `TAB` is what a shell runs for completions. A row has the median and the maximum of
the runs, in seconds of wall clock and of CPU. It also has the median's ratio to that of an empty
Python program in the same minute. With `--against` it also has the CPU seconds of another commit,
whose runs alternate with those of this tree, and the median ratio of the pairs. The exit code is 1
if the median wall clock of a command is above the bar, as on a busy machine.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from local_runs import commit
from start_up import checked_out

BAR_S = 0.3
PACKAGES = ("api", "operator", "worker", "cli")
ROOT = Path(__file__).parents[1]
COMMANDS = (
    "--help", "explain trainer.stop", "completion bash", "ls .", "init NEW",
    "validate --no-run JOB", "submit BAD", "render JOB --site plant-a", "submit JOB", "get",
    "get digits", "describe digits", "top digits", "events digits", "wait digits", "logs digits",
    "fetch digits", "suspend digits", "delete digits --yes",
    "scale digits --site plant-a --group small --workers 3", "trust show", "report .", "TAB",
    "get --context TAB",
)  # fmt: skip


class _Refusing(BaseHTTPRequestHandler):
    """Refuses every request at once."""

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
    """Write the kubeconfig of an API server that refuses everything."""
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


def timed(
    command: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> tuple[float, float, int]:
    """Return wall clock and CPU seconds of a process, and its exit code."""
    began_s = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={**os.environ, **environment},
    )  # fmt: skip
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - began_s
    process.returncode = os.waitstatus_to_exitcode(status)
    return wall_s, usage.ru_utime + usage.ru_stime, process.returncode


def one_run(
    text: str, new: str, folder: Path, tree: Path, config: Path
) -> tuple[float, float, int]:
    """Return `timed` of a command with the sources of `tree`; `new` is an unused name."""
    environment = {
        "KUBECONFIG": str(config),
        "PYTHONPATH": os.pathsep.join(str(tree / package) for package in PACKAGES),
        # An installed command has its modules compiled. Bytecode of the tree may be absent or old.
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPYCACHEPREFIX": str(config.parent / "bytecode"),
    }
    files = {"NEW": new, "JOB": "job.yaml", "BAD": "bad.yaml"}
    words = [files.get(word, word) for word in text.split()]
    if words[-1] == "TAB":
        line = ["dlion", *words[:-1]]
        environment |= {
            "_DLION_COMPLETE": "bash_complete",
            "COMP_WORDS": " ".join([*line, ""]),
            "COMP_CWORD": str(len(line)),
        }
        words = []
    run = "import sys; sys.argv[0] = 'dlion'; from dlion_cli.__main__ import main; main()"
    return timed([sys.executable, "-c", run, *words], folder, environment)


def described(
    rounds: Sequence[Sequence[tuple[float, float, int]]], base_s: float
) -> tuple[float, str]:
    """Return the median wall clock of this tree's runs, and a row of the table."""
    walls, cpus, codes = zip(*(each[0] for each in rounds), strict=True)
    wall_s = statistics.median(walls)
    row = (
        f"{wall_s:7.3f} {max(walls):8.3f} {statistics.median(cpus):7.3f} "
        f"{wall_s / base_s:6.1f} {codes[0]:5}"
    )
    if len(rounds[0]) > 1:
        earlier_s = statistics.median(each[1][1] for each in rounds)
        ratio = statistics.median(each[0][1] / each[1][1] for each in rounds)
        row += f" {earlier_s:10.3f} {ratio:8.2f}"
    return wall_s, row


def main() -> int:
    """Print the table; return 1 if a command is above the bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--against", metavar="REV", help="another commit to compare with")
    parser.add_argument("--only", metavar="WORD", nargs="+", help="commands that begin with one")
    options = parser.parse_args()
    runs, late = options.runs, []
    commands = [each for each in COMMANDS if each.split()[0] in (options.only or each.split())]
    with tempfile.TemporaryDirectory() as name, cluster(Path(name)) as config:
        folder = Path(name)
        job = (ROOT / "examples" / "digits.yaml").read_text()
        (folder / "job.yaml").write_text(job)
        (folder / "bad.yaml").write_text(job.replace("maxSeconds", "maxSecond"))
        trees = [ROOT]
        if options.against:
            (folder / "earlier").mkdir()
            trees.append(checked_out(options.against, folder / "earlier", PACKAGES))
        empty = [timed([sys.executable, "-c", ""], folder, {})[0] for _ in range(runs)]
        base_s = statistics.median(empty)
        print(f"commit {commit()}; an empty Python program: {base_s:.3f} s; bar {BAR_S} s\n")
        compared = f" {options.against:>10} {'in pairs':>8}" if options.against else ""
        columns = f"{'command':45} {'wall':>7} {'longest':>8} {'CPU':>7} {'ratio':>6} {'code':>5}"
        print(columns + compared)
        for number, text in enumerate(commands):
            rounds = [
                [
                    one_run(text, f"new-{number}-{run}-{place}", folder, tree, config)
                    for place, tree in enumerate(trees)
                ]
                for run in range(runs + 1)
            ]
            wall_s, row = described(rounds[1:], base_s)  # the first run compiles its imports
            print(f"{text:45} {row}", flush=True)
            if wall_s > BAR_S:
                late.append(text)
    if late:
        print(f"\nabove {BAR_S} s: {', '.join(late)}")
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
