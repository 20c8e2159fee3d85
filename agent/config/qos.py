"""Defines which annotations state QoS levels and enhancements of pods, and the defaults of enhancements."""

from __future__ import annotations

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
