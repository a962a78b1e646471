"""Find what a pod has by a podTemplate that its site does not allow. Pure.

It looks at the pod as it would be created, so that no merge directive hides anything. What equals
the operator's own pod is allowed. Of the rest each field must be known here, and each name must be
in a list of the site's `TemplateLimits`: an allow-list, so that what a newer Kubernetes adds is
refused until it has been judged.

The operator creates pods by its own rights. Without these limits a user who may create DLionJobs,
and nothing else, could read every Secret of the namespace and act as each of its service accounts.
What breaks pod security `restricted` is for `pki.pod_security`. Source: Kubernetes' PodSpec, v1.34.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from dlion_api.document.shapes import document_name
from dlion_operator.model.tenancy import ANY, TemplateLimits, matches

Document = Mapping[str, Any]

_POD_FIELDS: Final = frozenset(
    {"activeDeadlineSeconds", "affinity", "automountServiceAccountToken", "containers", "dnsConfig",
     "dnsPolicy", "enableServiceLinks", "hostAliases", "hostIPC", "hostNetwork", "hostPID",
     "hostUsers", "hostname", "imagePullSecrets", "initContainers", "nodeSelector", "os",
     "overhead", "preemptionPolicy", "priority", "priorityClassName", "readinessGates",
     "resourceClaims", "resources", "restartPolicy", "runtimeClassName", "schedulerName",
     "schedulingGates", "securityContext", "serviceAccount", "serviceAccountName",
     "setHostnameAsFQDN", "shareProcessNamespace", "subdomain", "terminationGracePeriodSeconds",
     "tolerations", "topologySpreadConstraints", "volumes"}
)  # fmt: skip
"""Not `nodeName`, which passes the scheduler and with it taints and queues."""
_CONTAINER_FIELDS: Final = frozenset(
    {"args", "command", "env", "envFrom", "image", "imagePullPolicy", "lifecycle", "livenessProbe",
     "name", "ports", "readinessProbe", "resizePolicy", "resources", "restartPolicy",
     "restartPolicyRules", "securityContext", "startupProbe", "stdin", "stdinOnce",
     "terminationMessagePath", "terminationMessagePolicy", "tty", "volumeDevices", "volumeMounts",
     "workingDir"}
)  # fmt: skip
_SOURCES_OF_VALUES: Final = frozenset(
    {"configMapKeyRef", "fieldRef", "fileKeyRef", "resourceFieldRef", "secretKeyRef"}
)
_SOURCES_OF_PROJECTIONS: Final = frozenset(
    {"clusterTrustBundle", "configMap", "downwardAPI", "secret", "serviceAccountToken"}
)
_DEFAULT_ACCOUNT: Final = "default"
_OWN_VOLUME: Final = "token"
"""The operator's volume with the token for the coordinator alone."""
_SYSTEM_CLASS: Final = "system-"
_APPARMOR: Final = "container.apparmor.security.beta.kubernetes.io/"
MAX_LISTED: Final = 8


@dataclass(frozen=True, order=True)
class RefusedField:
    """One thing in a pod that the site does not allow."""

    path: str
    """The path in the pod: `volumes[key].secret`."""
    what: str
    """What stands there, for users."""
    limit: str = ""
    """The field of `TemplateLimits` that could allow it. Empty: none."""
    by_rights: bool = False
    """Whether the rights of the user who writes the job could allow it: the site's admission policy
    compares it with them."""


def refused_fields(
    template: Document, own: Document, limits: TemplateLimits
) -> tuple[RefusedField, ...]:
    """Return what the pod template has that neither the site's own template `own` has nor the
    limits allow, sorted by path.

    >>> volume = {"name": "key", "secret": {"secretName": "db"}}
    >>> spec = {"automountServiceAccountToken": False, "volumes": [volume]}
    >>> [found] = refused_fields({"spec": spec}, {}, TemplateLimits())
    >>> found.path, found.what, found.limit
    ('volumes[key].secret', 'Secret db', 'secrets')
    """
    spec = template.get("spec")
    if not isinstance(spec, Mapping):
        return (_malformed("spec"),)
    own_spec = _mapping(own.get("spec"))
    found = [
        *_annotations(template.get("metadata"), _mapping(own.get("metadata")), limits),
        *_pod(spec, own_spec, limits),
        *_tolerations(spec, own_spec, limits),
        *_account(spec, own_spec, limits),
        *_volumes(spec, own_spec, limits),
        *_containers(spec, own_spec, limits),
    ]
    return tuple(sorted(set(found)))


