"""Objects of an API server, read over kept connections, as `kubectl get -o json` prints them.

A kubectl takes a tenth of a second of CPU, and tests read several times a second. `Kubectl.get`
asks this reader first. The reader returns None for arguments that it does not support and for
answers that are not objects. Then kubectl itself runs and reports the error.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import http.client
import json
import ssl
import tempfile
import threading
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import yaml

_TIMEOUT_S = 30.0
_DISCOVERY = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
_SELECTORS = {"-l": "labelSelector", "--field-selector": "fieldSelector"}
_EVERYWHERE = ("-A", "--all-namespaces")


@dataclass(frozen=True)
class Kind:
    """One kind of object as an API server serves it."""

    version: str
    """Its `apiVersion`."""
    name: str
    plural: str
    namespaced: bool

    def path(self, namespace: str, name: str) -> str:
        """The path of the objects in that namespace (empty for all), or of one object."""
        root = "/apis" if "/" in self.version else "/api"
        place = f"/namespaces/{namespace}" if self.namespaced and namespace else ""
        return f"{root}/{self.version}{place}/{self.plural}" + (f"/{quote(name)}" if name else "")


@dataclass(frozen=True)
class Question:
    """The arguments of a `kubectl get`."""

    kinds: list[str]
    name: str
    query: dict[str, str]
    everywhere: bool


@dataclass
class Reader:
    """Reads with the credentials of one kubeconfig. Threads may share it."""

    server: str
    trust: ssl.SSLContext
    headers: dict[str, str]
    namespace: str
    """The namespace of the context."""
    _kinds: dict[str, Kind] = field(default_factory=dict)
    _idle: list[http.client.HTTPConnection] = field(default_factory=list)

    def get(self, arguments: tuple[str, ...], namespace: str) -> Any:
        """The object, or a list of objects; None if kubectl has to be used."""
        question = _understood(arguments)
        if question is None:
            return None
        found = []
        for kind in map(self._kind, question.kinds):
            place = "" if question.everywhere else namespace or self.namespace
            if kind is None or (question.name and question.everywhere):
                return None
            query = f"?{urlencode(question.query)}" if question.query else ""
            answer = self._ask(kind.path(place, question.name) + query)
            if answer is None or question.name:
                return answer
            known = {"apiVersion": kind.version, "kind": kind.name}
            found += [known | each for each in answer["items"]]
        return {"apiVersion": "v1", "kind": "List", "items": found}

    def is_well(self, path: str) -> bool:
        """Whether the API server answers a GET of that path, such as /readyz, with 200."""
        answer = self._answered(path, "*/*")
        return answer is not None and answer[0] == http.HTTPStatus.OK

    def close(self) -> None:
        """Close the kept connections."""
        while self._idle:
            self._idle.pop().close()

    def _kind(self, name: str) -> Kind | None:
        """Find a kind by name; like kubectl, ignore capitals."""
        if name.lower() not in self._kinds:
            self._kinds = self._discovered()
        return self._kinds.get(name.lower())

    def _discovered(self) -> dict[str, Kind]:
        """Every kind by each of its names; the first kind with a name gets it, as in kubectl."""
        found: dict[str, Kind] = {}
        for root in ("/api", "/apis"):
            answer = self._ask(root, _DISCOVERY) or {}
            for group in answer.get("items", ()):
                version: dict[str, Any] = next(iter(group.get("versions", ())), {})
                of = "/".join(filter(None, (group["metadata"].get("name"), version.get("version"))))
                for each in version.get("resources", ()):
                    is_in = each["scope"] == "Namespaced"
                    kind = Kind(of, each["responseKind"]["kind"], each["resource"], is_in)
                    short = each.get("shortNames", ())
                    for name in (kind.plural, each.get("singularResource"), kind.name, *short):
                        found.setdefault(str(name).lower(), kind)
        return found

    def _ask(self, path: str, accept: str = "application/json") -> Any:
        """The answer to a GET; None if it is not an object."""
        answer = self._answered(path, accept)
        return json.loads(answer[1]) if answer and answer[0] == http.HTTPStatus.OK else None

    def _answered(self, path: str, accept: str) -> tuple[int, bytes] | None:
        """Status and body of a GET; None without an answer. A kept connection may be broken."""
        while True:
            try:
                connection = self._idle.pop()
                is_new = False
            except IndexError:
                connection, is_new = self._connection(), True
            try:
                connection.request("GET", path, headers={"Accept": accept, **self.headers})
                answer = connection.getresponse()
                body = answer.read()
            except (OSError, http.client.HTTPException):
                connection.close()
                if is_new:
                    return None
                continue
            self._idle.append(connection)
            return answer.status, body

    def _connection(self) -> http.client.HTTPConnection:
        address = urlsplit(self.server)
        if address.scheme == "http":
            return http.client.HTTPConnection(address.netloc, timeout=_TIMEOUT_S)
        return http.client.HTTPSConnection(address.netloc, timeout=_TIMEOUT_S, context=self.trust)


def _understood(arguments: tuple[str, ...]) -> Question | None:
    """The parsed arguments; None if this reader does not support them."""
    words: list[str] = []
    query: dict[str, str] = {}
    everywhere = False
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        flag, is_equal, value = word.partition("=")
        if word in _EVERYWHERE:
            everywhere = True
        elif flag in _SELECTORS and (is_equal or rest):
            query[_SELECTORS[flag]] = value if is_equal else rest.pop(0)
        elif word.startswith("-") or "/" in word:
            return None
        else:
            words.append(word)
    if not 1 <= len(words) <= 2 or (len(words) == 2 and (query or "," in words[0])):
        return None
    return Question(words[0].split(","), "".join(words[1:]), query, everywhere)


_LOCK = threading.Lock()


def reader_of(kubeconfig: Path, context: str) -> Reader | None:
    """The reader for those credentials; None if they need a program to log in."""
    with _LOCK:
        return _reader_of(kubeconfig, context, kubeconfig.stat().st_mtime_ns)


@cache
def _reader_of(kubeconfig: Path, context: str, _changed: int) -> Reader | None:
    document = yaml.safe_load(kubeconfig.read_text())
    chosen = context or document.get("current-context")
    try:
        about = _named(document["contexts"], chosen)["context"]
        cluster = _named(document["clusters"], about["cluster"])["cluster"]
        user = _named(document["users"], about["user"])["user"]
    except (KeyError, StopIteration):
        return None
    trust = ssl.create_default_context(cadata=_pem(cluster, "certificate-authority"))
    certificate, key = _pem(user, "client-certificate"), _pem(user, "client-key")
    headers = {"Authorization": f"Bearer {user['token']}"} if user.get("token") else {}
    if certificate and key:
        with tempfile.TemporaryDirectory() as folder:
            both = Path(folder) / "client.pem"
            both.write_text(f"{certificate}\n{key}")
            trust.load_cert_chain(both)
    elif not headers:
        return None
    made = Reader(cluster["server"], trust, headers, about.get("namespace") or "default")
    atexit.register(made.close)
    return made


def _named(entries: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(each for each in entries if each["name"] == name)


def _pem(entry: dict[str, Any], key: str) -> str | None:
    """The PEM data or file under that name."""
    if data := entry.get(f"{key}-data"):
        return base64.b64decode(data).decode()
    with contextlib.suppress(KeyError, OSError):
        return Path(entry[key]).read_text()
    return None
