"""The document settings.md matches the types, and its examples are valid."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import yaml
from msgspec import inspect as types

from agent.config.config import AgentConfig
from agent.config.profiles import profile_rows
from agent.dynamic_config.effective import format_flow_yaml
from probes import registry
from tests.builders.settings import parse_config
from tools.settings_reference import EXAMPLES, field_docstrings, settings_reference

DOCUMENT = Path(__file__).parents[2] / "docs" / "settings.md"
TEXT = settings_reference()
ROWS = [line for line in TEXT.partition("\n## The agent\n")[2].splitlines() if line.startswith("| `")]


def structs(kind: types.Type) -> set[type]:
    """Every Struct in a type, however deep."""
    types_: set[type] = set()
    for value in (getattr(kind, name) for name in kind.__struct_fields__):
        for inner in value if isinstance(value, tuple) else (value,):
            if isinstance(inner, types.Field):
                types_ |= structs(inner.type)
            elif isinstance(inner, types.Type):
                types_ |= structs(inner)
    return types_ | ({kind.cls} if isinstance(kind, types.StructType) else set())


STRUCTS = sorted(structs(types.type_info(AgentConfig)), key=lambda kind: f"{kind.__module__}.{kind.__name__}")


def test_the_document_is_fresh() -> None:
    assert DOCUMENT.read_text() == TEXT, "run: python -m tools.settings_reference docs/settings.md"


def test_profiles_are_shown_with_every_setting() -> None:
    section = TEXT.partition("\n## Profiles\n")[2].partition("\n## ")[0]
    assert "| | `observe` | `colocate` | `katalyst` |" in section
    assert "| `--act` | `dry-run` | `on` | `on` |" in section
    for path, values in profile_rows():
        (row,) = [line for line in section.splitlines() if line.startswith(f"| `{path}` |")]
        assert all(f"`{format_flow_yaml(value)}`" in row for value in values if value != ""), row


def test_there_are_structs_to_check() -> None:
    assert len(STRUCTS) > 40
    assert len(ROWS) > 300


@pytest.mark.parametrize("kind", STRUCTS, ids=lambda kind: kind.__name__)
def test_every_setting_is_in_it_with_a_text(kind: type) -> None:
    texts = field_docstrings(kind)
    for field in msgspec.structs.fields(kind):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            continue
        assert texts.get(field.name, "")[-1:] in (".", ",", ";"), f"{kind.__name__}.{field.name} has no docstring"
        text = texts[field.name].replace("|", "\\|")
        assert any(f"{field.encode_name}` |" in row and row.endswith(f"| {text} |") for row in ROWS), field.name


def test_every_setting_is_in_it_once() -> None:
    names = [row.split(" | ")[0] for row in ROWS]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize(
    "row",
    [
        "| `advisor.latency.calmS` | `3` | (0, 3600] | Time below half",
        "| `advisor.minReclaimedCores` | unset | integer [1, 8192] | [minReclaimedResourceForAllocate] Reserved",
        "| `advisor.policy` | `latency` | `canonical`, `latency`, `none` |",
        "| `shadow` | unset | as [`advisor`](#advisor) |",
        '| `knobs.burst.policy` | `"off"` | `katalyst`, `koordinator`, `off` |',
        "| `knobs.io.wbtUs` | `{}` | map: `HDD`, `NVME`, `SSD`, `VIRTIO` → integer [-1, 10000000] |",
        "| `advisor.provision.gains.NAME.up` | must be set | [0, 10] |",
        "| `inference.slots[].below` | must be set | number |",
        "| `eviction.rootfsOveruse.shared` | `{}` | as [`FilesystemThreshold`](#filesystemthreshold) |",
        "| `memory.offloading.pools` | `{}` | map: text → as [`memory.offloading.default`](#memoryoffloadingdefault) |",
        "| `memory.reservedForAllocateBytes` | unset | integer [0, 2^60] |",
        "| `advisor.latency.minWaitsAbove` | `2` | integer [1, 1000] |",
        "| `eviction.oomd.fullAvg10` | `60` | ≥ 0 |",
        "| `advisor.latency.minLentRatio` | `0.05` | (0, 1) |",
    ],
)
def test_rows_have_default_bounds_and_choices(row: str) -> None:
    assert [types_ for types_ in ROWS if types_.startswith(row)] != []


def test_links_lead_to_headings() -> None:
    anchors = {
        "".join(c for c in line.lstrip("# ").lower().replace(" ", "-") if c.isalnum() or c in "-_")
        for line in TEXT.splitlines()
        if line.startswith("##")
    }
    links = {part.split(")")[0] for part in TEXT.split("](#")[1:]}
    assert len(links) >= 5
    assert links <= anchors


def test_long_defaults_stand_below_their_table_as_they_are_written_in_a_file() -> None:
    _, _, after = TEXT.partition("The default of `advisor.provision.gains`:\n\n```yaml\n")
    types_ = yaml.safe_load(after.partition("```")[0])
    assert types_["gains"]["cpu_usage_ratio"] == {"up": 0.1, "down": 0.04, "deadAbove": 0.01, "deadBelow": 0.06}


@pytest.mark.parametrize(
    "value",
    ["", "off", "12", "8:16", "-a", "a b", "/x-*", "8:16 rbps=1", True, None, 0.5, 1 << 40, [1, "y"], {"a": ["no", 2]}],
)
def test_values_are_written_so_that_yaml_reads_the_same(value: object) -> None:
    assert yaml.safe_load(format_flow_yaml(value)) == value


@pytest.mark.parametrize("part", EXAMPLES)
def test_examples_are_taken_and_change_something(part: str) -> None:
    for text in EXAMPLES[part].split("---\n"):
        config = parse_config(text.encode(), part)
        assert set(config.probes or ()) <= set(registry.PROBE_NAMES)
        assert config != AgentConfig()
        assert not part or getattr(config, part) != getattr(AgentConfig(), part)
        assert f"```yaml\n{text}```\n" in TEXT


def test_every_part_of_the_file_has_an_example() -> None:
    parts = {
        field.encode_name
        for field in msgspec.structs.fields(AgentConfig)
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct)
    }
    assert set(EXAMPLES) == {"", *parts}