def refusal_message(found: Sequence[RefusedField], rights_note: str = "") -> str:
    """Return what is refused and what to do, for the job's status. `rights_note`: why the rights of
    its writer do not count; empty: they do not matter."""
    shown = [f"{each.path}: {each.what}" for each in found[:MAX_LISTED]]
    more = [f"and {len(found) - MAX_LISTED} more"] if len(found) > MAX_LISTED else []
    text = f"the job asks for what this site does not allow: {'; '.join([*shown, *more])}."
    lists = sorted(
        {f"tenancy.podTemplate.{document_name(each.limit)}" for each in found if each.limit}
    )
    advice = " Remove it"
    if lists:
        advice += f", or have this site's administrators allow it in {' or '.join(lists)}"
    if rights_note and any(each.by_rights for each in found):
        advice += f". {rights_note}"
    return f"{text}{advice}"


def _malformed(path: str) -> RefusedField:
    return RefusedField(path, "it has not the form that a pod needs")


def _entries(spec: Document, name: str, at: str = "") -> Iterator[tuple[str, Document | None]]:
    """Paths and entries of a list; an entry that is not a mapping is None, and so is a list that is
    none."""
    value = spec.get(name)
    path = f"{at}.{name}" if at else name
    if value is None:
        return
    if not isinstance(value, list):
        yield path, None
        return
    for place, entry in enumerate(value):
        if isinstance(entry, Mapping):
            yield f"{path}[{str(entry.get('name', place))[:80]}]", entry
        else:
            yield f"{path}[{place}]", None


def _items(mapping: Document) -> list[tuple[str, Any]]:
    """Shortened names with their values. Only a file that no API server has read has others than
    text."""
    return [(str(name)[:80], value) for name, value in mapping.items()]


def _mapping(value: object) -> Document:
    return value if isinstance(value, Mapping) else {}


def _own(own: Document, name: str) -> list[Any]:
    value = own.get(name)
    return value if isinstance(value, list) else []


def _listed(
    path: str, kind: str, name: object, limits: TemplateLimits, limit: str, *, rights: bool = False
) -> Iterator[RefusedField]:
    """Refuse a name that the list `limit` has not."""
    if not isinstance(name, str):
        yield _malformed(path)
    elif not matches(name, getattr(limits, limit)):
        yield RefusedField(path, f"{kind} {name[:253]}", limit, rights)


def _annotations(metadata: object, own: Document, limits: TemplateLimits) -> Iterator[RefusedField]:
    own_annotations = _mapping(own.get("annotations"))
    for key, value in _mapping(_mapping(metadata).get("annotations")).items():
        if key in own_annotations and own_annotations[key] == value:
            continue
        path = f"metadata.annotations[{str(key)[:80]}]"
        if str(key).startswith(_APPARMOR) and value == "unconfined":
            yield RefusedField(path, "AppArmor must not be switched off")
        yield from _listed(path, "annotation", key, limits, "annotations")


def _pod(spec: Document, own: Document, limits: TemplateLimits) -> Iterator[RefusedField]:
    for field, value in spec.items():
        is_known = field in _POD_FIELDS or (field in own and own[field] == value)
        if not is_known and not matches(str(field), limits.fields):
            yield RefusedField(str(field)[:80], f"the field {str(field)[:80]}", "fields")
    if (name := spec.get("runtimeClassName")) not in (None, "", own.get("runtimeClassName")):
        yield from _listed("runtimeClassName", "runtime class", name, limits, "runtime_classes")
    if (name := spec.get("priorityClassName")) not in (None, "", own.get("priorityClassName")):
        yield from _priority_class(name, limits)
    own_secrets = _own(own, "imagePullSecrets")
    for path, entry in _entries(spec, "imagePullSecrets"):
        if entry is None:
            yield _malformed(path)
        elif entry not in own_secrets:
            yield from _listed(path, "pull Secret", entry.get("name"), limits, "pull_secrets")


def _priority_class(name: object, limits: TemplateLimits) -> Iterator[RefusedField]:
    """Kubernetes' own classes push out what runs the cluster: `*` does not mean them."""
    if isinstance(name, str) and name.startswith(_SYSTEM_CLASS):
        named = tuple(entry for entry in limits.priority_classes if entry != ANY)
        limits = replace(limits, priority_classes=named)
    yield from _listed("priorityClassName", "priority class", name, limits, "priority_classes")


