"""Test `dlion trust`: the certificates that a site gives to others, and the file that joins them.

The authorities are made as operators make them.

- `show` prints the certificates that an operator publishes, with the site's name and the address of
  the Service. It reads no Secret. `verify` accepts its output for several sites.
- `verify` reports all problems of a file together, with lines, and repeats no key.
- A ConfigMap that is missing, foreign or unreadable has its message and exit code.

Left out: a real API server (tests/cluster/test_cli.py), the chart's own refusals (tests/chart).
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes

from dlion_api.exit_codes import ExitCode
from dlion_api.names import SiteName
from dlion_cli.__main__ import main
from dlion_operator.pki.authority import CertificateAuthority
from given_authorities import odd_certificates
from scripted_servers import Server, served

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from scripted_servers import Answer

NOW = datetime.now(UTC)
AUTHORITIES = {
    name: CertificateAuthority(SiteName(name)) for name in ("plant-a", "plant-b", "plant-c")
}
KEY = AUTHORITIES["plant-a"].to_stored().key_pem.decode()


def bundle(site: str) -> str:
    return AUTHORITIES[site].bundle_pem.decode()


def shown(certificates: bytes) -> Answer:
    """Return the ConfigMap as an API server sends it."""
    return 200, json.dumps({"data": {"ca.crt": certificates.decode()}})


def service(kind: str, *, ingress: Any = None, **port: int) -> dict[str, Any]:
    """Return a federation Service as the chart creates it."""
    return {
        "metadata": {"name": "dlion-operator-federation"},
        "spec": {"type": kind, "ports": [{"name": "federation", "port": 8446, **port}]},
        "status": {"loadBalancer": {"ingress": ingress} if ingress else {}},
    }


OTHER = {
    "metadata": {"name": "dlion-operator"},
    "spec": {"ports": [{"name": "metrics", "port": 1}]},
}


def site(name: str, *services: dict[str, Any], settings_text: str = "gateway: null") -> Server:
    """Return a cluster with that site's operator and the settings of its chart."""
    kept = shown(AUTHORITIES[name].bundle_pem)
    listed = (200, json.dumps({"items": [OTHER, *services]}))
    settings = (200, json.dumps({"data": {"config.yaml": settings_text}}))
    answers = {"dlion-authority": kept, "own-ca": kept, "services": listed}
    return Server({**answers, "dlion-operator": settings})


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Return a file with a context for each given server."""
    with ExitStack() as stack:

        def made(**servers: Server | None) -> str:
            return stack.enter_context(served(tmp_path / "kubeconfig", servers))

        yield made


# ---- show ----------------------------------------------------------------------------------------


def test_show_prints_the_certificates_and_reads_no_key(
    kubeconfig: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    server = site("plant-a")
    command = ["trust", "show", "--kubeconfig", kubeconfig(a=server)]
    (certificate,) = x509.load_pem_x509_certificates(bundle("plant-a").encode())
    fingerprint = certificate.fingerprint(hashes.SHA256()).hex(":").upper()
    printed = {}
    for output in ("yaml", "json", "pem"):
        assert main([*command, "-o", output, "--address", "plant-a.example:30446"]) == 0
        printed[output] = capsys.readouterr().out
        assert "PRIVATE" not in printed[output]
        assert KEY.splitlines()[1] not in printed[output]
    assert not any("secrets" in path for path in server.asked)
    assert printed["pem"] == bundle("plant-a")
    entry = {"name": "plant-a", "address": "plant-a.example:30446", "bundle": bundle("plant-a")}
    assert yaml.safe_load(printed["yaml"]) == {"sites": [entry]}
    until = certificate.not_valid_after_utc
    assert f"    # until {until:%Y-%m-%d}, sha256 {fingerprint}\n" in printed["yaml"]
    document = json.loads(printed["json"])
    assert entry.items() <= document.items()
    assert document["sha256"] == fingerprint
    assert document["notAfter"] == until.isoformat()


@pytest.mark.parametrize(
    ("services", "address", "hint"),
    [
        ([service("LoadBalancer", ingress=[{"ip": "192.0.2.7"}])], "192.0.2.7:8446", ""),
        ([service("LoadBalancer", ingress=[{"ip": "fd00::7"}])], "[fd00::7]:8446", ""),
        ([service("LoadBalancer", ingress=[{"hostname": "lb"}])], "lb:8446", ""),
        ([service("LoadBalancer")], "", "it has none yet"),
        ([service("NodePort", nodePort=30446)], "", "a node's address, and :30446"),
        ([service("ClusterIP")], "", "Service dlion-operator-federation (ClusterIP), and :8446"),
        ([], "", "no federation Service yet"),
        ([service("ClusterIP"), service("NodePort")], "", "several federation Services"),
    ],
)
def test_the_address_or_the_missing_setting_is_shown(
    kubeconfig: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    services: list[dict[str, Any]],
    address: str,
    hint: str,
) -> None:
    file = kubeconfig(a=site("plant-a", *services))
    assert main(["trust", "show", "--authority", "own-ca", "--kubeconfig", file]) == 0
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed)["sites"][0]["address"] == address
    (line,) = [line for line in printed.splitlines() if "address:" in line]
    assert (hint in line) if hint else ("#" not in line)


GATEWAY = "gateway: {address: 'edge.example:443'}"


@pytest.mark.parametrize(
    ("services", "settings_text", "address", "hint"),
    [
        ([service("ClusterIP")], GATEWAY, "edge.example:443", ""),
        ([], GATEWAY, "edge.example:443", ""),
        ([service("NodePort", nodePort=30446)], GATEWAY, "edge.example:443", ""),
        ([service("LoadBalancer", ingress=[{"ip": "192.0.2.7"}])], GATEWAY, "192.0.2.7:8446", ""),
        ([OTHER], GATEWAY, "", "no federation Service yet"),
        ([service("ClusterIP")], "gateway: {address: edge}", "", "(ClusterIP), and :8446"),
        ([service("ClusterIP")], "gateway: 7", "", "(ClusterIP), and :8446"),
        (
            [service("ClusterIP")], "[", "",
            "and :8446; or its gateway.address (ConfigMap dlion-operator cannot be read)",
        ),
    ],
)  # fmt: skip
def test_a_site_behind_a_gateway_shows_the_gateways_address(
    kubeconfig: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    services: list[dict[str, Any]],
    settings_text: str,
    address: str,
    hint: str,
) -> None:
    file = kubeconfig(a=site("plant-a", *services, settings_text=settings_text))
    assert main(["trust", "show", "--kubeconfig", file]) == 0
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed)["sites"][0]["address"] == address
    (line,) = [line for line in printed.splitlines() if "address:" in line]
    assert (hint in line) if hint else ("#" not in line)


def test_without_a_right_to_services_the_rest_is_shown(
    kubeconfig: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    kept = shown(AUTHORITIES["plant-a"].bundle_pem)
    file = kubeconfig(a=Server({"dlion-authority": kept, "services": (403, "{}")}))
    assert main(["trust", "show", "--kubeconfig", file]) == 0
    assert "no permission to list Services" in capsys.readouterr().out


def test_verify_accepts_the_output_of_show_for_several_contexts(
    kubeconfig: Callable[..., str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lb = service("LoadBalancer", ingress=[{"hostname": "plant-b.example"}])
    other = service("LoadBalancer", ingress=[{"hostname": "plant-a.example"}])
    file = kubeconfig(a=site("plant-a", other), b=site("plant-b", lb), c=None)
    command = ["trust", "show", "--kubeconfig", file, "--contexts"]
    assert main([*command, "a,b"]) == 0
    shown = tmp_path / "sites.yaml"
    shown.write_text(capsys.readouterr().out)
    assert main(["trust", "verify", str(shown)]) == 0
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines()[::2]] == ["plant-a", "plant-b"]
    assert all(line.split()[-1] in shown.read_text() for line in printed.splitlines()[1::2])
    assert main([*command, "c,b", "-o", "json"]) == ExitCode.UNAVAILABLE
    captured = capsys.readouterr()
    assert [each["name"] for each in json.loads(captured.out)] == ["plant-b"]
    assert "context c: no API server answers" in captured.err


ABSENT = (404, json.dumps({"message": 'configmaps "x" not found',
                           "details": {"kind": "configmaps"}}))  # fmt: skip
FORBIDDEN = (403, json.dumps({"message": 'User "jane" cannot get resource "configmaps" in API '
                              'group "" in the namespace "dlion-system"'}))  # fmt: skip
LEAF = AUTHORITIES["plant-a"].server_identity("a.b").certificate_chain_pem
TWO = AUTHORITIES["plant-a"].bundle_pem + AUTHORITIES["plant-b"].bundle_pem


@pytest.mark.parametrize(
    ("answer", "code", "words"),
    [
        (ABSENT, ExitCode.UNAVAILABLE, "there is no ConfigMap dlion-system/dlion-authority"),
        (
            FORBIDDEN,
            ExitCode.DENIED,
            "--resource-name=dlion-authority; it contains",
        ),
        ((200, "{}"), ExitCode.DATA, "its ca.crt is invalid: is not PEM"),
        ((200, '{"data": {"ca.crt": "?"}}'), ExitCode.DATA, "its ca.crt is invalid"),
        ((200, '{"data": {"ca.crt": 7}}'), ExitCode.DATA, "its ca.crt is invalid"),
        ((200, '{"data": {"ca.crt": "\\ud800"}}'), ExitCode.DATA, "its ca.crt is invalid"),
        (shown(LEAF), ExitCode.DATA, "holds a certificate that is not an authority's"),
        (shown(TWO), ExitCode.DATA, "its certificates name plant-a and plant-b"),
        (shown(KEY.encode()), ExitCode.DATA, "holds a private key"),
    ],
)
def test_an_invalid_config_map_is_refused(
    kubeconfig: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    answer: Answer,
    code: ExitCode,
    words: str,
) -> None:
    file = kubeconfig(a=Server({"dlion-authority": answer}))
    assert main(["trust", "show", "--kubeconfig", file]) == code
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""
    assert KEY.splitlines()[1] not in captured.err


# ---- verify --------------------------------------------------------------------------------------


def entry(site: str, **changes: Any) -> dict[str, Any]:
    made = {"name": site, "address": f"{site}.example:8446", "bundle": bundle(site)}
    return made | changes


def verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *sites: Any, options: tuple[str, ...] = ()
) -> tuple[int, str]:
    """Return exit code and messages of `verify` for a file with these entries."""
    file = tmp_path / "all-sites.yaml"
    file.write_text(yaml.safe_dump({"images": {"tag": 1}, "sites": list(sites)}, sort_keys=False))
    code = main(["trust", "verify", str(file), *options])
    captured = capsys.readouterr()
    assert KEY.splitlines()[1] not in captured.out + captured.err
    return code, captured.err


def aged(age: timedelta, site: str = "plant-b") -> str:
    return CertificateAuthority(SiteName(site), now=NOW - age).bundle_pem.decode()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bundle": ""}, "bundle: of plant-b is missing. Run `dlion trust show`"),
        ({"bundle": "plant-b.pem"}, "of plant-b is not PEM of certificates"),
        ({"bundle": bundle("plant-b") + KEY}, "of plant-b holds a private key"),
        ({"bundle": LEAF.decode()}, "of plant-b holds a certificate that is not an authority's"),
        *(({"bundle": each.decode()}, "of plant-b is not PEM of certificates")
          for each in odd_certificates(bundle("plant-b").encode()).values()),
        ({"bundle": bundle("plant-c")}, "of plant-b is of site plant-c"),
        ({"bundle": bundle("plant-b") * 30}, "bytes long; allowed: 16000"),
        ({"bundle": aged(timedelta(days=400))}, "of plant-b expired on"),
        ({"bundle": aged(timedelta(days=350))}, "of plant-b expires on"),
        ({"bundle": aged(timedelta(days=-2))}, "UTC; check the clock"),
        ({"address": ""}, "address: is missing"),
        ({"address": "plant-b"}, "is not host:port (given: plant-b)"),
        ({"address": "plant-b:65536"}, "is not host:port"),
        ({"address": "plant-a.example:8446"}, "is also that of plant-a"),
        ({"name": "Plant-B"}, "sites[1].name: has the wrong form"),
        ({"name": "plant-a"}, "is a duplicate of sites[0]"),
        ({"cert": "x"}, 'there is no field "cert" here; allowed: name, address, bundle'),
        ({"bundle": None, "name": None}, "sites[1].name"),
    ],
)  # fmt: skip
def test_an_invalid_entry_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], words: str
) -> None:
    entries = entry("plant-a"), entry("plant-b", **changes)
    code, message = verified(tmp_path, capsys, *entries)
    assert code == ExitCode.SPEC
    assert words in message
    assert "line " in message


def test_all_problems_are_reported_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = entry("plant-b", address="b", bundle=""), entry("plant-c", bundle=bundle("plant-b"))
    code, message = verified(tmp_path, capsys, entry("plant-a"), *wrong)
    assert code == ExitCode.SPEC
    assert "3 problems" in message


def test_two_sites_with_one_key_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if the certificates differ, as after a renewal with the same key."""
    foreign = own_authority("factory ca")
    renewed = own_authority("factory ca 2")
    entries = entry("plant-a", bundle=foreign), entry("plant-b", bundle=renewed)
    code, message = verified(tmp_path, capsys, *entries)
    assert code == ExitCode.SPEC
    assert "of plant-b has the same key as plant-a's" in message
    assert verified(tmp_path, capsys, entries[0])[0] == 0  # valid on its own


