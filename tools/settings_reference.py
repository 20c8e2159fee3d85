"""Generates docs/settings.md from the types of `agent.config.config`.
Run `python -m tools.settings_reference docs/settings.md`. A Struct that exactly one field holds becomes a section; a
Struct in a list or a map, or of several fields, is described once.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import inspect as types

from agent.config.config import AgentConfig
from agent.config.profiles import PROFILES, profile_rows
from agent.dynamic_config.effective import format_flow_yaml
from api.qos import QoSLevel

EXAMPLES: Mapping[str, str] = {
    "": """\
intervalS: 2                    # half as many cycles at half the cost
watchIntervalS: 0.05            # breaches are still seen sooner
probes: [blame, throttles]      # these and no others, besides runqlat
shadow: {policy: canonical}     # show what Katalyst's policy would do
""",
    "qos": """\
qos:                            # batch pods have the annotation `tier: offline`
  reclaimedSelector: {example.com/tier: offline}
  enhancementDefaults: {oom_priority: "50"}
---
qos:                            # pods of namespace payments may set OOM priorities
  rights: {oomPriority: {namespaces: [kube-system, payments]}}
""",
    "advisor": """\
advisor:
  policy: latency
  latency: {targetWaitMs: 5, growRatioPerS: 0.05}     # protect more, reclaim more slowly
---
advisor:                        # as Katalyst, with its controller on two indicators
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
  offloading:                   # offload unused file cache of batch pods, no swap
    levels: {reclaimed_cores: {enable: true, policy: psi}}
""",
    "forecast": """\
forecast: {missRatio: 0.03}     # safer, for about two points of the node
""",
    "inference": """\
inference:                      # pods above their latency target get a lower target of CPU use
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
node:                           # overcommit CPU by up to 2.5
  annotations: {katalyst.kubewharf.io/cpu_overcommit_ratio: "2.5"}
""",
    "placing": """\
placing:
  reservedCpuList: 0,24         # both threads of the first core
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
  resctrl:                      # batch pods get a fifth of each L3 cache
    enabled: true
    levels: {reclaimed_cores: {catEndPercent: 20, mbaPercent: 50}}
""",
    "eviction": """\
eviction:                       # docs/eviction.md describes the plugins
  plugins: ["*", rss-overuse-eviction-plugin]
  dryRun: [rss-overuse-eviction-plugin]
  systemMemory: {kswapdPagesPerS: 5000}
""",
    "kubelet": """\
kubelet:                        # self-signed certificate, CRI-O
  caFile: /var/lib/kubelet/pki/kubelet.crt
  serverName: worker-3
  runtimeSocket: /run/crio/crio.sock
""",
    "sockets": """\
sockets: {serve: [advisor, pod-resources]}              # for Katalyst's agent without its advisor
---
sockets: {take: [cpu, memory]}                          # Katalyst's advisor, this agent's QRM
""",
    "exporters": """\
exporters: {maxCgroups: 100}
""",
}
"""Examples by section; the empty name is the agent's own settings. A line of three dashes starts another file."""

HEAD = """# Settings

Generated from `agent/config/` and `tools/settings_reference.py` by
`python -m tools.settings_reference docs/settings.md`; edit those files instead of this one.

`dioptase agent --config FILE` reads one YAML file of optional settings. A file with an unknown or duplicate field, a value of
the wrong type or out of bounds, contradicting values, or values that this node cannot hold is rejected before anything is
changed; the error names file, field and remedy.

- Names are paths: `advisor.latency.targetWaitMs` is `advisor: {latency: {targetWaitMs: 5}}`. `NAME`: any key of a map; `[]`:
  any item of a list.
- `[name]` at the start of a meaning: Katalyst's name, unless the section says otherwise.
- Units: `S`, `Ms`, `Us` (seconds, milli- and microseconds), `Cores` (CPUs' worth of time), `Bytes`, `Mib`, `Mbit`,
  `Ratio` (of 1), `Percent` (of 100).
- Values: `(0, 1]` is a number above 0 and at most 1; a QoS level is `shared_cores`, `dedicated_cores`, `reclaimed_cores` or
  `system_cores`. Quote text that YAML reads otherwise: `policy: "off"`, `start: "19:00"`.
"""
PROFILES_HEAD = """
## Profiles

`dioptase agent --profile NAME`, and `profile` of the [chart](install.md), select these settings. The settings file and
objects of the cluster override each of them, and `--act` overrides the mode. `dioptase config` shows `(profile NAME)` as the
source of a value.

"""
_MAX_DEFAULT_CHARS = 40
"""Longer defaults stand below their table."""


