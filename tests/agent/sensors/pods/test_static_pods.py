"""The pods file: what it means, and that whatever cannot hold is refused with file, field and remedy."""

from __future__ import annotations

import os
import tracemalloc
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.sensors.pods.static_pods import PodsError, StaticPods, parse_pods
from api.interfaces import Unavailable
from api.pod import Container, Pod
from api.qos import QOS_LEVEL_KEY, QoSLevel

GOOD = """
pods:
- name: web
  annotations:
    katalyst.kubewharf.io/qos_level: shared_cores
    prometheus.io/scrape: "true"
  containers:
  - cgroup: /kubepods/web
    resources: {requests: {cpu: 500m, memory: 256Mi}, limits: {cpu: "2"}}
- name: batch
  namespace: jobs
  annotations: {katalyst.kubewharf.io/qos_level: reclaimed_cores}
  containers:
  - {name: sorter, cgroup: /batch/sorter, resources: {requests: {cpu: 0.25, memory: 1.5k}}}
  - {name: mapper, cgroup: /batch/mapper}
"""


def one_pod(container: str = "{cgroup: /web}", **fields: str) -> str:
    more = "".join(f", {key}: {value}" for key, value in fields.items())
    return f"pods: [{{name: web, containers: [{container}]{more}}}]"


def refusal(text: str) -> str:
    with pytest.raises(PodsError) as caught:
        parse_pods(text, "pods.yaml")
    return str(caught.value)


def test_pods_mean() -> None:
    web, batch = parse_pods(GOOD, "pods.yaml")
    assert web == Pod(
        uid="default/web",
        namespace="default",
        name="web",
        qos=QoSLevel.SHARED,
        containers=(
            Container(
                name="web",
                cgroup="/kubepods/web",
                cpu_request_cores=0.5,
                cpu_limit_cores=2.0,
                memory_request_bytes=256 << 20,
            ),
        ),
        annotations={"katalyst.kubewharf.io/qos_level": "shared_cores", "prometheus.io/scrape": "true"},
        address="127.0.0.1",
    )
    assert (batch.key, batch.qos) == ("jobs/batch", QoSLevel.RECLAIMED)
    sorter, mapper = batch.containers
    assert (sorter.cpu_request_cores, sorter.memory_request_bytes) == (0.25, 1500)
    assert (mapper.name, mapper.cpu_request_cores, mapper.memory_limit_bytes) == ("mapper", None, None)


def test_no_pods_are_written_down() -> None:
    assert parse_pods("pods: []", "pods.yaml") == ()
    assert refusal("") == "pods.yaml: the file is empty; write `pods: []` for no pods"
    assert "pods: is missing" in refusal("{}")


NOTES = "pods[0].annotations"
C0, C1 = "pods[0].containers[0]", "pods[0].containers[1]"


def asks(resources: str) -> str:
    """A container with these resources."""
    return one_pod(f"{{cgroup: /a, resources: {{{resources}}}}}")


