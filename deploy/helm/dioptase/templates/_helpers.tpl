{{/* Names of what is made; a release called dioptase has no other word in them. */}}
{{- define "dioptase.name" -}}
{{- if contains "dioptase" .Release.Name -}}{{ .Release.Name | trunc 50 }}{{- else -}}{{ printf "%s-dioptase" .Release.Name | trunc 50 }}{{- end -}}
{{- end -}}

{{/* What chooses the pods of a component, and never changes: dict "root" "component". */}}
{{- define "dioptase.selector" -}}
app.kubernetes.io/name: dioptase
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "dioptase.labels" -}}
{{ include "dioptase.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{- define "dioptase.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "dioptase.tlsSecret" -}}
{{ .Values.tls.secretName | default (printf "%s-tls" (include "dioptase.name" .)) }}
{{- end -}}

{{/* The names in the certificate; agents are asked by their nodes' addresses, so whoever verifies them names one of these. */}}
{{- define "dioptase.serverName" -}}
{{ include "dioptase.name" .root }}-{{ .component }}.{{ .root.Release.Namespace }}.svc
{{- end -}}

{{/* What kubelets below 1.33 know only as a right to far more. */}}
{{- define "dioptase.kubeletRight" -}}
{{- if .Values.agent.kubelet.right -}}{{ .Values.agent.kubelet.right }}
{{- else if semverCompare ">=1.33.0-0" .Capabilities.KubeVersion.Version -}}pods
{{- else -}}proxy{{- end -}}
{{- end -}}

{{/* Settings of the agent: what the chart has to say, and over it what was set. */}}
{{- define "dioptase.agentSettings" -}}
{{- $kubelet := dict -}}
{{- if .Values.agent.kubelet.caFile -}}{{- $_ := set $kubelet "caFile" "/etc/dioptase/kubelet.crt" -}}{{- end -}}
{{- $said := dict "kubelet" $kubelet "exporters" (dict "tokenReview" .Values.tokenReview) -}}
{{- if .Values.agent.extendedResources -}}{{- $_ := set $said "report" (dict "extendedResources" true) -}}{{- end -}}
{{ mergeOverwrite $said (deepCopy .Values.agent.settings) | toYaml }}
{{- end -}}

{{/* Whether agents write into the Node's own capacity, by whichever of the two ways that was said. */}}
{{- define "dioptase.extendedResources" -}}
{{- $report := (include "dioptase.agentSettings" . | fromYaml).report | default dict -}}
{{- if $report.extendedResources -}}true{{- end -}}
{{- end -}}

{{/* Folder with the runtime's socket for plugins; only an agent that acts is one. */}}
{{- define "dioptase.nri" -}}
{{- if eq .Values.agent.act "on" -}}{{ .Values.agent.nriDir }}{{- end -}}
{{- end -}}

{{- define "dioptase.controllerSettings" -}}
{{- /* A node that is to have no agent must not be taken for one that has lost it. */ -}}
{{- $nodes := list -}}
{{- range $label, $value := .Values.agent.nodeSelector -}}{{- $nodes = append $nodes (printf "%s=%s" $label $value) -}}{{- end -}}
{{- $agents := printf "app.kubernetes.io/name=dioptase,app.kubernetes.io/instance=%s,app.kubernetes.io/component=agent" .Release.Name -}}
{{- $health := dict "agents" (dict "dioptase-agent" $agents) "nodeSelector" (join "," $nodes) -}}
{{- /* Agents that somebody names beside ours may be anywhere. */ -}}
{{- if not (dig "health" "agents" dict .Values.controller.settings) }}{{ $_ := set $health "namespace" .Release.Namespace }}{{ end -}}
{{- /* Where agents lend nothing, nobody is evicted because one of them is gone. */ -}}
{{- if ne (toString .Values.agent.act) "on" }}{{ $_ := set $health "dryRun" true }}{{ end -}}
{{- $said := dict "tokenReview" .Values.tokenReview "lease" (printf "%s-controller" (include "dioptase.name" .)) "health" $health -}}
{{ mergeOverwrite $said (deepCopy .Values.controller.settings) | toYaml }}
{{- end -}}

{{/* The web configuration of both. */}}
{{- define "dioptase.web" -}}
tls_server_config:
  cert_file: /etc/dioptase/tls/tls.crt
  key_file: /etc/dioptase/tls/tls.key
{{- end -}}
