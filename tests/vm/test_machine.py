"""What boots the guests: the kernel's image, the first file system, the machine's shape, and no result taken for granted."""

from __future__ import annotations

import gzip
import lzma
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.builders.waiting import until
from tests.vm.__main__ import BOOTS, is_whole
from tests.vm.__main__ import pytest as pytest_command
from tests.vm.initramfs import Cpio
from tests.vm.kernels import Kernel, Missing, fill, newest_of, obtain, run_program, uncompressed
from tests.vm.machine import LOST, ROOT, Shape, is_translators_fault, status_of, watch

PYTHON = [sys.executable, "-I", "-S", "-c"]


def image(payload: bytes, setup_sectors: int = 3) -> bytes:
    """A bzImage with this payload, 100 bytes into its protected-mode part."""
    head = bytearray((setup_sectors + 1) * 512 + 100)
    head[0x1F1] = setup_sectors
    struct.pack_into("<II", head, 0x248, 100, len(payload))
    return bytes(head) + payload + b"what follows is not the payload"


ELF = b"\x7fELF" + bytes(range(256)) * 40


@pytest.mark.parametrize("compressed", [lzma.compress, gzip.compress], ids=["xz", "gzip"])
def test_the_kernel_is_found_in_its_image(compressed: Callable[[bytes], bytes]) -> None:
    assert uncompressed(image(compressed(ELF) + struct.pack("<I", len(ELF)))) == ELF


def test_what_is_no_kernel_is_refused() -> None:
    for payload in (gzip.compress(b"MZ, not ELF"), b"not compressed at all"):
        with pytest.raises(ValueError, match="no ELF file"):
            uncompressed(image(payload))


def test_the_first_file_system_unpacks_to_what_was_put_in(tmp_path: Path) -> None:
    archive = Cpio()
    archive.add("bin", 0o040755, b"")
    archive.add("bin/tool", 0o100755, b"#!/bin/sh\necho odd length\n")
    archive.add("bin/link", 0o120777, b"tool")
    subprocess.run(
        ["/bin/busybox", "cpio", "-i", "-d"], cwd=tmp_path, input=archive.finish(), check=True, capture_output=True
    )
    assert (tmp_path / "bin/link").readlink() == Path("tool")
    assert subprocess.run([tmp_path / "bin/link"], capture_output=True, check=True).stdout == b"odd length\n"


def test_the_newest_kernel_is_what_the_metapackage_depends_on() -> None:
    shown = "linux-image-6.12-amd64\n  Depends: linux-image-6.12.117+deb12-amd64\n  Suggests: linux-headers\n"
    assert newest_of(shown) == "6.12.117+deb12-amd64"
    assert newest_of("linux-image-6.12-amd64\n  Depends: linux-image-amd64\n") is None
    assert newest_of("") is None


def test_nodes_are_sockets_of_the_same_size() -> None:
    words = " ".join(Shape(cpus=48, nodes=2, memory_mib=4097).options())
    assert "48,sockets=2,cores=24,threads=1" in words
    assert "node,nodeid=1,cpus=24-47,memdev=m1" in words
    assert (words.count("size=2048M"), "-m 4096M" in words) == (2, True)
    assert words.count("dist,") == 2
    assert " ".join(Shape(cpus=4, nodes=4, memory_mib=4096).options()).count("dist,") == 12
    with pytest.raises(Missing, match="5 CPUs cannot be shared out evenly to 2"):
        Shape(cpus=5).options()


@pytest.mark.parametrize(
    "torn",
    ["", "<testsuites><testsuite tests='3'", "<a/><b/>", "<a/>", "<testsuite tests='0'/>", "<testsuite tests='x'/>"],
)
def test_a_report_that_is_not_whole_is_none(tmp_path: Path, torn: str) -> None:
    report = tmp_path / "junit.xml"
    assert not is_whole(report)
    report.write_text(torn)
    assert not is_whole(report)
    report.write_text("<testsuites><testsuite tests='3'/></testsuites>")
    assert is_whole(report)


def test_a_guest_without_a_status_is_lost(tmp_path: Path) -> None:
    assert status_of(tmp_path) == LOST
    for text, status in (("", LOST), ("\n", LOST), ("0\n", 0), ("7\n", 7), ("256\n", LOST), ("-1\n", LOST)):
        (tmp_path / "status").write_text(text)
        assert status_of(tmp_path) == status


def test_a_breakpoint_that_was_taken_back_is_the_translators_fault() -> None:
    assert is_translators_fault(b"[100%][  307.684084] Oops: int3: 0000 [#1] PREEMPT SMP NOPTI\r\n")  # 6.12
    assert is_translators_fault(b"[  11.1] int3: 0000 [#1] PREEMPT SMP\r\n")  # 6.1
    for other in (b"Oops: 0000 [#1] PREEMPT SMP", b"Kernel panic - not syncing: sysrq triggered crash", b""):
        assert not is_translators_fault(other)


def test_only_files_that_name_the_mark_are_collected(tmp_path: Path) -> None:
    tests = tmp_path / "tests/some"
    tests.mkdir(parents=True)
    for name, mark in (("a", "vm"), ("b", "vm_big"), ("c", "kernel")):
        (tests / f"test_{name}.py").write_text(f"pytestmark = pytest.mark.{mark}\n")
    assert pytest_command(["vm"], tmp_path)[-1:] == ["tests/some/test_a.py"]
    both = pytest_command(["vm", "vm_big"], tmp_path)
    assert both[-2:] == ["tests/some/test_a.py", "tests/some/test_b.py"]
    assert both[both.index("vm or vm_big") - 1] == "-m"
    assert [word for word in pytest_command(["vm_big"], tmp_path) if word.endswith(".py")] == ["tests/some/test_b.py"]
    with pytest.raises(Missing, match="no test is marked vm_none"):
        pytest_command(["vm_none"], tmp_path)
    for mark in BOOTS:
        assert pytest_command([mark]), "each machine has its tests"