def _tolerations(spec: Document, own: Document, limits: TemplateLimits) -> Iterator[RefusedField]:
    own_tolerations = _own(own, "tolerations")
    for path, entry in _entries(spec, "tolerations"):
        if entry is None:
            yield _malformed(path)
        elif entry in own_tolerations:
            continue
        elif entry.get("key") not in (None, ""):
            yield from _listed(path, "the taint", entry["key"], limits, "tolerations")
        elif ANY not in limits.tolerations:
            yield RefusedField(path, "it tolerates every taint", "tolerations")


_ACCOUNT_FIELDS: Final = ("serviceAccountName", "serviceAccount")


def _account(spec: Document, own: Document, limits: TemplateLimits) -> Iterator[RefusedField]:
    for field in _ACCOUNT_FIELDS:
        name = spec.get(field)
        if name not in (None, "", _DEFAULT_ACCOUNT, own.get(field)):
            yield from _listed(
                field, "service account", name, limits, "service_accounts", rights=True
            )
    name, has_token = _account_of(spec), spec.get("automountServiceAccountToken") is not False
    is_own = name == _account_of(own) and own.get("automountServiceAccountToken") is not False
    if has_token and not (own and is_own) and isinstance(name, str):
        path = "automountServiceAccountToken"
        kind = "a token of service account"
        # The policy compares `default` only where the job itself asks for a token.
        is_asked = name != _DEFAULT_ACCOUNT or own.get(path) is False or not own
        yield from _listed(path, kind, name, limits, "service_accounts", rights=is_asked)
    if name == _DEFAULT_ACCOUNT != _account_of(own):
        yield from _tokens_of_default(spec, own, limits)


def _tokens_of_default(
    spec: Document, own: Document, limits: TemplateLimits
) -> Iterator[RefusedField]:
    """Tokens of the site's account in its own volumes, which become those of `default`."""
    for path, volume in _entries(spec, "volumes"):
        if volume is None or volume not in _own(own, "volumes") or volume["name"] == _OWN_VOLUME:
            continue
        projected = _mapping(volume.get("projected"))
        for each in _projected(f"{path}.projected", projected, spec, limits):
            if each.limit == "service_accounts":
                yield replace(each, by_rights=False)


def _account_of(spec: Document) -> object:
    """The account of the pod: of two names that differ Kubernetes takes the first."""
    return next(filter(None, map(spec.get, _ACCOUNT_FIELDS)), _DEFAULT_ACCOUNT)


def _volumes(spec: Document, own: Document, limits: TemplateLimits) -> Iterator[RefusedField]:
    own_volumes = _own(own, "volumes")
    for path, volume in _entries(spec, "volumes"):
        if volume is None:
            yield _malformed(path)
        elif volume not in own_volumes:
            for kind, source in _items(volume):
                if kind != "name":
                    yield from _volume(f"{path}.{kind}", kind, source, spec, limits)


def _volume(
    path: str, kind: str, source: object, spec: Document, limits: TemplateLimits
) -> Iterator[RefusedField]:
    if not matches(kind, limits.volumes):
        yield RefusedField(path, f"a volume of kind {kind}", "volumes")
        return
    if not isinstance(source, Mapping):
        yield _malformed(path)
        return
    match kind:
        case "secret":
            yield from _secret(path, source.get("secretName"), limits)
        case "configMap":
            yield from _listed(path, "ConfigMap", source.get("name"), limits, "config_maps")
        case "persistentVolumeClaim":
            yield from _listed(path, "claim", source.get("claimName"), limits, "claims")
        case "image":
            yield from _listed(path, "image", source.get("reference"), limits, "images")
        case "projected":
            yield from _projected(path, source, spec, limits)
        case "ephemeral":
            yield from _copied(path, source, limits)
        case "emptyDir" | "downwardAPI":
            pass
        case _:  # the site allows the kind: a Secret that it needs must be in the list, too
            for name in _secret_references(source):
                yield from _listed(path, "Secret", name, limits, "secrets")


