"""What a site's operator is told by its chart: one YAML file, checked like a manifest.

Read once at the start by `__main__`; the rest of the operator gets parts of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml

from dlion_api.cluster_names import (
    COORDINATOR_PORT,
    FEDERATION_PORT,
    HEALTH_PORT,
    METRICS_PORT,
)
from dlion_api.document import Rule, parse, setting
from dlion_api.errors import Problem, SpecError
from dlion_api.spec.bounds import INT32_MAX, LABEL, LABEL_WORDS, MOST_SITES, SITE_NAME_LENGTH
from dlion_api.spec.sites import Resources

MAX_FILE_BYTES = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Images:
    """What the pods of a job run."""

    worker: str = setting(
        "image of trainers and keepers where a job names none (trainer.image).",
        min_length=1,
        max_length=512,
    )
    sidecar: str = setting("image of sidecars.", min_length=1, max_length=512)
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = setting(
        "when the node fetches an image.", default="IfNotPresent"
    )
    pull_secrets: tuple[str, ...] = setting(
        "Secrets of a registry, in the job's namespace.", default=(), max_items=16
    )


@dataclass(frozen=True, kw_only=True)
class Coordinator:
    """The gRPC service that this site's workers talk to."""

    port: int = setting(
        "port that it listens on.", default=COORDINATOR_PORT, minimum=1, maximum=65535
    )
    address: str = setting(
        "host:port by which this site's pods reach it (the chart's Service).",
        min_length=1,
        max_length=512,
    )


@dataclass(frozen=True, kw_only=True)
class Keeper:
    """The pod that holds a job's checkpoints and model."""

    size: str = setting(
        "size of the claim that is made for each job; empty: no claim, and what is kept goes with"
        " the keeper's pod.",
        default="",
        max_length=64,
    )
    storage_class_name: str = setting(
        "storage class of that claim; empty: the cluster's default.", default="", max_length=253
    )
    claim_name: str = setting(
        "a claim that exists in the job's namespace, used instead of one that is made.",
        default="",
        max_length=253,
    )
    resources: Resources = setting("resources of the keeper's container.", default=Resources())


@dataclass(frozen=True, kw_only=True)
class Sidecar:
    """The container beside each trainer."""

    resources: Resources = setting("resources of the sidecar's container.", default=Resources())


@dataclass(frozen=True, kw_only=True)
class LoadBalancer:
    """The Services of workers of jobs with exposure LoadBalancer."""

    annotations: Mapping[str, str] = setting(
        "annotations of them, as load balancers ask for.", default={}, max_items=64
    )
    class_name: str = setting(
        "their load balancer class; empty: the cluster's default.", default="", max_length=253
    )


@dataclass(frozen=True, kw_only=True)
class Listener:
    """The part of a Gateway (of the Gateway API) that passes TLS through."""

    name: str = setting("name of the Gateway; empty: there is none.", default="", max_length=253)
    namespace: str = setting("its namespace; empty: that of each job.", default="", max_length=63)
    section_name: str = setting(
        "its listener; empty: all that will do.", default="", max_length=253
    )


@dataclass(frozen=True, kw_only=True)
class Gateway:
    """A proxy through which other sites reach all workers by one port: TLS goes through as it is,
    and leads to a worker by the server name that the caller asks for (SNI)."""

    address: str = setting(
        "host:port by which other sites reach it.",
        pattern=r"[^\s/]+:[0-9]{1,5}",
        pattern_words="host:port",
        max_length=512,
    )
    route: Literal["TLSRoute", "IngressRouteTCP"] = setting(
        "what tells it of workers: objects of the Gateway API (1.5 or newer), or of Traefik.",
        default="TLSRoute",
    )
    parent: Listener = setting("the Gateway of TLSRoutes.", default=Listener())
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
class Authority:
    """The site's certificate authority."""

    secret_name: str = setting(
        "Secret in the operator's namespace that holds it (tls.crt, tls.key); made if absent.",
        default="dlion-authority",
        min_length=1,
        max_length=253,
    )
    owner_service: str = setting(
        "Service in the operator's namespace with which it goes; empty: it stays until somebody"
        " deletes it.",
        default="",
        max_length=253,
    )
    certificate_life_seconds: int = setting(
        "life of a worker's certificate; at half of it the next one is signed, and connections are"
        " remade with that.",
        default=86400,
        minimum=60,
        maximum=INT32_MAX,
        unit="seconds",
    )


