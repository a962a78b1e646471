"""Test `dlion preflight` from a machine without credentials.

Sockets on loopback present certificates as operators and others make them.

- A faulty name, port, handshake or certificate is reported with a remedy. A certificate bounds the
  clock of the site.
- The command ends within its time limit for any answer: silence, an endless stream, plain text, an
  old TLS. Ctrl-C ends it immediately.
- The tests cover exit codes and JSON.

Left out: the federation ports of operators (tests/local/test_preflight.py).
"""

from __future__ import annotations

import contextlib
import json
import select
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from dlion_api.exit_codes import ExitCode
from dlion_api.names import SiteName
from dlion_api.protocol.trust import CLOCK_SKEW_ALLOWANCE
from dlion_cli.__main__ import main
from dlion_cli.inputs.bundles import read_bundle
from dlion_cli.inputs.listed_sites import TrustedSite
from dlion_cli.preflight_checks.checks import Check, CheckOutcome
from dlion_cli.preflight_checks.server_certificate import (
    PresentedCertificate,
    certificate_clock_check,
)
from dlion_cli.preflight_checks.site_probe import SMALL_SEGMENT_BYTES, probe_site, probe_sites
from dlion_operator.pki.authority import CertificateAuthority, ServerIdentity
from manifest_table import smallest
from presenting import listening, presents, stays_silent

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

A, B = SiteName("plant-a"), SiteName("plant-b")
NOW = datetime.now(UTC)
OURS, OTHERS = CertificateAuthority(A), CertificateAuthority(B)
SOON_S, LATER_S = 1.0, 20.0
"""Time limits: of checks that end by it, and of others."""


def never_ends(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"\0" * 65536)


def drips_a_handshake(connection: socket.socket) -> None:
    """Send the header of a TLS record, and then further bytes without end."""
    connection.sendall(b"\x16\x03\x03\x40\x00")
    while True:
        connection.sendall(b"\x02")
        time.sleep(0.01)


def speaks_plain(connection: socket.socket) -> None:
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def site(
    port: int, *, host: str = "127.0.0.1", authority: CertificateAuthority = OURS
) -> TrustedSite:
    return TrustedSite("plant-a", f"{host}:{port}", read_bundle(authority.bundle_pem))


def by_name(checks: list[Check]) -> dict[str, Check]:
    assert {check.site for check in checks} == {"plant-a"}
    return {check.name: check for check in checks}


# ---- names and ports -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("no-such-site.invalid", "no-such-site.invalid: "),
        ("a" * 70, "is not a valid name"),
        ("two..dots", "is not a valid name"),
    ],
)
def test_an_invalid_name_is_reported(host: str, words: str) -> None:
    (check,) = probe_site(site(1, host=host), LATER_S)
    assert (check.name, check.outcome) == ("dns", CheckOutcome.FAIL)
    assert words in check.observed
    assert "address of plant-a" in check.advice


def test_a_resolver_without_an_answer_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, done = threading.Event(), threading.Event()

    def hangs(*_: Any, **__: Any) -> list[Any]:
        asked.set()
        done.wait(LATER_S)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", hangs)
    (check,) = probe_site(site(1, host="plant-a.example"), SOON_S)
    done.set()
    assert asked.is_set()
    assert (check.name, check.outcome) == ("dns", CheckOutcome.FAIL)
    assert "no answer in time" in check.observed


def test_a_closed_port_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    found = by_name(probe_site(site(port), LATER_S))
    assert found["dns"].outcome is CheckOutcome.OK
    assert found["dns"].observed == "127.0.0.1 is an address"
    assert found["port"].outcome is CheckOutcome.FAIL
    assert found["port"].observed == f"127.0.0.1:{port}: nothing listens there"
    assert "open the port" in found["port"].advice
    assert set(found) == {"dns", "port"}


def test_a_port_that_drops_packets_is_reported() -> None:
    """With a full queue of one, the system answers no further connection."""
    with socket.socket() as server, contextlib.ExitStack() as held:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(4):
            each = held.enter_context(socket.socket())
            each.setblocking(False)
            each.connect_ex(server.getsockname())
        found = by_name(probe_site(site(server.getsockname()[1]), SOON_S))
    assert found["port"].outcome is CheckOutcome.FAIL
    assert found["port"].observed.endswith(": no answer in time")


