"""The connection to close when there are too many: floods from one address, from many, and of clients with requests in
progress."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from common.http.connection_table import ConnectionTable

NODE, POD = "192.0.2.1", "198.51.100.1"


def full(*addresses: str) -> ConnectionTable[int]:
    """A table of 8 connections with 2 reserved; those of this machine are NODE's."""
    table = ConnectionTable[int](8, 2)
    for number, address in enumerate(addresses):
        table.add(number, address, is_local=address == NODE)
    return table


def test_there_is_room_up_to_the_limit() -> None:
    assert full(*[POD] * 7).find_excess(POD) is None
    assert full(*[POD] * 8).find_excess(POD) == 0


def test_a_flood_costs_its_own_address() -> None:
    table = full("a", "b", *[POD] * 6)
    assert table.find_excess("c") == 2, "the oldest of the address with most"
    assert table.find_excess(POD) == 2
    assert table.find_excess(NODE) == 2


def test_no_number_of_addresses_displaces_the_connections_of_this_machine() -> None:
    table = full(NODE, NODE, *"abcdef")
    assert table.find_excess("g") == 2, "of addresses with one each the one that has been idle for longest"
    table = full(NODE, NODE, NODE, *"abcde")
    assert table.find_excess("g") == 0, "more than the reserved share counts like any other"
    assert full(*[NODE] * 8).find_excess(POD) == 0


def test_requests_in_progress_are_spared_but_not_all() -> None:
    table = full(*[POD] * 8)
    for number in range(6):
        table.record_activity(number, is_busy=True)
    assert table.find_excess(POD) == 6
    table.record_activity(6, is_busy=True)
    assert table.find_excess(POD) == 0, "one idle connection of 8 is less than a quarter"
    table.record_activity(0, is_busy=False)
    assert table.find_excess(POD) == 7
    table.remove(7)
    assert table.find_excess(POD) is None


def test_a_removed_connection_is_ignored() -> None:
    table = full(POD)
    table.remove(0)
    table.remove(0)
    table.record_activity(0, is_busy=True)
    assert (len(table), list(table)) == (0, [])


@given(
    st.lists(st.tuples(st.sampled_from((NODE, POD, "a", "b", "c", "d", "e", "f", "g", "h", "i")), st.booleans()), max_size=60)
)  # fmt: skip
def test_the_limit_holds_and_this_machine_keeps_its_share(arrivals: list[tuple[str, bool]]) -> None:
    table, open_connections = ConnectionTable[int](8, 2), dict[int, str]()
    for number, (address, is_busy) in enumerate(arrivals):
        excess = table.find_excess(address)
        if excess is not None:
            local = [each for each in open_connections.values() if each == NODE]
            assert open_connections.pop(excess) != NODE or len(local) > 2
            table.remove(excess)
        table.add(number, address, is_local=address == NODE)
        open_connections[number] = address
        table.record_activity(number, is_busy=is_busy)
        assert set(table) == open_connections.keys()
        assert len(table) <= 8
