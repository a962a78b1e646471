{{/* Names, labels and image references that several templates share. */}}

{{/* The release's name with `dlion` in it, short enough for all that is appended. */}}
{{- define "dlion.name" -}}
{{- $release := .Release.Name -}}
{{- if not (contains "dlion" $release) }}{{ $release = printf "%s-dlion" $release }}{{ end -}}
{{- $release | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "dlion.operator" -}}
{{ include "dlion.name" . }}-operator
{{- end }}

{{- define "dlion.serviceAccount" -}}
{{- if .Values.serviceAccount.name -}}
{{ .Values.serviceAccount.name }}
{{- else if .Values.serviceAccount.create -}}
{{ include "dlion.operator" . }}
{{- else -}}
{{- fail "serviceAccount.name is missing: with serviceAccount.create=false name the account that the operator uses" -}}
{{- end -}}
{{- end }}

{{/* Labels that do not change in a release's life. */}}
{{- define "dlion.selector" -}}
app.kubernetes.io/name: dlion
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end }}

{{/* Labels of every object. */}}
{{- define "dlion.labels" -}}
{{- $own := include "dlion.selector" . | fromYaml -}}
{{- $more := dict
  "app.kubernetes.io/version" .Chart.AppVersion
  "app.kubernetes.io/managed-by" .Release.Service
  "helm.sh/chart" (printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63) -}}
{{- merge (dict) $own $more .Values.commonLabels | toYaml -}}
{{- end }}

{{/* Reference of the image whose part of values `name` is: registry/repository:tag or …@digest. */}}
{{- define "dlion.image" -}}
{{- $image := index .root.Values.images .name -}}
{{- $repository := $image.repository -}}
{{- with .root.Values.images.registry }}{{ $repository = printf "%s/%s" (trimSuffix "/" .) $repository }}{{ end -}}
{{- if $image.digest -}}
{{ printf "%s@%s" $repository $image.digest }}
{{- else -}}
{{ printf "%s:%s" $repository (default .root.Chart.AppVersion $image.tag) }}
{{- end -}}
{{- end }}

{{- define "dlion.pullSecrets" -}}
{{- with .Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{/* The operator's tolerations. Kubernetes' default would leave it on a dead node for five minutes. */}}
{{- define "dlion.tolerations" -}}
{{- $all := .Values.operator.tolerations -}}
{{- $keys := list -}}
{{- range $all }}{{ $keys = append $keys .key }}{{ end -}}
{{- range list "node.kubernetes.io/not-ready" "node.kubernetes.io/unreachable" -}}
{{- if not (has . $keys) -}}
{{- $all = append $all (dict "key" . "operator" "Exists" "effect" "NoExecute" "tolerationSeconds" 20) -}}
{{- end -}}
{{- end -}}
{{- toYaml $all -}}
{{- end }}

{{/* What pod security `restricted` asks of a pod and of its containers. */}}
{{- define "dlion.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "dlion.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* Where this release's workers are: an entry of a NetworkPolicy's from, less the leading dash. */}}
{{- define "dlion.fromWorkers" -}}
podSelector:
  matchLabels: {app.kubernetes.io/name: dlion}
  matchExpressions:
    - {key: app.kubernetes.io/component, operator: In, values: [worker, keeper]}
{{- if .Values.namespaces }}
namespaceSelector:
  matchExpressions:
    - key: kubernetes.io/metadata.name
      operator: In
      values: {{ .Values.namespaces | toJson }}
{{- else }}
namespaceSelector: {}
{{- end }}
{{- end }}
