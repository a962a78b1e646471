"""Events and names of actions on objects. Pure."""

from dlion_operator.kubernetes.client import Document
from dlion_operator.plan.decisions import Action, Apply, Create, Delete, JobEvent, Patch


def creation_event(document: Document, *, was_there: bool) -> JobEvent | None:
    """The event for a created object. `was_there`: it had been created before."""
    kind, name = document["kind"], document["metadata"]["name"]
    if kind == "Job":
        count = document["spec"]["completions"]
        workers = "1 worker" if count == 1 else f"{count} workers"
        return JobEvent("WorkersCreated", f"Job {name} with {workers}")
    if kind == "Deployment":
        return JobEvent("KeeperCreated", f"Deployment {name}{', which was deleted' * was_there}")
    if kind == "Workload":
        queue, count = document["spec"]["queueName"], len(document["spec"]["podSets"])
        return JobEvent("WorkloadCreated", f"Workload {name} in queue {queue}, {count} pod sets")
    return JobEvent("StorageCreated", f"{kind} {name}") if kind != "ConfigMap" else None


def describe(action: Action) -> str:
    """Name the object that the action is about."""
    match action:
        case Apply(document) | Create(document):
            return f"{document['kind']} {document['metadata']['name']}"
        case Patch(kind, name) | Delete(kind, name):
            return f"{kind} {name}"
    return type(action).__name__
