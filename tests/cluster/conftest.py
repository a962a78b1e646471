"""Fixtures for tests on real clusters: the testbed, or the cluster that you name, and sites on it.

Without a testbed the fixtures give the reason. A test that needs only an API server is `podless`.
One that starts its own sites has `own_sites`. Both may run in sessions beside the others
(`tools/test-all`).

At the end the requests of all operators to the API servers are compared with the chart's grants, by
mode, namespace and name. No request is outside them. A session of all these tests, or of all with
`own_sites`, uses every granted right in both modes.
"""

from __future__ import annotations

import os
import signal
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from xdist.workermanage import NodeManager  # type: ignore[import-untyped]

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
# API servers start often and live briefly: garbage collection takes a tenth of their CPU.
os.environ.setdefault("GOGC", "400")
USED = pytest.StashKey[set[tuple[str, str, Right]]]()
"""Rights used by all processes of xdist together."""
LACKING = pytest.StashKey[dict[str, list[str]]]()
ASKED = pytest.StashKey[list[AuditedRequest]]()
"""Requests of the whole session: a retry of its last test creates its fixtures again."""


def pytest_configure() -> None:
    """End a session at SIGTERM as at Ctrl-C, so that its fixture removes the testbed.

    The next `Testbed.up` removes what a killed session leaves.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt_once)
    # xdist kills its processes after this time; they take up to 15 s to react to an interrupt.
    NodeManager.EXIT_TIMEOUT = 40


def _interrupt_once(*_: object) -> None:
    """A second one would break off the teardown: an interrupted process of xdist sends itself one
    after 5 s."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests before any is deselected by its marks."""
    for item in items:
        if not isinstance(item, pytest.Function) or item.get_closest_marker("podless"):
            continue
        if WITHOUT_PODS & set(item.fixturenames):
            item.add_marker(pytest.mark.podless)
        elif OWN_SITES in item.fixturenames:
            item.add_marker(pytest.mark.own_sites)


@pytest.fixture(scope="session", autouse=True)
def rights_in_the_suite(request: pytest.FixtureRequest) -> Iterator[None]:
    """Collect the used rights of all testbeds of the session, before each is removed."""
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
    used_by_mode = ", ".join(
        f"{sum(of == m for of, *_ in used)} ({m or 'mode unknown'})" for m in SHOWN
    )
    print(f"operators: {len(asked)} requests in the session; rights used: {used_by_mode}")
    assert not_granted(asked) == [], "operators made requests that the chart does not grant"
    if (output := getattr(request.config, "workeroutput", None)) is not None:  # of xdist
        output["used"] = [(mode, scope, *astuple(right)) for mode, scope, right in used]
        return
    was_broken_off = request.session.exitstatus == pytest.ExitCode.INTERRUPTED
    if _is_whole(request.config) and not (request.session.testsfailed or was_broken_off):
        assert _unused_rights(used) == {}, "granted, and used by no test"


