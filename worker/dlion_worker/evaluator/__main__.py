"""`python -m dlion_worker.evaluator --config FILE --snapshots DIR`: one per local run.

Evaluates every snapshot in DIR and appends a record to DIR/records.jsonl, which the runner reads.
Answers the trainers' requests for final evaluations first. Ends on SIGTERM.
"""

import argparse
import logging
import signal
import sys
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from dlion_api.errors import DLionError
from dlion_api.exit_codes import ExitCode
from dlion_api.protocol.records import record_to_json
from dlion_api.protocol.worker_config import WorkerConfig
from dlion_api.spec import Job, load_job
from dlion_core.lifecycle.reporting import EvaluationResult
from dlion_core.policies.interface import Flat
from dlion_worker.evaluator import RECORDS_FILE
from dlion_worker.evaluator.final_evaluations import answer_requests, present
from dlion_worker.evaluator.snapshot_files import take_snapshots
from dlion_worker.training import datasets, programs, threads
from dlion_worker.training.evaluation import Evaluator
from dlion_worker.training.model import FlatModel

_LOG = logging.getLogger("dlion_worker.evaluator")

POLL_S = 0.1
NICENESS = 5
"""Training processes have priority."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until a signal; return the exit code."""
    parser = argparse.ArgumentParser(prog="dlion_worker.evaluator", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="any worker's configuration")
    parser.add_argument("--snapshots", type=Path, required=True, help="folder of the snapshots")
    options = parser.parse_args(arguments)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    try:
        config = WorkerConfig.load(options.config)
        with present(options.snapshots):
            _serve(config, load_job(config.job_document), options.snapshots, ended)
    except DLionError as error:
        _LOG.error("%s", error)
        return ExitCode.FAILED
    return ExitCode.OK


def _serve(config: WorkerConfig, job: Job, folder: Path, ended: threading.Event) -> None:
    threads.configure(None)
    trainer = job.spec.trainer
    root = Path(config.data_root)
    program = programs.load(trainer.program, directory=config.program_dir)
    cache = datasets.SharedDatasetCache(folder)
    worker = job.worker(config.rank)
    data = datasets.load(
        job, worker, program=program, data_root=root, cache=cache, held_out_only=True
    )
    model = FlatModel.of_data(program, data, trainer)
    evaluator = Evaluator(
        model,
        data.held_out_x,
        data.held_out_y,
        seed=trainer.seed,
        max_samples=trainer.evaluation.max_samples,
    )
    final = partial(_final_result, model, evaluator)
    # Not before: trainers wait for the held-out samples that it decodes.
    threads.lower_priority(NICENESS)
    with (folder / RECORDS_FILE).open("a", encoding="utf-8", buffering=1) as records:
        while not ended.wait(POLL_S):
            answer_requests(folder, final)
            for replica in take_snapshots(folder):
                snapshot = model.snapshot_of(replica.weights_D, replica.model_state_S)
                tag = (replica.iteration, replica.samples, replica.time_s)
                result = evaluator.evaluate_subset(tag, snapshot=snapshot)
                record = result.record(replica.rank, final=False)
                records.write(record_to_json(record) + "\n")
                answer_requests(folder, final)  # trainers wait for these
                if ended.is_set():
                    return


def _final_result(
    model: FlatModel, evaluator: Evaluator, weights_D: Flat, state_S: Flat
) -> EvaluationResult | None:
    """The result on all held-out samples; None if the program failed."""
    try:
        snapshot = model.snapshot_of(weights_D, state_S)
        return evaluator.evaluate_all(None, snapshot=snapshot).evaluation
    except DLionError as error:
        _LOG.error("%s", error)
        return None


if __name__ == "__main__":
    sys.exit(main())
