"""Tests of the catalogue of policies: known names, policies of installed packages, and refusals."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from dlion_api.document import setting
from dlion_api.errors import SpecError
from dlion_api.spec import load_job
from dlion_core.policies import catalogue
from dlion_core.policies.catalogue import Policy
from local_run import job_document


@dataclass(frozen=True, kw_only=True)
class Knobs:
    share: float = setting("a share.", default=0.5, minimum=0, maximum=1)


MINE = Policy("One of a package.", lambda _context, knobs: knobs, Knobs)
NOT_ONE = "no policy"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint("mine", f"{__name__}:MINE", catalogue.GROUP),
        EntryPoint("broken", f"{__name__}:NOT_ONE", catalogue.GROUP),
    ]
    monkeypatch.setattr(EntryPoint, "load", lambda point: globals()[point.value.split(":")[1]])
    monkeypatch.setattr(catalogue, "entry_points", lambda group: points if group else [])


def spec(policy: str, **exchange: Any) -> Any:
    return load_job(job_document(2, exchange={"policy": policy, **exchange})).spec


@pytest.mark.parametrize("name", sorted(catalogue.BUILT_IN))
def test_every_built_in_policy_can_be_made_with_its_defaults(name: str) -> None:
    policy = catalogue.find(name)
    assert callable(policy.builder())
    assert isinstance(catalogue.parameters_of(spec("dlion")), catalogue.find("dlion").parameters)


@pytest.mark.usefixtures("installed")
def test_an_installed_package_adds_a_policy_with_its_own_parameters() -> None:
    assert "mine" in catalogue.names()
    assert catalogue.parameters_of(spec("mine", parameters={"share": 0.25})) == Knobs(share=0.25)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("policy", "parameters", "words"),
    [
        ("nonsense", {}, "allowed: adacomp"),
        ("gaja", {}, "Did you mean gaia? A policy of your own is "),
        ("broken", {}, "is not a dlion_core.policies.catalogue.Policy"),
        ("mine", {"share": 2}, "spec.exchange.parameters.share"),
        ("mine", {"sahre": 0.1}, "spec.exchange.parameters.sahre"),
        ("mine", {"share": "much"}, "spec.exchange.parameters.share"),
        ("full", {"share": 0.1}, "spec.exchange.parameters.share"),
    ],
)
def test_an_error_names_the_wrong_value_and_the_allowed_ones(
    policy: str, parameters: dict[str, Any], words: str
) -> None:
    with pytest.raises(SpecError) as refused:
        catalogue.parameters_of(spec(policy, parameters=parameters))
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("exchange", "mode", "expected"),
    [
        ({"policy": "dlion"}, "bounded", False),
        ({"policy": "dlion"}, "synchronous", True),
        ({"policy": "dlion", "residual": "perLink"}, "bounded", True),
        ({"policy": "ako"}, "asynchronous", True),
    ],
)
def test_policies_that_track_sent_values_do_not_allow_superseding(
    exchange: dict[str, str], mode: str, expected: bool
) -> None:
    job = load_job(job_document(2, exchange=exchange, synchronization={"mode": mode}))
    assert catalogue.messages_must_arrive(job.spec) is expected


@pytest.mark.parametrize(
    ("policy", "exchange", "allowed"),
    [
        ("adpsgd", {"topology": "randomRegular", "degree": 2}, "allToAll, bipartite, ring"),
        ("d2", {"topology": "clustered"}, "allToAll, bipartite, randomRegular, ring"),
        ("async", {"topology": "ring", "parameters": {"server": 0}}, "allToAll"),
        ("demo", {"topology": "ring"}, "allToAll"),
        ("sparseloco", {"topology": "bipartite"}, "allToAll"),
        ("halos", {"topology": "ring"}, "allToAll"),
        ("quorum-diloco", {"topology": "clustered"}, "allToAll"),
    ],
)
def test_a_topology_that_a_policy_does_not_support_is_refused_with_its_line(
    policy: str, exchange: dict[str, Any], allowed: str
) -> None:
    job = load_job(job_document(4, exchange={"policy": policy, **exchange}))
    with pytest.raises(SpecError) as caught:
        catalogue.parameters_of(job.spec, lines={"spec.exchange.topology": 17})
    (problem,) = caught.value.problems
    assert (problem.path, problem.line) == ("spec.exchange.topology", 17)
    assert (problem.value, problem.allowed) == (
        exchange["topology"],
        f"{allowed}, or a policy that works on it, such as dlion",
    )


@pytest.mark.parametrize(
    ("policy", "exchange", "at", "value", "allowed"),
    [
        ("fedat", {"parameters": {"tiers": [1, 2]}}, "tiers", "2 tiers", "4 tiers"),
        ("fedat", {"parameters": {"server": 99}}, "server", "99", "0 to 3"),
        ("async", {"parameters": {"server": 4}}, "server", "4", "0 to 3"),
        ("adacomp", {"parameters": {"server": 4}}, "server", "4", "0 to 3"),
        ("hop", {"parameters": {"backupWorkers": 3}}, "backupWorkers", "3", "0 to 2"),
        (
            "hop",
            {"topology": "ring", "parameters": {"backupWorkers": 2}},
            "backupWorkers",
            "2",
            "0 to 1",
        ),
        ("demo", {"parameters": {"momentum": 0.999}}, "momentum", "0.999", "one place only"),
        ("dgc", {"parameters": {"momentum": 0.9}}, "momentum", "0.9", "one place only"),
        ("twostep", {"parameters": {"momentum": 0.9}}, "momentum", "0.9", "one place only"),
        (
            "twostep",
            {"topology": "ring", "parameters": {"combineEverySteps": 2, "momentum": 0}},
            "combineEverySteps",
            "2",
            "allToAll",
        ),
    ],
)
def test_incompatible_settings_are_refused_before_the_start(
    policy: str, exchange: dict[str, Any], at: str, value: str, allowed: str
) -> None:
    document = job_document(4, exchange={"policy": policy, **exchange})
    document["spec"]["trainer"]["optimizer"] = {"name": "sgd", "momentum": 0.9}
    path = f"spec.exchange.parameters.{at}"
    with pytest.raises(SpecError) as caught:
        catalogue.parameters_of(load_job(document).spec, lines={path: 23})
    (problem,) = caught.value.problems
    assert (problem.path, problem.line) == (path, 23)
    assert problem.value.startswith(value)
    assert allowed in problem.allowed


@pytest.mark.parametrize(("workers", "backup"), [(1, 1), (2, 1), (4, 2)])
def test_backup_workers_that_leave_one_awaited_peer_and_the_default_are_accepted(
    workers: int, backup: int
) -> None:
    exchange = {"policy": "hop", "parameters": {"backupWorkers": backup}}
    job = load_job(job_document(workers, exchange=exchange))
    assert catalogue.parameters_of(job.spec).backup_workers == backup


@pytest.mark.parametrize(
    ("policy", "parameters", "refused"),
    [
        ("gaia", {}, True),
        ("twostep", {"momentum": 0}, True),
        ("async", {}, True),
        ("async", {"step": "whole"}, False),
        ("adacomp", {}, True),
        ("adacomp", {"step": "whole"}, False),
        ("dlion", {}, False),
    ],
)
@pytest.mark.parametrize("optimizer", ["adam", "program"])
def test_under_adam_there_are_no_shares_of_steps(
    policy: str, parameters: dict[str, Any], refused: bool, optimizer: str
) -> None:
    """The same holds for an unknown optimizer."""
    document = job_document(4, exchange={"policy": policy, "parameters": parameters})
    document["spec"]["trainer"]["optimizer"] = {"name": optimizer}
    document["spec"]["trainer"]["program"] = {"file": "mine.py"}
    spec = load_job(document).spec
    path = "spec.trainer.optimizer.name"
    catalogue.parameters_of(spec, ranks=[0])  # alone, its share is the whole
    if not refused:
        catalogue.parameters_of(spec)
        return
    with pytest.raises(SpecError) as caught:
        catalogue.parameters_of(spec, lines={path: 9})
    (problem,) = caught.value.problems
    assert (problem.path, problem.line, problem.value, problem.allowed) == (
        path,
        9,
        optimizer,
        "sgd",
    )


PAGE = Path(__file__).resolve().parents[4] / "docs" / "policies.md"


@pytest.mark.parametrize("name", sorted(catalogue.BUILT_IN))
def test_a_policy_that_documents_no_effect_of_synchronization_sets_its_own_pace(
    name: str,
) -> None:
    page = PAGE.read_text()
    (exceptions,) = re.findall(r"^\| `synchronization`.*\| all but (.*) \|$", page, re.MULTILINE)
    waiting = set(re.findall(r"`([\w-]+)`", exceptions))
    documented = set(re.findall(r"^## (.+)$", page, re.MULTILINE))
    assert waiting <= documented
    assert catalogue.find(name).own_pace == (name in documented - waiting)


@pytest.mark.parametrize(
    ("policy", "synchronization", "barrier", "together"),
    [
        ("full", {"mode": "synchronous"}, True, True),
        ("full", {"mode": "backup", "backupWorkers": 1}, True, False),
        ("full", {"mode": "bounded"}, False, False),
        ("gaia", {"mode": "synchronous"}, False, False),
        ("demo", {"mode": "synchronous"}, True, True),
        ("sparseloco", {"mode": "synchronous"}, False, False),
        ("hierarchical", {"mode": "synchronous"}, True, True),
        ("hierarchical", {"mode": "backup", "backupWorkers": 1}, True, True),
        ("hierarchical", {"mode": "bounded"}, True, True),
    ],
)
def test_a_latecomer_joins_at_an_iteration_where_all_update_together(
    policy: str, synchronization: dict[str, Any], barrier: bool, together: bool
) -> None:
    document = job_document(2, exchange={"policy": policy})
    document["spec"]["synchronization"] = synchronization
    made = load_job(document).spec
    assert catalogue.has_barrier(made) == barrier
    assert catalogue.is_fully_synchronous(made) == together