class _SectionPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A Struct to describe, and its path in the file."""

    path: str
    kind: types.StructType


def settings_reference() -> str:
    places = {place.kind.cls: place for place in _section_places()}
    return HEAD + profiles_section() + "".join(_section(place, places) for place in places.values())


def profiles_section() -> str:
    """Return the table of the profiles: a column each, and a row for each setting of any of them."""
    rows = [("purpose", [profile.purpose for profile in PROFILES.values()])]
    rows.append(("`--act`", [f"`{profile.act.value}`" for profile in PROFILES.values()]))
    for path, values in profile_rows():
        rows.append((f"`{path}`", ["" if value == "" else f"`{format_flow_yaml(value)}`" for value in values]))
    head = ["| |" + "|".join(f" `{name}` " for name in PROFILES) + "|", "|---" * (len(PROFILES) + 1) + "|"]
    lines = (*head, *(f"| {name} | {' | '.join(values)} |" for name, values in rows))
    return (
        PROFILES_HEAD
        + "\n".join(lines)
        + "\n\nAn empty cell is the default. Without pods, `observe` means `--act off`.\n"
    )


def field_docstrings(kind: type) -> Mapping[str, str]:
    """Return the docstring of each field of a Struct: the text that follows it in the source."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    docstrings = {}
    for field, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(after, ast.Expr):
            text = ast.literal_eval(after.value)
            docstrings[field.target.id] = " ".join(text.split())
    return docstrings


def _section_places() -> Sequence[_SectionPlace]:
    """Return every Struct once: sections in the order of the fields, each followed by what it refers to."""
    top = types.type_info(AgentConfig)
    assert isinstance(top, types.StructType)
    direct, other = Counter[type](), Counter[type]()
    _count_uses(top, direct, other)
    places: dict[type, _SectionPlace] = {}

    def visit(kind: types.StructType, path: str) -> None:
        places[kind.cls] = _SectionPlace(path=path, kind=kind)
        for field in kind.fields:
            below = f"{path}.{field.encode_name}".lstrip(".")
            for inner, suffix in _nested_structs(field.type):
                if inner.cls in places or (suffix and direct[inner.cls] == 1):
                    continue
                shared = direct[inner.cls] > 1 or (not direct[inner.cls] and other[inner.cls] > 1)
                visit(inner, inner.cls.__name__.removesuffix("Config") if shared else below + suffix)

    visit(top, "")
    return tuple(places.values())


def _count_uses(kind: types.StructType, direct: Counter[type], other: Counter[type]) -> None:
    for field in kind.fields:
        for inner, suffix in _nested_structs(field.type):
            counted = direct[inner.cls] + other[inner.cls]
            (other if suffix else direct)[inner.cls] += 1
            if not counted:
                _count_uses(inner, direct, other)


def _nested_structs(kind: types.Type) -> Iterator[tuple[types.StructType, str]]:
    """Yield the Structs of a field with the suffix of their path; the suffix of a section is empty."""
    if isinstance(kind, types.StructType):
        yield kind, ""
    elif isinstance(kind, types.UnionType):
        yield from ((inner, "?") for part in kind.types for inner, _ in _nested_structs(part))
    elif isinstance(kind, types.DictType):
        yield from ((inner, ".NAME") for inner, _ in _nested_structs(kind.value_type))
    elif isinstance(kind, types.VarTupleType):
        yield from ((inner, "[]") for inner, _ in _nested_structs(kind.item_type))