def _unused_rights(used: set[tuple[str, str, Right]]) -> dict[str, list[str]]:
    tls = ("Secret", "CertManager") if cert_manager.built() is not None else ("Secret",)
    return granted_but_unused(used, *tls, "Kueue", "KueueClasses")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add the used rights that one process of xdist reports."""
    used = node.config.stash.setdefault(USED, set())
    reported = getattr(node, "workeroutput", {}).get("used", ())
    used |= {(mode, scope, Right(*right)) for mode, scope, *right in reported}


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a session of several processes that leaves a right unused."""
    used = session.config.stash.get(USED, None)
    is_well = session.exitstatus == pytest.ExitCode.OK
    if (
        used is not None
        and is_well
        and _is_whole(session.config)
        and (lacking := _unused_rights(used))
    ):
        session.config.stash[LACKING] = lacking
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the unused rights."""
    if lacking := terminalreporter.config.stash.get(LACKING, None):
        terminalreporter.write_line(f"FAILED: granted, and used by no test: {lacking}")


def _is_whole(config: pytest.Config) -> bool:
    """Report whether the session has all tests of this folder except slow ones, or all `own_sites`.

    Only such a session uses every right.
    """
    here = Path(__file__).parent
    named = {Path(config.invocation_params.dir, each).resolve() for each in config.args}
    option = config.option
    marks = option.markexpr
    is_podless = "podless" in marks and "not podless" not in marks
    is_chosen = "not slow" not in marks or "not own_sites" in marks or is_podless
    # `lf` is missing without the plugin cacheprovider.
    is_part = option.keyword or getattr(option, "lf", False) or option.deselect or is_chosen
    is_here = existing_cluster() is None and not missing()
    return bool(named & {here, here.parent}) and not is_part and is_here


@pytest.fixture(scope="session")
def testbed(request: pytest.FixtureRequest) -> Iterator[Testbed]:
    """A site of two nodes with the project's images, removed at the end.

    If a test of the session asks for `other_site`, there is a second site without the images.
    """
    _require_testbed()
    store = image_store(build_images())
    chosen = [item for item in request.session.items if isinstance(item, pytest.Function)]
    sites = 1 + any("other_site" in item.fixturenames for item in chosen)
    with Testbed.up(name=f"t{os.getpid()}", sites=sites, nodes=2, stores={SITE: store}) as made:
        yield made


@pytest.fixture
def other_site(testbed: Testbed) -> Site:
    """The second site."""
    return testbed.site("site-b")


@pytest.fixture(scope="session")
def testbed_possible() -> None:
    """Allow a test to start its own testbed."""
    _require_testbed()


@pytest.fixture(scope="module")
def bare_site() -> Iterator[Site]:
    """A site with only an API server and no kubelet."""
    _require_testbed()
    with Testbed.up(name=f"c{os.getpid()}", sites=1, nodes=0) as made:
        yield made.site("site-a")


@pytest.fixture(scope="session")
def api_site() -> Iterator[Site]:
    """Another such site with the DLionJob definition, for all tests that allow it."""
    _require_testbed()
    with Testbed.up(name=f"a{os.getpid()}", sites=1, nodes=0) as made:
        site = made.site("site-a")
        site.kubectl.run("apply", "-f", str(ROOT / "crds/dlionjob.yaml"))
        site.kubectl.wait_until_known("dlj")
        yield site


@pytest.fixture(scope="session")
def other_cluster() -> Kubectl | None:
    """The cluster of $DLION_TEST_KUBECONFIG, in which DLion is not in use."""
    return vacant_cluster()


@pytest.fixture(scope="module")
def control_plane(other_cluster: Kubectl | None, request: pytest.FixtureRequest) -> Kubectl:
    """An API server without a kubelet, or the cluster of $DLION_TEST_KUBECONFIG."""
    if other_cluster is not None:
        return other_cluster
    site: Site = request.getfixturevalue("bare_site")
    return site.kubectl


def _require_testbed() -> None:
    """Skip if the machine lacks something; with $DLION_REQUIRE_TESTBED set, fail."""
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
    """A cluster that runs pods: the first site, or the cluster of $DLION_TEST_KUBECONFIG."""
    if other_cluster is not None:
        return other_cluster
    testbed: Testbed = request.getfixturevalue("testbed")
    return testbed.site(SITE).kubectl


@pytest.fixture(scope="session")
def testbed_alone(other_cluster: Kubectl | None) -> None:
    """Skip on other clusters: the test changes machines."""
    if other_cluster is not None:
        pytest.skip(f"this takes the testbed's own machines: unset {KUBECONFIG}")


@pytest.fixture(scope="session")
def no_running_pods(other_cluster: Kubectl | None) -> None:
    """Skip on other clusters: the test acts as a node, or needs pods that fit on no node."""
    if other_cluster is not None:
        pytest.skip(f"this takes an API server without nodes: unset {KUBECONFIG}")


@pytest.fixture
def cluster(pods_cluster: Kubectl) -> Iterator[Kubectl]:
    """A new namespace of that cluster."""
    namespace = f"dlion-test-{uuid.uuid4().hex[:8]}"
    pods_cluster.run("create", "namespace", namespace)
    try:
        yield replace(pods_cluster, namespace=namespace)
    finally:
        pods_cluster.run("delete", "namespace", namespace, "--wait=false")


@pytest.fixture
def busybox() -> str:
    """An image with a shell that the cluster of `cluster` has or can pull."""
    elsewhere = "docker.io/library/busybox:1.36"
    return BUSYBOX_IMAGE if existing_cluster() is None else elsewhere


@pytest.fixture(scope="session")
def images(
    other_cluster: Kubectl | None,
    pods_cluster: Kubectl,  # otherwise the build is useless
    request: pytest.FixtureRequest,
) -> dict[Target, ProjectImage]:
    """The images of the present tree, on the nodes of the first site or of the other cluster."""
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


def _operator_scope(fixture_name: str, config: pytest.Config) -> str:
    """Return the scope of an installed operator.

    On the testbed the tests of the operator have their own site; another cluster is shared, file by
    file.
    """
    return "module" if os.environ.get(KUBECONFIG) else "session"


@pytest.fixture(scope=_operator_scope)
def operated_site(
    other_cluster: Kubectl | None,
    pods_cluster: Kubectl,
    images: dict[Target, ProjectImage],
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[Kubectl]:
    """The cluster with the chart installed."""
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
    # `helm uninstall` deletes the rights without waiting for the pod, which may still ask for more.
    system = replace(kubectl, namespace=SYSTEM)
    system.run("delete", "deployment/dlion-operator", "--cascade=foreground")
    helm.run("uninstall", "dlion", "--namespace", SYSTEM, "--wait")
    assert denied == [], "the operator made requests that the chart does not grant"


def _on_another_cluster(
    kubectl: Kubectl, helm: Helm, install: list[str], values: dict[str, Any]
) -> Iterator[Kubectl]:
    """Install the chart in a new namespace; remove everything at the end, installed or not."""
    kubectl.run("create", "namespace", SYSTEM)
    try:
        helm.run(*install, values=values)
        yield kubectl
    finally:
        helm.run("uninstall", "dlion", "--namespace", SYSTEM, "--wait", "--ignore-not-found")
        kubectl.run("delete", "namespace", SYSTEM, timeout_s=120)
        _forget_jobs(kubectl)


def _forget_jobs(kubectl: Kubectl) -> None:
    """Remove the definitions and every job; `vacant_cluster` has checked that they are ours."""
    kubectl.run("delete", "--ignore-not-found", "-k", str(ROOT / "crds"), timeout_s=120)


@pytest.fixture
def restricted(operated_site: Kubectl) -> Iterator[Kubectl]:
    """A new namespace there that enforces pod security `restricted`."""
    with restricted_namespace(operated_site) as made:
        yield made


@pytest.fixture(scope="module")
def api(other_cluster: Kubectl | None, request: pytest.FixtureRequest) -> Iterator[Kubectl]:
    """An API server with the DLionJob definition and no kubelet, or that of another cluster."""
    if other_cluster is None:
        site: Site = request.getfixturevalue("api_site")
        yield site.kubectl
        return
    other_cluster.run("apply", "-f", str(ROOT / "crds/dlionjob.yaml"))
    other_cluster.wait_until_known("dlj", timeout_s=30)
    yield other_cluster
    _forget_jobs(other_cluster)  # a chart that is installed later has its own


@pytest.fixture
def kubectl(api: Kubectl) -> Iterator[Kubectl]:
    """A new namespace there."""
    namespace = f"dlion-test-{uuid.uuid4().hex[:8]}"
    api.run("create", "namespace", namespace)
    try:
        yield replace(api, namespace=namespace)
    finally:
        api.run("delete", "namespace", namespace, "--wait=false")


@pytest.fixture(scope="module")
def operator_of_module(
    api: Kubectl, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OperatorProcess]:
    """One operator for all namespaces, for a module whose tests need no other."""
    folder = tmp_path_factory.mktemp("operator")
    with OperatorProcess(folder, api.kubeconfig, namespace="default") as process:
        yield process
        assert process.metric('dlion_operator_reconciles_total{result="defect"}') == 0


@pytest.fixture
def shared_operator(operator_of_module: OperatorProcess) -> OperatorProcess:
    """The operator of the module, running: a failed restart in one test fails no other."""
    if not operator_of_module.is_running():
        operator_of_module.start()
    return operator_of_module
