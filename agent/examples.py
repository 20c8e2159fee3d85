"""An example for each part of the settings file, as docs/settings.md shows it. Every one is a file of its own that is taken."""

from __future__ import annotations

from collections.abc import Mapping

EXAMPLES: Mapping[str, str] = {
    "": """\
intervalS: 2                    # rounds are half as many, and cost half as much
watchIntervalS: 0.05            # and breaches are seen sooner all the same
probes: [blame, throttles]      # of the probes beside run-queue waits these alone
shadow: {policy: canonical}     # what would Katalyst's policy lend?
""",
    "qos": """\
qos:                            # a cluster that calls its batch pods `tier: offline`
  reclaimedSelector: {example.com/tier: offline}
  enhancementDefaults: {oom_priority: "50"}
""",
    "advisor": """\
advisor:
  policy: latency
  latency: {targetWaitMs: 5, growRatioPerS: 0.05}     # protect harder, lend more slowly
---
advisor:                        # what Katalyst does, with its controller on two indicators
  policy: canonical
  reservedForAllocateCores: 2
  provision:
    sharePolicies: [rama, canonical]
    targets: {share: {cpu_sched_wait: 300, cpu_usage_ratio: 0.7}}
    isolation: {enabled: true}
""",
    "memory": """\
memory:
  policy: numa_aware
  reclaimRoot: /kubepods/besteffort
  reaper: {enable: true}
  offloading:                   # batch pods give up what they do not use; swap is left alone
    levels: {reclaimed_cores: {enable: true, policy: psi}}
""",
    "forecast": """\
forecast: {missRatio: 0.03}     # surer, and about two points of the node less are promised
""",
    "inference": """\
inference:                      # where pods take longer than their profiles' target, less CPU use is aimed at
  strategy: borwein_v2
  slots: [{below: 0.5, offset: 0.1}, {below: 1.0, offset: 0.0}, {below: 2.0, offset: -0.1}]
  specialTimes: [{start: "19:00", end: "22:00", offset: -0.2}]
""",
    "report": """\
report: {periodS: 10, windowS: 60, reservedCores: 1}
""",
    "overcommit": """\
overcommit: {enable: true, targetCpu: 0.5}
""",
    "power": """\
power: {enable: true, annotationPrefix: example.com}
""",
    "node": """\
node:                           # the node may be scheduled for up to 2.5 times its CPUs
  annotations: {katalyst.kubewharf.io/cpu_overcommit_ratio: "2.5"}
""",
    "placing": """\
placing:
  reservedCpuList: 0,24         # both threads of the first core are the system's
  numaHint: packing
""",
    "knobs": """\
knobs:
  burst: {policy: katalyst, dedicated: true, percent: 50}
  memoryQos: {shared_cores: {minPercent: 20, lowPercent: 60}}
  io:
    weights: {shared_cores: 500, reclaimed_cores: 10}
    max: {reclaimed_cores: "8:16 wbps=52428800"}
    wbtUs: {SSD: 2000, NVME: 2000, HDD: 75000}
    costQos: {sda: enable=1 ctrl=user rpct=95.00 rlat=10000 wpct=95.00 wlat=20000 min=50.00 max=150.00}
  resctrl:                      # batch pods have a fifth of each L3 cache
    enabled: true
    levels: {reclaimed_cores: {catEndPercent: 20, mbaPercent: 50}}
""",
    "eviction": """\
eviction:                       # docs/eviction.md says what each plugin does
  plugins: ["*", rss-overuse-eviction-plugin]
  dryRun: [rss-overuse-eviction-plugin]
  systemMemory: {kswapdPagesPerS: 5000}
""",
    "kubelet": """\
kubelet:                        # one that signs its own certificate, beside CRI-O
  caFile: /var/lib/kubelet/pki/kubelet.crt
  serverName: worker-3
  runtimeSocket: /run/crio/crio.sock
""",
    "sockets": """\
sockets: {serve: [advisor, pod-resources]}              # beside Katalyst's agent without its own advisor
---
sockets: {take: [cpu, memory]}                          # or its advisor, and our QRM
""",
    "exporters": """\
exporters: {maxCgroups: 100}
""",
}
"""By the name of the part; the agent's own settings have none. A line of three dashes begins another file."""
