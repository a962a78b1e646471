{{/* What bounds the users of jobs: namespaces, the admission policy's name and its expressions. */}}

{{/* Namespaces without jobs, as JSON: the operator's own as well, unless `namespaces` names it. */}}
{{- define "dlion.excludedNamespaces" -}}
{{- $excluded := list -}}
{{- range concat .Values.tenancy.excludedNamespaces (list .Release.Namespace) | uniq -}}
{{- if not (has . $.Values.namespaces) }}{{ $excluded = append $excluded . }}{{ end -}}
{{- end -}}
{{- $excluded | toJson -}}
{{- end }}

{{/* Name of the ValidatingAdmissionPolicy and its binding; empty: there is none. */}}
{{- define "dlion.admissionPolicy" -}}
{{- $isServed := semverCompare ">=1.30.0-0" .Capabilities.KubeVersion.Version -}}
{{- $auto := and $isServed (not .Values.namespaces) -}}
{{- if or (eq .Values.tenancy.admissionPolicy "Always") (and (eq .Values.tenancy.admissionPolicy "Auto") $auto) -}}
{{ printf "%s-%s-tenancy" (include "dlion.name" .) .Release.Namespace }}
{{- end -}}
{{- end }}

{{/* Ports at which other sites expose workers, as JSON: with that of the gateway, which sites share as a rule. */}}
{{- define "dlion.peerPorts" -}}
{{- $ports := list -}}
{{- range .Values.networkPolicies.peerPorts -}}
{{- $ports = append $ports (dict "port" (int .port) "endPort" (int (default 0 .endPort))) -}}
{{- end -}}
{{- with .Values.gateway.address }}{{ $ports = append $ports (dict "port" (splitList ":" . | last | int) "endPort" 0) }}{{ end -}}
{{- $ports | toJson -}}
{{- end }}

{{/* CEL: the list of that name, or an empty one. */}}
{{- define "dlion.cel.list" -}}
(has({{ . }}) && {{ . }} != null ? {{ . }} : [])
{{- end }}

{{/* CEL: whether `n` is in none of these entries. */}}
{{- define "dlion.cel.unlisted" -}}
{{- $terms := list -}}
{{- range . -}}
{{- if hasSuffix "*" . }}{{ $terms = append $terms (printf "n.startsWith(%s)" (trimSuffix "*" . | toJson)) -}}
{{- else }}{{ $terms = append $terms (printf "n == %s" (toJson .)) }}{{ end -}}
{{- end -}}
!({{ $terms | join " || " | default "false" }})
{{- end }}

{{/* CEL: of the list `list` the names under `path`, separated by commas. */}}
{{- define "dlion.cel.names" -}}
{{- $at := "x" -}}
{{- $terms := list -}}
{{- range splitList "." .path -}}
{{- $at = printf "%s.%s" $at . -}}
{{- $terms = append $terms (printf "has(%s) && %s != null" $at $at) -}}
{{- end -}}
{{ .list }}.filter(x, {{ $terms | join " && " }}).map(x, string({{ $at }})).join(",")
{{- end }}
