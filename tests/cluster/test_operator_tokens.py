"""Test an operator whose account's token is refused, exchanged, or expires.

A kubelet exchanges a token in time. The operator then continues past the end of the old one, in the
same process and without an answer 401. If the token expired or its account was
created again, the operator acts once it has a new token (a restart is allowed).

The tests take minutes, since an API server grants no token for less than ten. Left out: the
kubelet's own exchange.
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
"""The shortest life of a token that an API server grants."""
EXCHANGED_AFTER_S = 480
"""A kubelet exchanges a token after four fifths of its life."""
ACTS_WITHIN_S = 180
UNAUTHORIZED = 'dlion_operator_api_errors_total{code="401"}'


@pytest.fixture
def homes(api: Kubectl) -> Iterator[list[Kubectl]]:
    """Two namespaces, each with an account that has all rights."""
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
    """Start an operator of that namespace under that account."""
    namespaces = (kubectl.namespace,)
    return OperatorProcess(folder, account, namespaces=namespaces, namespace=kubectl.namespace)


def account_of(kubectl: Kubectl, folder: Path, *, seconds: int = 3600) -> Account:
    """Return the namespace's account with a token of that life."""
    folder.mkdir()
    account = Account.of(kubectl, NAME, folder / "account")
    account.take(token_of(kubectl, NAME, seconds=seconds))
    return account


def is_refused(kubectl: Kubectl, token: str) -> bool:
    """Report whether the API server refuses that token."""
    review = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenReview",
        "spec": {"token": token},
    }
    url = "/apis/authentication.k8s.io/v1/tokenreviews"
    answer = json.loads(kubectl.run("create", "--raw", url, "-f", "-", text=json.dumps(review)))
    return not answer["status"].get("authenticated")


def acts(kubectl: Kubectl, operator: OperatorProcess) -> Callable[[], bool]:
    """Report whether a job has its pods; restart the operator if it has ended."""

    def look() -> bool:
        if not operator.is_running():
            operator.start()  # as a kubelet does
        return len(workers(kubectl)) == 3

    return look


def test_a_refused_token_is_replaced_by_the_next(homes: list[Kubectl], tmp_path: Path) -> None:
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
    """Report whether the operator met the refusal: it logs it, or has ended."""
    return not operator.is_running() or operator.metric(UNAUTHORIZED) > 0


def test_the_operator_survives_the_end_of_a_token(homes: list[Kubectl], tmp_path: Path) -> None:
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