# ---- handshakes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("talk", "within_s", "words"),
    [
        (stays_silent, SOON_S, "does not respond in time"),
        (drips_a_handshake, SOON_S, "does not respond in time"),
        (lambda _: None, LATER_S, "closes the connection in the handshake"),
        (speaks_plain, LATER_S, "does not speak TLS 1.3"),
        (never_ends, LATER_S, "does not speak TLS 1.3"),
    ],
)
def test_a_port_of_another_program_is_reported(
    talk: Callable[[socket.socket], object], within_s: float, words: str
) -> None:
    with listening(talk) as port:
        found = by_name(probe_site(site(port), within_s))
    assert found["port"].outcome is CheckOutcome.OK
    assert found["port"].figures["connect_s"] > 0
    assert found["tls"].outcome is CheckOutcome.FAIL
    assert words in found["tls"].observed
    assert "pass TLS through" in found["tls"].advice
    assert "clock" not in found


def test_a_port_that_resets_connections_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server resets the connection directly after accepting it."""
    taken = threading.Event()

    def resets(connection: socket.socket) -> None:
        assert taken.wait(LATER_S)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    class ResetBeforeUse(socket.socket):
        def connect(self, address: Any) -> None:
            super().connect(address)
            taken.set()
            poll = select.poll()
            poll.register(self, 0)  # errors and a hang-up are reported in any case
            assert poll.poll(LATER_S * 1e3)

    with listening(resets) as port:
        monkeypatch.setattr(socket, "socket", ResetBeforeUse)
        found = by_name(probe_site(site(port), LATER_S))
    assert found["port"].outcome is CheckOutcome.OK
    assert f"connected to 127.0.0.1:{port} in" in found["port"].observed
    assert found["tls"].outcome is CheckOutcome.FAIL
    assert found["tls"].observed == "it closes the connection in the handshake"


def test_a_path_that_loses_full_packets_is_named(tmp_path: Path) -> None:
    """The server answers only connections with small segments, as beyond such a path."""
    talk = presents(tmp_path, OURS.operator_identity())

    def answers_small(connection: socket.socket) -> None:
        size = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
        (talk if size <= SMALL_SEGMENT_BYTES else stays_silent)(connection)

    with listening(answers_small) as port:
        found = by_name(probe_site(site(port), 2.0))
    assert found["mtu"].outcome is CheckOutcome.FAIL
    assert f"lost on the way to 127.0.0.1:{port}" in found["mtu"].observed
    assert "clamp the MSS" in found["mtu"].advice
    assert "tls" not in found


def test_the_first_message_is_longer_than_a_full_packet(tmp_path: Path) -> None:
    talk, sizes = presents(tmp_path, OURS.operator_identity()), []

    def measures(connection: socket.socket) -> None:
        time.sleep(0.2)
        sizes.append(len(connection.recv(65536, socket.MSG_PEEK)))
        talk(connection)

    with listening(measures) as port:
        found = by_name(probe_site(site(port), LATER_S))
    assert found["tls"].outcome is CheckOutcome.OK
    assert 1500 < sizes[0] < 4096


def test_an_old_tls_is_reported(tmp_path: Path) -> None:
    old = presents(tmp_path, OURS.operator_identity(), maximum_version=ssl.TLSVersion.TLSv1_2)
    with listening(old) as port:
        found = by_name(probe_site(site(port), LATER_S))
    assert "does not speak TLS 1.3" in found["tls"].observed


def found_of(tmp_path: Path, identity: ServerIdentity) -> dict[str, Check]:
    with listening(presents(tmp_path, identity)) as port:
        return by_name(probe_site(site(port), LATER_S))


@pytest.mark.parametrize(
    ("identity", "outcome", "observed", "advice"),
    [
        (lambda: OURS.operator_identity(), CheckOutcome.OK, "operator.plant-a.dlion by its", ""),
        (
            lambda: CertificateAuthority(A).operator_identity(), CheckOutcome.FAIL,
            "by another authority than the listed one",
            "Run `dlion trust show` at plant-a",
        ),
        (
            lambda: OTHERS.operator_identity(), CheckOutcome.FAIL,
            "a certificate for operator.plant-b.dlion, and not for operator.plant-a.dlion",
            "Correct the address of plant-a",
        ),
        (
            lambda: OURS.server_identity("coordinator.example"), CheckOutcome.FAIL,
            "a certificate for coordinator.example",
            "a gateway presents its own certificate if it has no route for operator.plant-a.",
        ),
        (
            lambda: OURS.operator_identity(now=NOW - timedelta(days=2)), CheckOutcome.FAIL,
            "its certificate expired on", "which should renew it",
        ),
        (
            lambda: OURS.operator_identity(now=NOW + timedelta(hours=1)), CheckOutcome.FAIL,
            "its certificate is valid only from", "Synchronize the clocks",
        ),
    ],
)  # fmt: skip
def test_each_certificate_has_its_outcome(
    tmp_path: Path,
    identity: Callable[[], ServerIdentity],
    outcome: CheckOutcome,
    observed: str,
    advice: str,
) -> None:
    tls = found_of(tmp_path, identity())["tls"]
    assert tls.outcome is outcome
    assert observed in tls.observed
    assert advice in tls.advice
    assert bool(tls.advice) == (outcome is not CheckOutcome.OK)


def test_a_certificate_from_the_year_9999_gives_no_clock(tmp_path: Path) -> None:
    """A stranger's certificate with the right name: its clock cannot be computed."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([])
    end = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
    names = x509.SubjectAlternativeName([x509.DNSName("operator.plant-a.dlion")])
    made = x509.CertificateBuilder(
        name, name, key.public_key(), x509.random_serial_number(), end, end
    )
    signed = made.add_extension(names, critical=True).sign(key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    key_pem = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    found = found_of(tmp_path, ServerIdentity(key_pem, signed.public_bytes(pem), NOW, NOW))
    assert found["tls"].outcome is CheckOutcome.FAIL
    assert "that its bundle does not verify" in found["tls"].observed
    assert "clock" not in found


def test_the_earlier_bundle_trusts_a_renewed_authority(tmp_path: Path) -> None:
    renewed = OURS.renewed(now=NOW)
    assert renewed.bundle_pem != OURS.bundle_pem
    assert found_of(tmp_path, renewed.operator_identity())["tls"].outcome is CheckOutcome.OK


# ---- clocks --------------------------------------------------------------------------------------

MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)


