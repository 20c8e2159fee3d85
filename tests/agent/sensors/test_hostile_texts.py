"""No text makes a parser of kernel files raise or invent a number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.agent.sensors import test_parsers
from tests.agent.sensors.cgroup import test_cgroup_files
from tests.agent.sensors.hostile_texts import assert_sane, damaged, garbage
from tests.agent.sensors.node import test_proc_texts


class HostileCase(NamedTuple):
    """A parser, a real text for it, characters that it looks for, and its smallest valid number."""

    parse: Callable[[bytes], Any]
    text: bytes
    alphabet: str
    at_least: int


CASES = {
    f"{group}-{name}": HostileCase(parse, text, alphabet, at_least)
    for group, module, alphabet, at_least in (
        ("shared", test_parsers, "cpusomefull avg10=total:.kBMem", 0),
        ("cgroup", test_cgroup_files, "userN0= 123rbyteswios:254Read\n-max,", -1),
        ("node", test_proc_texts, "cpuNode zoneTcp:/,.-freemanaged", -1000),
    )
    for name, (parse, text) in module.PARSERS.items()
}


@pytest.mark.parametrize("name", CASES)
@given(data=st.data())
def test_hostile_texts_are_read_without_raising(name: str, data: st.DataObject) -> None:
    case = CASES[name]
    for texts in (garbage(case.alphabet), damaged(case.text)):
        assert_sane(case.parse(data.draw(texts)), case.at_least)
