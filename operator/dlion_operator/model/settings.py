"""The settings of a site's operator: one YAML file from the chart, validated like a manifest."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml

from dlion_api.bounds import (
    INT32_MAX,
    LABEL,
    LABEL_DESCRIPTION,
    MAX_SITES,
    OPTIONAL_OBJECT_NAME_FORM,
    SITE_NAME_LENGTH,
)
from dlion_api.cluster_names import (
    COORDINATOR_PORT,
    FEDERATION_PORT,
    HEALTH_PORT,
    METRICS_PORT,
)
from dlion_api.document import Rule, parse, setting
from dlion_api.errors import Problem, SpecError
from dlion_api.spec.sites import LabelValue, Resources
from dlion_operator.model.site_runtime import SiteRuntime
from dlion_operator.model.tenancy import NetworkSettings, ScratchSizes, Tenancy

MAX_FILE_BYTES = 1024 * 1024


def _port(description: str, default: int) -> Any:
    return setting(description, default=default, minimum=1, maximum=65535)


def _required(description: str) -> Any:
    return setting(description, min_length=1, max_length=512)


def _name(description: str) -> Any:
    """The name of an object, which may be empty."""
    return setting(description, default="", max_length=253)


def _site_name(description: str) -> Any:
    return setting(
        description,
        pattern=LABEL,
        pattern_description=LABEL_DESCRIPTION,
        max_length=SITE_NAME_LENGTH,
    )


def _certificate_life(description: str) -> Any:
    return setting(description, default=86400, minimum=60, maximum=INT32_MAX, unit="seconds")


@dataclass(frozen=True, kw_only=True)
class Images:
    """What the pods of a job run."""

    worker: str = _required("image of trainers and keepers where a job names none (trainer.image).")
    sidecar: str = _required("image of sidecars.")
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = setting(
        "when the node fetches an image.", default="IfNotPresent"
    )
    pull_secrets: tuple[str, ...] = setting(
        "Secrets of a registry, in the job's namespace.", default=(), max_items=16
    )


@dataclass(frozen=True, kw_only=True)
class CoordinatorSettings:
    port: int = _port("port that it listens on.", COORDINATOR_PORT)
    address: str = _required("host:port by which this site's pods reach it (the chart's Service).")


@dataclass(frozen=True, kw_only=True)
class KeeperSettings:
    """The pod that stores a job's checkpoints and model."""

    size: str = setting(
        "size of the claim that is created for each job; empty: no claim, and the data is lost"
        " with the keeper's pod.",
        default="",
        max_length=64,
    )
    storage_class_name: str = _name("storage class of that claim; empty: the cluster's default.")
    claim_name: str = _name("an existing claim in the job's namespace, used instead of a new one.")
    resources: Resources = setting("resources of the keeper's container.", default=Resources())
    node_selector: Mapping[str, LabelValue] = setting(
        "labels of the nodes for keepers; empty: those of the job's podTemplate.",
        default={},
        max_items=64,
    )
    tolerations: tuple[Mapping[str, Any], ...] = setting(
        "taints that keepers tolerate besides those of the job's podTemplate.",
        default=(),
        max_items=64,
    )
    affinity: Mapping[str, Any] = setting(
        "affinity of keepers, as in a pod; empty: the node affinity of the job's podTemplate.",
        default={},
    )
    priority_class_name: str = _name("their priority class; empty: that of the job's podTemplate.")


@dataclass(frozen=True, kw_only=True)
class SidecarSettings:
    resources: Resources = setting("resources of the sidecar's container.", default=Resources())


@dataclass(frozen=True, kw_only=True)
class LoadBalancer:
    """Services of workers in jobs with exposure LoadBalancer."""

    annotations: Mapping[str, str] = setting(
        "their annotations, as load balancers require.", default={}, max_items=64
    )
    class_name: str = _name("their load balancer class; empty: the cluster's default.")


@dataclass(frozen=True, kw_only=True)
class GatewayListenerSettings:
    """The listener of a Gateway (Gateway API) that passes TLS through."""

    name: str = _name("name of the Gateway; empty: there is none.")
    namespace: str = setting("its namespace; empty: that of each job.", default="", max_length=63)
    section_name: str = _name("its listener; empty: all suitable ones.")


@dataclass(frozen=True, kw_only=True)
class Gateway:
    """A proxy through which other sites reach all workers at one port. TLS passes through; the
    server name (SNI) selects the worker."""

    address: str = setting(
        "host:port by which other sites reach it.",
        pattern=r"[^\s/]+:[0-9]{1,5}",
        pattern_description="host:port",
        max_length=512,
    )
    route: Literal["TLSRoute", "IngressRouteTCP"] = setting(
        "the kind of its routes: of the Gateway API (1.5 or newer), or of Traefik.",
        default="TLSRoute",
    )
    parent: GatewayListenerSettings = setting(
        "the Gateway of TLSRoutes.", default=GatewayListenerSettings()
    )
    entry_points: tuple[str, ...] = setting(
        "Traefik's entry points; empty: all.", default=(), max_items=16
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.route != 'TLSRoute' || self.parent.name != ''",
            message="a TLSRoute needs the name of its Gateway, parent.name",
            holds=lambda it: it.route != "TLSRoute" or bool(it.parent.name),
            reads=("route", "parent.name"),
        ),
    )


