{{- /* The metadata of an object: (list . NAME). */ -}}
{{- define "headrace.metadata" -}}
{{- $root := index . 0 -}}
{{- dict "name" (index . 1) "labels" (dict
  "app.kubernetes.io/name" "headrace"
  "app.kubernetes.io/part-of" "headrace"
  "app.kubernetes.io/version" $root.Chart.AppVersion
  "app.kubernetes.io/managed-by" $root.Release.Service
  "helm.sh/chart" (printf "%s-%s" $root.Chart.Name $root.Chart.Version)) | toJson -}}
{{- end -}}

{{- define "headrace.image" -}}
{{- $images := (index . 0).Values.images -}}
{{ $images.prefix }}{{ index . 1 }}:{{ $images.tag | default (index . 0).Chart.AppVersion }}
{{- end -}}

{{- /* The settings of all pods; a value of the user wins. */ -}}
{{- define "headrace.settings" -}}
{{- $keys := ternary "" "/etc/headrace/keys/keys.yaml" .Values.withoutKeys -}}
{{- /* Addresses, localhost (a port forward) and names without a dot may always call. */ -}}
{{- $name := printf "gateway.%s" .Release.Namespace -}}
{{- $hosts := list $name (printf "%s.svc" $name) (printf "%s.svc.cluster.local" $name) -}}
{{- if .Values.route.to -}}{{- $hosts = append $hosts .Values.route.host -}}{{- end -}}
{{- if eq .Values.route.to "gateway" -}}{{- $hosts = append $hosts .Values.route.grpcHost -}}{{- end -}}
{{- $settings := dict
  "MODELS" "storyteller=models/storyteller,normalizer=models/normalizer"
  "GATEWAY_KEYS" $keys
  "TRANSFORMER_KEYS" $keys
  "GATEWAY_HOSTS" (join "," $hosts)
  "GATEWAY_TRACE_PERCENT" "0"
  "TRACE_PAGE" "" -}}
{{- if .Values.withoutKeys -}}{{- $_ := set $settings "GATEWAY_INSECURE" "true" -}}{{- end -}}
{{- if .Values.tls.enabled -}}{{- $_ := set $settings "GATEWAY_TLS" "/etc/gateway/tls" -}}{{- end -}}
{{- if .Values.observability.enabled -}}
{{- $_ := set $settings "GATEWAY_TRACE_PERCENT" "100" -}}
{{- $_ := set $settings "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT" "http://jaeger:4317" -}}
{{- /* By `kubectl port-forward`. */ -}}
{{- $_ := set $settings "TRACE_PAGE" "http://127.0.0.1:16686/trace/" -}}
{{- end -}}
{{- toYaml (mergeOverwrite $settings .Values.settings) -}}
{{- end -}}

{{- /* What every pod has: (list . COMPONENT SECONDS), the seconds longer than its drains and the flush of the last records
and spans. */ -}}
{{- define "headrace.pod" -}}
enableServiceLinks: false
automountServiceAccountToken: false
terminationGracePeriodSeconds: {{ index . 2 }}
{{- with (index . 0).Values.images.pullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "headrace.spread" -}}
topologySpreadConstraints:
{{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
- maxSkew: 1
  topologyKey: {{ . }}
  whenUnsatisfiable: ScheduleAnyway
  labelSelector: {matchLabels: {app.kubernetes.io/component: {{ $ }}}}
{{- end }}
{{- end -}}

{{- define "headrace.podMetadata" -}}
labels:
  app.kubernetes.io/component: {{ index . 1 }}
  app.kubernetes.io/name: headrace
  app.kubernetes.io/part-of: headrace
annotations:
  checksum/settings: {{ include "headrace.settings" (index . 0) | sha256sum }}
{{- end -}}

{{- define "headrace.hardened" -}}
readOnlyRootFilesystem: true
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
{{- end -}}

{{- /* The process answers. It listens while it loads, so that no download is too long; where its event loop hangs it ends
itself (*_LOOP_TIMEOUT). Readiness, by gRPC at the port: tokenizers or the models of MODELS are loaded, the database answers. */ -}}
{{- define "headrace.probes" -}}
readinessProbe:
  grpc: {port: {{ . }}}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 3
startupProbe:
  httpGet: {path: /metrics, port: metrics}
  periodSeconds: 2
  timeoutSeconds: 10
  failureThreshold: 150
livenessProbe:
  httpGet: {path: /metrics, port: metrics}
  periodSeconds: 20
  timeoutSeconds: 10
  failureThreshold: 3
{{- end -}}

{{- define "headrace.claim" -}}
- metadata: {name: {{ index . 0 }}}
  spec:
    accessModes: [ReadWriteOnce]
    resources: {requests: {storage: {{ index . 1 }}}}
{{- end -}}

{{- define "headrace.hubToken" -}}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .Values.hub.secret }}, key: HF_TOKEN, optional: true}}
{{- end -}}

{{- define "headrace.selects" -}}
{matchLabels: {app.kubernetes.io/component: {{ . }}}}
{{- end -}}
