"""The settings that the chart gives to a site's operator, from its values.

Called by `dlion render`. Repeats what `helm/dlion/templates/_settings.tpl` makes of the values that
matter for a job's objects; tests/chart compares both.
"""

import functools
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from dlion_api.cluster_names import COMPONENT_LABEL, NAME, NAME_LABEL
from dlion_api.document import parse, to_document
from dlion_api.errors import DataError, Problem, SpecError
from dlion_environments.yaml_text import MAX_BYTES, parse_any_documents
from dlion_operator.model.settings import Settings
from dlion_operator.model.tenancy import (
    SYSTEM_NAMESPACES,
    NetworkSettings,
    ScratchSizes,
    TemplateLimits,
)

_NAMESPACE: Final = "dlion-system"
_COORDINATOR: Final = f"dlion-operator.{_NAMESPACE}.svc"
"""The operator's Service if the release is named `dlion`, in the namespace of the documents."""
_OPERATOR_LABELS: Final = {
    NAME_LABEL: NAME,
    "app.kubernetes.io/instance": NAME,
    COMPONENT_LABEL: "operator",
}
"""Its pod's, in that release."""

Values = Mapping[str, Any]

DEFAULTS: Final[Values] = {
    "site": {"name": "", "advertisedAddress": ""},
    "images": {
        "registry": "",
        "worker": {"repository": "dlion-worker", "tag": "", "digest": ""},
        "sidecar": {"repository": "dlion-sidecar", "tag": "", "digest": ""},
        "pullPolicy": "IfNotPresent",
        "pullSecrets": [],
    },
    "coordinator": {"port": 7443, "address": ""},
    "keeper": {
        "size": "",
        "storageClassName": "",
        "claimName": "",
        "resources": {
            "requests": {"cpu": "50m", "memory": "192Mi"},
            "limits": {"memory": "1Gi"},
        },
        "nodeSelector": {},
        "tolerations": [],
        "affinity": {},
        "priorityClassName": "",
    },
    "sidecar": {
        "resources": {
            "requests": {"cpu": "50m", "memory": "128Mi"},
            "limits": {"memory": "384Mi"},
        }
    },
    "loadBalancer": {"annotations": {}, "className": ""},
    "gateway": {
        "address": "",
        "route": "TLSRoute",
        "parent": {"name": "", "namespace": "", "sectionName": ""},
        "entryPoints": [],
    },
    "namespaces": [],
    "sites": [],
    "tenancy": {
        "excludedNamespaces": list(SYSTEM_NAMESPACES),
        "podTemplate": to_document(TemplateLimits()),
    },
    "scratch": to_document(ScratchSizes()),
    "networkPolicies": {
        "enabled": True,
        "restrictEgress": True,
        "peerCIDRs": ["0.0.0.0/0", "::/0"],
        "peerPorts": to_document(NetworkSettings())["peerPorts"],
        "gatewayFrom": [],
        "metricsFrom": [],
        "egress": [],
        "dnsTo": [],
    },
    "kueue": {"enabled": False},
    "runtimes": {"default": ""},
}
"""Defaults of the values that matter here (helm/dlion/values.yaml)."""


def read_values(path: Path | None) -> Values:
    """The chart's defaults, with the values of that file.

    Raises: DataError if it cannot be read; SpecError if it is not YAML, or no values of the chart.
    """
    if path is None:
        return DEFAULTS
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}. Check the path.") from None
    documents = parse_any_documents(content, source=str(path))
    if len(documents) > 1:
        raise SpecError([Problem("(file)", "has several documents")], source=str(path))
    given: object = documents[0].value if documents else None
    problems: list[Problem] = []
    merged: Values = _merged(DEFAULTS, {} if given is None else given, "", problems)
    if problems:
        raise SpecError(problems, source=str(path))
    return merged


