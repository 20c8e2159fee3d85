"""The agent as a process: it acts on listed pods only, puts everything back, and says what it cannot do."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from agent.sensors.cgroup.hierarchy import Hierarchy
from agent.sensors.node.machine import read_topology
from api.knobs import Knob
from probes.bpf import programs
from tests.builders.waiting import until
from tests.kernel.real_cgroups import TestCgroup, cgroup, require_writable_cgroups
from tests.live.agent_process import DIOPTASE, Agent, pods_file, write_pods

pytestmark = pytest.mark.live
UNPRIVILEGED = ("setpriv", "--bounding-set=-all", "--inh-caps=-all")
"""Root without any capability: BPF is refused, files of root are still root's."""


@pytest.fixture
def hierarchy() -> Hierarchy:
    return require_writable_cgroups()


@pytest.fixture
def groups(hierarchy: Hierarchy) -> Iterator[tuple[TestCgroup, TestCgroup]]:
    """An online and a batch cgroup, each with one burner."""
    with cgroup(hierarchy, "live-web") as web, cgroup(hierarchy, "live-batch") as batch:
        web.burn()
        batch.burn()
        yield web, batch


@pytest.fixture
def options(groups: tuple[TestCgroup, TestCgroup], tmp_path: Path) -> list[str]:
    pods = pods_file(tmp_path / "pods.yaml", groups[0].path, groups[1].path)
    return ["--pods", str(pods), "--state-dir", str(tmp_path / "state")]


def knobs(group: TestCgroup) -> dict[str, str]:
    """Every knob file of a cgroup that this hierarchy has."""
    names = {
        "cpu": ("cpu.idle", "cpu.shares", "cpu.weight", "cpu.cfs_quota_us", "cpu.max"),
        "cpuset": ("cpuset.cpus",),
    }
    files = [group.file(controller, name) for controller, given in names.items() for name in given]
    return {file.name: file.read_text().strip() for file in files if file.exists()}


def attached() -> set[int]:
    """Ids of every BPF program in the kernel."""
    return {program.id for program in programs()}


def held_by(agent: Agent) -> set[int]:
    """Ids of the BPF programs that this agent's descriptors hold."""
    held = set()
    for fdinfo in Path(f"/proc/{agent.process.pid}/fdinfo").iterdir():
        with suppress(FileNotFoundError):
            held.update(int(line.split()[1]) for line in fdinfo.read_text().splitlines() if line.startswith("prog_id:"))
    return held


def topology_ids() -> tuple[int, ...]:
    return read_topology(Path("/sys")).ids


def pinned(group: TestCgroup) -> dict[str, str]:
    """The weight as it shows while cpu.idle pins it."""
    return {name: value for name, value in knobs(group).items() if name in ("cpu.shares", "cpu.weight")}


def idle(group: TestCgroup) -> bool:
    return group.file("cpu", "cpu.idle").read_text().strip() == "1"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=["sigterm", "sighup"])
def test_batch_yields_while_the_agent_runs_and_is_put_back_by_a_signal(
    number: signal.Signals, groups: tuple[TestCgroup, TestCgroup], options: list[str]
) -> None:
    web, batch = groups
    before = knobs(web), knobs(batch)
    with Agent("--act", "on", *options) as agent:
        until(lambda: idle(batch), "batch runs with cpu.idle")
        assert knobs(web) == before[0], "online cgroups are not touched where priority keeps the pools apart"
        view = agent.view()
        assert view["act"] == "on"
        assert [source["name"] for source in view["sources"] if not source["ok"]] == []
        own = held_by(agent)
        assert own
        assert own <= attached()
        assert agent.end(number) == 0
        assert (knobs(web), knobs(batch)) == before
        assert "changed values" in agent.log
    state = Path(options[options.index("--state-dir") + 1])
    last = json.loads((state / "decisions.jsonl").read_text().splitlines()[-1])
    assert (last["trigger"], last["outcome"]["decision"]["pod"]) == ("end", "default/batch")
    until(lambda: not own & attached(), "nothing stays attached")


