"""Direct requests to a real API server: what it accepts, and with which message it refuses.

kubectl is the proxy, because it knows every way to log in. One kept connection carries all
requests, so that hundreds of documents take seconds. This module does not judge documents.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from dlion_api.errors import UnavailableError
from dlion_api.names import GROUP, VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator

    from testbed.kubectl import Kubectl

_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Answer:
    """A response: the object where `code` is 2xx, else a `metav1.Status`."""

    code: int
    document: dict[str, Any]

    @property
    def accepted(self) -> bool:
        """Whether the request succeeded, or would succeed."""
        return 200 <= self.code < 300

    @property
    def message(self) -> str:
        """The reason of a refusal, for people; empty if accepted."""
        return "" if self.accepted else str(self.document.get("message", ""))

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that the refusal names, such as `spec.sites[0].name`."""
        causes = (self.document.get("details") or {}).get("causes") or ()
        return () if self.accepted else tuple(str(cause.get("field", "")) for cause in causes)


@dataclass(frozen=True)
class Jobs:
    """The `DLionJob`s of one namespace, with strict validation: unknown fields are refused."""

    connection: http.client.HTTPConnection
    namespace: str

    def create(self, document: object, *, dry_run: bool = True, user: str = "") -> Answer:
        """POST a document as that user; by default as a dry run."""
        return self._send("POST", "", document, dry_run=dry_run, user=user)

    def replace(self, name: str, document: object, *, dry_run: bool = True) -> Answer:
        """PUT everything but the status."""
        return self._send("PUT", f"/{name}", document, dry_run=dry_run)

    def replace_status(self, name: str, document: object, *, dry_run: bool = True) -> Answer:
        """PUT only the status; the API server ignores the rest of the document."""
        return self._send("PUT", f"/{name}/status", document, dry_run=dry_run)

    def wait_until_served(self) -> None:
        """Wait until the API server knows the kind. Raises: UnavailableError after a time-out."""
        deadline_s = time.monotonic() + _TIMEOUT_S
        while not (answer := self._send("GET", "", None, dry_run=False)).accepted:
            if time.monotonic() > deadline_s:
                raise UnavailableError(f"DLionJobs are not served: {answer.message}")
            time.sleep(0.1)

    def delete(self, name: str) -> None:
        """DELETE a job; it is gone on return."""
        answer = self._send("DELETE", f"/{name}", {}, dry_run=False)
        assert answer.accepted, answer.message

    def get(self, name: str) -> dict[str, Any]:
        """Return one job as it is stored."""
        answer = self._send("GET", f"/{name}", None, dry_run=False)
        assert answer.accepted, answer.message
        return answer.document

    def _send(
        self, method: str, path: str, manifest: object, *, dry_run: bool, user: str = ""
    ) -> Answer:
        query = {"fieldValidation": "Strict"} | ({"dryRun": "All"} if dry_run else {})
        jobs = f"/apis/{GROUP}/{VERSION}/namespaces/{self.namespace}/dlionjobs"
        url = f"{jobs}{path}" + ("" if method == "GET" else f"?{urlencode(query)}")
        body = None if method == "GET" else json.dumps(manifest)
        headers = {"Content-Type": "application/json"}
        headers |= {"Impersonate-User": user} if user else {}
        try:
            self.connection.request(method, url, body, headers)
            response = self.connection.getresponse()
            text = response.read()
        except BaseException:  # also a test's time limit: the next request opens it again
            self.connection.close()
            raise
        is_json = response.getheader("Content-Type", "").startswith("application/json")
        # The API server answers with plain text for a path that it does not know yet.
        document = json.loads(text) if is_json else {"message": text.decode().strip()}
        answer = Answer(response.status, document)
        if answer.code >= 500:
            raise UnavailableError(f"{method} {url}: {answer.code} {answer.message}")
        return answer


@contextlib.contextmanager
def jobs_of(kubectl: Kubectl) -> Iterator[Jobs]:
    """Return the jobs of kubectl's namespace. Raises: UnavailableError if kubectl cannot proxy."""
    command = [str(kubectl.program), f"--kubeconfig={kubectl.kubeconfig}"]
    command += [f"--context={kubectl.context}"] if kubectl.context else []
    with subprocess.Popen(
        [*command, "proxy", "--port=0"], stdout=subprocess.PIPE, text=True
    ) as proxy:
        try:
            assert proxy.stdout is not None
            line = proxy.stdout.readline()
            found = re.search(r"127\.0\.0\.1:([0-9]+)", line)
            if found is None:
                raise UnavailableError(f"kubectl proxy printed {line!r} without a port")
            connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=_TIMEOUT_S)
            with contextlib.closing(connection):
                yield Jobs(connection, kubectl.namespace)
        finally:
            proxy.terminate()