def noted(annotations: str) -> str:
    """A pod with these annotations."""
    return one_pod(annotations=f"{{{annotations}}}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (one_pod("{cgroup: web}"), f"{C0}.cgroup: 'web' must begin with / and be a cgroup"),
        (one_pod("{cgroup: /}"), f"{C0}.cgroup: '/' must begin with / and be a cgroup below the root"),
        (one_pod("{cgroup: /a/../b}"), f"{C0}.cgroup: '/a/../b' has an empty part, '.' or '..'"),
        (one_pod("{cgroup: /..}"), f"{C0}.cgroup: '/..'"),
        (one_pod("{cgroup: /a/./b}"), f"{C0}.cgroup: '/a/./b'"),
        (one_pod("{cgroup: /a//b}"), f"{C0}.cgroup: '/a//b'"),
        (one_pod("{cgroup: /a/}"), f"{C0}.cgroup: '/a/'"),
        (one_pod("{cgroup: //}"), f"{C0}.cgroup: '//'"),
        (one_pod('{cgroup: "/a\\0"}'), f"{C0}.cgroup: '/a\\x00' contains control characters"),
        (one_pod('{cgroup: "/a\\nb"}'), f"{C0}.cgroup: '/a\\nb' contains control characters"),
        (one_pod("{cgroup: /%s}" % ("x" * 5000)), f"{C0}.cgroup: '/xxx"),
        (one_pod("{cgroup: 7}"), f"{C0}.cgroup: is not text; write it in quotes"),
        (one_pod("{cgroup: ~}"), f"{C0}.cgroup: expected `str`, got `null`"),
        (one_pod("{name: x}"), f"{C0}.cgroup: is missing"),
        (one_pod("{cgroup: /a}, {cgroup: /b}"), f"{C0}.name: is missing; name each container"),
        (one_pod("{cgroup: /a, name: a}, {cgroup: /b, name: a}"), f"{C1}.name: 'a' is also the name of another"),
        (one_pod("{cgroup: /a, name: a}, {cgroup: /a, name: b}"), f"{C1}.cgroup: /a is already the cgroup of {C0}"),
        (one_pod("{cgroup: /a/b/c, name: a}, {cgroup: /a, name: b}"), f"{C0}.cgroup: /a/b/c is inside the cgroup of {C1}"),
        (one_pod("{cgroup: /a, image: x}"), f"{C0}: object contains unknown field `image`"),
        (asks("requests: {gpu: 1}"), f"{C0}.resources.requests: object contains unknown field `gpu`"),
        (asks("requests: {cpu: -1}"), f"{C0}.resources.requests.cpu: '-1' is not a quantity"),
        (asks("limits: {memory: 1GB}"), f"{C0}.resources.limits.memory: '1GB' is not a quantity"),
        (asks("limits: {cpu: .nan}"), f"{C0}.resources.limits.cpu: 'nan' is not a quantity"),
        (asks("limits: {cpu: .inf}"), f"{C0}.resources.limits.cpu: 'inf' is not a quantity"),
        (asks("limits: {cpu: 0}"), f"{C0}.resources.limits.cpu: is 0"),
        (asks("requests: {cpu: 2}, limits: {cpu: 1500m}"), f"{C0}.resources.requests.cpu: 2 is more than the limit 1.5"),
        (one_pod(namespace="a/b"), "pods[0].namespace: 'a/b' is not a name; use letters"),
        (one_pod(namespace='""'), "pods[0].namespace: '' is not a name"),
        (one_pod(hostname="x"), "pods[0]: object contains unknown field `hostname`"),
        (noted("prometheus.io/scrape: true"), f"{NOTES}['prometheus.io/scrape']: True is not text; write it in quotes"),
        (noted("a: {b: c}"), "pods[0].annotations['a']: {'b': 'c'} is not text; write it in quotes"),
        (noted(f"{QOS_LEVEL_KEY}: best"), f"{NOTES}: {QOS_LEVEL_KEY}: 'best' is not a QoS level; use one of shared_cores"),
        (one_pod(""), "pods[0].containers: is empty; list at least one"),
        ("pods: [{containers: [{cgroup: /a}]}]", "pods[0].name: is missing"),
        ("pods: [{name: a}]", "pods[0].containers: is missing"),
        ("pods: [7]", "pods[0]: expected `object`, got `int`"),
        ("pods: [{name: yes, containers: []}]", "pods[0].name: is not text; write it in quotes"),
        ("pods: {}", "pods: expected `array`, got `object`"),
        ("[]", "top level: expected `object`, got `array`"),
        ("pods", "top level: expected `object`, got `str`"),
        ("pods: []\nnodes: []", "top level: object contains unknown field `nodes`"),
        (GOOD.replace("name: batch\n  namespace: jobs", "name: web"), "pods[1].name: default/web is already pods[0]"),
        (GOOD.replace("/batch/mapper", "/kubepods/web"),
         f"pods[1].containers[1].cgroup: /kubepods/web is already the cgroup of {C0}"),
        ("pods: []\npods: []", "line 2: key 'pods' occurs twice"),
        (one_pod("{cgroup: /a, cgroup: /b}"), "line 1: key 'cgroup' occurs twice"),
        ("pods: [", "line 2: not YAML"),
        ("pods:\n\t- x", "line 2: not YAML"),
        ("pods: []\n---\npods: []", "line 2: a second document begins"),
        ("pods: [&a {name: a}, *a]", "line 1: anchors and aliases (& and *) are not supported: write the values out"),
        ("pods: [2024-99-99]", "a value cannot be read: month must be in 1..12"),
        ("pods: [%s]" % ("9" * 5000), "a value cannot be read"),
        ("pods: [!!python/object/apply:os.getpid []]", "line 1: tags such as !!int are not supported: write the plain value"),
        ("pods: !!int ''", "line 1: tags such as !!int are not supported: write the plain value"),
        ("? [pods]\n: []", "line 1: a key must be a plain word"),
        ("pods: \0", "not YAML: unacceptable character"),
        ("pods: \ud800", "not text: surrogates not allowed"),
    ],
)  # fmt: skip
def test_what_cannot_hold_is_refused_with_field_and_remedy(text: str, message: str) -> None:
    assert refusal(text).startswith(f"pods.yaml: {message}")


