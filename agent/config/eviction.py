"""Settings of node-level eviction. Names in brackets are Katalyst's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from agent.config import eviction_cpu as cpu
from agent.config import eviction_memory as memory
from agent.config.units import Seconds

PluginName = Literal[
    "reclaimed-resource-pressure-eviction-plugin",
    "reclaimed-numa-resource-pressure-eviction-plugin",
    "numa-memory-pressure-eviction-plugin",
    "system-memory-pressure-eviction-plugin",
    "rss-overuse-eviction-plugin",
    "rootfs-pressure-eviction-plugin",
    "rootfs-overuse-eviction-plugin",
    "network-eviction-plugin",
    "cpu-pressure-load-plugin",
    "cpu-pressure-suppression-plugin",
    "numa-cpu-pressure-plugin",
    "numa-sys-cpu-pressure-plugin",
    "koordinator-cpu-evict",
    "koordinator-memory-evict",
    "oomd-pressure",
    "node_power_pressure",
]
"""Every plugin there is."""
NAMES: tuple[str, ...] = get_args(PluginName)
USUAL = frozenset(NAMES[:4])
"""Those that `*` stands for: what Katalyst runs unless told otherwise. The others run where they are named."""

KillerName = Literal["eviction-api-killer", "deletion-api-killer", "container-killer", "signals"]
Level = Literal["shared_cores", "dedicated_cores", "reclaimed_cores"]


class EvictionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Which pods have to leave this node when it is in trouble. Nobody has to, unless a plugin is named."""

    plugins: tuple[PluginName | Literal["*"], ...] = ()
    """[evictionPlugins] plugins that judge, by name; `*` are those that Katalyst has on by default."""
    dry_run: tuple[str, ...] = ()
    """[dryRun] plugins whose victims and conditions are only shown, those of others by their names too; `*` are all."""
    interval_s: Seconds = 5.0
    """[evictionManagerSyncPeriod] between two rounds."""
    burst: Annotated[int, Meta(ge=1, le=100)] = 3
    """[evictionBurst] victims in one round at most."""
    condition_s: Seconds = 300.0
    """[evictionConditionTransitionPeriod] a condition is shown for so long after it was last met."""
    stale_s: Seconds = 30.0
    """What was read longer ago than this counts as missing: it never evicts."""
    skipped_annotations: tuple[str, ...] = ()
    """[evictionSkippedAnnotation] pods that carry one of these keys never leave."""
    skipped_labels: tuple[str, ...] = ()
    """[evictionSkippedLabels] the same of labels."""
    killer: KillerName | None = None
    """[pod-killer] how pods are made to leave. `eviction-api-killer` asks the API server, and disruption budgets are respected;
    `deletion-api-killer` deletes them, whatever budgets say; `container-killer` has the runtime stop their containers, which
    the kubelet starts again where it is to; `signals` signals their processes. Unless set, the first with `--node` and
    `--kubelet`, else the last."""
    killers: Mapping[Level, KillerName] = {}
    """[qos-pod-killers] the same for pods of single levels."""
    plugin_sockets: str = ""
    """[pluginRegistrationDir] directory in which eviction plugins of others register, such as
    `/var/lib/katalyst/plugin-socks`; empty: none are asked."""
    plugin_tokens_file: str = ""
    """[strictAuthentication] with it only plugins are heeded whose token is a line of this file, which is read again when it
    changes; a token is what the plugin answers to GetToken, such as `Basic dXNlcjpwYXNzd29yZA==`. Empty: all are."""
    notify_root: str = ""
    """[HostPathNotifierRootPath] directory in which pods that ask for it are told of soft thresholds, each in a folder of its
    own that it may mount; Katalyst's is `/opt/katalyst`. Empty: they are told by events alone."""
    reclaimed: memory.ReclaimedConfig = memory.ReclaimedConfig()
    numa_memory: memory.NumaMemoryConfig = memory.NumaMemoryConfig()
    system_memory: memory.SystemMemoryConfig = memory.SystemMemoryConfig()
    rss: memory.RssConfig = memory.RssConfig()
    rootfs_pressure: memory.RootfsPressureConfig = memory.RootfsPressureConfig()
    rootfs_overuse: memory.RootfsOveruseConfig = memory.RootfsOveruseConfig()
    network: memory.NetworkConfig = memory.NetworkConfig()
    load: cpu.LoadConfig = cpu.LoadConfig()
    suppression: cpu.SuppressionConfig = cpu.SuppressionConfig()
    numa_cpu: cpu.NumaCpuConfig = cpu.NumaCpuConfig()
    numa_sys: cpu.NumaSysConfig = cpu.NumaSysConfig()
    koordinator_cpu: cpu.KoordinatorCpuConfig = cpu.KoordinatorCpuConfig()
    koordinator_memory: memory.KoordinatorMemoryConfig = memory.KoordinatorMemoryConfig()
    oomd: memory.OomdConfig = memory.OomdConfig()

    def __post_init__(self) -> None:
        """Raise ValueError for what no single field's bounds can say."""
        for name in self.dry_run:
            if name not in NAMES and name != "*" and not self.plugin_sockets:
                raise ValueError(
                    f"dryRun: there is no plugin {name!r:.80}; those of others are asked with pluginSockets"
                )
            if name in NAMES and not self.enabled(name):
                raise ValueError(f"dryRun: {name} does not judge at all; name it in plugins too, or take it out here")

    def enabled(self, name: str) -> bool:
        """Whether this plugin judges at all."""
        return name in self.plugins or ("*" in self.plugins and name in USUAL)

    def dry(self, name: str) -> bool:
        """Whether its victims stay."""
        return name in self.dry_run or "*" in self.dry_run
