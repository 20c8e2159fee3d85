"""Parses Katalyst's enhancement annotations and the service profile of a pod.
Pure. Nothing here raises: an unreadable value is replaced by the harmless one and reported as a problem that names
the annotation, the field and the remedy. Enhancement values are strings in JSON objects, or annotations of their
own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from api.cpu import parse_cpu_list
from api.qos import CPU_KEY, MEMORY_KEY, NETWORK_KEY, AnnotationMapping, BurstPolicy, Enhancements, QoSLevel
from api.text import printable, quote

OOM_PRIORITY_BOUNDS = {
    QoSLevel.RECLAIMED: (-100, -1),
    QoSLevel.SHARED: (0, 99),
    QoSLevel.DEDICATED: (100, 199),
    QoSLevel.SYSTEM: (200, 299),
}
"""Bounds of oom_priority; the lower one is the default."""
OOM_PRIORITY_NEVER, OOM_PRIORITY_IGNORE = 300, -300
RSS_THRESHOLD_UNREACHABLE = 1e18
"""The rss_overuse_threshold of a pod whose value is invalid: no usage reaches it, so the pod is not evicted by mistake."""
MAX_ANNOTATION_CHARS = 16 << 10
"""Characters of an annotation or label that is interpreted; Kubernetes allows 256 KiB in all annotations of a pod."""
MAX_ENTRIES = 64
"""Entries of the JSON object of an annotation; Katalyst documents 17 enhancements."""
MAX_ERROR_CHARS = 200
INEFFECTIVE_MARKS = ("has no effect", "is no enhancement of it", "belongs in", "numa_binding: is missing")
"""Parts of the problems of enhancements that change nothing or count as meant; all other problems are of values that cannot be
applied as written."""
_DEFAULT_MAPPING = AnnotationMapping()
_NOTHING_WITHHELD: Mapping[str, str] = {}
_ALL_LEVELS = tuple(QoSLevel)
_NOT_SYSTEM = (QoSLevel.SHARED, QoSLevel.DEDICATED, QoSLevel.RECLAIMED)
_INTEGER = re.compile(r"[+-]?\d{1,9}", re.ASCII)
_NUMBER = re.compile(r"\+?(?:\d{1,30}(?:\.\d{0,30})?|\.\d{1,30})(?:[eE][+-]?\d{1,3})?", re.ASCII)
_POOL = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", re.ASCII)
_RESERVED_POOL = re.compile(r"reclaim|reserve|dedicated|interrupt|fallback|isolation.*|system-.*|.*-NUMA\d+", re.ASCII)
"""Names of pools that the agent creates itself."""
_SYSTEM_POOL = re.compile(r"reserve|system-.*", re.ASCII)
"""Reserved pools that system_cores pods, and no others, may name."""

_ParsedValue = tuple[Any, str]
"""Parsed value, and a description of what is wrong with the text; empty if it is valid."""


class _EnhancementRule(NamedTuple):
    section: str
    """Annotation whose JSON object contains the enhancement; empty if it is an annotation of its own."""
    field: str
    """Field of Enhancements; empty if the enhancement has no effect."""
    levels: Sequence[QoSLevel]
    read: Callable[[str, QoSLevel], _ParsedValue]


def parse_enhancements(
    annotations: Mapping[str, str],
    level: QoSLevel,
    mapping: AnnotationMapping = _DEFAULT_MAPPING,
    numa_nodes: Collection[int] | None = None,
    withheld: Mapping[str, str] = _NOTHING_WITHHELD,
) -> tuple[Enhancements, tuple[str, ...]]:
    """Parse the enhancements of a pod of this level. Also returns one sentence for each problem.

    Enhancements that the level does not support are dropped, and `withheld` ones, by name with their problem, unless
    their text changes nothing. NUMA nodes that the machine lacks (`numa_nodes`; None if
    unknown) are retained: CPU allocation has to reject the pod instead of using other nodes.
    """
    texts, problems = _collect_enhancements(annotations, mapping)
    values: dict[str, Any] = {"oom_priority": OOM_PRIORITY_BOUNDS[level][0]}
    ignored = {name for name, (_, text) in texts.items() if name in withheld and not _is_ineffective(name, text)}
    for name, (where, text) in texts.items():
        rule = _ENHANCEMENT_RULES[name]
        if name in ignored:
            problem = withheld[name]
        elif level in rule.levels:
            value, problem = rule.read(text, level)
            if rule.field:
                values[rule.field] = value
        else:
            problem = f"is for {' and '.join(rule.levels)} only, this pod has {level.value}; remove it"
        if problem:
            problems.append(f"{where}: {problem}")
    for name, text in mapping.defaults.items():
        default = _ENHANCEMENT_RULES.get(name)
        is_stated = name in texts and name not in ignored
        if default is not None and not is_stated and level in default.levels and default.field:
            values[default.field] = default.read(text, level)[0]
    enhancements = _drop_unsupported(Enhancements(**values), level, texts, problems)
    _check_nodes(enhancements, texts, numa_nodes, problems)
    return enhancements, tuple(problems)


def _is_ineffective(name: str, text: str) -> bool:
    """Return whether the text of an enhancement that needs a right leaves the pod as it is without it."""
    if name == "numa_exclusive":
        return text != "true"
    return text == {"numa_share": "true", "cpuset_pool": "share", "oom_priority": str(OOM_PRIORITY_IGNORE)}.get(name)


def parse_numa_bind_result(
    annotations: Mapping[str, str], mapping: AnnotationMapping = _DEFAULT_MAPPING
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Parse numa_bind_result (`1`, or a list; -1 is none) into NUMA nodes. Also returns its problem, if it is invalid."""
    text = annotations.get(mapping.numa_bind_result_key, "-1")
    nodes: tuple[int, ...] | None = ()
    problem = size_problem(text)
    if not problem and text.strip() != "-1":
        nodes, problem = _parse_numa_nodes(text, QoSLevel.SHARED)
    return nodes or (), ((f"annotation {mapping.numa_bind_result_key}: {problem}",) if problem else ())