def _copied(path: str, ephemeral: Document, limits: TemplateLimits) -> Iterator[RefusedField]:
    """Refuse a new claim with the data of another claim, of a snapshot or of a named volume."""
    claim = _mapping(_mapping(ephemeral.get("volumeClaimTemplate")).get("spec"))
    for field in ("dataSource", "dataSourceRef"):
        if (data := claim.get(field)) is not None:
            name = _mapping(data).get("name")
            yield from _listed(f"{path}.{field}", "claim", name, limits, "claims")
    if (name := claim.get("volumeName")) not in (None, ""):
        yield from _listed(f"{path}.volumeName", "volume", name, limits, "claims")


def _secret(path: str, name: object, limits: TemplateLimits) -> Iterator[RefusedField]:
    yield from _listed(path, "Secret", name, limits, "secrets", rights=True)


def _projected(
    path: str, projected: Document, spec: Document, limits: TemplateLimits
) -> Iterator[RefusedField]:
    for at, source in _entries(projected, "sources", path):
        if source is None:
            yield _malformed(at)
            continue
        for kind, below in _items(source):
            if kind not in _SOURCES_OF_PROJECTIONS:
                yield RefusedField(at, f"a projection of kind {kind}")
            elif not isinstance(below, Mapping):
                yield _malformed(f"{at}.{kind}")
            elif kind == "secret":
                yield from _secret(f"{at}.{kind}", below.get("name"), limits)
            elif kind == "configMap":
                name = below.get("name")
                yield from _listed(f"{at}.{kind}", "ConfigMap", name, limits, "config_maps")
            elif kind == "serviceAccountToken":
                yield from _listed(
                    f"{at}.{kind}", "a token of service account", _account_of(spec), limits,
                    "service_accounts", rights=True,
                )  # fmt: skip


def _secret_references(source: object) -> Iterator[object]:
    """Names under each `secretRef` and the like, at any depth of a volume's source."""
    pending = [source]
    while pending:
        value = pending.pop()
        if isinstance(value, Mapping):
            for name, below in value.items():
                if str(name).lower().endswith("secretref"):
                    yield below.get("name") if isinstance(below, Mapping) else below
                elif str(name).lower() == "secretname":
                    yield below
                else:
                    pending.append(below)
        elif isinstance(value, list):
            pending.extend(value)


def _containers(spec: Document, own: Document, limits: TemplateLimits) -> Iterator[RefusedField]:
    for field in ("initContainers", "containers"):
        own_containers = {each.get("name"): each for each in _own(own, field)}
        for path, container in _entries(spec, field):
            if container is None:
                yield _malformed(path)
                continue
            name = container.get("name")
            own_container = own_containers.get(name, {}) if isinstance(name, str) else {}
            for key, value in container.items():
                is_known = key in _CONTAINER_FIELDS or own_container.get(key) == value
                if not is_known and not matches(str(key), limits.fields):
                    yield RefusedField(f"{path}.{str(key)[:80]}", "the field", "fields")
            if (image := container.get("image")) is None or image != own_container.get("image"):
                yield from _listed(f"{path}.image", "image", image, limits, "images")
            yield from _environment(path, container, own_container, limits)


def _environment(
    path: str, container: Document, own: Document, limits: TemplateLimits
) -> Iterator[RefusedField]:
    checks: tuple[tuple[str, Callable[[Document], object], frozenset[str]], ...] = (
        ("env", lambda entry: entry.get("valueFrom"), _SOURCES_OF_VALUES),
        (
            "envFrom",
            lambda entry: {k: v for k, v in entry.items() if k != "prefix"},
            frozenset({"configMapRef", "secretRef"}),
        ),
    )
    for field, sources_of, known in checks:
        if container.get(field) == own.get(field):
            continue
        own_entries = _own(own, field)
        for at, entry in _entries(container, field, path):
            if entry is not None and entry in own_entries:
                continue
            sources = None if entry is None else sources_of(entry)
            if entry is None or (sources is not None and not isinstance(sources, Mapping)):
                yield _malformed(at)
                continue
            for kind, below in _items(sources or {}):
                if kind not in known:
                    yield RefusedField(at, f"a source of kind {kind}")
                elif not isinstance(below, Mapping):
                    yield _malformed(f"{at}.{kind}")
                elif kind.startswith("secret"):
                    yield from _secret(f"{at}.{kind}", below.get("name"), limits)
                elif kind.startswith("configMap"):
                    name = below.get("name")
                    yield from _listed(f"{at}.{kind}", "ConfigMap", name, limits, "config_maps")
