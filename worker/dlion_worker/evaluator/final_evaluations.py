"""Final evaluations of a local run by its shared evaluator: requests and results as files.

At the end of a run each worker evaluates its replica, and the lead of each site those of all. A
trainer's quota may be a tenth of a core, and replicas may be equal. So trainers ask the evaluator,
which has no quota and evaluates equal weights once. A trainer evaluates itself if the evaluator is
away.
"""

import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np

from dlion_api.atomic_file import write_atomically
from dlion_core.lifecycle.reporting import EvaluationResult
from dlion_core.npz_errors import as_array
from dlion_core.policies.interface import Flat
from dlion_worker.training.evaluation import replica_hash
from dlion_worker.training.model import FlatModel, Snapshot
from dlion_worker.training.snapshot import write_npz

_LOG = logging.getLogger(__name__)

POLL_S = 0.05
MAX_AWAY_S = 5.0
"""Total seconds without an evaluator after which a trainer evaluates itself. The runner restarts a
dead evaluator sooner than that."""

_LOCK = "evaluator.lock"
_REQUEST = ".final"


class FinalEvaluations:
    """A trainer's side: asks the evaluator of `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def evaluate(
        self, key: str, weights_D: Flat, state_S: Flat, *, between_polls: Callable[[], None]
    ) -> EvaluationResult | None:
        """Return the result for these weights, whose hash is `key`. None: evaluate here.

        `between_polls` may raise to end the wait.
        """
        result_path = self._folder / f"{key}.json"
        asking = f"{os.getpid()}.{threading.get_ident()}"  # others may ask for the same weights
        request_path = self._folder / f"{asking}-{key}{_REQUEST}"
        try:
            if not result_path.exists():
                values = {"weights_D": weights_D, "model_state_S": state_S}
                write_npz(request_path, values, is_synced=False)
        except OSError:  # a full disk
            return None
        away_s = 0.0
        while request_path.exists():
            away_s += POLL_S if _is_evaluator_away(self._folder) else 0.0
            if away_s > MAX_AWAY_S:
                return None
            between_polls()
            time.sleep(POLL_S)
        if not result_path.exists():
            return None
        found = json.loads(result_path.read_text())
        return EvaluationResult(**{**found, "class_accuracy": tuple(found["class_accuracy"])})


def ask_evaluator(
    folder: str, model: FlatModel, snapshot: Snapshot, *, check: Callable[[], None]
) -> EvaluationResult | None:
    """The result for a snapshot of `model`. None: evaluate it here.

    `folder`: of the run's evaluator process; empty if there is none. `check` may raise to end the
    wait.
    """
    if not folder:
        return None
    weights_D, state_S = snapshot.weights_D, model.get_state(snapshot)
    # A hash of the whole snapshot differs between workers: each has its own random generators.
    key = replica_hash(weights_D, state_S)
    return FinalEvaluations(Path(folder)).evaluate(key, weights_D, state_S, between_polls=check)


@contextmanager
def present(folder: Path) -> Iterator[None]:
    """Show trainers that an evaluator is there, until this process ends."""
    with (folder / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def answer_requests(
    folder: Path, evaluate: Callable[[Flat, Flat], EvaluationResult | None]
) -> None:
    """Answer all requests: store the result, then delete the request.

    `evaluate` gets weights and moving statistics. If it returns None, or the disk is full, there is
    no result. The request of an evaluator that is killed remains for the next one.
    """
    for path in sorted(folder.glob(f"*{_REQUEST}")):
        result_path = folder / f"{path.stem.partition('-')[2]}.json"
        if not result_path.exists():
            with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
                arrays = as_array(archive["weights_D"]), as_array(archive["model_state_S"])
            result = evaluate(*arrays)
            if result is not None:
                _store(result_path, result)
        path.unlink(missing_ok=True)


def _store(path: Path, result: EvaluationResult) -> None:
    try:
        write_atomically(path, json.dumps(asdict(result)).encode(), mode=0o644)
    except OSError as error:
        _LOG.warning("a final evaluation cannot be stored, its trainer repeats it: %s", error)


def _is_evaluator_away(folder: Path) -> bool:
    try:
        with (folder / _LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except BlockingIOError:
        return False
    return True