@dataclass(frozen=True, kw_only=True)
class Federation:
    """The gRPC service through which the sites' operators tell each other what they see."""

    port: int = setting(
        "port that it listens on.", default=FEDERATION_PORT, minimum=1, maximum=65535
    )
    certificate_life_seconds: int = setting(
        "life of the operator's own certificate; it is renewed at half of it.",
        default=86400,
        minimum=60,
        maximum=INT32_MAX,
        unit="seconds",
    )
    measure_on_demand: bool = setting(
        "whether whoever reaches the port of metrics may have the links to other sites measured.",
        default=False,
    )


@dataclass(frozen=True, kw_only=True)
class RemoteSite:
    """Another site, as this one is told of it."""

    name: str = setting(
        "name of the site, as spec.sites has it.",
        pattern=LABEL,
        pattern_words=LABEL_WORDS,
        max_length=SITE_NAME_LENGTH,
    )
    address: str = setting(
        "host:port of its federation service, from here.", min_length=1, max_length=512
    )
    bundle_file: str = setting(
        "file with the public certificates of its authority (PEM; `dlion trust show` there). Read"
        " again whenever it changes.",
        min_length=1,
        max_length=1024,
    )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One site's operator."""

    site: str = setting(
        "name of this site: the operator acts on the entry of spec.sites that bears it.",
        pattern=LABEL,
        pattern_words=LABEL_WORDS,
        max_length=SITE_NAME_LENGTH,
    )
    advertised_address: str = setting(
        "host by which other sites reach this site's nodes and load balancers, for jobs that are"
        " exposed by them; empty: the address of a worker's node, or of its load balancer.",
        default="",
        pattern=r"([A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?|[0-9A-Fa-f.]*:[0-9A-Fa-f.:]*:[0-9A-Fa-f.:]*)?",
        pattern_words="a host name or an IP address, without a port",
        max_length=253,
    )
    namespaces: tuple[str, ...] = setting(
        "namespaces that are watched; empty: all, which needs a ClusterRole.",
        default=(),
        max_items=256,
    )
    images: Images = setting("what the pods of a job run.")
    coordinator: Coordinator = setting("the service that workers talk to.")
    keeper: Keeper = setting("the pod that holds checkpoints and models.", default=Keeper())
    sidecar: Sidecar = setting("the container beside each trainer.", default=Sidecar())
    load_balancer: LoadBalancer = setting(
        "the Services of workers behind load balancers.", default=LoadBalancer()
    )
    gateway: Gateway | None = setting(
        "the proxy before workers of jobs with exposure Gateway; absent: there is none.",
        default=None,
    )
    authority: Authority = setting("the site's certificate authority.", default=Authority())
    federation: Federation | None = setting(
        "the service for other sites' operators; absent: this site knows no other.", default=None
    )
    sites: tuple[RemoteSite, ...] = setting(
        "the other sites; empty: this site knows no other.",
        default=(),
        key="name",
        max_items=MOST_SITES,
    )
    metrics_port: int = setting("port of /metrics.", default=METRICS_PORT, minimum=1, maximum=65535)
    health_port: int = setting(
        "port of /livez and /readyz.", default=HEALTH_PORT, minimum=1, maximum=65535
    )

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
    def remote_sites(self) -> tuple[RemoteSite, ...]:
        """The sites that this one is federated with."""
        return self.sites if self.federation is not None else ()


def load_settings(path: Path) -> Settings:
    """The settings in that file.

    Raises:
        SpecError: it is no YAML, or not what `Settings` allows; says all that is wrong.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        problem = Problem("", "is too long", allowed=f"at most {MAX_FILE_BYTES} bytes")
        raise SpecError([problem], source=str(path))
    try:
        document: Mapping[str, Any] = yaml.safe_load(content)
    except (yaml.YAMLError, UnicodeError, RecursionError) as error:
        raise SpecError([Problem("", f"is not YAML: {error}")], source=str(path)) from error
    return parse(Settings, document, source=str(path))
