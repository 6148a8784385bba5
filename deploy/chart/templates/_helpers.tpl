{{- define "kvarn.name" -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "kvarn.selector" -}}
app.kubernetes.io/name: kvarn
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kvarn.labels" -}}
{{ include "kvarn.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "kvarn.routerSelector" -}}
app.kubernetes.io/name: kvarn-router
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kvarn.routerLabels" -}}
{{ include "kvarn.routerSelector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- /* Who may ask: clients and, where it is scraped, Prometheus. */ -}}
{{- define "kvarn.ingressRules" -}}
- ports:
    - {port: http, protocol: TCP}
  from:
    {{- if .Values.networkPolicy.from }}
    {{- toYaml .Values.networkPolicy.from | nindent 4 }}
    {{- else }}
    - podSelector: {}
    {{- end }}
{{- if .Values.metrics.serviceMonitor }}
- ports:
    - {port: http, protocol: TCP}
  from:
    - namespaceSelector:
        matchLabels:
          kubernetes.io/metadata.name: {{ .Values.networkPolicy.monitoringNamespace }}
{{- end }}
{{- end -}}

{{- /* The Service whose endpoints are the servers. */ -}}
{{- define "kvarn.serversService" -}}
{{- include "kvarn.name" . }}{{ if .Values.router.enabled }}-replicas{{ end -}}
{{- end -}}

{{- define "kvarn.keysSecret" -}}
{{- .Values.keys.existingSecret | default (printf "%s-keys" (include "kvarn.name" .)) -}}
{{- end -}}

{{- define "kvarn.hasKeys" -}}
{{- if or .Values.keys.existingSecret .Values.keys.toml }}yes{{ end -}}
{{- end -}}

{{- /* The server needs preStop + delay + timeout, and less than 5 s to end; the rest is for the kubelet. */ -}}
{{- define "kvarn.graceSeconds" -}}
{{- add .Values.drain.preStopSeconds .Values.drain.delaySeconds .Values.drain.timeoutSeconds 10 -}}
{{- end -}}

{{- define "kvarn.limitsUrl" -}}
{{- if .Values.redis.enabled }}redis://{{ include "kvarn.name" . }}-redis:6379/0{{ else }}{{ .Values.limits.url }}{{ end -}}
{{- end -}}

{{- define "kvarn.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "kvarn.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "kvarn.check" -}}
{{- if not (or (include "kvarn.hasKeys" .) .Values.keys.insecure) -}}
{{- fail "keys: give existingSecret or toml; or insecure: true if everybody who can reach the pods may use the models" -}}
{{- end -}}
{{- if and (include "kvarn.hasKeys" .) .Values.keys.insecure -}}
{{- fail "keys.insecure is true and there are keys; choose one" -}}
{{- end -}}
{{- if and .Values.redis.enabled (or .Values.limits.url .Values.limits.existingSecret) -}}
{{- fail "redis.enabled is true and limits names another Redis; choose one" -}}
{{- end -}}
{{- if and .Values.router.enabled (not .Values.router.clusterKeySecret) -}}
{{- fail "router.enabled is true; name a Secret with an entry cluster.key in router.clusterKeySecret" -}}
{{- end -}}
{{- if and .Values.autoscaling.enabled (gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas)) -}}
{{- fail (printf "autoscaling.minReplicas is %v, more than maxReplicas %v" .Values.autoscaling.minReplicas .Values.autoscaling.maxReplicas) -}}
{{- end -}}
{{- if and (eq .Values.modelCache.type "existing") (not .Values.modelCache.existingClaim) -}}
{{- fail "modelCache.type is existing; name the claim in modelCache.existingClaim" -}}
{{- end -}}
{{- end -}}