def settings_of(values: Values, site: str, *, source: str) -> Settings:
    """The operator's settings at that site. Raises: SpecError."""
    images, keeper, gateway = values["images"], values["keeper"], values["gateway"]
    if keeper["claimName"] and keeper["size"]:
        problem = Problem("keeper", "claimName and size exclude each other", advice="Remove one")
        raise SpecError([problem], source=source)
    port = values["coordinator"]["port"]
    document: dict[str, Any] = {
        "site": site,
        "advertisedAddress": values["site"]["advertisedAddress"],
        "images": {
            "worker": _image(images, "worker"),
            "sidecar": _image(images, "sidecar"),
            "pullPolicy": images["pullPolicy"],
            "pullSecrets": images["pullSecrets"],
        },
        "coordinator": {
            "port": port,
            "address": values["coordinator"]["address"] or f"{_COORDINATOR}:{port}",
        },
        "keeper": keeper,
        "sidecar": values["sidecar"],
        "loadBalancer": values["loadBalancer"],
        "tenancy": _tenancy(values),
        "scratch": values["scratch"],
        "networkPolicies": _network(values, site),
        "kueue": values["kueue"]["enabled"],
        "defaultRuntime": values["runtimes"]["default"],
    }
    if gateway["address"]:
        document["gateway"] = gateway
    return parse(Settings, document, source=source)


def _tenancy(values: Values) -> dict[str, Any]:
    """The values of tenancy without the admission policy: only a cluster knows the rights of a
    user."""
    tenancy, watched = values["tenancy"], values["namespaces"]
    excluded: list[Any] = []  # of any types, which `parse` checks
    for each in [*tenancy["excludedNamespaces"], _NAMESPACE]:
        if each not in excluded and each not in watched:
            excluded.append(each)
    return {
        "excludedNamespaces": excluded,
        "podTemplate": tenancy["podTemplate"],
    }


def _network(values: Values, site: str) -> dict[str, Any]:
    network = dict(values["networkPolicies"])
    cidrs = network.pop("peerCIDRs")
    network.pop("apiServerPorts", None)  # the operator's own policy
    is_federated = any(
        isinstance(each, Mapping) and each.get("name") != site for each in values["sites"]
    )
    port = str(values["gateway"]["address"]).rpartition(":")[2]
    of_gateway = [{"port": int(port)}] if port.isdecimal() else []  # else refused, or there is none
    return {
        **network,
        "operatorNamespace": "" if values["coordinator"]["address"] else _NAMESPACE,
        "operatorLabels": dict(_OPERATOR_LABELS),
        "peerCidrs": cidrs if is_federated else [],
        "peerPorts": [*network["peerPorts"], *of_gateway],
        "gatewayFrom": network["gatewayFrom"] if is_federated else [],
    }


def _image(images: Values, name: str) -> str:
    """The reference, as the chart's `dlion.image` makes it."""
    image, registry = images[name], str(images["registry"]).removesuffix("/")
    repository = f"{registry}/{image['repository']}" if registry else str(image["repository"])
    if image["digest"]:
        return f"{repository}@{image['digest']}"
    return f"{repository}:{image['tag'] or _own_version()}"


@functools.cache  # it reads a file, and each image of each site asks
def _own_version() -> str:
    return version("dlion")


def _merged(default: Values, given: object, where: str, problems: list[Problem]) -> Values:
    """As Helm merges: mappings by key, other values replaced. A null leaves the default, except in
    `resources`, which it removes."""
    if not isinstance(given, Mapping):
        problems.append(Problem(where or "(file)", "is not a mapping", value=str(given)[:80]))
        return default
    merged = dict(default)
    for key, value in given.items():
        name, path = str(key), f"{where}.{key}" if where else str(key)
        if value is None:
            if ".resources." in f"{path}.":
                merged.pop(name, None)
        elif isinstance(below := merged.get(name), Mapping):
            merged[name] = _merged(below, value, path, problems)
        elif isinstance(below, list) and not isinstance(value, list):
            problems.append(Problem(path, "must be a list", value=str(value)[:80]))
        else:
            merged[name] = value
    return merged