def _section(place: _SectionPlace, places: Mapping[type, _SectionPlace]) -> str:
    texts, rows, long = field_docstrings(place.kind.cls), "", ""
    prefix = f"{place.path}." if place.path else ""
    for field in place.kind.fields:
        if isinstance(field.type, types.StructType) and places[field.type.cls].path == prefix + field.encode_name:
            continue
        default = _default_text(field)
        if len(default) > _MAX_DEFAULT_CHARS:
            long += f"\nThe default of `{prefix}{field.encode_name}`:\n\n```yaml\n{_default_block(field)}```\n"
            default = "below"
        name = f"`{prefix}{field.encode_name}`"
        values, text = _values_text(field.type, places), texts.get(field.name, "").replace("|", "\\|")
        rows += f"| {name} | {default} | {values} | {text} |\n"
    head, about = _heading(place), inspect.cleandoc(place.kind.cls.__doc__ or "")
    example = EXAMPLES.get(place.path, "")
    result = f"\n{head}\n\n{about}\n" + "".join(
        f"\n```yaml\n{text}```\n" for text in filter(None, example.split("---\n"))
    )
    if rows:
        result += f"\n| setting | default | values | meaning |\n|---|---|---|---|\n{rows}{long}"
    return result


def _heading(place: _SectionPlace) -> str:
    if not place.path:
        return "## The agent"
    return f"{'##' if place.path in AgentConfig.__struct_encode_fields__ else '###'} `{place.path}`"


def _anchor(path: str) -> str:
    return re.sub(r"[^\w-]", "", path.lower()) or "the-agent"


def _default_text(field: types.Field) -> str:
    if field.default_factory is not msgspec.NODEFAULT:
        return f"`{format_flow_yaml(field.default_factory())}`"
    if field.default is msgspec.NODEFAULT:
        return "must be set"
    return "unset" if field.default is None else f"`{format_flow_yaml(field.default)}`"


def _default_block(field: types.Field) -> str:
    value = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    name = field.encode_name
    if isinstance(value, Mapping):
        return f"{name}:\n" + "".join(
            f"  {format_flow_yaml(key)}: {format_flow_yaml(item)}\n" for key, item in value.items()
        )
    if isinstance(value, str):
        return f"{name}: {format_flow_yaml(value)}\n"
    assert isinstance(value, tuple)
    return f"{name}:\n" + "".join(f"- {format_flow_yaml(item)}\n" for item in value)


def _values_text(kind: types.Type, places: Mapping[type, _SectionPlace]) -> str:
    match kind:
        case types.UnionType():
            parts = [part for part in kind.types if not isinstance(part, types.NoneType)]
            return " or ".join(_values_text(part, places) for part in parts)
        case types.BoolType():
            return "boolean"
        case types.IntType() | types.FloatType():
            bounds = _bounds_text(kind)
            if isinstance(kind, types.IntType):
                return f"integer {bounds}".rstrip()
            return bounds or "number"
        case types.StrType():
            # A bar would end the table cell, even in code.
            pattern = (kind.pattern or "").replace("|", "\\|")
            return f"text matching `{pattern}`" if pattern else "text"
        case types.EnumType(cls=cls) if cls is QoSLevel:
            return "QoS level"
        case types.EnumType():
            return ", ".join(f"`{member.value}`" for member in kind.cls)
        case types.LiteralType():
            return ", ".join(f"`{value}`" for value in kind.values)
        case types.VarTupleType():
            return f"list of: {_values_text(kind.item_type, places)}"
        case types.DictType():
            return f"map: {_values_text(kind.key_type, places)} → {_values_text(kind.value_type, places)}"
        case types.StructType():
            path = places[kind.cls].path
            return f"as [`{path}`](#{_anchor(path)})"
    raise TypeError(f"no text for settings of type {kind}: add one here")


def _bounds_text(kind: types.IntType | types.FloatType) -> str:
    """The bounds as an interval, or as one comparison; empty without bounds."""
    low, high = (kind.gt if kind.ge is None else kind.ge), (kind.lt if kind.le is None else kind.le)
    if low is not None and high is not None:
        opening, closing = "(["[kind.ge is not None], ")]"[kind.le is not None]
        return f"{opening}{_number_text(low)}, {_number_text(high)}{closing}"
    comparisons = ((">", kind.gt), ("≥", kind.ge), ("<", kind.lt), ("≤", kind.le))
    return "".join(f"{sign} {_number_text(bound)}" for sign, bound in comparisons if bound is not None)


def _number_text(value: float) -> str:
    integer = int(value)
    if integer > 1 << 20 and integer & (integer - 1) == 0:
        return f"2^{integer.bit_length() - 1}"
    return f"{integer}" if integer == value else f"{value:g}"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(settings_reference())