def size_problem(text: str) -> str:
    """Describe what is wrong with the length of an annotation or label; empty if it may be parsed."""
    if len(text) <= MAX_ANNOTATION_CHARS:
        return ""
    return f"has {len(text)} characters, more than {MAX_ANNOTATION_CHARS}, and is not read; shorten it"


def validate_default_enhancement(name: str, text: str) -> str:
    """Describe what is wrong with a default value of an enhancement; empty if at least one level accepts it."""
    rule = _ENHANCEMENT_RULES.get(name)
    if rule is None:
        return f"there is no such enhancement; choose from {', '.join(_ENHANCEMENT_RULES)}"
    problems = [rule.read(text, level)[1] for level in rule.levels]
    return problems[0] if all(problems) else ""


def _collect_enhancements(
    annotations: Mapping[str, str], mapping: AnnotationMapping
) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """Map enhancements to their location, for messages, and their text.

    The annotation where an enhancement belongs takes precedence over the other two objects, and these over an
    annotation of its own.
    """
    correct: dict[str, tuple[str, str]] = {}
    problems: list[str] = []
    misplaced: dict[str, tuple[str, str]] = {}
    for section in (MEMORY_KEY, CPU_KEY, NETWORK_KEY):
        key = section if section in annotations else mapping.renamed.get(section, section)
        for name, text in _decode_object(annotations, key, problems).items():
            where = f"annotation {key}: {name}"
            rule = _ENHANCEMENT_RULES.get(name)
            if rule is None or not rule.section:
                names = ", ".join(choice for choice, rule in _ENHANCEMENT_RULES.items() if rule.section == section)
                problems.append(f"annotation {key}: {quote(name)} is no enhancement of it; use one of {names}")
            elif rule.section == section:
                correct[name] = (where, text)
            else:
                misplaced[name] = (where, text)
                problems.append(f"{where}: belongs in {rule.section}; write it there")
    own = {"numa_number": mapping.numa_number_key, "numa_ids": mapping.numa_ids_key}
    keys = {name: own.get(name, name) for name in _ENHANCEMENT_RULES}
    separate: dict[str, tuple[str, str]] = {}
    for name, key in keys.items():
        if key in annotations and (problem := size_problem(annotations[key])):
            problems.append(f"annotation {key}: {problem}")
        elif key in annotations:
            separate[name] = (f"annotation {key}", annotations[key])
    return {**separate, **misplaced, **correct}, problems


