"""`dioptase capture` on this machine: what is in the archive, what is not, and that the sources read the same from it."""

from __future__ import annotations

import io
import os
import socket
import stat
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from agent.offline.capture import CapturedFile
from agent.sensors.cgroup.cgroup_reader import CgroupReader
from agent.sensors.cgroup.hierarchy import detect_hierarchy
from agent.sensors.node.machine import read_topology
from agent.sensors.node.node_reader import NodeReader
from api.interfaces import Unavailable
from cli.capture import CaptureManifest, capture, limit_size, write_archive
from tests.captures import Captured

MANIFEST = CaptureManifest(
    version="1", kernel="Linux 6.18", machine="x86_64", captured_at="", mode="v2", ticks_per_second=100,
    page_bytes=4096, files=0, left_out=0,
)  # fmt: skip


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        detect_hierarchy()
    except Unavailable as missing:
        pytest.skip(missing.reason)
    path = tmp_path_factory.mktemp("capture") / "capture.tar.gz"
    result = CliRunner().invoke(capture, ["-o", str(path), "--cgroups", "20"])
    assert result.exit_code == 0, result.output
    return path


def test_the_sources_read_the_same_from_it_as_from_the_machine(archive: Path, tmp_path: Path) -> None:
    captured = Captured(archive, tmp_path)
    text = captured.snapshot()
    live_node, live_cgroups = NodeReader(Path("/proc"), live=False), CgroupReader(detect_hierarchy(), limit=20)
    node, cgroups = live_node.read(), live_cgroups.read()
    live_node.close()
    live_cgroups.close()
    for field in ("machine", "sysctl", "cpu_khz"):
        assert getattr(text.node, field) == getattr(node, field)
    for field in (
        "meminfo",
        "vmstat",
        "netstat",
        "numa",
        "disks",
        "interfaces",
        "interrupts",
        "per_cpu",
        "fragmentation",
    ):
        assert getattr(text.node, field).keys() == getattr(node, field).keys(), field
    assert text.node.numa[0].distances == node.numa[0].distances
    assert [zone.managed for zone in text.node.zones] == [zone.managed for zone in node.zones]
    assert text.node.cpu is not None
    assert node.cpu is not None
    assert 0 <= node.cpu.total_ns - text.node.cpu.total_ns < 600e9
    assert text.boot_id == live_node.boot_id
    assert text.topology == read_topology(Path("/sys"))
    assert "/" in text.cgroups
    assert len(text.cgroups) <= 20
    for path in text.cgroups.keys() & cgroups.keys():
        before, after = text.cgroups[path], cgroups[path]
        assert before.limits == after.limits
        assert before.memory_stat.keys() == after.memory_stat.keys()
        if before.cpu_usage_ns is not None and after.cpu_usage_ns is not None:
            assert before.cpu_usage_ns <= after.cpu_usage_ns
    assert not [
        status for status in text.sources if not status.ok and status.name in ("node", "node-files", "cgroup-files")
    ]


def test_nothing_of_processes_is_in_it(archive: Path) -> None:
    with tarfile.open(archive) as tar:
        names = tar.getnames()
    assert names[0] == "manifest.json"
    assert len(names) == len(set(names))
    assert not [name for name in names if name.endswith(("environ", "cmdline", "comm", "/status"))]
    assert not [name for name in names if name.startswith("proc/") and name.split("/")[1].isdigit()]
    assert {name.split("/")[0] for name in names} == {"manifest.json", "proc", "sys"}
    assert archive.stat().st_mode & 0o777 == 0o600, "counters of a machine are its owner's to show"


def test_the_manifest_tells_where_it_is_from(archive: Path, tmp_path: Path) -> None:
    manifest = Captured(archive, tmp_path).manifest
    assert manifest.kernel.startswith("Linux ")
    assert manifest.mode == detect_hierarchy().mode
    with tarfile.open(archive) as tar:
        assert manifest.files == len(tar.getnames()) - 1
    assert manifest.left_out == 0


def test_what_does_not_fit_is_left_out_and_counted() -> None:
    texts = [CapturedFile(Path(f"/proc/{size}"), b"x" * size) for size in (10, 95, 80)]
    rest, left_out = limit_size(texts, max_bytes=100)
    assert ([len(text.text or b"") for text in rest], left_out) == ([10, 80], 1)


