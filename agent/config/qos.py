"""Defines which annotations state QoS levels and enhancements of pods, and the defaults of enhancements."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from api.annotations import validate_default_enhancement
from api.qos import (
    CPU_KEY,
    MEMORY_KEY,
    NETWORK_KEY,
    NUMA_BIND_RESULT_KEY,
    NUMA_IDS_KEY,
    NUMA_NUMBER_KEY,
    AnnotationMapping,
    QoSLevel,
)
from api.text import quote

Key = Annotated[str, Meta(min_length=1, max_length=317)]
"""Annotation key: a DNS name of at most 253 characters, a slash, and at most 63 more."""
_SECTIONS = (MEMORY_KEY, CPU_KEY, NETWORK_KEY)


Name = Annotated[str, Meta(min_length=1, max_length=253)]
ANY = "*"
"""Stands for every namespace or every priority class."""


class RightHolders(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Pods with one right."""

    namespaces: tuple[Name, ...] = ("kube-system",)
    """Namespaces whose pods have the right; `"*"`: all."""
    priority_classes: tuple[Name, ...] = ()
    """Priority classes whose pods have the right; `"*"`: all. Every user may name any class unless a ResourceQuota limits
    it."""

    def include(self, namespace: str, priority_class: str) -> bool:
        """Return whether pods of this namespace or priority class (empty: none) have the right."""
        return bool({ANY, namespace} & set(self.namespaces)) or bool(
            priority_class and {ANY, priority_class} & set(self.priority_classes)
        )


class RightsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Pods that may use annotations with effects on the whole node or beyond their requests, see docs/security.md."""

    dedicated_cores: RightHolders = RightHolders()
    """`dedicated_cores` with a request that is no whole number of CPUs, which is rounded up."""
    system_cores: RightHolders = RightHolders()
    """`system_cores`: the reserved CPUs, and no limits."""
    numa_exclusive: RightHolders = RightHolders()
    """`numa_exclusive`, and `numa_share: "false"`."""
    cpuset_pool: RightHolders = RightHolders()
    """`cpuset_pool`."""
    disable_reclaim_level: RightHolders = RightHolders()
    """`disableReclaimLevel` `NUMA`, `Socket` and `Node`; without the right they count as `Pod`."""
    memory_offloading: RightHolders = RightHolders()
    """`memoryOffloading`, except to switch it off."""
    oom_priority: RightHolders = RightHolders()
    """`oom_priority`."""

    def by_name(self) -> Iterator[tuple[str, RightHolders]]:
        """Yield the holders of each right by the name of its setting."""
        for field, name in zip(self.__struct_fields__, self.__struct_encode_fields__, strict=True):
            yield name, getattr(self, field)


ALL_RIGHTS = RightsConfig(**{name: RightHolders(namespaces=(ANY,)) for name in RightsConfig.__struct_fields__})
"""Every pod has every right: without tenants, or where the operator lists the pods."""


class QosConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Annotations that mean the same as Katalyst's. Names in brackets are Katalyst's flags."""

    reclaimed_selector: dict[Key, str] = {}
    """[--pod-annotation-qos-level-reclaimed-selector] Annotations that also make a pod reclaimed_cores. Contradicting
    annotations are an error."""
    shared_selector: dict[Key, str] = {}
    """[--pod-annotation-qos-level-shared-selector] Annotations that also make a pod shared_cores; another value is an
    error."""
    dedicated_selector: dict[Key, str] = {}
    """[--pod-annotation-qos-level-dedicated-selector] Annotations that also make a pod dedicated_cores."""
    system_selector: dict[Key, str] = {}
    """[--pod-annotation-qos-level-system-selector] Annotations that also make a pod system_cores."""
    enhancement_keys: dict[str, Key] = {}
    """[--pod-annotation-qos-enhancements] Other annotation names for `katalyst.kubewharf.io/memory_enhancement`,
    `cpu_enhancement`, `network_enhancement`; Katalyst's take precedence."""
    enhancement_defaults: dict[str, str] = {}
    """[--qos-enhancement-default-values] Enhancements of pods without them, such as `{numa_binding: "true"}`, if their
    level has them."""
    numa_number_key: Key = NUMA_NUMBER_KEY
    """Annotation with the requested number of NUMA nodes."""
    numa_ids_key: Key = NUMA_IDS_KEY
    """Annotation with the requested NUMA nodes."""
    numa_bind_result_key: Key = NUMA_BIND_RESULT_KEY
    """Annotation with the chosen NUMA node."""
    rights: RightsConfig = RightsConfig()

    def __post_init__(self) -> None:
        level_by_pair: dict[tuple[str, str], str] = {}
        for level, values in self._selectors().items():
            for pair in values.items():
                if other := level_by_pair.get(pair):
                    raise ValueError(f"{pair[0]}: {quote(pair[1])} means both {other} and {level.value}; choose one")
                level_by_pair[pair] = level.value
        for name, text in self.enhancement_defaults.items():
            if problem := validate_default_enhancement(name, text):
                raise ValueError(f"enhancementDefaults: {name[:80]}: {problem}")
        for key in self.enhancement_keys:
            if key not in _SECTIONS:
                raise ValueError(f"enhancementKeys: {quote(key)} is none of {', '.join(_SECTIONS)}")
        keys = (self.numa_number_key, self.numa_ids_key, self.numa_bind_result_key, *self.enhancement_keys.values())
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(f"annotation {quote(key)} is set for two settings; use a different one for each")

    def dialect(self) -> AnnotationMapping:
        """Return the annotation mapping of these settings."""
        return AnnotationMapping(
            selectors=self._selectors(),
            renamed=self.enhancement_keys,
            defaults=self.enhancement_defaults,
            numa_number_key=self.numa_number_key,
            numa_ids_key=self.numa_ids_key,
            numa_bind_result_key=self.numa_bind_result_key,
        )

    def _selectors(self) -> dict[QoSLevel, dict[str, str]]:
        return {
            QoSLevel.RECLAIMED: self.reclaimed_selector,
            QoSLevel.SHARED: self.shared_selector,
            QoSLevel.DEDICATED: self.dedicated_selector,
            QoSLevel.SYSTEM: self.system_selector,
        }
