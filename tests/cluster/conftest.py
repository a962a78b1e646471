"""A testbed for the session, or why there is none; or the cluster that you name. On it
a site with this tree's operator, for those who ask for it.

A test that asks for an API server alone is `podless`, one that brings up sites of its own has
`own_sites`: both may run in sessions of their own beside the others (`tools/test-all`).

At the session's end all that operators asked of its API servers is held against what the chart
grants in that mode, in that namespace and by that name: nothing else, and in a session of all these
tests, or of all with `own_sites`, all of it, in both modes.
"""

from __future__ import annotations

import os
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import cert_manager
from audit import (
    MODES,
    AuditedRequest,
    Right,
    granted_but_unused,
    not_granted,
    refused,
    requests_of,
    requests_of_operators,
    used_in_modes,
)
from chart import Helm, helm_program, image_values
from operator_process import OperatorProcess
from testbed.binaries import built
from testbed.existing import KUBECONFIG, LOAD_IMAGES, existing_cluster, load_images, vacant_cluster
from testbed.image_store import image_store
from testbed.images import BUSYBOX_IMAGE
from testbed.project_images import ProjectImage, Target, build_images
from testbed.requirements import missing
from testbed.sites import Testbed
from trained_jobs import SITE, SYSTEM, restricted_namespace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from testbed.kubectl import Kubectl
    from testbed.sites import Site

ROOT = Path(__file__).parents[2]
REQUIRED = "DLION_REQUIRE_TESTBED"
SHOWN = (*MODES, "")
WITHOUT_PODS = {"api", "api_site", "bare_site", "control_plane"}
OWN_SITES = "testbed_possible"
# API servers start often and live shortly: collecting garbage is a tenth of their CPU.
os.environ.setdefault("GOGC", "400")
USED = pytest.StashKey[set[tuple[str, str, Right]]]()
"""By all processes of xdist together."""
LACKING = pytest.StashKey[dict[str, list[str]]]()
ASKED = pytest.StashKey[list[AuditedRequest]]()
"""Of the whole session: where its last test is run again, fixtures of the session are made anew."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks them, before any is left out by its marks."""
    for item in items:
        if not isinstance(item, pytest.Function) or item.get_closest_marker("podless"):
            continue
        if WITHOUT_PODS & set(item.fixturenames):
            item.add_marker(pytest.mark.podless)
        elif OWN_SITES in item.fixturenames:
            item.add_marker(pytest.mark.own_sites)


@pytest.fixture(scope="session", autouse=True)
def rights_in_the_suite(request: pytest.FixtureRequest) -> Iterator[None]:
    """Over all testbeds of the session, each read before it is taken away."""
    asked = request.config.stash.setdefault(ASKED, [])
    take_down = Testbed.down

    def read_and_take_down(testbed: Testbed) -> None:
        for site in testbed.sites.values():
            if (log := site.control_plane.audit_log).exists():
                asked.extend(requests_of_operators(log))
        take_down(testbed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Testbed, "down", read_and_take_down)
        yield
    used = used_in_modes(asked)
    told = ", ".join(f"{sum(of == m for of, *_ in used)} ({m or 'mode unknown'})" for m in SHOWN)
    print(f"operators: {len(asked)} requests in the session; rights used: {told}")
    assert not_granted(asked) == [], "operators asked for what the chart does not grant"
    if (output := getattr(request.config, "workeroutput", None)) is not None:  # of xdist
        output["used"] = [(mode, scope, *astuple(right)) for mode, scope, right in used]
        return
    was_broken_off = request.session.exitstatus == pytest.ExitCode.INTERRUPTED
    if _is_whole(request.config) and not (request.session.testsfailed or was_broken_off):
        assert _in_vain(used) == {}, "granted, and asked for by no test"