def test_names_of_any_bytes_come_back(tmp_path: Path) -> None:
    name = b"caf\xe9 \xff\n".decode(errors="surrogateescape")
    stream = io.BytesIO()
    write_archive(
        stream,
        MANIFEST,
        [CapturedFile(Path("/sys") / name / "cpu.stat", b"1"), CapturedFile(Path("/sys/empty"), None)],
        0,
    )
    stream.seek(0)
    with tarfile.open(fileobj=stream) as tar:
        tar.extractall(tmp_path, filter="data")
    assert (tmp_path / "sys" / name / "cpu.stat").read_bytes() == b"1"
    assert (tmp_path / "sys/empty").is_dir()


@pytest.fixture(scope="module")
def few() -> None:
    """Captures of one cgroup, on a machine that has any."""
    try:
        detect_hierarchy()
    except Unavailable as missing:
        pytest.skip(missing.reason)


def written(output: str) -> Result:
    return CliRunner().invoke(capture, ["-o", output, "--cgroups", "1"])


def is_archive(content: bytes) -> bool:
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        return tar.getnames()[0] == "manifest.json"


@pytest.mark.usefixtures("few")
def test_an_output_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    missing, loop = written(str(tmp_path / "none/x.tar.gz")), written(str(tmp_path / "loop"))
    assert (missing.exit_code, loop.exit_code) == (2, 2)
    assert "there is no directory " in missing.output
    assert f"cannot write -o {tmp_path / 'loop'}: Too many levels of symbolic links" in loop.output
    assert [path.name for path in tmp_path.iterdir()] == ["loop"]


@pytest.mark.parametrize(("output", "text"), [("", "name a file"), ("/", "is a directory")])
def test_a_name_that_is_none_is_refused_before_the_work(output: str, text: str) -> None:
    result = written(output)
    assert result.exit_code == 2
    assert "'-o' / '--output'" in result.output
    assert text in result.output


@pytest.mark.usefixtures("few")
def test_a_link_stays_and_leads_to_the_archive(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for name in ("new.tar.gz", "old.tar.gz"):
        (tmp_path / name).symlink_to(Path("there") / name)
    (tmp_path / "there/old.tar.gz").write_text("old")
    for name in ("new.tar.gz", "old.tar.gz"):
        assert written(str(tmp_path / name)).exit_code == 0
        assert (tmp_path / name).is_symlink()
        assert is_archive((tmp_path / "there" / name).read_bytes())
    assert len(list((tmp_path / "there").iterdir())) == 2


@pytest.mark.usefixtures("few")
def test_a_pipe_is_written_into_and_a_socket_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    content: list[bytes] = []
    reader = threading.Thread(target=lambda: content.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    assert written(str(tmp_path / "pipe")).exit_code == 0
    reader.join()
    assert is_archive(content[0])
    assert (tmp_path / "pipe").is_fifo()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        result = written(str(tmp_path / "socket"))
    assert result.exit_code == 2
    assert "it is not a file, pipe or character device: name a file, or use `-o -`" in result.output
    assert (tmp_path / "socket").is_socket()


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(("name", "minor", "code"), [("null", 3, 0), ("full", 7, 2)])
def test_a_device_stays_one(tmp_path: Path, name: str, minor: int, code: int) -> None:
    """Nodes of our own: what is wrong here would take the machine's away."""
    node = tmp_path / name
    try:
        os.mknod(node, stat.S_IFCHR | 0o600, os.makedev(1, minor))
        node.open("wb").close()
    except PermissionError:
        pytest.skip("device nodes cannot be made or used here")
    result = written(str(node))
    assert (result.exit_code, node.is_char_device()) == (code, True)
    assert (f"cannot write -o {node}: No space left on device" in result.output) == (name == "full")


@pytest.mark.usefixtures("few")
def test_standard_output_by_its_name_is_not_replaced(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from cli.main import main; main()", "capture", "--cgroups", "1", "-o"]
    with (tmp_path / "out").open("wb") as out:
        inode = (tmp_path / "out").stat().st_ino
        assert (
            subprocess.run([*command, "/dev/stdout"], stdout=out, stderr=subprocess.PIPE, check=False).returncode == 0
        )
    assert (tmp_path / "out").stat().st_ino == inode
    assert is_archive((tmp_path / "out").read_bytes())
    closed = subprocess.run(
        ["/bin/sh", "-c", 'exec "$@" >&-', "sh", *command, "-"], capture_output=True, text=True, check=False
    )
    assert closed.returncode == 2
    assert "cannot write -o -: Bad file descriptor" in closed.stderr
