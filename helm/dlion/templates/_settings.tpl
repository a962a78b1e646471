{{/* The operator's settings file, as dlion_operator.settings.Settings has it. */}}
{{- define "dlion.settings" -}}
{{- $site := required "site.name is missing: name this site as spec.sites[].name of your manifests does, for example --set site.name=plant-a" .Values.site.name -}}
{{- if eq (int .Values.metrics.port) (int .Values.health.port) -}}
{{- fail (printf "metrics.port and health.port are both %d: give them different ports" (int .Values.metrics.port)) -}}
{{- end -}}
{{- if eq (int .Values.coordinator.port) (int .Values.metrics.port) -}}
{{- fail (printf "coordinator.port and metrics.port are both %d: give them different ports" (int .Values.coordinator.port)) -}}
{{- end -}}
{{- if eq (int .Values.coordinator.port) (int .Values.health.port) -}}
{{- fail (printf "coordinator.port and health.port are both %d: give them different ports" (int .Values.coordinator.port)) -}}
{{- end -}}
{{- if and .Values.keeper.claimName .Values.keeper.size -}}
{{- fail (printf "keeper.claimName %q and keeper.size %q exclude each other: give the claim that exists, or the size of those to be made" .Values.keeper.claimName .Values.keeper.size) -}}
{{- end -}}
site: {{ $site | quote }}
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
sidecar:
  resources: {{ .Values.sidecar.resources | toJson }}
authority:
  secretName: {{ .Values.authority.secretName | quote }}
  certificateLifeSeconds: {{ int .Values.authority.certificateLifeSeconds }}
metricsPort: {{ int .Values.metrics.port }}
healthPort: {{ int .Values.health.port }}
{{- end }}
