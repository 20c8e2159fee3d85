"""Starts the compiling child of a probe, receives its map, program and link descriptors, and owns them.
The agent never imports bcc. Closing the descriptors detaches everything, and so does the death of this process.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import threading
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, TypeVar

import msgspec

from api.interfaces import Unavailable
from probes import bpf
from probes.btf import VMLINUX
from probes.remedies import (
    OUT_OF_DESCRIPTORS,
    REMEDIES,
    CompilerLost,
    FormRefusal,
    descriptor_limit_as_unavailable,
    explain_child_exit,
    explain_refusals,
)

T = TypeVar("T")
CHILD_PYTHON = Path("/usr/bin/python3")
"""Where the distribution's packages are, python3-bpfcc among them."""
TIMEOUT_S = 60.0
"""The child needs half a second here; a small node that starts thirty pods at once is slower."""
_COMPILER = Path(__file__).with_name("compiler.py")
_MAX_DESCRIPTORS = 64
_ITERATOR_BYTES = 1 << 16
"""Most that one read of an iterator is asked for; the kernel gives half of that at once."""


class Program(msgspec.Struct, frozen=True):
    """A function of the C source, the tracepoint that runs it and the name it has in the kernel's list (15 characters)."""

    function: str
    tracepoint: str
    """Or, of an iterator, the kind of objects it goes through: `task`; with `at`, a function of the kernel."""
    name: str
    needs: str = ""
    """Macro of an optional field; where the kernel lacks it, the source does not have this function either."""
    arguments: Sequence[str] = ()
    """What the tracepoint must pass first, as `Btf.arguments` spells it: kernels differ, and a wrong one would be misread."""
    iterator: bool = False
    """Whether it runs not at an event but over all objects of a kind, whenever somebody reads `Loaded.records`."""
    at: str = ""
    """`entry` or `return` of a kernel function, for what has no tracepoint: as fentry and fexit in a typed form, as kprobe and
    kretprobe in another one. At the return a kretprobe knows the arguments no more, and fexit has the result behind them."""


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run a probe."""

    name: str
    typed: bool
    """A BTF-typed tracepoint or function: fields are plain loads. Otherwise a raw tracepoint or a kprobe, whose fields are
    copied by a helper."""
    fields: Mapping[str, Sequence[tuple[str, str, int]]]
    """Macro to alternatives of (struct, member, size in bytes); the first that this kernel has gives the offset. Size 0 is a
    bitfield of one bit, whose mask is the macro with `_BIT` behind it. Without a struct it is a per-CPU variable of the kernel
    and its place among those; size 0 is then any size."""
    programs: Sequence[Program]
    optional: Mapping[str, Sequence[tuple[str, str, int]]] = {}
    """Like `fields`, but a macro without a field is left undefined."""
    constants: Mapping[str, int] = {}
    maps: Sequence[str] = ()
    """Maps that this form has beside those of the job."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What the child is to do: try the forms in order, keep the first that the kernel takes."""

    sources: Sequence[Path]
    """C files that make one program, in order; the last one is the probe's own."""
    forms: Sequence[Form]
    maps: Sequence[str]
    constants: Mapping[str, int]
    btf: Path = VMLINUX
    remedy: str = ""
    """What to do where the kernel takes no form; empty for the general advice."""
    scratch: str = ""


class MapDescription(msgspec.Struct, frozen=True):
    """A map's key and leaf as BCC read them from the C source."""

    name: str
    key: Any
    leaf: Any


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    form: str = ""
    maps: tuple[MapDescription, ...] = ()
    programs: tuple[str, ...] = ()
    compile_s: float = 0.0
    load_s: float = 0.0
    refused: tuple[FormRefusal, ...] = ()
    error: str = ""
    detail: str = ""


# Made before any thread decodes one: msgspec crashes the process where two threads use a type for the first time at once.
_ANSWERS = msgspec.json.Decoder(_Answer)


