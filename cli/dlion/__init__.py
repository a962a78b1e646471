"""DLion in Python: train jobs here, in virtual time or on Kubernetes, and follow them.

`Client` starts and follows jobs; `train` trains one in the foreground; `load_model` reads its
result (docs/python.md). What goes in: the Python interface and its three back ends. What stays out:
how a job is trained, which the command line and the operator do. Importing this package imports
neither TensorFlow nor gRPC nor a client for Kubernetes: jobs run in separate processes.
"""

from dlion.client import Client
from dlion.errors import JobEndedError, JobTimeoutError
from dlion.job import JobSnapshot as Job
from dlion.job import JobWorker
from dlion.training import load_model, train
from dlion_api.errors import DLionError, SpecError

__all__ = [
    "Client",
    "DLionError",
    "Job",
    "JobEndedError",
    "JobTimeoutError",
    "JobWorker",
    "SpecError",
    "load_model",
    "train",
]