def test_a_program_that_goes_on_is_ended(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    console = tmp_path / "console"
    messages = [*PYTHON, "import time\nprint('first\\r\\nso far', end='', flush=True)\ntime.sleep(600)"]
    assert watch(messages, console, 10) is None
    assert (console.read_bytes(), capfd.readouterr().out) == (b"first\r\nso far", "first\nso far")
    assert watch([*PYTHON, "print('all')"], console, 600) == 0
    assert console.read_bytes() == b"all\n"
    assert watch([*PYTHON, "raise SystemExit(3)"], console, 600) == 3


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_program_ends_with_the_process_that_watches_it(tmp_path: Path, number: signal.Signals) -> None:
    inner = [*PYTHON, "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)"]
    log = f"__import__('pathlib').Path({str(tmp_path / 'log')!r})"
    outer = f"from tests.vm.machine import watch\nwatch({inner!r}, {log}, 600)"
    with subprocess.Popen([sys.executable, "-c", outer], cwd=ROOT, stdout=subprocess.PIPE) as watching:
        assert watching.stdout is not None
        inside = int(watching.stdout.readline())
        assert Path(f"/proc/{inside}").exists()
        watching.send_signal(number)
        watching.wait()
        until(lambda: not alive(inside), "it is gone")


def alive(pid: int) -> bool:
    """Whether a process is there and does not merely wait to be reaped."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_what_is_not_installed_is_named_with_the_remedy() -> None:
    with pytest.raises(Missing, match="no-such-program is not installed: make packages-vm"):
        run_program(["no-such-program"])
    with pytest.raises(Missing, match="sh -c echo full >&2; false: full"):
        run_program(["sh", "-c", "echo full >&2; false"])


VERSION = "6.1.0-1-amd64"
PROGRAMS = {
    "apt-cache": f"echo '  Depends: linux-image-{VERSION}'",
    "apt-get": '[ "$1" = update ] || touch linux.deb',
    "dpkg": f'mkdir "$3/boot" && cp "$IMAGE" "$3/boot/vmlinuz-{VERSION}"',
    "depmod": "",
}


def test_the_cache_has_a_kernel_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With programs in place of apt's and dpkg's that have one kernel, and fail one after the other."""
    cache, programs, requested = tmp_path / "cache", tmp_path / "bin", tmp_path / "asked"
    for directory in (cache, programs):
        directory.mkdir()
    (tmp_path / "image").write_bytes(image(gzip.compress(ELF)))
    for name, text in PROGRAMS.items():
        stated = (
            f'#!/bin/sh\necho {name} "$1" >> {requested}\n[ "$BREAKS" != {name} ] || exec "$BREAKS-is-broken"\n{text}\n'
        )
        (programs / name).write_text(stated)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("IMAGE", str(tmp_path / "image"))
    place = cache / VERSION
    for broken in ("apt-get", "dpkg", "depmod"):
        monkeypatch.setenv("BREAKS", broken)
        with pytest.raises(Missing, match=f"{broken}-is-broken: not found"):
            fill(place, VERSION)
        assert list(cache.iterdir()) == []
    monkeypatch.setenv("BREAKS", "")
    # What a killed run left behind is not taken for a kernel, and is not in the way.
    for left in (place, cache / f"{VERSION}.part"):
        left.mkdir()
        (left / "half").touch()
    assert obtain("6.1", cache) == Kernel(VERSION, place)
    assert sorted(path.name for path in cache.iterdir()) == [VERSION, "lock"]
    assert sorted(path.name for path in place.iterdir()) == ["boot", "vmlinux"]
    assert (place / "vmlinux").read_bytes() == ELF
    requested.unlink()
    assert obtain("6.1", cache).vmlinux.read_bytes() == ELF
    assert requested.read_text() == "apt-cache depends\n", "what is there is not downloaded again"


def test_two_that_need_the_same_kernel_download_it_once(tmp_path: Path) -> None:
    """The second waits for the first one, and dies no worse for it if that one is killed."""
    cache, ready = tmp_path / "cache", tmp_path / "ready"
    cache.mkdir()
    holds = f"import fcntl, time\nlock = open({str(cache / 'lock')!r}, 'w')\nfcntl.flock(lock, fcntl.LOCK_EX)\n"
    holds += f"open({str(ready)!r}, 'w').close()\ntime.sleep(600)"
    waits = f"from pathlib import Path\nfrom tests.vm.kernels import obtain\nobtain('6.1', Path({str(cache)!r}))"
    programs, locks = tmp_path / "bin", Path("/proc/locks")
    programs.mkdir()
    (programs / "apt-cache").write_text("#!/bin/sh\nexit 1\n")
    (programs / "apt-get").write_text("#!/bin/sh\nexit 1\n")
    for program in programs.iterdir():
        program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    with subprocess.Popen([*PYTHON, holds]) as first:
        until(ready.exists, "the first has the lock")
        with subprocess.Popen(
            [sys.executable, "-c", waits], cwd=ROOT, env=environment, stderr=subprocess.PIPE
        ) as second:
            assert second.stderr is not None
            until(lambda: f"-> FLOCK  ADVISORY  WRITE {second.pid} " in locks.read_text(), "the second waits for it")
            first.kill()
            assert b"kernels.Missing: " in second.stderr.read()
