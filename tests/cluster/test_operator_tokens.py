"""The operator under an account as in a pod, whose token is refused, exchanged, or runs out.

Proves: with a token that is exchanged in time, as a kubelet does, the operator goes on over the
true end of the old one, in the same process and with no answer 401; with one that has run out, or
whose account was made anew, it acts again once there is a new one (a restart is allowed).
Minutes, since no API server gives a token for less than ten. Left out: the kubelet's own exchange.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from fault_proxy import waited
from operator_process import Account, OperatorProcess, token_of
from podless_jobs import manifest, workers

if TYPE_CHECKING:
    from pathlib import Path

    from testbed.kubectl import Kubectl

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
]
NAME = "operator"
LIFE_S = 600
"""The least that an API server gives."""
EXCHANGED_AFTER_S = 480
"""A kubelet exchanges a token when four fifths of its life are over."""
ACTS_WITHIN_S = 180
UNAUTHORIZED = 'dlion_operator_api_errors_total{code="401"}'


@pytest.fixture
def homes(api: Kubectl) -> Iterator[list[Kubectl]]:
    """Two namespaces with an account each that may do everything."""
    made = []
    for number in range(2):
        name = f"dlion-test-{uuid.uuid4().hex[:8]}"
        api.run("create", "namespace", name)
        made.append(replace(api, namespace=name))
        made[number].run("create", "serviceaccount", NAME)
        everything = ("--clusterrole=cluster-admin", f"--serviceaccount={name}:{NAME}")
        api.run("create", "clusterrolebinding", name, *everything)
    yield made
    for each in made:
        api.run("delete", "clusterrolebinding", each.namespace)
        api.run("delete", "namespace", each.namespace, "--wait=false")


def under(account: Account, kubectl: Kubectl, folder: Path) -> OperatorProcess:
    """An operator of that namespace under that account."""
    namespaces = (kubectl.namespace,)
    return OperatorProcess(folder, account, namespaces=namespaces, namespace=kubectl.namespace)


def account_of(kubectl: Kubectl, folder: Path, *, seconds: int = 3600) -> Account:
    """The namespace's account with a token of that life."""
    folder.mkdir()
    account = Account.of(kubectl, NAME, folder / "account")
    account.take(token_of(kubectl, NAME, seconds=seconds))
    return account


def is_refused(kubectl: Kubectl, token: str) -> bool:
    """Whether the API server believes that token no more."""
    review = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenReview",
        "spec": {"token": token},
    }
    url = "/apis/authentication.k8s.io/v1/tokenreviews"
    said = json.loads(kubectl.run("create", "--raw", url, "-f", "-", text=json.dumps(review)))
    return not said["status"].get("authenticated")


def acts(kubectl: Kubectl, operator: OperatorProcess) -> Callable[[], bool]:
    """Whether a job has its pods; an operator that has ended is started anew."""

    def look() -> bool:
        if not operator.is_running():
            operator.start()  # as a kubelet would
        return len(workers(kubectl)) == 3

    return look


def test_a_token_that_is_refused_gives_way_to_the_next(
    homes: list[Kubectl], tmp_path: Path
) -> None:
    home = homes[0]
    account = account_of(home, tmp_path / "one")
    with under(account, home, tmp_path / "one") as operator:
        old = account.token
        home.run("delete", "serviceaccount", NAME)
        home.run("create", "serviceaccount", NAME)
        assert waited(lambda: is_refused(home, old), 60)
        home.apply(manifest())
        assert waited(lambda: is_refusing(operator), 60)
        assert not workers(home)
        account.take(token_of(home, NAME))
        began_s = time.monotonic()
        assert waited(acts(home, operator), ACTS_WITHIN_S), operator.last_log_lines()
        print(
            f"acts {time.monotonic() - began_s:.0f} s after the new token; {operator.starts} starts"
        )


def is_refusing(operator: OperatorProcess) -> bool:
    """Whether it has met the refusal: it says so, or has ended of it."""
    return not operator.is_running() or operator.metric(UNAUTHORIZED) > 0


def test_the_end_of_a_token_is_survived_by_an_exchange_before_or_after_it(
    homes: list[Kubectl], tmp_path: Path
) -> None:
    intime, late = (
        account_of(home, tmp_path / name, seconds=LIFE_S)
        for home, name in zip(homes, ("intime", "late"), strict=True)
    )
    made_s, first = time.monotonic(), intime.token
    with (
        under(intime, homes[0], tmp_path / "intime") as one,
        under(late, homes[1], tmp_path / "late") as other,
    ):
        time.sleep(EXCHANGED_AFTER_S - (time.monotonic() - made_s))
        intime.take(token_of(homes[0], NAME, seconds=LIFE_S))
        assert waited(lambda: is_refused(homes[0], first), 300)
        assert waited(lambda: is_refused(homes[1], late.token), 60)
        ended_s = time.monotonic() - made_s
        for home in homes:
            home.apply(manifest())
        assert waited(lambda: len(workers(homes[0])) == 3, 30), one.last_log_lines()
        assert waited(lambda: is_refusing(other), 90)
        assert not workers(homes[1])
        late.take(token_of(homes[1], NAME, seconds=LIFE_S))
        began_s = time.monotonic()
        assert waited(acts(homes[1], other), ACTS_WITHIN_S), other.last_log_lines()
        print(
            f"refused {ended_s:.0f} s after it was made; exchanged in time: {one.starts} start, "
            f"exchanged late: acts after {time.monotonic() - began_s:.0f} s, {other.starts} starts"
        )
        assert (one.is_running(), one.starts, one.metric(UNAUTHORIZED)) == (True, 1, 0)
