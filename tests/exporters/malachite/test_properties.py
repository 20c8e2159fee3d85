"""Whatever a snapshot holds, the client can decode every document: integers in range, no NaN, nothing of another kind."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from api.cpu import Topology
from api.interfaces import Unavailable
from api.snapshot import CgroupSample, NodeSample, Snapshot
from exporters.malachite import cgroup_v1, cgroup_v2
from exporters.malachite.cgroup_documents import SubtreeSums, cgroup_inputs
from exporters.malachite.history import MalachiteHistory
from exporters.malachite.server import DOCUMENTS
from exporters.malachite.wire import success_body
from tests.exporters.malachite import contract
from tests.exporters.malachite.machine import V1, V2

PATHS = ("/", "/a", "/a/b", "/a/b/\udcff", '/a "quoted"\n')
KEYS = (
    "MemTotal", "MemFree", "MemUsed", "Cached", "Active(file)", "pgsteal_kswapd", "vm.watermark_scale_factor", "total_rss",
    "rss", "anon", "file", "workingset_refault_anon", "oom_kill", "local.oom", "Tcp.OutSegs", "Tcp.RetransSegs", "bytes",
    "8:0", "vda", "vda1", "package-0", "package-0/dram", "psys", "hierarchical_total", "close_wait", "\udcff",
)  # fmt: skip
INTEGERS = st.one_of(
    st.integers(0, 1000),
    st.integers(-5, (1 << 64) + 5),
    st.sampled_from((1 << 63, (1 << 64) - 1, 1 << 64, -1, 1 << 80)),
)


@cache
def values(kind: Any) -> st.SearchStrategy[Any]:
    """Anything that a field of this type may hold, likely or not."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is int:
        return INTEGERS
    if kind is float:
        return st.floats() | st.floats(0, 100)
    if kind is bool:
        return st.booleans()
    if kind is str:
        return st.sampled_from((*KEYS, "", "0-3,8", "3-1", "x", "0-99999999999"))
    if kind is type(None):
        return st.none()
    if origin in (types.UnionType, typing.Union):
        return st.one_of(*(values(arg) for arg in args))
    if origin is tuple:
        return st.lists(values(args[0]), max_size=3).map(tuple) if args[-1] is ... else st.tuples(*map(values, args))
    if origin is frozenset:
        return st.frozensets(values(args[0]), max_size=3)
    if origin is Mapping:
        return st.dictionaries(values(args[0]), values(args[1]), max_size=4)
    assert isinstance(kind, type), kind
    assert issubclass(kind, msgspec.Struct), kind
    hints = typing.get_type_hints(kind)
    fields = {f.name: values(hints[f.name]) for f in msgspec.structs.fields(kind)}
    needed = {f.name: fields.pop(f.name) for f in msgspec.structs.fields(kind) if f.required}
    return st.fixed_dictionaries(needed, optional=fields).map(lambda chosen: kind(**chosen))


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    cgroups = {
        path: msgspec.structs.replace(draw(values(CgroupSample)), path=path, id=draw(st.integers(1, 3)))
        for path in draw(st.lists(st.sampled_from(PATHS), unique=True, max_size=3))
    }
    return Snapshot(
        seq=1,
        taken_at_ns=draw(st.integers(0, 20)) * 1_000_000_000,
        wall_time_ns=draw(INTEGERS),
        boot_id=draw(st.sampled_from(("a", "a", "a", "b"))),
        topology=draw(values(Topology)),
        node=draw(values(NodeSample)),
        cgroups=cgroups,
    )


# Without shrinking: of snapshots this large it takes minutes, and a breach names the field anyway.
@settings(
    max_examples=100, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip
@given(st.lists(snapshots(), min_size=1, max_size=3))
def test_every_document_of_any_snapshot_can_be_decoded(observed: list[Snapshot]) -> None:
    history = MalachiteHistory()
    for snapshot in observed:
        history = history.after(snapshot)
    now = observed[-1]
    for name, make in DOCUMENTS.items():
        try:
            shown = json.loads(success_body(make(now, history)), parse_constant=pytest.fail)
        except Unavailable:
            continue
        assert not list(contract.breaches(shown["data"], contract.DOCUMENTS[name]))
    below = SubtreeSums(now, history)
    for sample in now.cgroups.values():
        for layout, make_groups in ((V1, cgroup_v1.v1_groups), (V2, cgroup_v2.v2_groups)):
            groups = make_groups(cgroup_inputs(sample, now, history, below, layout))
            shown = json.loads(success_body(groups), parse_constant=pytest.fail)
            assert not list(contract.breaches(shown["data"], contract.groups(layout.version)))


def test_the_contract_sees_what_the_client_would_refuse() -> None:
    """The check of the checks: each of these fails the whole document, or is lost, in Go."""
    for value, kind in (
        (1.0, "uint64"), (-1, "uint64"), (1 << 64, "uint64"), (1 << 63, "int"), ("1", "uint64"), (True, "uint64"),
        ("1", "float"), (float("nan"), "float"), (1, "str"), ({}, ["int"]), ([], {}), ({"a": 1}, {"b": "int"}),
        ({"x": {"Data": {"r": -1}}}, contract.DETAILS),
    ):  # fmt: skip
        assert list(contract.breaches(value, kind)), (value, kind)
    assert not list(contract.breaches({"max": (1 << 64) - 1, "full_path": None}, contract.CPU_V2))
