"""Find what in a pod violates Kubernetes' pod security standard `restricted`. Pure.

`decide` checks this because a dry run of a Job does not: its pods would be refused one by one
later, and the Job would wait indefinitely. Source: Pod Security Standards, v1.34.
"""

from collections.abc import Iterator, Mapping
from typing import Any

_VOLUMES = frozenset(
    {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image", "name",
     "persistentVolumeClaim", "projected", "secret"}
)  # fmt: skip
_HANDLERS = (
    ("livenessProbe",), ("readinessProbe",), ("startupProbe",),
    ("lifecycle", "postStart"), ("lifecycle", "preStop"),
)  # fmt: skip
_SECCOMP = ("RuntimeDefault", "Localhost")
_SELINUX_TYPES = ("", "container_t", "container_init_t", "container_kvm_t", "container_engine_t")
_SYSCTLS = frozenset(
    {"kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.ip_local_reserved_ports",
     "net.ipv4.ip_unprivileged_port_start", "net.ipv4.ping_group_range",
     "net.ipv4.tcp_fin_timeout", "net.ipv4.tcp_keepalive_intvl", "net.ipv4.tcp_keepalive_probes",
     "net.ipv4.tcp_keepalive_time", "net.ipv4.tcp_rmem", "net.ipv4.tcp_syncookies",
     "net.ipv4.tcp_wmem"}
)  # fmt: skip

Document = Mapping[str, Any]


def restricted_violations(spec: Document) -> tuple[str, ...]:
    """Return each violation of `restricted` in a pod's spec, with its path.

    >>> restricted_violations({"hostNetwork": True, "containers": []})
    ('hostNetwork must not be true',)
    """
    return (*_pod(spec), *_volumes(spec), *_containers(spec))


def _pod(spec: Document) -> Iterator[str]:
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(name):
            yield f"{name} must not be true"
    context = _mapping(spec.get("securityContext"))
    yield from _shared_context("securityContext", context)
    for sysctl in _list(context.get("sysctls")):
        if (name := str(_mapping(sysctl).get("name"))) not in _SYSCTLS:
            yield f"securityContext.sysctls must not hold {name}"


def _volumes(spec: Document) -> Iterator[str]:
    for place, volume in enumerate(_list(spec.get("volumes"))):
        for kind in sorted(_mapping(volume).keys() - _VOLUMES):
            advice = "; use a PersistentVolumeClaim" if kind == "hostPath" else ""
            yield f"volumes[{place}] must not be a {kind}{advice}"


def _containers(spec: Document) -> Iterator[str]:
    pod = _mapping(spec.get("securityContext"))
    for field in ("initContainers", "containers", "ephemeralContainers"):
        for place, entry in enumerate(_list(spec.get(field))):
            each = _mapping(entry)
            path = f"{field}[{each.get('name', place)}]"
            yield from _container(path, each, pod)


def _container(path: str, container: Document, pod: Document) -> Iterator[str]:
    context = _mapping(container.get("securityContext"))
    at = f"{path}.securityContext"
    yield from _shared_context(at, context)
    if context.get("privileged"):
        yield f"{at}.privileged must not be true"
    if context.get("allowPrivilegeEscalation") is not False:
        yield f"{at}.allowPrivilegeEscalation must be false"
    if context.get("procMount") not in (None, "", "Default"):
        yield f"{at}.procMount must be Default"
    capabilities = _mapping(context.get("capabilities"))
    if "ALL" not in _list(capabilities.get("drop")):
        yield f"{at}.capabilities.drop must hold ALL"
    if added := sorted(set(map(str, _list(capabilities.get("add")))) - {"NET_BIND_SERVICE"}):
        yield f"{at}.capabilities.add must not hold {', '.join(added)}"
    if not context.get("runAsNonRoot", pod.get("runAsNonRoot")):
        yield f"{at}.runAsNonRoot must be true"
    seccomp = context.get("seccompProfile", pod.get("seccompProfile"))
    if _mapping(seccomp).get("type") not in _SECCOMP:
        yield f"{at}.seccompProfile.type must be one of {', '.join(_SECCOMP)}"
    for port in _list(container.get("ports")):
        if _mapping(port).get("hostPort"):
            yield f"{path}.ports must not hold a hostPort"
    yield from _handlers(path, container)


def _handlers(path: str, container: Document) -> Iterator[str]:
    """Check probes and hooks for another host (forbidden since v1.34)."""
    for names in _HANDLERS:
        handler = container
        for name in names:
            handler = _mapping(handler.get(name))
        for action in ("httpGet", "tcpSocket"):
            if _mapping(handler.get(action)).get("host"):
                at = ".".join((path, *names, action))
                yield f"{at}.host must not be set; the default is the pod's own address"


def _shared_context(at: str, context: Document) -> Iterator[str]:
    """Check what applies to a pod's and to a container's security context."""
    if context.get("runAsUser") == 0:
        yield f"{at}.runAsUser must not be 0"
    seccomp = _mapping(context.get("seccompProfile")).get("type")
    if seccomp is not None and seccomp not in _SECCOMP:
        yield f"{at}.seccompProfile.type must be one of {', '.join(_SECCOMP)}"
    if _mapping(context.get("appArmorProfile")).get("type") == "Unconfined":
        yield f"{at}.appArmorProfile.type must not be Unconfined"
    if _mapping(context.get("windowsOptions")).get("hostProcess"):
        yield f"{at}.windowsOptions.hostProcess must not be true"
    selinux = _mapping(context.get("seLinuxOptions"))
    if selinux.get("type", "") not in _SELINUX_TYPES or selinux.get("user") or selinux.get("role"):
        yield f"{at}.seLinuxOptions may only hold a container's type and a level"


def _mapping(value: object) -> Document:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