def _decode_object(annotations: Mapping[str, str], key: str, problems: list[str]) -> dict[str, str]:
    """Decode a JSON object of strings; as in Katalyst, any other content invalidates the whole annotation."""
    if key not in annotations:
        return {}
    where, example = f"annotation {key}", """write it like '{"name": "value"}'"""
    if problem := size_problem(annotations[key]):
        problems.append(f"{where}: {problem}")
        return {}
    try:
        values = msgspec.json.decode(annotations[key])
    except (msgspec.DecodeError, ValueError, RecursionError):
        problems.append(f"{where}: {quote(annotations[key])} is not JSON; {example}; until then all of it is ignored")
        return {}
    if not isinstance(values, dict):
        problems.append(f"{where}: {quote(annotations[key])} is no JSON object; {example}; it is ignored")
        return {}
    if len(values) > MAX_ENTRIES:
        problems.append(f"{where}: has {len(values)} entries, more than {MAX_ENTRIES}; remove some; it is ignored")
        return {}
    for name, value in values.items():
        if not isinstance(value, str):
            text = msgspec.json.encode(value).decode()[:80]
            remedy = f'write "{text}"' if isinstance(value, (bool, int, float)) else "write text in quotes"
            problems.append(f"{where}: {quote(name)}: {text} is not text; {remedy}; until then all of it is ignored")
            return {}
    return values


def _drop_unsupported(
    enhancements: Enhancements, level: QoSLevel, texts: Mapping[str, tuple[str, str]], problems: list[str]
) -> Enhancements:
    if enhancements.numa_binding:
        return enhancements
    if level is QoSLevel.DEDICATED:
        problems.append(
            f"annotation {MEMORY_KEY}: numa_binding: is missing: {level.value} pods get CPUs only on NUMA nodes that "
            """they are bound to; write '{"numa_binding": "true"}'"""
        )
    for name in ("numa_ids", "numa_number"):
        # For dedicated_cores, the message above already covers these.
        if name in texts and level is not QoSLevel.DEDICATED and level in _ENHANCEMENT_RULES[name].levels:
            problems.append(f"{texts[name][0]}: has no effect without numa_binding; add that to {MEMORY_KEY}")
    return msgspec.structs.replace(enhancements, numa_exclusive=False, numa_ids=None, numa_number=None)


def _check_nodes(
    enhancements: Enhancements,
    texts: Mapping[str, tuple[str, str]],
    numa_nodes: Collection[int] | None,
    problems: list[str],
) -> None:
    """Report NUMA nodes that contradict numa_number or that the machine lacks."""
    where = {name: texts[name][0] if name in texts else f"default of {name}" for name in ("numa_ids", "numa_number")}
    ids, number = enhancements.numa_ids, enhancements.numa_number
    if ids is not None and number not in (None, len(ids)):
        problems.append(
            f"{where['numa_ids']}: names {len(ids)} nodes, numa_number says {number}; the ids count, remove the number"
        )
    if numa_nodes is None:
        return
    lacking = sorted(set(ids or ()) - set(numa_nodes))
    if lacking:
        problems.append(f"{where['numa_ids']}: this machine has no NUMA node {lacking[0]}; name others")
    elif ids is None and number is not None and number > len(numa_nodes):
        problems.append(
            f"{where['numa_number']}: this machine has {len(numa_nodes)} NUMA nodes, not {number}; ask for fewer"
        )


def _parse_flag(text: str, _level: QoSLevel) -> _ParsedValue:
    problem = "" if text in ("true", "false") else f'{quote(text)} counts as "false"; write "true" or "false"'
    return text == "true", problem


def _parse_numa_share(text: str, _level: QoSLevel) -> _ParsedValue:
    problem = "" if text in ("true", "false") else f'{quote(text)} counts as "true"; write "true" or "false"'
    return text != "false", problem