BOMBS = {
    "laughs": "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in pairwise("abcdefghijklmnop")),
    "10 MiB": "pods: []\n" + "#" * (10 << 20),
    "brackets": "[" * 900_000,
    "braces": "{a: " * 200_000,
    "dashes": "- " * 400_000,
    "many": f"pods: [{'a,' * 400_000}]",
    "long": f"pods: [{'a' * 1_000_000}]",
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_before_they_grow(name: str) -> None:
    """At most 64 MiB: the text, and what libyaml keeps of it. Nothing is built into values."""
    tracemalloc.start()
    message = refusal(BOMBS[name])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert message.startswith("pods.yaml: ")
    assert len(message) < 300
    assert peak < 64 << 20


@given(st.text(max_size=200) | st.text("pods:[]{}-?&*!|>'\"%@` \n\tname,cgroup/", max_size=80))
def test_any_text_is_refused_or_means_pods(text: str) -> None:
    try:
        reported = repr(parse_pods(text, "f"))
    except PodsError as error:
        reported = str(error)
    assert reported.startswith("f: ") or reported == "()"


@given(st.text(max_size=40))
def test_no_path_leads_out_of_the_hierarchy(path: str) -> None:
    quoted = path.encode("unicode_escape").decode().replace('"', '\\"')
    try:
        (pod,) = parse_pods(one_pod(f'{{cgroup: "{quoted}"}}'), "f")
    except PodsError:
        return
    (container,) = pod.containers
    normal = os.path.normpath(f"/sys/fs/cgroup/cpu{container.cgroup}")
    assert normal == f"/sys/fs/cgroup/cpu{container.cgroup}"
    assert normal.startswith("/sys/fs/cgroup/cpu/")


def write(path: Path, text: str) -> None:
    """Replace the file as an editor does, with a time stamp that is long past."""
    other = path.with_suffix(".new")
    other.write_text(text)
    os.utime(other, ns=(1_000_000_000, 1_000_000_000))
    other.replace(path)


def test_the_file_is_read_again_when_it_changes_and_only_then(tmp_path: Path) -> None:
    path = tmp_path / "pods.yaml"
    write(path, GOOD)
    pods = StaticPods(path)
    first = pods.read()
    assert [pod.key for pod in first] == ["default/web", "jobs/batch"]
    assert pods.read() is first
    write(path, one_pod())
    assert [pod.key for pod in pods.read()] == ["default/web"]
    path.write_text(one_pod().replace("name: web", "name: now"))
    path.write_text(one_pod().replace("name: web", "name: new"))
    assert [pod.key for pod in pods.read()] == ["default/new"], "written a moment ago, twice, with the same size"
    path.write_text(one_pod().replace("name: web", "name: end"))
    assert [pod.key for pod in pods.read()] == ["default/end"]


def test_a_file_that_becomes_invalid_is_rejected_until_it_is_corrected(tmp_path: Path) -> None:
    path = tmp_path / "pods.yaml"
    write(path, GOOD)
    pods = StaticPods(path)
    write(path, "pods: [")
    for _ in range(2):
        with pytest.raises(Unavailable, match=r"pods\.yaml: line 2: not YAML") as caught:
            pods.read()
        assert "stay in force" in caught.value.remedy
    path.unlink()
    with pytest.raises(Unavailable, match="cannot be read: No such file"):
        pods.read()
    write(path, "pods: []")
    assert pods.read() == ()


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read: No such file"), (b"\x7fELF\xff\xfe", "not UTF-8 text at byte 4"), (b"\0" * 9, "not YAML"),
     (b"#" * (10 << 20), "larger than 1048576 bytes")],
)  # fmt: skip
def test_a_file_that_cannot_hold_is_refused_at_the_start(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "pods.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PodsError) as caught:
        StaticPods(path)
    assert str(caught.value).startswith(f"{path}: {message}")


def test_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PodsError, match="Is a directory"):
        StaticPods(tmp_path)


def test_a_pipe_in_place_of_the_file_keeps_the_last_good_pods_and_never_waits(tmp_path: Path) -> None:
    path = tmp_path / "pods.yaml"
    path.write_text("pods: [{name: a, containers: [{cgroup: /a}]}]")
    pods = StaticPods(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(Unavailable, match="not a regular file"):
        pods.read()