def test_sigkill_leaves_nothing_attached_and_reset_puts_everything_back(
    groups: tuple[TestCgroup, TestCgroup], options: list[str]
) -> None:
    batch = groups[1]
    before = knobs(batch)
    with Agent("--act", "on", *options) as agent:
        until(lambda: idle(batch), "batch runs with cpu.idle")
        assert agent.view()["containers"][0]["wait"]["slots"] is not None
        own = held_by(agent)
        assert own
        assert own <= attached()
        agent.end(signal.SIGKILL)
    until(lambda: not own & attached(), "nothing stays attached")
    assert knobs(batch) != before
    reset = subprocess.run([DIOPTASE, "reset", *options[2:]], capture_output=True, text=True, check=False)
    assert reset.returncode == 0, reset.stdout + reset.stderr
    assert batch.path in reset.stdout
    assert knobs(batch) == before
    again = subprocess.run([DIOPTASE, "reset", *options[2:]], capture_output=True, text=True, check=False)
    assert (again.returncode, "Nothing is left" in again.stdout) == (0, True)


def test_under_nohup_a_terminal_that_closes_ends_nothing(options: list[str]) -> None:
    with Agent("--act", "dry-run", *options, prefix=("nohup",)) as agent:
        agent.view()
        agent.process.send_signal(signal.SIGHUP)
        seq = agent.view()["seq"]
        until(lambda: agent.view()["seq"] > seq, "rounds go on")
        assert agent.end() == 0


def test_settings_are_shown_and_a_slow_agent_is_healthy(options: list[str], tmp_path: Path) -> None:
    config = tmp_path / "dioptase.yaml"
    config.write_text("{intervalS: 12, advisor: {policy: canonical, latency: {staleS: 12, targetWaitMs: 5}}}\n")
    with Agent("--act", "dry-run", "--config", str(config), *options) as agent:
        until(lambda: "dioptase_rounds_total" in agent.get("/metrics"), "a first round")
        metrics = agent.get("/metrics")
        for line in (
            "dioptase_round_interval_seconds 12.0",
            "dioptase_latency_target_seconds 0.005",
            "dioptase_journal_writable 1",
        ):
            assert f"\n{line}\n" in metrics
        until(lambda: json.loads(agent.get("/healthz"))["age_s"] > 5.5, "the round is older than 5 s")
        assert agent.end() == 0


def test_the_package_is_no_command() -> None:
    run = subprocess.run([sys.executable, "-m", "agent"], capture_output=True, text=True, check=False, timeout=30)
    assert (run.returncode, run.stderr) == (2, "python -m agent is no command; run `dioptase agent`\n")


@pytest.mark.parametrize("act", ["off", "dry-run"])
def test_without_on_nothing_is_written(act: str, groups: tuple[TestCgroup, TestCgroup], options: list[str]) -> None:
    before = knobs(groups[0]), knobs(groups[1])
    with Agent("--act", act, *options) as agent:
        view = agent.view()
        assert view["act"] == act
        statuses = {change["status"] for change in view["changes"]}
        assert statuses == ({"dry-run"} if act == "dry-run" else set())
        assert (knobs(groups[0]), knobs(groups[1])) == before
        assert agent.end() == 0
    assert (knobs(groups[0]), knobs(groups[1])) == before


@pytest.fixture
def canonical(tmp_path: Path) -> Path:
    """Settings of the policy that gives both kinds of pods CPUs of their own."""
    if len(topology_ids()) < 2:
        pytest.skip("one CPU cannot be parted")
    config = tmp_path / "dioptase.yaml"
    config.write_text("advisor: {policy: canonical}\n")
    return config


def test_canonical_policy_parts_the_cpus(
    groups: tuple[TestCgroup, TestCgroup], options: list[str], canonical: Path
) -> None:
    web, batch = groups
    before = knobs(web), knobs(batch)
    with Agent("--act", "on", "--config", str(canonical), *options) as agent:
        until(lambda: knobs(web)["cpuset.cpus"] != before[0]["cpuset.cpus"], "the cpusets are disjoint")
        agent.view()
        assert not set(knobs(web)["cpuset.cpus"]) & set(knobs(batch)["cpuset.cpus"])
        assert agent.end() == 0
    assert (knobs(web), knobs(batch)) == before


