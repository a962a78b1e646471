"""Measure trainers from inside: CPU by part, state of the links. Only for benchmarks.

Python loads this module at start if its folder is in PYTHONPATH. It is active only in the server
that forks the trainers, if DLION_PROBE_DIR is set. Each trainer then appends a JSON line per step
to `<pid>.jsonl` there. The line has CPU seconds by part of the exchange (exclusive, by thread
clocks), CPU seconds by thread, and private memory. With DLION_PROBE_LINKS_S another thread appends
the state of every link at that interval.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

_FOLDER = os.environ.get("DLION_PROBE_DIR", "")
_LINKS_S = float(os.environ.get("DLION_PROBE_LINKS_S", "0"))


class Clocks:
    """CPU seconds of named parts, summed over threads."""

    def __init__(self) -> None:
        self.spent_s: Counter[str] = Counter()
        self._inside = threading.local()

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """Count the cost of that function from now on, without that of wrapped functions in it."""
        function = getattr(owner, name)

        def timed(*arguments: Any, **keywords: Any) -> Any:
            outer = getattr(self._inside, "nested_s", 0.0)
            self._inside.nested_s = 0.0
            began_s = time.thread_time()
            try:
                return function(*arguments, **keywords)
            finally:
                took_s = time.thread_time() - began_s
                self.spent_s[part] += took_s - self._inside.nested_s
                self._inside.nested_s = outer + took_s

        setattr(owner, name, timed)


def _install() -> None:
    from dlion_core.codecs.payload import GradientPart
    from dlion_core.lifecycle import reporting, step_cycle
    from dlion_core.links import framing, send_queue
    from dlion_core.policies.gradient import gradient_exchange, gradient_selectors, magnitudes
    from dlion_worker.trainer import loop
    from dlion_worker.training import model, replica
    from dlion_worker.transport import peer_exchange as exchange

    clocks = Clocks()
    clocks.wrap(model.FlatModel, "step", "gradient (its Python thread)")
    clocks.wrap(magnitudes.Magnitudes, "measure", "select")
    clocks.wrap(magnitudes.Magnitudes, "count", "select")
    clocks.wrap(magnitudes.Magnitudes, "largest", "select")
    clocks.wrap(gradient_selectors, "encode_selected", "encode")
    clocks.wrap(gradient_selectors, "encode_whole", "encode")
    clocks.wrap(gradient_exchange, "decode_gradient", "decode")
    clocks.wrap(GradientPart, "add_to", "add")
    clocks.wrap(gradient_exchange, "combined_gradient", "add")
    clocks.wrap(gradient_exchange, "plus", "add")
    clocks.wrap(replica.LocalReplica, "apply_gradient", "optimizer")
    clocks.wrap(step_cycle.StepCycle, "handle", "policies, rest")
    clocks.wrap(loop.TrainingLoop, "_report", "reports to sidecar and coordinator")
    clocks.wrap(exchange.PeerExchange, "cpu_s", "reading clocks")
    clocks.wrap(send_queue.SendQueue, "next_frame", "cut into frames, checksum")
    clocks.wrap(framing.StreamReceiver, "parse", "parse frames")
    clocks.wrap(framing.StreamReceiver, "feed", "put together, checksum")
    _watch(clocks, exchange.PeerExchange, reporting.Reporter)


class Notes:
    """The file to which this trainer's probe writes."""

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self._lock = threading.Lock()

    def write(self, line: dict[str, Any]) -> None:
        """Append a line."""
        with self._lock, (Path(_FOLDER) / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def step(self, record: Any) -> None:
        """Append the present values at the end of a step."""
        line = {"kind": "step", "rank": record.rank, "iteration": record.iteration}
        times = {"process_s": time.process_time(), "parts": dict(self._clocks.spent_s)}
        self.write({**line, **times, "threads": _threads(), "private_bytes": _private_bytes()})


def _watch(clocks: Clocks, exchange_class: Any, reporter_class: Any) -> None:
    notes = Notes(clocks)
    clocks.wrap(notes, "step", "probe")
    step, start = reporter_class.step, exchange_class.start

    def noted_step(self: Any, record: Any) -> Any:
        notes.step(record)
        return step(self, record)

    def noted_start(self: Any) -> Any:
        port = start(self)
        if _LINKS_S:
            threading.Thread(target=_links, args=(self, notes.write), daemon=True).start()
        return port

    reporter_class.step, exchange_class.start = noted_step, noted_start


def _links(exchange: Any, write: Any) -> None:
    while True:
        time.sleep(_LINKS_S)
        now_s = time.monotonic()
        for peer, state in exchange.link_counters().items():
            write(
                {
                    "kind": "link",
                    "time_s": now_s,
                    "peer": peer,
                    "queued_bytes": state.queued_bytes,
                    "unacknowledged_bytes": state.unacknowledged_bytes,
                    "window_bytes": state.window_bytes,
                    "sent_total": state.sent_total,
                    "acknowledged_total": state.acknowledged_total,
                }
            )


def _threads() -> dict[str, float]:
    """Return CPU seconds by the kernel's name of the thread, or Python's name if there is one."""
    names = {t.native_id: t.name for t in threading.enumerate()}
    spent: Counter[str] = Counter()
    for task in Path("/proc/self/task").iterdir():
        number = int(task.name)
        try:
            name = names.get(number) or (task / "comm").read_text().strip()
            spent[name] += int((task / "schedstat").read_text().split()[0]) / 1e9
        except OSError:
            continue
    return dict(spent)


def _private_bytes() -> int:
    """Return the memory that this process does not share with the one that it is forked from."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Private_"))


if _FOLDER and "dlion_local.runner.fork_server" in sys.orig_argv:
    _install()
