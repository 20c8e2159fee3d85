"""Deferred loading: readings until a probe is loaded, the order of loading, and prompt closing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from api.interfaces import KernelFeatureAbsent, Probe, ProbeReading, Unavailable
from api.snapshot import ABSENT
from probes import deferred_loading as background_module
from probes.deferred_loading import LOADING, DeferredLoader, DeferredProbe
from probes.loader import Compiler, Job, load, sharing
from tests.builders.waiting import until

JOB = Job(sources=[Path("/nowhere/x.bpf.c")], forms=[], maps=[], constants={})


class Counting:
    """A probe that has seen one thing."""

    form = "tp_btf"
    lost_events = 2

    def __init__(self, name: str) -> None:
        self.name, self.closed = name, 0

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> ProbeReading:
        return ProbeReading(node={"procs_running": len(live)})

    def problem(self) -> Unavailable | None:
        return Unavailable("2 were lost", "lose less")

    def close(self) -> None:
        self.closed += 1


def refuse() -> Probe:
    raise Unavailable("no BPF here", "boot another kernel")


def lack() -> Probe:
    raise KernelFeatureAbsent("the kernel accepts no form of this probe", "use Linux 6.8 or later")


def bug() -> Probe:
    raise KeyError("slot 27")


def loaded(*openers: tuple[str, Callable[[], Probe]]) -> DeferredLoader:
    background = DeferredLoader(openers)
    background.start()
    until(lambda: all(probe.form != LOADING for probe in background.probes))
    return background


def test_until_it_is_open_a_probe_has_seen_nothing() -> None:
    probe = Counting("a")
    late = DeferredProbe("a", lambda: probe)
    assert (late.name, late.form, late.read({1: "/"}), late.problem()) == ("a", LOADING, ProbeReading(), None)
    assert late.lost_events is None
    late.open()
    assert (late.form, late.read({1: "/"}).node) == ("tp_btf", {"procs_running": 1})
    problem = late.problem()
    assert problem is not None
    assert (problem.reason, late.lost_events) == ("2 were lost", 2)


def test_they_are_opened_in_their_order_and_one_that_fails_costs_the_others_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    order: list[str] = []

    def opener(name: str) -> Callable[[], Probe]:
        return lambda: order.append(name) or Counting(name)

    background = loaded(("a", opener("a")), ("b", refuse), ("c", bug), ("d", opener("d")))
    assert order == ["a", "d"]
    assert [probe.form for probe in background.probes] == ["tp_btf", "", "", "tp_btf"]
    with pytest.raises(Unavailable, match="no BPF here") as refused:
        background.probes[1].read({})
    assert refused.value.remedy == "boot another kernel"
    with pytest.raises(Unavailable, match="KeyError: 'slot 27'") as failed:
        background.probes[2].read({})
    assert "bug" in failed.value.remedy
    assert len(caplog.records) == 1
    background.close()


def test_what_the_kernel_lacks_is_absent_and_says_so_each_time() -> None:
    background = loaded(("a", lack), ("b", refuse))
    assert [probe.form for probe in background.probes] == [ABSENT, ""]
    for _ in range(2):
        with pytest.raises(Unavailable, match="accepts no form") as refused:
            background.probes[0].read({})
        assert refused.value.remedy == "use Linux 6.8 or later"
    background.close()


def test_closing_closes_what_is_open_once() -> None:
    probes = [Counting("a"), Counting("b")]
    background = loaded(("a", lambda: probes[0]), ("b", lambda: probes[1]))
    background.close()
    background.close()
    assert [probe.closed for probe in probes] == [1, 1]
    with pytest.raises(Unavailable, match="the probe a is closed"):
        background.probes[0].read({})


def test_what_opens_after_the_end_is_closed_at_once() -> None:
    probe = Counting("a")
    late = DeferredProbe("a", lambda: probe)
    late.close()
    late.open()
    assert probe.closed == 1


def test_closing_ends_a_child_that_is_at_work(tmp_path: Path) -> None:
    """It would otherwise take ten minutes; later probes are not started."""
    started = threading.Event()
    slow = tmp_path / "python3"
    slow.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    slow.chmod(0o755)
    opened: list[str] = []

    def hang() -> Probe:
        opened.append("hang")
        started.set()
        load(JOB, child_python=slow)
        raise AssertionError("a job that never ends has ended")

    background = DeferredLoader([("hang", hang), ("never", lambda: opened.append("never") or Counting("never"))], slow)
    background.start()
    assert started.wait(10)
    until((tmp_path / "pid").exists)
    background.close()
    assert opened == ["hang"]
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


def killed_at(tmp_path: Path, deaths: int) -> Path:
    """A child that is killed in its first jobs, as by the kernel short of memory, and answers later ones: so many live."""
    script = tmp_path / "python3"
    script.write_text(
        f"#!/bin/sh\necho $$ >> {tmp_path}/pids\n[ $(wc -l < {tmp_path}/pids) -le {deaths} ] && kill -9 $$\n"
        "exec /usr/bin/env python3 -c '\nimport json, socket, sys\nchannel = socket.socket(fileno=int(sys.argv[1]))\n"
        'while channel.recv(1 << 20): channel.send(json.dumps({"form": "answered"}).encode())\n\' $4\n'
    )
    script.chmod(0o755)
    return script


@pytest.mark.parametrize(
    ("deaths", "tries", "forms"),
    [
        (0, "ac", ["answered", "answered"]),
        (1, "aca", ["answered", "answered"]),
        (2, "acac", ["answered", "answered"]),
        (3, "acac", ["", "answered"]),
    ],
)
def test_a_probe_whose_child_was_killed_is_tried_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaths: int, tries: str, forms: list[str]
) -> None:
    monkeypatch.setattr(background_module, "RETRY_S", 0.0)
    python = killed_at(tmp_path, deaths)
    tried: list[str] = []

    def opener(name: str) -> Callable[[], Probe]:
        def opened() -> Probe:
            tried.append(name)
            probe = Counting(name)
            probe.form = load(JOB, child_python=python).form
            return probe

        return opened

    background = DeferredLoader([("a", opener("a")), ("b", refuse), ("c", opener("c"))], python)
    background.start()
    background._thread.join(20)
    first, refused, last = background.probes
    assert ("".join(tried), [first.form, last.form]) == (tries, forms)
    assert remedy_of(refused) == "boot another kernel"
    assert remedy_of(last) == ""
    assert ("start the agent again" in remedy_of(first)) == (deaths == 3)
    assert "once more" not in remedy_of(first)
    background.close()


def remedy_of(probe: DeferredProbe) -> str:
    try:
        probe.read({})
    except Unavailable as error:
        return error.remedy
    return ""


def test_closing_does_not_wait_for_the_second_try(tmp_path: Path) -> None:
    python = killed_at(tmp_path, 9)
    background = DeferredLoader([("a", lambda: load(JOB, child_python=python) and Counting("a"))], python)
    background.start()
    until(lambda: remedy_of(background.probes[0]).endswith("or wait for the retry after 60 s"))
    background.close()
    assert not background._thread.is_alive()
    assert len((tmp_path / "pids").read_text().split()) == 1


def test_a_background_that_was_never_started_closes() -> None:
    background = DeferredLoader([("a", refuse)])
    background.close()
    assert background.probes[0].name == "a"


def answering(tmp_path: Path) -> Path:
    """A child that refuses every job and says which of its jobs it was."""
    script = tmp_path / "python3"
    script.write_text(
        "#!/bin/sh\nexec /usr/bin/env python3 -c '\n"
        "import json, os, socket, sys\n"
        "channel, jobs = socket.socket(fileno=int(sys.argv[1])), 0\n"
        "while channel.recv(1 << 20):\n"
        "    jobs += 1\n"
        '    channel.send(json.dumps({"error": "bcc", "detail": f"{os.getpid()} {jobs} {sys.argv[2]}"}).encode())\n'
        "' $4 $5\n"
    )
    script.chmod(0o755)
    return script


def message(compiler: Compiler | None, python: Path) -> list[int]:
    """Pid of the child, how many jobs it has had, and its nice increment."""
    with pytest.raises(Unavailable) as caught:
        load(JOB, child_python=python) if compiler is None else compiler.load(JOB)
    return [int(word) for word in caught.value.reason.split()]


def test_one_child_does_several_jobs_and_only_for_the_thread_that_shares_it(tmp_path: Path) -> None:
    python = answering(tmp_path)
    with Compiler(python, nice=7) as compiler, sharing(compiler):
        first, second = message(None, python), message(None, python)
        assert (first[0], first[1], second[1]) == (second[0], 1, 2)
        assert first[2] == 7, "what is to be added to its nice value"
        elsewhere: list[list[int]] = []
        thread = threading.Thread(target=lambda: elsewhere.append(message(None, python)))
        thread.start()
        thread.join()
        assert elsewhere[0][0] != first[0]
    assert not Path(f"/proc/{first[0]}").exists()
    assert message(None, python)[0] != first[0]


def test_an_ended_compiler_starts_nothing(tmp_path: Path) -> None:
    compiler = Compiler(answering(tmp_path))
    compiler.end()
    with pytest.raises(Unavailable, match="loading of probes was ended"):
        compiler.load(JOB)


def test_a_read_while_a_retry_succeeds_raises_the_old_reason_or_reads_the_probe() -> None:
    """The cycle thread reads while the loading thread replaces the reason by the probe."""

    class Replaced(DeferredProbe):
        """The retry succeeds right after the first look at the reason."""

        looks = 0

        @property
        def _refusal(self) -> Unavailable | None:
            self.looks += 1
            return Unavailable("the compiler was killed", "wait") if self.looks == 1 else None

        @_refusal.setter
        def _refusal(self, value: Unavailable | None) -> None: ...

    with pytest.raises(Unavailable, match="the compiler was killed"):
        Replaced("a", lambda: Counting("a")).read({})

    class Closed(DeferredProbe):
        """The probe is closed right after the first look at it."""

        looks = 0

        @property
        def _probe(self) -> Probe | None:
            self.looks += 1
            return Counting("a") if self.looks == 1 else None

        @_probe.setter
        def _probe(self, value: Probe | None) -> None: ...

    for look in (
        lambda late: late.read({}),
        lambda late: late.problem(),
        lambda late: late.lost_events,
        lambda late: late.form,
    ):
        look(Closed("a", lambda: Counting("a")))


@pytest.mark.parametrize("moment", ["before the new compiler", "after the new compiler"])
def test_closing_at_the_moment_of_a_retry_starts_no_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Whichever side wins, no child outlives `close`, and `close` returns."""
    monkeypatch.setattr(background_module, "RETRY_S", 0.05)
    python, closing = killed_at(tmp_path, 100), list[threading.Thread]()

    def lose() -> Probe:
        load(JOB, child_python=python)
        raise AssertionError("a killed child has loaded a probe")

    class Retried(Compiler):
        count = 0

        def __init__(self, *arguments: Any, **options: Any) -> None:
            Retried.count += 1
            if Retried.count == 2 and moment.startswith("before"):
                close_elsewhere()
            super().__init__(*arguments, **options)

        def load(self, job: Job) -> Any:
            if Retried.count == 2:
                close_elsewhere()
            return super().load(job)

    def close_elsewhere() -> None:
        closer = threading.Thread(target=loader.close)
        closer.start()
        closing.append(closer)
        assert loader._closed.wait(10)
        time.sleep(0.05)  # so that `close` has ended the compiler that it found

    monkeypatch.setattr(background_module, "Compiler", Retried)
    loader = DeferredLoader([("lost", lose)], python)
    loader.start()
    until(lambda: closing)
    closing[0].join(10)
    assert not closing[0].is_alive()
    assert len((tmp_path / "pids").read_text().split()) == 1, "the retry started no child"
