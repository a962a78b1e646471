{{/* The operator's settings file, as dlion_operator.model.settings.Settings has it. */}}
{{- define "dlion.settings" -}}
{{- $site := include "dlion.site" . -}}
{{- $others := (include "dlion.otherSites" . | fromJson).all -}}
{{- $byPort := dict -}}
{{- range $part := list "coordinator" "federation" "metrics" "health" -}}
{{- $port := index $.Values $part "port" | int | toString -}}
{{- if hasKey $byPort $port -}}
{{- fail (printf "%s.port and %s.port are both %s: give them different ports" (get $byPort $port) $part $port) -}}
{{- end -}}
{{- $_ := set $byPort $port $part -}}
{{- end -}}
{{- if and .Values.keeper.claimName .Values.keeper.size -}}
{{- fail (printf "keeper.claimName %q and keeper.size %q exclude each other: give the claim that exists, or the size of those to be made" .Values.keeper.claimName .Values.keeper.size) -}}
{{- end -}}
site: {{ $site | quote }}
advertisedAddress: {{ .Values.site.advertisedAddress | quote }}
namespaces: {{ .Values.namespaces | toJson }}
images:
  worker: {{ include "dlion.image" (dict "root" . "name" "worker") | quote }}
  sidecar: {{ include "dlion.image" (dict "root" . "name" "sidecar") | quote }}
  pullPolicy: {{ .Values.images.pullPolicy }}
  pullSecrets: {{ .Values.images.pullSecrets | toJson }}
coordinator:
  port: {{ int .Values.coordinator.port }}
  address: {{ default (printf "%s.%s.svc:%d" (include "dlion.operator" .) .Release.Namespace (int .Values.coordinator.port)) .Values.coordinator.address | quote }}
keeper:
  size: {{ .Values.keeper.size | quote }}
  storageClassName: {{ .Values.keeper.storageClassName | quote }}
  claimName: {{ .Values.keeper.claimName | quote }}
  resources: {{ .Values.keeper.resources | toJson }}
  nodeSelector: {{ .Values.keeper.nodeSelector | toJson }}
  tolerations: {{ .Values.keeper.tolerations | toJson }}
  affinity: {{ .Values.keeper.affinity | toJson }}
  priorityClassName: {{ .Values.keeper.priorityClassName | quote }}
sidecar:
  resources: {{ .Values.sidecar.resources | toJson }}
loadBalancer:
  annotations: {{ .Values.loadBalancer.annotations | toJson }}
  className: {{ .Values.loadBalancer.className | quote }}
{{- with .Values.gateway }}
{{- if .address }}
{{- if and (eq .route "TLSRoute") (not .parent.name) }}
{{- fail "gateway.parent.name is missing: a TLSRoute needs the name of its Gateway; or take gateway.route IngressRouteTCP" }}
{{- end }}
gateway:
  address: {{ .address | quote }}
  route: {{ .route }}
  parent: {{ .parent | toJson }}
  entryPoints: {{ .entryPoints | toJson }}
{{- end }}
{{- end }}
authority:
  secretName: {{ .Values.authority.secretName | quote }}
  ownerService: {{ ternary "" (include "dlion.operator" .) .Values.authority.keep | quote }}
  certificateLifeSeconds: {{ int .Values.authority.certificateLifeSeconds }}
tenancy:
  excludedNamespaces: {{ include "dlion.excludedNamespaces" . | trim }}
  admissionPolicy: {{ include "dlion.admissionPolicy" . | quote }}
  podTemplate: {{ .Values.tenancy.podTemplate | toJson }}
scratch: {{ .Values.scratch | toJson }}
networkPolicies:
  {{- with .Values.networkPolicies }}
  enabled: {{ .enabled }}
  restrictEgress: {{ .restrictEgress }}
  # The name of this site's coordinator; empty for an address that a user has set.
  operatorNamespace: {{ ternary "" $.Release.Namespace (ne $.Values.coordinator.address "") | quote }}
  operatorLabels: {{ include "dlion.selector" $ | fromYaml | toJson }}
  peerCidrs: {{ ternary .peerCIDRs list (gt (len $others) 0) | toJson }}
  peerPorts: {{ include "dlion.peerPorts" $ }}
  gatewayFrom: {{ ternary .gatewayFrom list (gt (len $others) 0) | toJson }}
  metricsFrom: {{ .metricsFrom | toJson }}
  egress: {{ .egress | toJson }}
  dnsTo: {{ .dnsTo | toJson }}
  {{- end }}
kueue: {{ .Values.kueue.enabled }}
defaultRuntime: {{ .Values.runtimes.default | quote }}
metricsPort: {{ int .Values.metrics.port }}
healthPort: {{ int .Values.health.port }}
{{- if $others }}
federation:
  port: {{ int .Values.federation.port }}
  certificateLifeSeconds: {{ int .Values.federation.certificateLifeSeconds }}
  measureOnDemand: {{ .Values.federation.measureOnDemand }}
sites:
{{- range $others }}
  - name: {{ .name | quote }}
    address: {{ .address | quote }}
    bundleFile: {{ printf "/etc/dlion/trust/%s.pem" .name | quote }}
{{- end }}
{{- end }}
{{- end }}