@dataclass(frozen=True, kw_only=True)
class AuthoritySettings:
    secret_name: str = setting(
        "Secret in the operator's namespace that holds it (tls.crt, tls.key); created if absent.",
        default="dlion-authority",
        min_length=1,
        max_length=253,
    )
    owner_service: str = _name(
        "Service in the operator's namespace that owns it; empty: it stays until a user deletes it."
    )
    certificate_life_seconds: int = _certificate_life(
        "life of a worker's certificate; it is renewed at half of it, and connections are"
        " reopened with the new one."
    )


@dataclass(frozen=True, kw_only=True)
class FederationSettings:
    """The gRPC service through which the sites' operators exchange reports."""

    port: int = _port("port that it listens on.", FEDERATION_PORT)
    certificate_life_seconds: int = _certificate_life(
        "life of the operator's own certificate; it is renewed at half of it."
    )
    measure_on_demand: bool = setting(
        "whether any client of the metrics port may measure the links to other sites.",
        default=False,
    )


@dataclass(frozen=True, kw_only=True)
class RemoteSite:
    """Another site, as configured here."""

    name: str = _site_name("name of the site, as spec.sites has it.")
    address: str = _required("host:port of its federation service, from here.")
    bundle_file: str = setting(
        "file with the public certificates of its authority (PEM; `dlion trust show` there). Read"
        " again on every change.",
        min_length=1,
        max_length=1024,
    )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One site's operator."""

    site: str = _site_name(
        "name of this site: the operator acts on the entry of spec.sites with this name."
    )
    advertised_address: str = setting(
        "host at which other sites reach this site's nodes and load balancers, for jobs that are"
        " exposed there; empty: the address of a worker's node, or of its load balancer.",
        default="",
        pattern=r"([A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?|[0-9A-Fa-f.]*:[0-9A-Fa-f.:]*:[0-9A-Fa-f.:]*)?",
        pattern_description="a host name or an IP address, without a port",
        max_length=253,
    )
    namespaces: tuple[str, ...] = setting(
        "namespaces that are watched; empty: all, which needs a ClusterRole.",
        default=(),
        max_items=256,
    )
    images: Images = setting("what the pods of a job run.")
    coordinator: CoordinatorSettings = setting("the service for workers.")
    keeper: KeeperSettings = setting(
        "the pod that stores checkpoints and models.", default=KeeperSettings()
    )
    sidecar: SidecarSettings = setting(
        "the container beside each trainer.", default=SidecarSettings()
    )
    load_balancer: LoadBalancer = setting(
        "the Services of workers behind load balancers.", default=LoadBalancer()
    )
    gateway: Gateway | None = setting(
        "the proxy for workers of jobs with exposure Gateway; absent: there is none.", default=None
    )
    authority: AuthoritySettings = setting(
        "the site's certificate authority.", default=AuthoritySettings()
    )
    federation: FederationSettings | None = setting(
        "the service for other sites' operators; absent: no federation.", default=None
    )
    sites: tuple[RemoteSite, ...] = setting(
        "the other sites; empty: no federation.",
        default=(),
        key="name",
        max_items=MAX_SITES,
    )
    tenancy: Tenancy = setting("what users of jobs may do.", default=Tenancy())
    scratch: ScratchSizes = setting("sizes of emptyDir volumes.", default=ScratchSizes())
    network_policies: NetworkSettings = setting(
        "the NetworkPolicies of runs.", default=NetworkSettings()
    )
    kueue: bool = setting(
        "whether Kueue admits jobs with its queue label; their pods do not start otherwise.",
        default=False,
    )
    default_runtime: str = setting(
        "DLionRuntime in the operator's namespace for jobs that name none (spec.runtime); empty:"
        " they use none.",
        default="",
        **OPTIONAL_OBJECT_NAME_FORM,
    )
    metrics_port: int = _port("port of /metrics.", METRICS_PORT)
    health_port: int = _port("port of /livez and /readyz.", HEALTH_PORT)
    runtime: SiteRuntime | None = None
    """The runtime with which a run's pods are rendered (`plan.runs.Run`); the file never sets
    it."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.metricsPort != self.healthPort",
            message="metricsPort and healthPort must differ",
            holds=lambda it: it.metrics_port != it.health_port,
            reads=("metricsPort", "healthPort"),
        ),
        Rule(
            cel="self.sites.all(s, s.name != self.site)",
            message="sites names the other sites, not this one",
            holds=lambda it: all(each.name != it.site for each in it.sites),
            reads=("sites", "site"),
        ),
    )

    @property
    def worker_image(self) -> str:
        """The image of trainers and keepers where neither job nor group names one."""
        own = self.runtime.spec.image if self.runtime is not None else ""
        return own or self.images.worker

    @property
    def remote_sites(self) -> tuple[RemoteSite, ...]:
        """The sites that this one is federated with."""
        return self.sites if self.federation is not None else ()


def load_settings(path: Path) -> Settings:
    """Load the settings from that file.

    Raises: SpecError if it is not YAML, or invalid; lists all problems. OSError.
    """
    with path.open("rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        problem = Problem("", "is too long", allowed=f"at most {MAX_FILE_BYTES} bytes")
        raise SpecError([problem], source=str(path))
    try:
        document: Mapping[str, Any] = yaml.safe_load(content)
    # ValueError: no UTF-8, a date that does not exist, or an integer that is too long.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SpecError([Problem("", f"is not YAML: {error}")], source=str(path)) from error
    return parse(Settings, document, source=str(path))
