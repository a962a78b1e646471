"""Names of the files and folders of a result folder (docs/results.md).

Imports nothing, so that `dlion ls` starts without NumPy.
"""

from typing import Final

JOB: Final = "job.yaml"
ENVIRONMENT: Final = "environment.yaml"
EVENTS: Final = "events.jsonl"
SUMMARY: Final = "summary.json"
LOCK: Final = "run.lock"
REPORT: Final = "report.html"
TENSORBOARD: Final = "tensorboard"
LOGS: Final = "logs"
CHECKPOINTS: Final = "state/w*/checkpoint.npz"
"""Pattern of the workers' checkpoints."""
SIMULATION: Final = "simulation.json"
"""How a run was simulated; written at its end."""
REPLAY: Final = "replay.json"
"""How a replay compares with the recorded run; written at its end."""
COMPARISON_MARKER: Final = "comparing.json"
"""Marks a folder that belongs to `dlion compare`, before its run starts there."""
COMPARISON: Final = "comparison.json"
"""Figures of a comparison, in its own folder once all its runs have ended."""
COMMAND: Final = "command.json"
"""Written by what starts a run in a child process: the command line, and the process."""
COMMAND_LOG: Final = "command.log"
"""What that process prints."""
MODEL_AND_DATA: Final = "model-and-data"
"""Folder of the program of a run that Python started with a model and data in memory."""
COMPARED: Final = "compared.json"
"""Settings of a run of `dlion compare`, in its folder once it has ended."""


def has_results(names: set[str]) -> bool:
    """Whether a folder with these files is a run's, possibly a half-written one."""
    return EVENTS in names or (JOB in names and not names.isdisjoint({LOCK, SUMMARY}))