def own_authority(organization: str) -> str:
    """Return a certificate for one and the same key, as a factory's own authority may have."""
    from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

    key: Any = load_pem_private_key(KEY.encode(), None)
    name = x509.Name([x509.NameAttribute(x509.NameOID.ORGANIZATION_NAME, organization)])
    constraints = x509.BasicConstraints(ca=True, path_length=0)
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name)
    made = made.public_key(key.public_key()).serial_number(x509.random_serial_number())
    made = made.not_valid_before(NOW).not_valid_after(NOW + timedelta(days=365))
    signed = made.add_extension(constraints, critical=True).sign(key, hashes.SHA256())
    return signed.public_bytes(Encoding.PEM).decode()


def test_a_renewed_bundle_is_valid_as_long_as_its_newest_certificate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = CertificateAuthority(SiteName("plant-b"), now=NOW - timedelta(days=350))
    both = old.renewed(now=NOW).bundle_pem.decode()
    assert both.count("BEGIN") == 2
    assert verified(tmp_path, capsys, entry("plant-b", bundle=both))[0] == 0
    late = entry("plant-b", bundle=old.bundle_pem.decode())
    assert verified(tmp_path, capsys, late)[0] == ExitCode.SPEC
    assert verified(tmp_path, capsys, late, options=("--valid-for", "5"))[0] == 0


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("site: {name: plant-a}", ExitCode.SPEC, "sites"),
        ("sites: []", ExitCode.SPEC, "has too few items"),
        ("sites: plant-a", ExitCode.SPEC, "must be a list"),
        ("- name: plant-a", ExitCode.SPEC, "sites"),
        ("", ExitCode.SPEC, "is empty"),
        ("sites: [", ExitCode.SPEC, "is not YAML"),
        (None, ExitCode.DATA, "cannot be read"),
    ],
)
def test_an_invalid_file_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str | None,
    code: ExitCode,
    words: str,
) -> None:
    file = tmp_path / "values.yaml"
    if text is not None:
        file.write_text(text)
    assert main(["trust", "verify", str(file)]) == code
    assert words in capsys.readouterr().err


def test_a_bundle_that_expires_within_the_longest_time_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, message = verified(tmp_path, capsys, entry("plant-b"), options=("--valid-for", "36500"))
    assert code == ExitCode.SPEC
    assert "of plant-b expires on" in message


@pytest.mark.parametrize(
    "arguments",
    [
        ["show", "--address", "plant-a"],
        ["show", "--contexts", "a,b", "--address", "a:1"],
        ["show", "--contexts", "a,b", "-o", "pem"],
        ["verify"],
        ["verify", "f", "--valid-for", "-1"],
        ["verify", "f", "--valid-for", "36501"],
        ["list"],
    ],
)
def test_conflicting_options_are_refused(
    kubeconfig: Callable[..., str], arguments: list[str]
) -> None:
    file = ["--kubeconfig", kubeconfig(a=None, b=None)] if arguments[0] == "show" else []
    assert main(["trust", *arguments, *file]) == ExitCode.USAGE