def test_what_is_below_a_container_s_cgroup_is_parted_too(
    groups: tuple[TestCgroup, TestCgroup], options: list[str], canonical: Path
) -> None:
    web, batch = groups
    inner = TestCgroup(batch.hierarchy, f"{batch.path}/inner")
    try:
        inner.burn()
        before = knobs(batch), knobs(inner)
        with Agent("--act", "on", "--config", str(canonical), *options) as agent:
            until(lambda: len(knobs(batch)["cpuset.cpus"]) == 1, "batch has one CPU")
            view = agent.view()
            assert not set(knobs(web)["cpuset.cpus"]) & set(knobs(inner)["cpuset.cpus"])
            assert not [change for change in view["changes"] if change["status"] == "refused"]
            assert agent.end() == 0
        assert (knobs(batch), knobs(inner)) == before
    finally:
        inner.close()


def test_an_agent_that_was_killed_in_a_breach_starts_with_the_reduced_quota(
    groups: tuple[TestCgroup, TestCgroup], options: list[str], tmp_path: Path
) -> None:
    web, batch = groups
    cpu = min(os.sched_getaffinity(0))
    for process in (*web.processes, *web.burn(7)):
        os.sched_setaffinity(process.pid, {cpu})  # they wait for one another far longer than any target allows
    before = knobs(batch)
    strict = tmp_path / "strict.yaml"
    strict.write_text("advisor: {latency: {leastBlameRatio: 0}}\n")
    with Agent("--act", "on", "--config", str(strict), *options) as first:
        until(lambda: first.view()["lent_cores"] < 0.2, "batch is down to its minimum")
        quotas = before.keys() & {"cpu.cfs_quota_us", "cpu.max"}
        until(
            lambda: all(knobs(batch)[name] != before[name] for name in quotas),
            "the quota is written, after its original",
        )
        limited = knobs(batch)
        first.end(signal.SIGKILL)
    config = tmp_path / "slow.yaml"
    config.write_text("advisor: {latency: {growRatioPerS: 0.0001, leastBlameRatio: 0}}\n")
    with Agent("--act", "on", "--config", str(config), *options) as second:
        assert second.view()["lent_cores"] < 0.2
        assert knobs(batch) == limited
        assert second.end() == 0
    assert knobs(batch) == before


def test_a_queue_of_its_own_tasks_costs_batch_work_nothing(
    groups: tuple[TestCgroup, TestCgroup], options: list[str]
) -> None:
    """Eight tasks on one CPU wait for one another longer than any target allows; batch work with cpu.idle hardly has it."""
    web, _ = groups
    cpu = min(os.sched_getaffinity(0))
    for process in (*web.processes, *web.burn(7)):
        os.sched_setaffinity(process.pid, {cpu})
    with Agent("--act", "on", *options) as agent:
        # Other sessions on the machine may take the CPU first, and are named then.
        until(
            lambda: agent.view()["rule"] == "wait_by_others" and ", its own tasks for" in agent.view()["reason"],
            lambda: f"the aggressor is identified: {agent.view()['reason']}",
            40,
        )
        reclaimable = agent.view()["lent_cores"]
        for _ in range(5):
            time.sleep(1)
            assert agent.view()["lent_cores"] >= reclaimable
        assert agent.end() == 0


def test_another_policy_gives_back_what_the_former_one_changed(
    groups: tuple[TestCgroup, TestCgroup], options: list[str], canonical: Path
) -> None:
    web, batch = groups
    before = knobs(web), knobs(batch)
    with Agent("--act", "on", "--config", str(canonical), *options) as first:
        until(lambda: knobs(web)["cpuset.cpus"] != before[0]["cpuset.cpus"], "the cpusets are disjoint")
        first.end(signal.SIGKILL)
    with Agent("--act", "on", *options) as second:
        until(lambda: idle(batch), "batch runs with cpu.idle")
        until(lambda: knobs(web) == before[0], "the cpuset is whole again")
        # Decisions of one cycle are applied one after the other: this one may still be the old value.
        expected = {**before[1], "cpu.idle": "1", **pinned(batch)}
        until(lambda: knobs(batch) == expected, lambda: f"so is that of batch: {knobs(batch)}")
        assert second.end() == 0
    assert (knobs(web), knobs(batch)) == before


