"""Names that are not UTF-8 leave as escapes; everything else leaves as it is."""

from __future__ import annotations

import json
import os

import pytest

from api.samples import CgroupSample
from api.text import printable, to_json


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("/plain", "/plain"),
        ("/größe", "/größe"),
        (os.fsdecode(b"/a\xff\xfe"), "/a\\xff\\xfe"),
        ("/high\ud800", "/high\\ud800"),
        ("", ""),
    ],
)
def test_only_bytes_that_are_not_utf8_are_spelled_out(given: str, expected: str) -> None:
    assert printable(given) == expected


def test_json_of_a_cgroup_with_a_broken_name() -> None:
    sample = CgroupSample(path=os.fsdecode(b"/\xe9"), id=7)
    decoded = json.loads(to_json({"cgroups": {sample.path: sample}, "list": (sample.path,)}))
    assert decoded["cgroups"]["/\\xe9"]["path"] == "/\\xe9"
    assert decoded["cgroups"]["/\\xe9"]["id"] == 7
    assert decoded["list"] == ["/\\xe9"]
