"""What every command does alike when what it writes cannot be written."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

MAIN = "from cli.main import main; main(prog_name='dioptase')"
COMMANDS = [["--help"], ["--version"], ["probe", "--help"], ["top", "--help"], ["agent", "--help"]]


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """A device that is always full, of our own."""
    node = tmp_path / "full"
    try:
        os.mknod(node, stat.S_IFCHR | 0o600, os.makedev(1, 7))
        node.open("wb").close()
    except PermissionError:
        pytest.skip("device nodes cannot be made or used here")
    return node


def run(arguments: list[str], redirect: str, script: str = MAIN, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/sh", "-c", f'"$@" {redirect}', "sh", sys.executable, "-c", script, *arguments],
        capture_output=True, text=True, check=False, env={**os.environ, **environ},
    )  # fmt: skip


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_output_to_a_full_disk_ends_with_one_line(full: Path, arguments: list[str]) -> None:
    done = run(arguments, f">{full}")
    text = "dioptase: cannot write to standard output: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, text)


@pytest.mark.parametrize("redirect", [">&-", ">&- <&-"])
@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_closed_output_ends_with_one_line(arguments: list[str], redirect: str) -> None:
    done = run(arguments, redirect)
    assert (done.returncode, done.stderr) == (1, "dioptase: cannot write to standard output: Bad file descriptor\n")


def test_a_reader_that_went_away_ends_a_command_without_a_word() -> None:
    done = run(["--help"], "| true", f"import time; time.sleep(0.3); {MAIN}")
    assert done.stderr == ""


GENERIC = """
import sys
from types import SimpleNamespace
from api.interfaces import ProbeReading
from cli import main
from probes import registry
class SocketProbe:
    name, form, reads = "sockets", "tp_btf", 0
    def read(self, live, *, complete=True):
        self.reads += 1
        return ProbeReading(node={"procs_running": 1}, cgroups={1: {"größe": self.reads}})
    def problem(self): return None
    def close(self): print("closed", file=sys.stderr)
row = SimpleNamespace(name="sockets", about="what sockets do", open=SocketProbe)
registry.BY_NAME["sockets"] = row
main.main(prog_name="dioptase")
"""


@pytest.mark.parametrize("form", [["--json"], []], ids=["json", "table"])
def test_a_probe_whose_output_is_lost_is_closed(full: Path, form: list[str]) -> None:
    for redirect, reason in ((f">{full}", "No space left on device"), (">&-", "Bad file descriptor")):
        done = run(["probe", "sockets", "--interval", "0.05", *form], redirect, GENERIC)
        lines = done.stderr.splitlines()
        assert (done.returncode, lines) == (1, ["closed", f"dioptase: cannot write to standard output: {reason}"])


@pytest.mark.parametrize("form", [["--json"], []], ids=["json", "table"])
def test_a_terminal_without_our_characters_gets_others_and_json_stays_as_it_is(form: list[str]) -> None:
    arguments = ["probe", "sockets", "--interval", "0.05", "--duration", "0.06", *form]
    done = run(arguments, "", GENERIC, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "closed\n")
    assert ("größe" in done.stdout) == bool(form)


def test_a_lack_of_descriptors_ends_with_one_line() -> None:
    script = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (12, 12)); {MAIN}"
    done = run(["agent", "--listen", "127.0.0.1:0", "--duration", "30"], "", script)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "dioptase: Too many open files: raise the limit: ulimit -n 1024"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("module", "name"), [("cli.main", "dioptase"), ("cli.kubectl", "kubectl dioptase")])
def test_a_program_is_run_by_its_module_too(module: str, name: str) -> None:
    """`python -m cli.main agent` did nothing, and said that all went well."""
    done = subprocess.run([sys.executable, "-m", module, "agnet"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"Usage: {name} [OPTIONS] COMMAND [ARGS]...")
    assert "No such command 'agnet'" in done.stderr
