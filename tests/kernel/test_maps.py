"""Reading real maps, with the batch calls and without them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from probes import bpf, maps
from probes.loader import MapDescription
from probes.maps import BpfMap, possible_cpus
from tests.kernel.real_cgroups import require_root

pytestmark = pytest.mark.kernel

U32, U64 = "unsigned int", "unsigned long long"
PAIR = ["pair", [["a", U64], ["b", U32]], "struct"]


@pytest.fixture(params=["batch", "single"])
def make(request: pytest.FixtureRequest) -> Iterator[object]:
    """A maker of maps whose reader uses the batch calls, or believes that the kernel has none."""
    require_root()
    created: list[int] = []

    def make_map(kind: int, key: object, leaf: object, entries: int) -> BpfMap:
        cpus = possible_cpus()
        sizes = (maps.dtype_of(key).itemsize, maps.dtype_of(leaf).itemsize)
        try:
            created.append(bpf.create_map(kind, *sizes, entries, "dioptase_test"))
        except PermissionError as error:
            pytest.skip(f"maps cannot be made here: {error}")
        opened = BpfMap(created[-1], MapDescription("test", key, leaf), cpus)
        opened._batch = request.param == "batch"
        return opened

    yield make_map
    for fd in created:
        os.close(fd)


def test_a_hash_larger_than_a_chunk_is_read_completely(make, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(maps, "MAX_READ_BYTES", 256)
    table = make(bpf.HASH, U64, PAIR, 1000)
    for key in range(700):
        table.set(key * 1_000_003, np.array((key, 7), table.value).tobytes())
    keys, values = table.items()
    assert sorted(keys.tolist()) == [key * 1_000_003 for key in range(700)]
    assert (values["a"] * 1_000_003 == keys).all()
    assert set(values["b"].tolist()) == {7}


def test_an_empty_hash_and_no_rows_are_empty(make) -> None:  # type: ignore[no-untyped-def]
    keys, values = make(bpf.PERCPU_HASH, U64, U64, 10).items()
    assert len(keys) == len(values) == 0
    assert values.shape == (0, possible_cpus())
    assert make(bpf.PERCPU_ARRAY, U32, U64, 10).rows([]).shape == (0, possible_cpus())


@pytest.mark.parametrize("places", [[0], [9], [0, 1, 2], [3, 7], [0, 50, 99], list(range(100)), [5, 14, 15, 60]])
@pytest.mark.parametrize("bridge", [1, 1 << 20])
def test_a_per_cpu_array_returns_the_requested_rows(  # type: ignore[no-untyped-def]
    make, monkeypatch: pytest.MonkeyPatch, places: list[int], bridge: int
) -> None:
    monkeypatch.setattr(maps, "BRIDGE_BYTES", bridge)
    table = make(bpf.PERCPU_ARRAY, U32, U64, 100)
    for place in range(100):
        table.set(place, (place + 1000).to_bytes(8, "little"))
    rows = table.rows(places)
    assert rows.shape == (len(places), possible_cpus())
    assert rows.tolist() == [[place + 1000] * possible_cpus() for place in places]


def test_values_that_are_no_multiple_of_eight_are_padded_per_cpu(make) -> None:  # type: ignore[no-untyped-def]
    table = make(bpf.PERCPU_ARRAY, U32, U32, 10)
    table.set(3, (77).to_bytes(4, "little"))
    assert table.rows([2, 3]).tolist() == [[0] * possible_cpus(), [77] * possible_cpus()]


def test_deleting_is_idempotent(make) -> None:  # type: ignore[no-untyped-def]
    table = make(bpf.HASH, U32, U64, 10)
    table.set(5, bytes(8))
    table.delete(5)
    table.delete(5)
    assert len(table.items()[0]) == 0


def test_a_kernel_without_batch_calls_is_probed_once() -> None:
    """A queue has no such call at all: the refusal that older kernels give for hashes and arrays."""
    require_root()
    fd = bpf.create_map(bpf.HASH, 4, 8, 10)
    try:
        table = BpfMap(fd, MapDescription("test", U32, U64), possible_cpus())
        table.set(1, (5).to_bytes(8, "little"))
        refused = 0

        def refuse(*_: object) -> bpf.LookupBatch:
            nonlocal refused
            refused += 1
            raise OSError(524, "not supported")

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(bpf, "lookup_batch", refuse)
            assert table.items()[1].tolist() == [5]
            assert table.items()[1].tolist() == [5]
        assert refused == 1
    finally:
        os.close(fd)


def test_a_layout_that_is_not_the_maps_is_refused() -> None:
    require_root()
    fd = bpf.create_map(bpf.HASH, 8, 8, 10)
    try:
        with pytest.raises(ValueError, match="described as 4 and 8 bytes, the kernel has 8 and 8"):
            BpfMap(fd, MapDescription("test", U32, U64), possible_cpus())
    finally:
        os.close(fd)