def certificate(made: timedelta, life: timedelta) -> PresentedCertificate:
    """Return a certificate of this age by the site's clock, which expires after `life`."""
    return PresentedCertificate((), NOW - made - CLOCK_SKEW_ALLOWANCE, NOW - made + life)


@pytest.mark.parametrize(
    ("made", "life", "outcome", "words"),
    [
        (3 * HOUR, 24 * HOUR, CheckOutcome.UNKNOWN, "between 3:00:00 behind and 13:00:00 ahead"),
        (MINUTE, 6 * MINUTE, CheckOutcome.OK, "between 1:00 behind and 3:00 ahead"),
        (-MINUTE, 24 * HOUR, CheckOutcome.WARN, "at least 1:00 ahead of this machine's"),
        (-HOUR, 24 * HOUR, CheckOutcome.FAIL, "at least 1:00:00 ahead of this machine's"),
        (3 * HOUR, 3 * HOUR, CheckOutcome.WARN, "at least 1:00:00 behind this machine's, or"),
    ],
)
def test_the_bounds_of_a_clock_follow_from_the_certificate(
    made: timedelta, life: timedelta, outcome: CheckOutcome, words: str
) -> None:
    check = certificate_clock_check(site(1), certificate(made, life), NOW)
    assert check.outcome is outcome
    assert words in check.observed
    least, most = check.figures.values()
    assert least == -made.total_seconds()
    assert most == pytest.approx((life * 2 / 3 - made).total_seconds())
    assert bool(check.advice) == (outcome is not CheckOutcome.OK)


@pytest.mark.parametrize("ahead_s", [-480, -60, 0, 60, 480])
def test_the_bounds_contain_the_true_clock(tmp_path: Path, ahead_s: int) -> None:
    """For certificates made just now by a clock that is this far ahead."""
    ahead = timedelta(seconds=ahead_s)
    identity = OURS.operator_identity(now=datetime.now(UTC) + ahead)
    figures = found_of(tmp_path, identity)["clock"].figures
    assert figures["clock_ahead_at_least_s"] <= ahead_s <= figures["clock_ahead_at_most_s"]
    assert figures["clock_ahead_at_least_s"] > ahead_s - 30


# ---- the command ---------------------------------------------------------------------------------


def listed(folder: Path, *sites: tuple[CertificateAuthority, str]) -> str:
    entries = [
        {"name": str(each.site), "address": address, "bundle": each.bundle_pem.decode()}
        for each, address in sites
    ]
    file = folder / "sites.yaml"
    file.write_text(yaml.safe_dump({"sites": entries}))
    return str(file)


