"""Tests of objects in S3.

An object is requested by a signed request to the server that the Secret names, whatever the
machine's variables are. An error has the server's code and a remedy. No message contains a key.
Invalid values are refused before a request.

Left out: the check of the signature by a server (tests/local/test_s3.py); features of all downloads
(test_store).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from dlion_api.errors import DataError, UnavailableError
from dlion_api.spec.initializers import Download
from dlion_worker.initializers.credentials import local_variables, s3_credentials
from dlion_worker.initializers.s3_object import S3Object
from dlion_worker.initializers.store import DownloadStore
from file_server import served

CONTENT = b"content"
KEYS = {"AWS_ACCESS_KEY_ID": "AKIA", "AWS_SECRET_ACCESS_KEY": "PRIVATE"}
ENDPOINT = {"AWS_ENDPOINT_URL": "https://store.example:9000/"}


def download(url: str = "s3://bucket/a/data.npz") -> Download:
    return Download(url=url, sha256=hashlib.sha256(CONTENT).hexdigest(), secret_name="hub")


def variables(secret: Mapping[str, str]) -> dict[str, str]:
    """Set the variables that replace the Secret outside a cluster."""
    return {local_variables("hub")[key]: value for key, value in secret.items()}


def s3_object(secret: Mapping[str, str], url: str = "s3://bucket/a/data.npz") -> S3Object:
    it = download(url)
    return S3Object.of(it, s3_credentials(it, variables(secret), local_variables("hub")))


def test_a_request_is_signed_for_the_servers_path() -> None:
    url = urlsplit(s3_object({**KEYS, **ENDPOINT}, "s3://bucket/a/my%20data%2B.npz").signed_url())
    assert (url.scheme, url.netloc) == ("https", "store.example:9000")
    assert url.path == "/bucket/a/my%20data%2B.npz"
    given = parse_qs(url.query)
    assert given["X-Amz-Credential"][0].split("/")[::2] == ["AKIA", "us-east-1", "aws4_request"]
    assert given["X-Amz-Expires"] == ["900"]
    assert "PRIVATE" not in url.query


def test_a_region_has_its_own_server() -> None:
    url = urlsplit(s3_object({**KEYS, "AWS_REGION": "eu-west-1\n"}).signed_url())
    assert url.netloc == "s3.eu-west-1.amazonaws.com"
    assert "eu-west-1" in parse_qs(url.query)["X-Amz-Credential"][0]


def test_a_session_has_its_token() -> None:
    url = s3_object({**KEYS, "AWS_SESSION_TOKEN": "session"}).signed_url()
    assert parse_qs(urlsplit(url).query)["X-Amz-Security-Token"] == ["session"]


def test_the_machines_own_variables_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*KEYS, "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_BUCKET"):
        monkeypatch.setenv(name, "other")
    for name in ("SKIP_SIGNATURE", "VIRTUAL_HOSTED_STYLE_REQUEST", "S3_EXPRESS", "REQUEST_PAYER"):
        monkeypatch.setenv(f"AWS_{name}", "true")
    for name in ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.setenv(name, "https://other.example")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", "/other")
    monkeypatch.setenv("AWS_ROLE_ARN", "other")
    url = s3_object({**KEYS, **ENDPOINT}).signed_url()
    assert url.startswith("https://store.example:9000/bucket/a/data.npz?")
    assert "X-Amz-Signature" in url
    assert "other" not in url
    assert "Security-Token" not in url


@pytest.mark.parametrize(
    ("endpoint", "variable"),
    [("https://store.example:99999", ""), ("https://store.example", "AWS_UNSIGNED_PAYLOAD"),
     ("https://store.example", "AWS_CHECKSUM_ALGORITHM")],
)  # fmt: skip
def test_an_address_that_obstore_refuses_is_named(
    endpoint: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable:
        monkeypatch.setenv(variable, "malformed")
    with pytest.raises(DataError, match="Correct AWS_ENDPOINT_URL in Secret hub") as caught:
        s3_object({**KEYS, "AWS_ENDPOINT_URL": endpoint}).signed_url()
    assert variable in str(caught.value)
    assert not [each for each in ("\n", "AKIA", "PRIVATE") if each in str(caught.value)]


@pytest.mark.parametrize("missing", [[*KEYS], ["AWS_ACCESS_KEY_ID"], ["AWS_SECRET_ACCESS_KEY"]])
def test_a_secret_without_keys_fails_before_a_request(missing: list[str]) -> None:
    given = {key: " \n" if key in missing else value for key, value in KEYS.items()}
    with pytest.raises(UnavailableError, match="no access key in Secret hub") as caught:
        s3_object(given)
    assert "DLION_DOWNLOAD_AWS_ACCESS_KEY_ID_HUB" in str(caught.value)
    assert "PRIVATE" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [("AWS_ENDPOINT_URL", "store.example"), ("AWS_ENDPOINT_URL", "file:///etc"),
     ("AWS_ENDPOINT_URL", "https://user:WORD@store.example"), ("AWS_ENDPOINT_URL", "https://"),
     ("AWS_ENDPOINT_URL", "https://store.example/?a=b"), ("AWS_ENDPOINT_URL", "https://a b"),
     ("AWS_REGION", "WORD.example/"), ("AWS_REGION", "x" * 65), ("AWS_SESSION_TOKEN", "a\nWORD"),
     ("AWS_SECRET_ACCESS_KEY", "a WORD"), ("AWS_ACCESS_KEY_ID", "\udcffWORD")],
)  # fmt: skip
def test_invalid_keys_are_refused_and_not_shown(key: str, value: str) -> None:
    with pytest.raises(DataError, match=f"Secret hub: {key} .*Correct it") as caught:
        s3_object({**KEYS, key: value})
    assert "WORD" not in str(caught.value)


@pytest.mark.parametrize("key", ["a/../b.npz", "a/%2E%2E/b", "a/.", "a%2F%2Fb", "a%00b"])
def test_a_key_that_no_request_can_have_is_refused(key: str) -> None:
    with pytest.raises(DataError, match="Correct the address"):
        s3_object(KEYS, f"s3://bucket/{key}")


@pytest.mark.parametrize(
    ("code", "words"),
    [("NoSuchBucket", "Correct the bucket"), ("NoSuchKey", "Correct the key"),
     ("SignatureDoesNotMatch", "AWS_SECRET_ACCESS_KEY"), ("InvalidAccessKeyId", "Secret hub"),
     ("ExpiredToken", "AWS_SESSION_TOKEN"), ("PermanentRedirect", "AWS_REGION"),
     ("AccessDenied", "s3:GetObject"), ("SomethingNew", "Correct the address or the keys")],
)  # fmt: skip
def test_an_error_has_a_remedy(code: str, words: str) -> None:
    answer = f'<?xml version="1.0"?>\n<Error><Code>{code}</Code><Message>m</Message></Error>'
    explained = s3_object(KEYS).explain(answer.encode(), format_datetime(datetime.now(UTC)))
    assert explained.startswith(code)
    assert words in explained


@pytest.mark.parametrize("answer", [b"", b"<html>", b"<Code>" + b"x" * 65, b"<Code>\xff</Code>"])
def test_the_answer_of_another_server_is_named(answer: bytes) -> None:
    assert "not an answer of S3. Correct AWS_ENDPOINT_URL" in s3_object(KEYS).explain(answer, "")


@pytest.mark.parametrize(("hours", "side"), [(-1, "ahead of"), (1, "behind")])
def test_a_wrong_clock_is_named(hours: int, side: str) -> None:
    server_time = format_datetime(datetime.now(UTC) + timedelta(hours=hours))
    explained = s3_object(KEYS).explain(b"<Code>AccessDenied</Code>", server_time)
    assert explained.startswith("AccessDenied. The clock here is ")
    assert f"s {side} the server's: set it" in explained


@pytest.mark.parametrize("code", ["PermanentRedirect", "InvalidAccessKeyId", "NoSuchKey"])
def test_a_clock_that_is_not_the_cause_is_not_named(code: str) -> None:
    server_time = format_datetime(datetime.now(UTC) + timedelta(hours=1))
    explained = s3_object(KEYS).explain(f"<Code>{code}</Code>".encode(), server_time)
    assert "clock" not in explained


def test_an_object_is_stored_like_any_download(tmp_path: Path) -> None:
    with served(CONTENT) as server:
        server.failures = [503, "cut 3"]
        endpoint = server.url.partition("/files/")[0]
        given = variables({**KEYS, "AWS_ENDPOINT_URL": endpoint})
        place = DownloadStore(tmp_path).fetch(download(), environment=given)
        assert (place / "data.npz").read_bytes() == CONTENT
        assert [each.get("Range") for each in server.requests] == [None, None, "bytes=3-"]
        server.failures = [403]
        with pytest.raises(DataError) as caught:
            DownloadStore(tmp_path / "other").fetch(download(), environment=given)
    message = str(caught.value)
    assert message.startswith(f"s3://bucket/a/data.npz at {endpoint}: HTTP 403 Forbidden: ")
    assert not [each for each in ("AKIA", "PRIVATE", "Signature") if each in message]