def test_a_pod_that_leaves_the_file_gets_its_cgroup_back(
    groups: tuple[TestCgroup, TestCgroup], options: list[str]
) -> None:
    batch = groups[1]
    before = knobs(batch)
    with Agent("--act", "on", *options) as agent:
        until(lambda: idle(batch), "batch runs with cpu.idle")
        Path(options[1]).write_text("pods: []\n")
        until(lambda: knobs(batch) == before, "the cgroup is given back")
        assert agent.end() == 0


def test_a_cgroup_that_vanishes_ends_nothing(
    hierarchy: Hierarchy, groups: tuple[TestCgroup, TestCgroup], options: list[str]
) -> None:
    with cgroup(hierarchy, "live-gone") as removed:
        pods_file(Path(options[1]), groups[0].path, removed.path)
        with Agent("--act", "on", *options) as agent:
            until(lambda: idle(removed), "batch runs with cpu.idle")
            removed.close()
            seq = agent.view()["seq"]
            until(lambda: agent.view()["seq"] > seq + 2, "rounds go on")
            assert agent.end() == 0
            assert "Traceback" not in agent.log


def test_a_second_agent_on_the_same_state_is_refused(options: list[str]) -> None:
    with Agent("--act", "on", *options) as first:
        first.view()
        with Agent("--act", "on", *options) as second:
            assert second.process.wait(timeout=20) == 1
            second._reader.join()
            assert f"process {first.process.pid}" in second.log
            assert "--state-dir" in second.log
        assert first.end() == 0