def test_one_site_that_hangs_hides_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = presents(tmp_path, OURS.operator_identity())
    with listening(good) as port, listening(stays_silent) as silent:
        file = listed(tmp_path, (OTHERS, f"127.0.0.1:{silent}"), (OURS, f"127.0.0.1:{port}"))
        code = main(["preflight", file, "--timeout", "1", "-o", "json"])
        assert code == ExitCode.UNAVAILABLE
        document = json.loads(capsys.readouterr().out)
        assert document["outcome"] == "fail"
        outcomes = {(each["site"], each["check"]): each["outcome"] for each in document["checks"]}
        assert list(dict.fromkeys(name for name, _ in outcomes)) == ["plant-b", "plant-a"]
        assert outcomes["plant-b", "tls"] == "fail"
        assert outcomes["plant-a", "tls"] == "ok"
        assert main(["preflight", listed(tmp_path, (OURS, f"127.0.0.1:{port}"))]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["SITE", "CHECK", "RESULT", "OBSERVED"]
    assert rows[1][:3] == ["plant-a", "bundle", "ok"]
    assert [row[0] for row in rows[2:6]] == ["dns", "port", "tls", "clock"]


def test_a_bundle_that_ends_soon_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    aged = CertificateAuthority(A, now=NOW - timedelta(days=350))
    with listening(presents(tmp_path, aged.operator_identity())) as port:
        assert main(["preflight", listed(tmp_path, (aged, f"127.0.0.1:{port}")), "-o", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["outcome"] == "warn"
    (bundle, *_) = document["checks"]
    assert (bundle["check"], bundle["outcome"]) == ("bundle", "warn")
    assert "`dlion trust show` at plant-a" in bundle["advice"]


def test_an_unlisted_site_of_a_job_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump(smallest()))
    with listening(presents(tmp_path, OURS.operator_identity())) as port:
        file = listed(tmp_path, (OURS, f"127.0.0.1:{port}"))
        code = main(["preflight", file, "-f", str(job), "-o", "json"])
    captured = capsys.readouterr()
    assert code == ExitCode.UNAVAILABLE, captured.err
    named = [each for each in json.loads(captured.out)["checks"] if each["check"] == "listed"]
    assert [(each["site"], each["outcome"]) for each in named] == [
        ("plant-a", "ok"), ("plant-b", "fail"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        (None, ExitCode.DATA, "cannot be read"),
        ("", ExitCode.SPEC, "is empty"),
        ("sites: 7", ExitCode.SPEC, "must be a list"),
        ("sites: [7]", ExitCode.SPEC, "sites[0]"),
        ("sites: [{name: a, address: [], bundle: {}}]", ExitCode.SPEC, "sites[0].address"),
        ("sites: [{name: a, address: 'a:1'}]", ExitCode.SPEC, "bundle: of a is missing"),
        ("x: " + "y" * 1_100_000, ExitCode.SPEC, "is too large"),
        ("[" * 1000, ExitCode.SPEC, "is nested deeper"),
    ],
)
def test_an_invalid_list_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str | None,
    code: ExitCode,
    words: str,
) -> None:
    file = tmp_path / "sites.yaml"
    if text is not None:
        file.write_text(text)
    assert main(["preflight", str(file)]) == code
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    "arguments", [[], ["-", "-f", "-"], ["f", "--timeout", "0"], ["f", "--timeout", "nan"]]
)
def test_conflicting_options_are_refused(arguments: list[str]) -> None:
    assert main(["preflight", *arguments]) == ExitCode.USAGE


def test_ctrl_c_ends_the_command_immediately(tmp_path: Path) -> None:
    asked = threading.Event()

    def hears(connection: socket.socket) -> None:
        asked.set()
        stays_silent(connection)

    with listening(hears) as port:
        file = listed(tmp_path, (OURS, f"127.0.0.1:{port}"))
        command = [sys.executable, "-m", "dlion_cli", "preflight", file, "--timeout", "3600"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            assert asked.wait(60)
            process.send_signal(signal.SIGINT)
            _, message = process.communicate(timeout=60)
    assert process.returncode == ExitCode.INTERRUPTED
    assert message.strip() == "dlion: interrupted"


def test_an_unexpected_error_at_one_site_hides_no_other(tmp_path: Path) -> None:
    odd = TrustedSite("plant-b", "plant-b.example:http", read_bundle(OTHERS.bundle_pem))
    with listening(presents(tmp_path, OURS.operator_identity())) as port:
        checks = probe_sites([odd, site(port)], LATER_S)
    assert [(check.site, check.name) for check in checks if check.outcome is CheckOutcome.FAIL] == [
        ("plant-b", "tls")
    ]
    assert "ValueError: invalid literal" in checks[0].observed
    assert [check.name for check in checks[1:]] == ["dns", "port", "tls", "clock"]


def test_sites_are_dialled_at_the_same_time() -> None:
    """Each site answers only once all have been dialled."""
    all_here = threading.Barrier(4)

    def waits(_: socket.socket) -> None:
        all_here.wait(LATER_S)

    with listening(waits) as port:
        checks = probe_sites([site(port) for _ in range(4)], LATER_S)
    assert not all_here.broken
    assert sum("closes the connection" in check.observed for check in checks) == 4
