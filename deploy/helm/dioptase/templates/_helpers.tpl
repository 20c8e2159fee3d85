{{/* Names of the objects; a release called dioptase adds no prefix. */}}
{{- define "dioptase.name" -}}
{{- if contains "dioptase" .Release.Name -}}{{ .Release.Name | trunc 50 }}{{- else -}}{{ printf "%s-dioptase" .Release.Name | trunc 50 }}{{- end -}}
{{- end -}}

{{/* Immutable selector of a component's pods: dict "root" "component". */}}
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
{{ .Values.image.repository }}{{ if .Values.image.digest }}@{{ .Values.image.digest }}{{ else }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end -}}

{{- define "dioptase.tlsSecret" -}}
{{ .Values.tls.secretName | default (printf "%s-tls" (include "dioptase.name" .)) }}
{{- end -}}

{{/* Name in the certificate. Agents are reached at their nodes' addresses, so clients that verify them have to expect this name. */}}
{{- define "dioptase.serverName" -}}
{{ include "dioptase.name" .root }}-{{ .component }}.{{ .root.Release.Namespace }}.svc
{{- end -}}

{{/* Subresource of nodes for reading pods. Kubelets before 1.33 (KEP-2862) check only `proxy`, which allows commands in any pod: the chart
     grants it only if the operator chooses it. */}}
{{- define "dioptase.kubeletRight" -}}
{{- if .Values.agent.kubelet.right -}}{{ .Values.agent.kubelet.right }}
{{- else if semverCompare ">=1.33.0-0" .Capabilities.KubeVersion.Version -}}pods
{{- else -}}
{{- fail (printf "agent.kubelet.right: a kubelet of Kubernetes %s lets an agent read the pods of its node only with the right nodes/proxy, which also allows commands in any pod of any node. Set agent.kubelet.right=proxy to grant it. Set agent.kubelet.right=pods if the kubelets have KubeletFineGrainedAuthz enabled (1.32), or if agent.settings.kubelet.url is their read-only port. Without a cluster, --kube-version names the version (docs/install.md, Privileges)." .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- end -}}

{{/* Hosts of the agent's --listen: the node's own addresses, and loopback for the kubelet's probes unless 0.0.0.0 includes it. */}}
{{- define "dioptase.listen" -}}
{{ .Values.agent.listen | default "$(NODE_ADDRESSES)" }}{{ if ne .Values.agent.listen "0.0.0.0" }},127.0.0.1{{ end }}
{{- end -}}

{{/* The profile: purpose, act and settings, of profiles.yaml, which is generated from agent/config/profiles.py. */}}
{{- define "dioptase.profile" -}}
{{ get (.Files.Get "profiles.yaml" | fromYaml) .Values.profile | toYaml }}
{{- end -}}

{{/* Mode of the agent. */}}
{{- define "dioptase.act" -}}
{{ .Values.agent.act | default (include "dioptase.profile" . | fromYaml).act }}
{{- end -}}

{{/* Pods with each right: the defaults of agent/config/qos.py, overridden by agent.settings. The agent's own pods are always system_cores. */}}
{{- define "dioptase.rights" -}}
{{- $rights := dict -}}
{{- range list "dedicatedCores" "systemCores" "numaExclusive" "cpusetPool" "disableReclaimLevel" "memoryOffloading" "oomPriority" -}}
{{- $_ := set $rights . (dict "namespaces" (list "kube-system") "priorityClasses" list) -}}
{{- end -}}
{{- $settings := (.Values.agent.settings.qos | default dict).rights | default dict -}}
{{- $rights = mergeOverwrite $rights (deepCopy $settings) -}}
{{- $_ := set $rights.systemCores "namespaces" (append $rights.systemCores.namespaces .Release.Namespace | uniq) -}}
{{ $rights | toYaml }}
{{- end -}}

{{/* The agent's settings file: settings of the chart, overridden by agent.settings. */}}
{{- define "dioptase.agentSettings" -}}
{{- $kubelet := dict -}}
{{- if .Values.agent.kubelet.caFile -}}{{- $_ := set $kubelet "caFile" "/etc/dioptase/kubelet.crt" -}}{{- end -}}
{{- $settings := dict "kubelet" $kubelet "exporters" (dict "tokenReview" .Values.tokenReview "metricProfile" .Values.metrics.profile) -}}
{{- $report := dict -}}
{{- if kindIs "bool" .Values.agent.extendedResources -}}{{- $_ := set $report "extendedResources" .Values.agent.extendedResources -}}{{- end -}}
{{- /* Load and harm, by which the scheduler prefers nodes, and the descheduler finds hot ones. */ -}}
{{- if or .Values.scheduler.enabled .Values.descheduler.enabled -}}{{- $_ := set $report "nodeMetrics" true -}}{{- end -}}
{{- if $report -}}{{- $_ := set $settings "report" $report -}}{{- end -}}
{{- $eviction := dict -}}
{{- if eq (toString .Values.agent.evictions) "false" -}}{{- $_ := set $eviction "plugins" list -}}{{- end -}}
{{- /* Without the controller nothing renews the budget, and agents would evict no pod. */ -}}
{{- if .Values.controller.enabled -}}{{- $_ := set $eviction "budgetLease" (include "dioptase.budgetLease" .) -}}{{- end -}}
{{- if $eviction -}}{{- $_ := set $settings "eviction" $eviction -}}{{- end -}}
{{- $settings = mergeOverwrite $settings (deepCopy .Values.agent.settings) -}}
{{- $own := dict "qos" (dict "rights" (dict "systemCores" (include "dioptase.rights" . | fromYaml).systemCores)) -}}
{{ mergeOverwrite $settings $own | toYaml }}
{{- end -}}

{{/* Lease with the eviction budget of all agents, NAMESPACE/NAME. */}}
{{- define "dioptase.budgetLease" -}}
{{ .Release.Namespace }}/{{ dig "evictionBudget" "lease" (printf "%s-evictions" (include "dioptase.name" .)) .Values.controller.settings }}
{{- end -}}

{{/* Settings of the file over those of the profile, as the agent merges them. */}}
{{- define "dioptase.effectiveSettings" -}}
{{ mergeOverwrite (include "dioptase.profile" . | fromYaml).settings (include "dioptase.agentSettings" . | fromYaml) | toYaml }}
{{- end -}}

{{/* Whether agents write into the Node's own capacity, enabled by profile, value or setting. */}}
{{- define "dioptase.extendedResources" -}}
{{- if dig "report" "extendedResources" false (include "dioptase.effectiveSettings" . | fromYaml) -}}true{{- end -}}
{{- end -}}

{{/* Whether agents may evict pods and taint their nodes: if they act and a plugin is enabled. */}}
{{- define "dioptase.evictions" -}}
{{- $eviction := dig "eviction" dict (include "dioptase.effectiveSettings" . | fromYaml) -}}
{{- if kindIs "bool" .Values.agent.evictions -}}{{- if .Values.agent.evictions -}}true{{- end -}}
{{- else if and (eq (include "dioptase.act" .) "on") (or $eviction.plugins $eviction.pluginSockets) -}}true{{- end -}}
{{- end -}}

{{/* Whether agents list disruption budgets. Plugins at sockets receive these budgets, also in a dry run, and one built-in plugin can rank
     pods by them. */}}
{{- define "dioptase.budgets" -}}
{{- $eviction := dig "eviction" dict (include "dioptase.effectiveSettings" . | fromYaml) -}}
{{- if eq (toString .Values.agent.evictions) "true" -}}true
{{- else if ne (include "dioptase.act" .) "off" -}}
{{- $ranked := and (has "numa-cpu-pressure-plugin" ($eviction.plugins | default list)) (has "WorkloadEvictionFrequency" (dig "numaCpu" "scorers" list $eviction)) -}}
{{- if or $eviction.pluginSockets $ranked -}}true{{- end -}}
{{- end -}}
{{- end -}}

{{/* Whether agents read the Node's annotations: power alerts and overcommit ratios. */}}
{{- define "dioptase.nodeAnnotations" -}}
{{- $settings := include "dioptase.agentSettings" . | fromYaml -}}
{{- if or ($settings.power | default dict).enable ($settings.overcommit | default dict).enable -}}true{{- end -}}
{{- end -}}

{{/* Directory of the runtime's NRI socket; only an agent that acts uses it. */}}
{{- define "dioptase.nri" -}}
{{- if eq (include "dioptase.act" .) "on" -}}{{ .Values.agent.nriDir }}{{- end -}}
{{- end -}}

{{- define "dioptase.controllerSettings" -}}
{{- /* Nodes without an agent by configuration must not count as having lost it. */ -}}
{{- $nodes := list -}}
{{- range $label, $value := .Values.agent.nodeSelector -}}{{- $nodes = append $nodes (printf "%s=%s" $label $value) -}}{{- end -}}
{{- $agents := printf "app.kubernetes.io/name=dioptase,app.kubernetes.io/instance=%s,app.kubernetes.io/component=agent" .Release.Name -}}
{{- $health := dict "agents" (dict "dioptase-agent" $agents) "nodeSelector" (join "," $nodes) -}}
{{- /* Other agents that the settings name may run on any node. */ -}}
{{- if not (dig "health" "agents" dict .Values.controller.settings) }}{{ $_ := set $health "namespace" .Release.Namespace }}{{ end -}}
{{- /* Without reclaimed resources, a missing agent is no reason to evict pods. */ -}}
{{- if ne (include "dioptase.act" .) "on" }}{{ $_ := set $health "dryRun" true }}{{ end -}}
{{- /* What an earlier release let agents write: Helm takes their right away before they end. Only recorded taints are removed. */ -}}
{{- $leftovers := list -}}
{{- if not (include "dioptase.extendedResources" .) -}}{{- $leftovers = append $leftovers "reclaimed-resources" -}}{{- end -}}
{{- if not (include "dioptase.evictions" .) -}}{{- $leftovers = append $leftovers "eviction-taints" -}}{{- end -}}
{{- $budget := dict "lease" (last (splitList "/" (include "dioptase.budgetLease" .))) -}}
{{- $settings := dict "leftovers" $leftovers "tokenReview" .Values.tokenReview "lease" (printf "%s-controller" (include "dioptase.name" .)) "health" $health "evictionBudget" $budget -}}
{{- if include "dioptase.webhooks" . -}}
{{- $_ := set $settings "webhooks" (dict "serve" (include "dioptase.webhooks" . | fromYamlArray) "port" (int .Values.webhooks.port) "service" (include "dioptase.webhooksName" .) "configuration" (include "dioptase.webhooksName" .) "secret" (include "dioptase.webhooksSecret" .) "certManager" (not (empty .Values.webhooks.certManager.secretName))) -}}
{{- end -}}
{{- if .Values.descheduler.enabled -}}
{{- $descheduler := dict "lease" (printf "%s-descheduler" (include "dioptase.name" .)) -}}
{{- /* Targets are evaluated by the plugins that will place the pods. */ -}}
{{- if .Values.scheduler.settings }}{{ $_ := set $descheduler "scheduler" .Values.scheduler.settings }}{{ end -}}
{{- if ne (include "dioptase.act" .) "on" }}{{ $_ := set $descheduler "lowNodeLoad" (dict "dryRun" true) }}{{ end -}}
{{- $_ := set $settings "descheduler" (mergeOverwrite $descheduler (deepCopy .Values.descheduler.settings)) -}}
{{- end -}}
{{- $settings = mergeOverwrite $settings (deepCopy .Values.controller.settings) -}}
{{- if .Values.descheduler.enabled -}}
{{- $_ := set $settings "controllers" (append ($settings.controllers | default (list "kcc" "lifecycle")) "descheduler" | uniq) -}}
{{- end -}}
{{ $settings | toYaml }}
{{- end -}}

{{/* Webhooks that the controller serves, as a list; empty if none. */}}
{{- define "dioptase.webhooks" -}}
{{- if and .Values.controller.enabled .Values.webhooks.enabled -}}
{{- $served := list -}}
{{- range list (list "podMutation" "pod-mutation") (list "podValidation" "pod-validation") (list "nodeOvercommit" "node-overcommit") (list "configValidation" "config-validation") (list "vpaValidation" "vpa-validation") -}}
{{- if index $.Values.webhooks (first .) -}}{{- $served = append $served (last .) -}}{{- end -}}
{{- end -}}
{{- if $served -}}{{ $served | toYaml }}{{- end -}}
{{- end -}}
{{- end -}}

{{- define "dioptase.webhooksName" -}}
{{ include "dioptase.name" . }}-webhooks
{{- end -}}

{{- define "dioptase.webhooksSecret" -}}
{{ .Values.webhooks.certManager.secretName | default (include "dioptase.webhooksName" .) }}
{{- end -}}

{{/* What all webhooks have in common: dict "root" "path". The controller writes caBundle. Ignore: without a replica pods start and
     kubelets report, and agents and controller check again what they apply. */}}
{{- define "dioptase.webhookClient" -}}
clientConfig:
  service: {name: {{ include "dioptase.webhooksName" .root }}, namespace: {{ .root.Release.Namespace }}, path: /{{ .path }}, port: 443}
admissionReviewVersions: [v1]
sideEffects: None
failurePolicy: Ignore
{{- end -}}

{{/* Pods of the cluster and of this release must start without the webhooks. */}}
{{- define "dioptase.webhookNamespaces" -}}
matchExpressions:
  - {key: kubernetes.io/metadata.name, operator: NotIn, values: [kube-system, {{ .Release.Namespace }}]}
{{- end -}}

{{/* Web configuration of agent and controller. */}}
{{- define "dioptase.web" -}}
tls_server_config:
  cert_file: /etc/dioptase/tls/tls.crt
  key_file: /etc/dioptase/tls/tls.key
{{- end -}}

{{- define "dioptase.schedulerSettings" -}}
{{ mergeOverwrite (dict "tokenReview" .Values.tokenReview) (deepCopy .Values.scheduler.settings) | toYaml }}
{{- end -}}

{{/* Web configuration of the scheduler extender: as that of the others, and client certificates if other schedulers may use it. */}}
{{- define "dioptase.schedulerWeb" -}}
{{ include "dioptase.web" . }}
{{- if .Values.scheduler.clientCASecret }}
  client_auth_type: VerifyClientCertIfGiven
  client_ca_file: /etc/dioptase/client-ca/ca.crt
{{- end }}
{{- end -}}

{{/* KubeSchedulerConfiguration of the stock kube-scheduler that calls the extender. */}}
{{- define "dioptase.kubeSchedulerConfiguration" -}}
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
leaderElection:
  leaderElect: true
  resourceName: {{ include "dioptase.name" . }}-scheduler
  resourceNamespace: {{ .Release.Namespace }}
# kube-scheduler asks the extender about the nodes that its own plugins accept. By default it stops to look for more after a share of a large
# cluster, and those may all lack reclaimed resources.
percentageOfNodesToScore: 100
# A pod that fits again is tried within a second, however often it was rejected before.
podMaxBackoffSeconds: 1
profiles:
  - schedulerName: {{ .Values.scheduler.name }}
    pluginConfig:
      - name: NodeResourcesFit
        args:
          # The extender checks these resources: a Node's own allocatable resources need not have them.
          ignoredResourceGroups: [resource.katalyst.kubewharf.io]
extenders:
  - urlPrefix: {{ ternary "https" "http" .Values.tls.enabled }}://127.0.0.1:{{ .Values.scheduler.port }}
    filterVerb: filter
    prioritizeVerb: prioritize
    preemptVerb: preempt
    bindVerb: bind
    weight: {{ .Values.scheduler.weight }}
    nodeCacheCapable: true
    # Longer than a request to a busy API server, because the extender binds.
    httpTimeout: 30s
    {{- if .Values.tls.enabled }}
    enableHTTPS: true
    # Loopback of this pod: no other server can answer there.
    tlsConfig: {insecure: true}
    {{- end }}
{{- end -}}
