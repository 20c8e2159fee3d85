from __future__ import annotations

from pathlib import Path

import pytest

from demo.counters import BOUNDS_US, BUCKETS, CLIENT_CELLS, ClientCell, SharedCounters, bucket_of, quantile_ms


def test_two_maps_of_one_file_see_the_same_cells(tmp_path: Path) -> None:
    writer, reader = SharedCounters(tmp_path / "c", 3), SharedCounters(tmp_path / "c", 3)
    writer[1] = 2**64 - 1
    writer[2] += 5
    assert reader.values() == [0, 2**64 - 1, 5]
    assert len(reader) == 3
    writer.close()
    reader.close()


def test_cells_lie_behind_the_buckets_and_fill_the_file() -> None:
    assert sorted(ClientCell) == list(range(BUCKETS, CLIENT_CELLS))


@pytest.mark.parametrize(
    ("latency_ns", "bucket"),
    [(0, 0), (100_000, 0), (100_001, 1), (125_000, 1), (125_001, 2), (10**12, BUCKETS - 1)],
)
def test_upper_bounds_belong_to_their_bucket(latency_ns: int, bucket: int) -> None:
    assert bucket_of(latency_ns) == bucket


def test_quantiles_are_interpolated_inside_a_bucket() -> None:
    buckets = [0] * BUCKETS
    assert quantile_ms(buckets, 0.5) is None
    buckets[bucket_of(110_000)] = 50
    buckets[bucket_of(150_000)] = 50
    assert quantile_ms(buckets, 0.25) == pytest.approx(0.1125)
    assert quantile_ms(buckets, 0.5) == pytest.approx(0.125)
    assert quantile_ms(buckets, 1.0) == pytest.approx(0.1562)


def test_the_open_bucket_answers_with_its_lower_bound() -> None:
    buckets = [0] * (BUCKETS - 1) + [1]
    assert quantile_ms(buckets, 0.5) == BOUNDS_US[-1] / 1000
