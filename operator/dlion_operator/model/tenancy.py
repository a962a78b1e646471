"""Settings that limit what a site's users may make the operator do.

Part of `Settings`. `children.template_limits` compares pods with `TemplateLimits`,
`children.network_policies` renders `NetworkSettings`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from dlion_api.cluster_names import EXCHANGE_PORT, MEASURING_PORT
from dlion_api.document import Limits, setting
from dlion_api.document.scalars import QUANTITY

ANY: Final = "*"
SYSTEM_NAMESPACES: Final = ("kube-system", "kube-public", "kube-node-lease")
VOLUME_KINDS: Final = (
    "configMap", "downwardAPI", "emptyDir", "ephemeral", "image", "persistentVolumeClaim",
    "projected", "secret",
)  # fmt: skip
Entry = Annotated[
    str,
    Limits(
        min_length=1,
        max_length=253,
        pattern=r"[^*]*\*?",
        pattern_description="a `*` at its end only",
    ),
]
Image = Annotated[
    str,
    Limits(
        min_length=1,
        max_length=512,
        # `registry.example*` would also match registry.example.attacker.com.
        pattern=r"\*|[^*\s]+([/:@]\*)?",
        pattern_description="an image, or the start of one up to `/`, `:` or `@` with a `*`",
    ),
]


def _entries(description: str, *default: str) -> Any:
    return setting(description, default=default, max_items=256)


@dataclass(frozen=True, kw_only=True)
class TemplateLimits:
    """What pods of a job may have beyond what the operator gives them.

    An entry that ends in `*` matches each name that begins with the rest.
    """

    service_accounts: tuple[Entry, ...] = _entries(
        "service accounts that pods may run as, and whose tokens they may have. `default` without a"
        " token is always allowed."
    )
    secrets: tuple[Entry, ...] = _entries("Secrets that pods may mount, or read as variables.")
    config_maps: tuple[Entry, ...] = _entries("ConfigMaps, likewise.", ANY)
    claims: tuple[Entry, ...] = _entries("volume claims that pods may mount.", ANY)
    volumes: tuple[Entry, ...] = _entries(
        "kinds of volumes, as a pod names them. Pod security `restricted` forbids others than its"
        " own, whatever this has.",
        *VOLUME_KINDS,
    )
    images: tuple[Image, ...] = setting(
        "images of containers and volumes, as manifests write them.", default=(ANY,), max_items=256
    )
    pull_secrets: tuple[Entry, ...] = _entries("Secrets by which nodes fetch images.", ANY)
    runtime_classes: tuple[Entry, ...] = _entries("runtime classes.", ANY)
    priority_classes: tuple[Entry, ...] = _entries(
        "priority classes; `*` leaves out Kubernetes' own, `system-…`.", ANY
    )
    tolerations: tuple[Entry, ...] = _entries(
        "keys of taints that pods may tolerate; only `*` allows to tolerate every taint.", ANY
    )
    annotations: tuple[Entry, ...] = _entries("keys of annotations.", ANY)
    fields: tuple[Entry, ...] = _entries(
        "fields of a pod's spec or of its containers that this operator does not know, or refuses."
    )


def matches(name: str, entries: Iterable[str]) -> bool:
    """Return whether one of the entries allows that name.

    >>> matches("team-a", ["team-*"]), matches("team", ["team-*"]), matches("x", ["x"])
    (True, False, True)
    """
    return any(
        name.startswith(entry[:-1]) if entry.endswith(ANY) else name == entry for entry in entries
    )


@dataclass(frozen=True, kw_only=True)
class Tenancy:
    """What users of DLionJobs may do."""

    excluded_namespaces: tuple[str, ...] = setting(
        "namespaces whose jobs get no pods.", default=SYSTEM_NAMESPACES, max_items=256
    )
    pod_template: TemplateLimits = setting(
        "what podTemplates may ask for.", default=TemplateLimits()
    )
    admission_policy: str = setting(
        "name of the ValidatingAdmissionPolicy, and of its binding, that checks the rights of users"
        " who write jobs; empty: there is none.",
        default="",
        max_length=253,
    )


@dataclass(frozen=True, kw_only=True)
class ScratchSizes:
    """Limits of the pods' emptyDir volumes; Kubernetes evicts a pod whose volume is larger."""

    tmp: str = setting("of /tmp.", default="4Gi", min_length=1, max_length=64)
    shared: str = setting(
        "of what a pod's containers share.", default="1Gi", min_length=1, max_length=64
    )
    state: str = setting(
        "of checkpoints, logs and results; and of a podTemplate's emptyDir without a limit.",
        default="16Gi",
        min_length=1,
        max_length=64,
    )
    downloads: str = setting(
        "of a job's downloads (trainer.initializer), packed and unpacked together.",
        default="32Gi",
        pattern=QUANTITY,
        pattern_description="a quantity such as 32Gi",
        max_length=64,
    )


@dataclass(frozen=True, kw_only=True)
class PortRange:
    """TCP ports, as in a NetworkPolicy."""

    port: int = setting("the first port.", minimum=1, maximum=65535)
    end_port: int = setting("the last port; 0: the first.", default=0, minimum=0, maximum=65535)


@dataclass(frozen=True, kw_only=True)
class NetworkSettings:
    """The NetworkPolicies that the operator makes for each run."""

    enabled: bool = setting("whether it makes them.", default=False)
    operator_namespace: str = setting(
        "namespace of the operator's pod; empty: workers reach the coordinator anywhere.",
        default="",
        max_length=63,
    )
    operator_labels: Mapping[str, str] = setting(
        "labels of the operator's pod.", default={}, max_items=64
    )
    peer_cidrs: tuple[str, ...] = setting(
        "address blocks of other sites' workers.", default=(), max_items=256
    )
    peer_ports: tuple[PortRange, ...] = setting(
        "ports at which other sites expose workers.",
        default=(
            PortRange(port=EXCHANGE_PORT, end_port=MEASURING_PORT),
            PortRange(port=30000, end_port=32767),
        ),
        max_items=64,
    )
    gateway_from: tuple[Mapping[str, Any], ...] = setting(
        "the gateway's pods, as `from` of a NetworkPolicy.", default=(), max_items=64
    )
    metrics_from: tuple[Mapping[str, Any], ...] = setting(
        "callers that may scrape workers, as `from` of a NetworkPolicy; empty: all.",
        default=(),
        max_items=64,
    )
    dns_to: tuple[Mapping[str, Any], ...] = setting(
        "DNS servers, as `to` of a NetworkPolicy; empty: any address, at the ports of DNS.",
        default=(),
        max_items=64,
    )
    egress: tuple[Mapping[str, Any], ...] = setting(
        "rules added to the `egress` of workers' policies.", default=(), max_items=64
    )
    restrict_egress: bool = setting("whether outgoing traffic is restricted.", default=True)