def _in_vain(used: set[tuple[str, str, Right]]) -> dict[str, list[str]]:
    tls = ("Secret", "CertManager") if cert_manager.built() is not None else ("Secret",)
    return granted_but_unused(used, *tls, "Kueue", "KueueClasses")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take what one process of xdist tells of the rights that were used."""
    used = node.config.stash.setdefault(USED, set())
    told = getattr(node, "workeroutput", {}).get("used", ())
    used |= {(mode, scope, Right(*right)) for mode, scope, *right in told}


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a session of several processes in which a right was used by none."""
    used = session.config.stash.get(USED, None)
    is_well = session.exitstatus == pytest.ExitCode.OK
    if used is not None and is_well and _is_whole(session.config) and (lacking := _in_vain(used)):
        session.config.stash[LACKING] = lacking
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name those rights."""
    if lacking := terminalreporter.config.stash.get(LACKING, None):
        terminalreporter.write_line(f"FAILED: granted, and asked for by no test: {lacking}")


def _is_whole(config: pytest.Config) -> bool:
    """Whether all tests of this folder are to run but for slow ones, or all with sites of their
    own: these alone ask for all that there is."""
    here = Path(__file__).parent
    named = {Path(config.invocation_params.dir, each).resolve() for each in config.args}
    option = config.option
    marks = option.markexpr
    is_podless = "podless" in marks and "not podless" not in marks
    is_chosen = "not slow" not in marks or "not own_sites" in marks or is_podless
    is_part = option.keyword or option.lf or option.deselect or is_chosen
    is_here = existing_cluster() is None and not missing()
    return bool(named & {here, here.parent}) and not is_part and is_here


@pytest.fixture(scope="session")
def testbed(request: pytest.FixtureRequest) -> Iterator[Testbed]:
    """A site of two nodes with the project's images, and another one without them where a test of
    the session asks for `other_site`; taken away at the end."""
    _require_testbed()
    store = image_store(build_images())
    chosen = [item for item in request.session.items if isinstance(item, pytest.Function)]
    sites = 1 + any("other_site" in item.fixturenames for item in chosen)
    with Testbed.up(name=f"t{os.getpid()}", sites=sites, nodes=2, stores={SITE: store}) as made:
        yield made


@pytest.fixture
def other_site(testbed: Testbed) -> Site:
    """The second one."""
    return testbed.site("site-b")


@pytest.fixture(scope="session")
def testbed_possible() -> None:
    """For a test that brings up its own."""
    _require_testbed()


@pytest.fixture(scope="module")
def bare_site() -> Iterator[Site]:
    """A site of its own with an API server and nothing that runs pods."""
    _require_testbed()
    with Testbed.up(name=f"c{os.getpid()}", sites=1, nodes=0) as made:
        yield made.site("site-a")


@pytest.fixture(scope="session")
def api_site() -> Iterator[Site]:
    """Another one, which knows DLionJobs, for all tests that let it know them."""
    _require_testbed()
    with Testbed.up(name=f"a{os.getpid()}", sites=1, nodes=0) as made:
        site = made.site("site-a")
        site.kubectl.run("apply", "-f", str(ROOT / "crds/dlionjob.yaml"))
        site.kubectl.wait_until_known("dlj")
        yield site


@pytest.fixture(scope="session")
def other_cluster() -> Kubectl | None:
    """The cluster of $DLION_TEST_KUBECONFIG, where nobody uses DLion."""
    return vacant_cluster()


@pytest.fixture(scope="module")
def control_plane(other_cluster: Kubectl | None, request: pytest.FixtureRequest) -> Kubectl:
    """An API server and nothing that runs pods; or the cluster of $DLION_TEST_KUBECONFIG."""
    if other_cluster is not None:
        return other_cluster
    site: Site = request.getfixturevalue("bare_site")
    return site.kubectl


def _require_testbed() -> None:
    """Skip where the machine lacks something; where $DLION_REQUIRE_TESTBED is set, fail."""
    lacking = missing()
    if built() is None:  # longer than any test may take
        lacking.append("Kubernetes is not built yet: run `make testbed-setup`")
    if lacking:
        reason = "no testbed here: " + "; ".join(lacking)
        if os.environ.get(REQUIRED):
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.fixture(scope="session")
def pods_cluster(other_cluster: Kubectl | None, request: pytest.FixtureRequest) -> Kubectl:
    """Where pods run: the first site, or the cluster of $DLION_TEST_KUBECONFIG."""
    if other_cluster is not None:
        return other_cluster
    testbed: Testbed = request.getfixturevalue("testbed")
    return testbed.site(SITE).kubectl


@pytest.fixture(scope="session")
def testbed_alone(other_cluster: Kubectl | None) -> None:
    """For a test that does to machines what nobody does to a cluster of others."""
    if other_cluster is not None:
        pytest.skip(f"this takes the testbed's own machines: unset {KUBECONFIG}")


@pytest.fixture(scope="session")
def nobody_runs_pods(other_cluster: Kubectl | None) -> None:
    """For a test that does what a node does, or counts on pods that fit nowhere."""
    if other_cluster is not None:
        pytest.skip(f"this takes an API server without nodes: unset {KUBECONFIG}")


@pytest.fixture
def cluster(pods_cluster: Kubectl) -> Iterator[Kubectl]:
    """A namespace of its own there."""
    namespace = f"dlion-test-{uuid.uuid4().hex[:8]}"
    pods_cluster.run("create", "namespace", namespace)
    try:
        yield replace(pods_cluster, namespace=namespace)
    finally:
        pods_cluster.run("delete", "namespace", namespace, "--wait=false")


@pytest.fixture
def busybox() -> str:
    """An image with a shell that the cluster of `cluster` has or can get."""
    elsewhere = "docker.io/library/busybox:1.36"
    return BUSYBOX_IMAGE if existing_cluster() is None else elsewhere


@pytest.fixture(scope="session")
def images(
    other_cluster: Kubectl | None,
    pods_cluster: Kubectl,  # else it is built for nothing
    request: pytest.FixtureRequest,
) -> dict[Target, ProjectImage]:
    """Those of the tree as it stands, on the nodes of the first site, or of the other cluster."""
    if other_cluster is not None and not os.environ.get(LOAD_IMAGES):
        pytest.skip(f"the project's images are not on that cluster's nodes: set {LOAD_IMAGES}")
    began_s = time.monotonic()
    made = build_images()
    built_s = time.monotonic()
    if other_cluster is None:
        testbed: Testbed = request.getfixturevalue("testbed")
        with ThreadPoolExecutor() as pool:
            loading = [pool.submit(node.load_missing, made) for node in testbed.site(SITE).nodes]
            for each in loading:
                each.result()
    else:
        load_images(image.archive for image in made)
    print(f"built in {built_s - began_s:.0f} s, loaded in {time.monotonic() - built_s:.0f} s")
    return {image.target: image for image in made}


def _as_long_as_nobody_needs_it_vacant(fixture_name: str, config: pytest.Config) -> str:
    """On the testbed tests of the operator alone have a site of their own; another cluster is one
    for all, file by file."""
    return "module" if os.environ.get(KUBECONFIG) else "session"


@pytest.fixture(scope=_as_long_as_nobody_needs_it_vacant)
def operated_site(
    other_cluster: Kubectl | None,
    pods_cluster: Kubectl,
    images: dict[Target, ProjectImage],
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[Kubectl]:
    """That cluster with the chart installed."""
    kubectl = pods_cluster
    program = helm_program()
    assert program is not None, "no helm: install it, or run `make testbed-setup`"
    helm = Helm(program, tmp_path_factory.mktemp("helm"), kubectl)
    values = {"site": {"name": SITE}, **image_values(images.values())}
    install = [
        "install", "dlion", str(ROOT / "helm/dlion"), "--namespace", SYSTEM,
        "--wait", "--timeout", "120s",
    ]  # fmt: skip
    if other_cluster is not None:
        yield from _on_another_cluster(kubectl, helm, install, values)
        return
    site: Site = request.getfixturevalue("testbed").site(SITE)
    helm.run(*install, "--create-namespace", values=values)
    yield kubectl
    account = f"system:serviceaccount:{SYSTEM}:dlion-operator"
    denied = refused(requests_of(account, site.control_plane.audit_log))
    helm.run("uninstall", "dlion", "--namespace", SYSTEM, "--wait")
    assert denied == [], "the operator asked for what the chart does not grant"


def _on_another_cluster(
    kubectl: Kubectl, helm: Helm, install: list[str], values: dict[str, Any]
) -> Iterator[Kubectl]:
    """The chart in a namespace that was not there; nothing of it is left, installed or not."""
    kubectl.run("create", "namespace", SYSTEM)
    try:
        helm.run(*install, values=values)
        yield kubectl
    finally:
        helm.run("uninstall", "dlion", "--namespace", SYSTEM, "--wait", "--ignore-not-found")
        kubectl.run("delete", "namespace", SYSTEM, timeout_s=120)
        _forget_jobs(kubectl)


def _forget_jobs(kubectl: Kubectl) -> None:
    """The definitions go, and every job: `vacant_cluster` has seen that these are ours."""
    kubectl.run("delete", "--ignore-not-found", "-k", str(ROOT / "crds"), timeout_s=120)


@pytest.fixture
def restricted(operated_site: Kubectl) -> Iterator[Kubectl]:
    """A namespace there that enforces pod security `restricted`."""
    with restricted_namespace(operated_site) as made:
        yield made


@pytest.fixture(scope="module")
def api(other_cluster: Kubectl | None, request: pytest.FixtureRequest) -> Iterator[Kubectl]:
    """An API server that knows DLionJobs, and runs no pods, or another cluster's."""
    if other_cluster is None:
        site: Site = request.getfixturevalue("api_site")
        yield site.kubectl
        return
    other_cluster.run("apply", "-f", str(ROOT / "crds/dlionjob.yaml"))
    other_cluster.wait_until_known("dlj", timeout_s=30)
    yield other_cluster
    _forget_jobs(other_cluster)  # a chart that is installed later brings its own


@pytest.fixture
def kubectl(api: Kubectl) -> Iterator[Kubectl]:
    """A namespace of its own there."""
    namespace = f"dlion-test-{uuid.uuid4().hex[:8]}"
    api.run("create", "namespace", namespace)
    try:
        yield replace(api, namespace=namespace)
    finally:
        api.run("delete", "namespace", namespace, "--wait=false")


@pytest.fixture(scope="module")
def shared_operator(
    api: Kubectl, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OperatorProcess]:
    """One for all namespaces, for a module whose tests do not need their own."""
    folder = tmp_path_factory.mktemp("operator")
    with OperatorProcess(folder, api.kubeconfig, namespace="default") as process:
        yield process
        assert process.metric('dlion_operator_reconciles_total{result="defect"}') == 0