class Loaded:
    """A running probe: its descriptors until `close`, after which nothing of it is left in the kernel."""

    def __init__(self, answer: _Answer, descriptors: Sequence[int]) -> None:
        split = len(answer.maps)
        self.form, self.refused = answer.form, answer.refused
        self.compile_s, self.load_s = answer.compile_s, answer.load_s
        self.maps = dict(zip((m.name for m in answer.maps), zip(descriptors, answer.maps, strict=False), strict=True))
        """Descriptor and description by name."""
        self.programs = dict(zip(answer.programs, descriptors[split::2], strict=True))
        """Program descriptor by its name in the kernel."""
        self._links = dict(zip(answer.programs, descriptors[split + 1 :: 2], strict=True))
        self.descriptors = tuple(descriptors)

    def records(self, iterator: str) -> bytes:
        """Run an iterator, by its name in the kernel, over all there is now: what it wrote. Raises OSError."""
        fd = bpf.open_iterator(self._links[iterator])
        try:
            return b"".join(iter(lambda: os.read(fd, _ITERATOR_BYTES), b""))
        finally:
            os.close(fd)

    def stats(self) -> dict[str, bpf.ProgramInfo]:
        """Runs and run time of each program; they grow only while `bpf.enable_stats` is held open by someone."""
        return {name: bpf.program_info(fd) for name, fd in self.programs.items()}

    def close(self) -> None:
        """Detach and free everything. Idempotent."""
        descriptors, self.descriptors = self.descriptors, ()
        for fd in reversed(descriptors):
            os.close(fd)

    def __enter__(self) -> Loaded:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _RunningChild(NamedTuple):
    """A child that waits for jobs."""

    child: subprocess.Popen[bytes]
    channel: socket.socket
    errors: IO[bytes]
    scratch: str
    owned: contextlib.ExitStack


class _ChildLost(Exception):
    """The child cannot be used any more."""

    def __init__(self, unavailable: Unavailable) -> None:
        super().__init__(unavailable.reason)
        self.unavailable = unavailable


class Compiler:
    """One compiling child for several jobs: Python and BCC cost it 0.35 s of CPU before the first of them.

    Started with the first job, and anew with the next one should it be lost. Jobs come from one thread, `end` from any.
    """

    def __init__(self, python: Path = CHILD_PYTHON, *, nice: int = 0, timeout_s: float = TIMEOUT_S) -> None:
        self.python = python
        self._nice, self._timeout_s = nice, timeout_s
        self._running: _RunningChild | None = None
        self._ended = False
        self._lock = threading.Lock()

    def load(self, job: Job) -> Loaded:
        """Have one job done and take over what was loaded. Raises Unavailable with the reason and what to do about it."""
        with self._lock:
            if self._ended:
                raise Unavailable("loading of probes was ended", "start the agent again")
            if self._running is None:
                with descriptor_limit_as_unavailable():
                    self._running = _start_child(self.python, self._nice)
            running = self._running
        try:
            with descriptor_limit_as_unavailable():
                return _exchange(running, job, self._timeout_s)
        except _ChildLost as lost:
            self._release()
            raise lost.unavailable from None

    def end(self) -> None:
        """End the child now, whatever it does, and load nothing more."""
        with self._lock:
            self._ended = True
            if self._running is not None:
                self._running.child.kill()

    def __enter__(self) -> Compiler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        self._release()

    def _release(self) -> None:
        with self._lock:
            running, self._running = self._running, None
        if running is not None:
            running.owned.close()


_thread_local = threading.local()


@contextlib.contextmanager
def sharing(compiler: Compiler) -> Iterator[None]:
    """Within, every `load` of this thread that asks for the compiler's Python uses this one child."""
    _thread_local.compiler = compiler
    try:
        yield
    finally:
        del _thread_local.compiler


def load(job: Job, *, child_python: Path = CHILD_PYTHON, timeout_s: float = TIMEOUT_S) -> Loaded:
    """Have a child of its own do the job, or the shared one. Raises Unavailable with the reason and what to do about it."""
    shared: Compiler | None = getattr(_thread_local, "compiler", None)
    if shared is not None and shared.python == child_python:
        return shared.load(job)
    with Compiler(child_python, timeout_s=timeout_s) as compiler:
        return compiler.load(job)