def test_a_port_that_is_taken_is_refused_with_the_remedy(options: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as samples:
        listen = f"127.0.0.1:{samples.getsockname()[1]}"
        run = subprocess.run(
            [DIOPTASE, "agent", *options, "--listen", listen], capture_output=True, text=True, check=False, timeout=30
        )
    assert run.returncode == 1
    assert f"cannot listen on {listen}" in run.stderr
    assert "--listen" in run.stderr


def test_a_log_without_a_reader_does_not_stop_the_agent(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, bytes(4096))
    os.set_blocking(writing, True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    process = subprocess.Popen([DIOPTASE, "agent", "--state-dir", tmp_path, "--listen", address], stderr=writing)
    os.close(writing)

    def healthy() -> bool:
        with suppress(OSError), urllib.request.urlopen(f"http://{address}/healthz", timeout=5) as answer:
            return bool(answer.status == 200)
        return False

    try:
        until(healthy, "it is healthy")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(reading)


def test_a_pods_file_that_cannot_hold_is_refused(tmp_path: Path) -> None:
    pods = tmp_path / "pods.yaml"
    pods.write_text("pods:\n- name: web\n  containers: [{cgroup: ../etc}]\n")
    run = subprocess.run(
        [DIOPTASE, "agent", "--pods", str(pods)], capture_output=True, text=True, check=False, timeout=30
    )
    assert run.returncode == 2
    assert str(pods) in run.stderr
    assert "cgroup" in run.stderr
    assert "Traceback" not in run.stderr


def test_without_privileges_it_measures_coarsely_and_says_so(
    groups: tuple[TestCgroup, TestCgroup], options: list[str]
) -> None:
    if shutil.which("setpriv") is None:
        pytest.skip("needs setpriv (util-linux)")
    with Agent("--act", "on", *options, prefix=UNPRIVILEGED) as agent:
        view = agent.view()
        waits = next(source for source in view["sources"] if source["name"] == "waits")
        assert (waits["ok"], waits["detail"]) == (True, "schedstat")
        assert any("BPF" in line for line in view["banner"])
        web = next(container for container in view["containers"] if container["pod"] == "default/web")
        assert web["wait"]["slots"] is None
        assert web["cpu_cores"] > 0
        assert agent.end() == 0


def test_where_cgroups_are_read_only_decisions_run_dry(
    hierarchy: Hierarchy, groups: tuple[TestCgroup, TestCgroup], options: list[str]
) -> None:
    mounts = sorted({str(mount) for mount in (*hierarchy.v1.values(), hierarchy.v2) if mount is not None})
    script = "".join(f"mount -o remount,bind,ro {mount}; " for mount in mounts) + 'exec "$@"'
    before = knobs(groups[1])
    with Agent("--act", "on", *options, prefix=("unshare", "--mount", "sh", "-ec", script, "sh")) as agent:
        view = agent.view()
        assert view["act"] == "dry-run"
        assert any("read-only" in line for line in view["banner"])
        assert Knob.IDLE.value in {change["knob"] for change in view["changes"]}
        assert agent.end() == 0
    assert "--act on was requested, but nothing was written. Decisions run dry: " in agent.lines[-1]
    assert knobs(groups[1]) == before
    request = ("unshare", "--mount", "sh", "-ec", script, "sh", DIOPTASE, "doctor", "--json", *options[2:])
    doctor = subprocess.run(request, capture_output=True, text=True, check=False, timeout=60)
    checks = {check["name"]: check for check in json.loads(doctor.stdout)}
    assert (doctor.returncode, checks["cgroup writes"]["ok"]) == (1, False)
    assert "read-only" in checks["cgroup writes"]["detail"]
    assert checks["cgroup writes"]["remedy"].endswith("until then decisions run dry")


@pytest.mark.parametrize(("pods", "limit_mib"), [(2, 71), (200, 75)])
def test_two_hundred_cgroups_fit_into_71_mib_and_little_more_when_all_are_pods(
    hierarchy: Hierarchy,
    groups: tuple[TestCgroup, TestCgroup],
    options: list[str],
    tmp_path: Path,
    pods: int,
    limit_mib: int,
) -> None:
    many = [TestCgroup(hierarchy, f"{groups[0].path}-{number}") for number in range(200)]
    levels = {group.path: "shared_cores" if number % 2 else "reclaimed_cores" for number, group in enumerate(many)}
    write_pods(Path(options[1]), dict(list(levels.items())[:pods]))
    config = tmp_path / "config.yaml"
    config.write_text("intervalS: 0.2\n")
    try:
        with Agent("--act", "on", "--config", str(config), *options) as agent:
            until(lambda: agent.view()["seq"] >= 100, "a hundred rounds to remember", 120)
            for _ in range(5):
                assert agent.get("/metrics").count("dioptase_cgroup_threads{") >= 200

            def resident_kib() -> int:
                status = Path(f"/proc/{agent.process.pid}/status").read_text()
                return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])

            # What a scrape needs for a moment is given back.
            until(lambda: resident_kib() <= limit_mib * 1024, lambda: f"at rest it holds {resident_kib()} KiB")
            assert agent.end() == 0
    finally:
        for group in many:
            group.close()


def test_without_pods_it_watches_everything_and_decides_nothing(
    groups: tuple[TestCgroup, TestCgroup], tmp_path: Path
) -> None:
    before = knobs(groups[0]), knobs(groups[1])
    groups[0].burn(3)
    with Agent("--state-dir", str(tmp_path / "state")) as agent:
        until(lambda: groups[0].path in {c["cgroup"] for c in agent.view()["others"]}, "the running cgroup is shown")
        view = agent.view()
        assert (view["act"], view["containers"], view["changes"]) == ("off", [], [])
        assert [source["name"] for source in view["sources"] if not source["ok"]] == []
        busy = next(c for c in view["others"] if c["cgroup"] == groups[0].path)
        assert busy["cpu_cores"] > 0.2
        assert busy["wait"]["count"] > 0
        assert view["other_cgroups"] >= 3
        assert agent.end() == 0
    assert (knobs(groups[0]), knobs(groups[1])) == before


@pytest.mark.parametrize("act", ["dry-run", "on"])
def test_deciding_without_pods_is_refused(act: str) -> None:
    run = subprocess.run([DIOPTASE, "agent", "--act", act], capture_output=True, text=True, check=False, timeout=30)
    assert (run.returncode, f"--act {act} needs --pods" in run.stderr) == (2, True)
