{{/* This site's name. */}}
{{- define "dlion.site" -}}
{{- required "site.name is missing: name this site as spec.sites[].name of your manifests does, for example --set site.name=plant-a" .Values.site.name -}}
{{- end }}

{{/* Of `sites` those that are not this one, as a JSON list under `all`; refuses what cannot be meant. */}}
{{- define "dlion.otherSites" -}}
{{- $own := include "dlion.site" . -}}
{{- $names := list -}}
{{- $others := list -}}
{{- $byAddress := dict -}}
{{- $byBundle := dict -}}
{{- range .Values.sites -}}
{{- if has .name $names -}}
{{- fail (printf "sites names %s twice: leave one of the two entries" .name) -}}
{{- end -}}
{{- $names = append $names .name -}}
{{- include "dlion.checkBundle" . -}}
{{- if ne .name $own -}}
{{- $others = append $others . -}}
{{- if not .address -}}
{{- fail (printf "sites: %s has no address: give host:port by which %s reaches its federation Service" .name $own) -}}
{{- end -}}
{{- if not .bundle -}}
{{- fail (printf "sites: %s has no bundle: run `dlion trust show` there and put what it prints into its entry" .name) -}}
{{- end -}}
{{- end -}}
{{- with .address -}}
{{- if hasKey $byAddress . -}}
{{- fail (printf "sites: %s and %s have the same address %s: give each site its own" (get $byAddress .) (last $names) .) -}}
{{- end -}}
{{- $_ := set $byAddress . (last $names) -}}
{{- end -}}
{{- with regexReplaceAll "\\s" (default "" .bundle) "" -}}
{{- if hasKey $byBundle . -}}
{{- fail (printf "sites: %s and %s have the same bundle, so that each could pass for the other: run `dlion trust show` at both" (get $byBundle .) (last $names)) -}}
{{- end -}}
{{- $_ := set $byBundle . (last $names) -}}
{{- end -}}
{{- end -}}
{{- if and $names (not (has $own $names)) -}}
{{- fail (printf "site.name %q is not among sites (%s): correct it, or add an entry of that name, the same at every site" $own (join ", " $names)) -}}
{{- end -}}
{{- dict "all" $others | toJson -}}
{{- end }}

{{/* Refuses an entry whose bundle is no PEM of certificates alone; does not print its content. */}}
{{- define "dlion.checkBundle" -}}
{{- $bundle := default "" .bundle -}}
{{- if contains "PRIVATE KEY" $bundle -}}
{{- fail (printf "sites: the bundle of %s holds a private key: take it out, and have a new one made at %s, as this one may be known to others (delete the Secret of its authority and restart its operator); `dlion trust show` prints certificates alone" .name .name) -}}
{{- end -}}
{{- if and $bundle (not (regexMatch "^\\s*(-----BEGIN CERTIFICATE-----\\s[A-Za-z0-9+/=\\s]+-----END CERTIFICATE-----\\s*)+$" $bundle)) -}}
{{- fail (printf "sites: the bundle of %s is not PEM of certificates: put in what `dlion trust show` prints there; `dlion trust verify` reports more" .name) -}}
{{- end -}}
{{- end }}