def _start_child(python: Path, nice: int) -> _RunningChild:
    owned = contextlib.ExitStack()
    try:
        os.close(
            os.open("/", os.O_RDONLY | os.O_CLOEXEC)
        )  # tempfile takes a lack of descriptors for one of directories
        scratch = owned.enter_context(_scratch_directory())
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        owned.enter_context(here)
        with there:
            errors = owned.enter_context(tempfile.TemporaryFile(dir=scratch))  # noqa: SIM115 - closed by `owned`
            child = _spawn(python, there, errors, (str(nice), scratch))
    except BaseException:
        owned.close()
        raise
    owned.callback(child.wait)
    owned.callback(child.kill)
    return _RunningChild(child, here, errors, scratch, owned)


def load_probe(job: Job, make: Callable[[Loaded], T], *, child_python: Path = CHILD_PYTHON) -> T:
    """The probe that `make` builds on what was loaded; where it fails nothing stays in the kernel. Raises as `load`."""
    loaded = load(job, child_python=child_python)
    try:
        with descriptor_limit_as_unavailable():
            return make(loaded)
    except BaseException:
        loaded.close()
        raise


@contextlib.contextmanager
def _scratch_directory() -> Iterator[str]:
    try:
        directory = tempfile.mkdtemp(prefix="dioptase-")
    except OSError as error:
        raise Unavailable(
            f"no temporary directory can be made: {error.strerror}",
            "make /tmp writable (in a pod: mount an emptyDir there) or set TMPDIR",
        ) from error
    try:
        yield directory
    finally:
        # A child that ended between two jobs left it empty, and this takes no descriptor: there may be none left.
        try:
            Path(directory).rmdir()
        except OSError:
            shutil.rmtree(directory, ignore_errors=True)


def _spawn(python: Path, channel: socket.socket, errors: IO[bytes], told: tuple[str, str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            [python, "-s", "-E", _COMPILER, str(channel.fileno()), *told],
            pass_fds=[channel.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
        )
    except OSError as error:
        if error.errno in OUT_OF_DESCRIPTORS:
            raise
        raise Unavailable(
            f"{python} cannot be run: {error.strerror}",
            "install the distribution's Python and BCC: apt-get install python3-bpfcc",
        ) from error


def _exchange(running: _RunningChild, job: Job, timeout_s: float) -> Loaded:
    request = msgspec.json.encode(msgspec.structs.replace(job, scratch=running.scratch), enc_hook=str)
    try:
        running.channel.settimeout(timeout_s)
        running.channel.send(request)
        message, descriptors = _receive(running.channel)
    except (BrokenPipeError, ConnectionResetError):
        message, descriptors = b"", []
    except TimeoutError:
        reason = f"compiling {job.sources[-1].name} took more than {timeout_s:g} s"
        raise _ChildLost(CompilerLost(reason, "see whether the node is short of CPU; then start again")) from None
    if not message:
        raise _ChildLost(explain_child_exit(running.child.wait(), running.errors))
    answer = _ANSWERS.decode(message)
    if answer.error:
        raise explain_refusals(answer.error, answer.detail, answer.refused, job.remedy)
    if len(descriptors) != len(answer.maps) + 2 * len(answer.programs):
        for fd in descriptors:
            os.close(fd)
        raise Unavailable(
            f"the kernel passed on {len(descriptors)} descriptors of a probe, not all of them",
            REMEDIES["files"],
        )
    return Loaded(answer, descriptors)


def _receive(channel: socket.socket) -> tuple[bytes, list[int]]:
    """A message and its descriptors, close-on-exec from the start; socket.recv_fds (3.11) ignores its flags."""
    fds = array("i")
    space = socket.CMSG_LEN(_MAX_DESCRIPTORS * fds.itemsize)
    message, control, _, _ = channel.recvmsg(1 << 20, space, socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in control:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return message, list(fds)