def _parse_rss_threshold(text: str, _level: QoSLevel) -> _ParsedValue:
    value = _parse_number(text)
    if value:
        return value, ""
    return (
        RSS_THRESHOLD_UNREACHABLE,
        f"{quote(text)} is no number above 0; write one such as 1.2, until then the pod is never evicted for it",
    )


def _parse_tolerance(text: str, _level: QoSLevel) -> _ParsedValue:
    value = _parse_number(text)
    problem = (
        "" if value is not None else f"{quote(text)} is no number; write one such as 1.5; it tolerates any suppression"
    )
    return value, problem


def _parse_oom_priority(text: str, level: QoSLevel) -> _ParsedValue:
    low, high = OOM_PRIORITY_BOUNDS[level]
    if not _INTEGER.fullmatch(text):
        return low, f"{quote(text)} is no whole number; write one from {low} to {high}, taken as {low}"
    value = int(text)
    if value == OOM_PRIORITY_NEVER:
        return value, ""
    if value == OOM_PRIORITY_IGNORE:
        # As in Katalyst, ignoring the priority means the level's default.
        return low, ""
    clamped = max(low, min(high, value))
    problem = f"{value} is outside of {low} to {high}, the range of {level.value}; it counts as {clamped}, write that"
    return clamped, "" if clamped == value else problem


def _parse_pool(text: str, level: QoSLevel) -> _ParsedValue:
    if not _POOL.fullmatch(text):
        return "", f"{quote(text)} is no name of a pool; use letters, digits, '-', '.' and '_', at most 63"
    if _RESERVED_POOL.fullmatch(text) and not (level is QoSLevel.SYSTEM and _SYSTEM_POOL.fullmatch(text)):
        return "", f"{quote(text)} is a pool that the agent creates itself; choose another name"
    return text, ""


def _parse_burst_policy(text: str, _level: QoSLevel) -> _ParsedValue:
    try:
        return BurstPolicy(text), ""
    except ValueError:
        return BurstPolicy.DEFAULT, f"{quote(text)} is no policy; use one of {', '.join(BurstPolicy)}"


def _parse_percent(text: str, _level: QoSLevel) -> _ParsedValue:
    value = _parse_number(text)
    if value is None:
        return None, f"{quote(text)} is no percentage; write a number from 0 to 100"
    return min(value, 100.0), "" if value <= 100 else f"{quote(text)} is more than 100, and counts as 100; write that"


def _ignore_threshold(_text: str, _level: QoSLevel) -> _ParsedValue:
    return None, "has no effect, here or in Katalyst; remove it"


def _network(_text: str, _level: QoSLevel) -> _ParsedValue:
    return None, "has no effect here: a pod gets the network card with the most free bandwidth; remove it"


def _parse_numa_count(text: str, _level: QoSLevel) -> _ParsedValue:
    value = int(text) if _INTEGER.fullmatch(text) else 0
    return (value, "") if value > 0 else (None, f"{quote(text)} is no number of NUMA nodes; write one such as 1 or 2")


def _parse_numa_nodes(text: str, _level: QoSLevel) -> _ParsedValue:
    try:
        nodes = parse_cpu_list(text)
    except ValueError:
        nodes = ()
    return (nodes, "") if nodes else (None, f"{quote(text)} is no list of NUMA nodes; write one such as 0 or 0-1,3")


def _parse_number(text: str) -> float | None:
    """Parse a finite number of at least zero; None for any other text."""
    value = float(text) if _NUMBER.fullmatch(text) else math.inf
    return value if math.isfinite(value) else None


_ENHANCEMENT_RULES: Mapping[str, _EnhancementRule] = {
    "numa_binding": _EnhancementRule(MEMORY_KEY, "numa_binding", _NOT_SYSTEM, _parse_flag),
    "numa_exclusive": _EnhancementRule(MEMORY_KEY, "numa_exclusive", (QoSLevel.DEDICATED,), _parse_flag),
    "rss_overuse_threshold": _EnhancementRule(MEMORY_KEY, "rss_overuse_threshold", _ALL_LEVELS, _parse_rss_threshold),
    "oom_priority": _EnhancementRule(MEMORY_KEY, "oom_priority", _ALL_LEVELS, _parse_oom_priority),
    "cpuset_pool": _EnhancementRule(CPU_KEY, "cpuset_pool", (QoSLevel.SHARED, QoSLevel.SYSTEM), _parse_pool),
    "numa_share": _EnhancementRule(CPU_KEY, "numa_share", _NOT_SYSTEM, _parse_numa_share),
    "suppression_tolerance_rate": _EnhancementRule(
        CPU_KEY, "suppression_tolerance_rate", (QoSLevel.RECLAIMED,), _parse_tolerance
    ),
    "cpu_burst_policy": _EnhancementRule(
        CPU_KEY, "burst_policy", (QoSLevel.SHARED, QoSLevel.DEDICATED), _parse_burst_policy
    ),
    "cpu_burst_percent": _EnhancementRule(
        CPU_KEY, "burst_percent", (QoSLevel.SHARED, QoSLevel.DEDICATED), _parse_percent
    ),
    "cpu_burst_threshold": _EnhancementRule(CPU_KEY, "", _ALL_LEVELS, _ignore_threshold),
    "align_by_socket": _EnhancementRule(CPU_KEY, "align_by_socket", _NOT_SYSTEM, _parse_flag),
    "distribute_evenly_across_numa": _EnhancementRule(CPU_KEY, "distribute_evenly", _NOT_SYSTEM, _parse_flag),
    "full_pcpus_pairing": _EnhancementRule(CPU_KEY, "full_cores", _NOT_SYSTEM, _parse_flag),
    "namespace_type": _EnhancementRule(NETWORK_KEY, "", _ALL_LEVELS, _network),
    "topology_affinity_restricted": _EnhancementRule(NETWORK_KEY, "", _ALL_LEVELS, _network),
    "numa_number": _EnhancementRule("", "numa_number", _NOT_SYSTEM, _parse_numa_count),
    "numa_ids": _EnhancementRule("", "numa_ids", _NOT_SYSTEM, _parse_numa_nodes),
}
"""Every enhancement that Katalyst documents."""

PROFILE_KEY = "dioptase.io/service-profile"
REQUEST_P99_MS = "request_p99_ms"
"""Indicator: 99th percentile of request latency in milliseconds, as the pod itself publishes it."""
IndicatorBound = Annotated[float, Meta(gt=0, lt=1e12)]


class IndicatorTarget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of one indicator in a service profile."""

    lower: IndicatorBound | None = None
    upper: IndicatorBound | None = None
    """Takes precedence over `lower`."""


class ServiceProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Service profile of one pod; the default sets nothing."""

    targets: Mapping[str, IndicatorTarget] = {}
    """Indicator bounds (Katalyst's extendedIndicator), by indicator and in its unit."""
    disable_reclaim_level: Literal["", "Pod", "NUMA", "Socket", "Node"] = ""
    """Scope whose resources are not reclaimed (disableReclaimLevel); empty allows reclaiming everywhere."""
    memory_offloading: Mapping[str, Any] = {}
    """Overrides of `memory.offloading.default` (transparentMemoryOffloading), by their names there."""

    @property
    def reclaimable(self) -> bool:
        """Whether the pod's idle resources may be reclaimed."""
        return not self.disable_reclaim_level


def parse_service_profile(annotations: Mapping[str, str]) -> tuple[ServiceProfile, tuple[str, ...]]:
    """Parse the service profile annotation. If it is invalid, nothing of the pod is reclaimed and the problem is returned."""
    text = annotations.get(PROFILE_KEY)
    if text is None:
        return ServiceProfile(), ()
    try:
        if problem := size_problem(text):
            raise ValueError(problem)
        profile = msgspec.json.decode(text, type=ServiceProfile)
        if len(profile.targets) > MAX_ENTRIES:
            raise ValueError(f"targets has {len(profile.targets)} entries, more than {MAX_ENTRIES}")
        return profile, ()
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        shown = printable(str(error), MAX_ERROR_CHARS)  # it quotes the names of unknown fields
        remedy = 'write JSON such as {"targets": {"request_p99_ms": {"upper": 20}}}; until then nothing of the pod is reclaimed'
        return ServiceProfile(disable_reclaim_level="Pod"), (f"annotation {PROFILE_KEY}: {shown}; {remedy}",)
