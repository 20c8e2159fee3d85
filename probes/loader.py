"""Starts the compiling child of a probe, receives its map, program and link descriptors, and owns them.
The agent never imports bcc. Closing the descriptors detaches everything, and so does the death of this process.
"""

from __future__ import annotations

import contextlib
import functools
import logging
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

log = logging.getLogger(__name__)
T = TypeVar("T")
CHILD_PYTHON = Path("/usr/bin/python3")
"""Python of the distribution, which has the package python3-bpfcc."""
TIMEOUT_S = 60.0
"""Timeout of one job. The child needs half a second; a small node that starts thirty pods at once is slower."""
_COMPILER = Path(__file__).with_name("compiler.py")
_MAX_DESCRIPTORS = 64
_ITERATOR_BYTES = 1 << 16
"""Size of one read of an iterator; the kernel returns half of it at once."""


class Program(msgspec.Struct, frozen=True):
    """Function of the C source, the tracepoint that runs it, and its name in the kernel (15 characters)."""

    function: str
    tracepoint: str
    """For an iterator, the kind of objects: `task`; with `at`, a function of the kernel."""
    name: str
    needs: str = ""
    """Macro of an optional field; if the kernel lacks the field, the source does not contain this function."""
    arguments: Sequence[str] = ()
    """Types of the first arguments, as returned by `Btf.arguments`: kernels differ, and a wrong type would be misread."""
    iterator: bool = False
    """Whether the program runs over all objects of a kind at each call of `Loaded.records`, instead of at an event."""
    at: str = ""
    """`entry` or `return` of a kernel function without a tracepoint: fentry and fexit in a typed form, otherwise kprobe and
    kretprobe. A kretprobe has no arguments; fexit has the result behind them."""


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """One variant of a probe."""

    name: str
    typed: bool
    """Whether the tracepoint or function is BTF-typed: fields are plain loads. Otherwise it is a raw tracepoint or a kprobe,
    and a helper copies the fields."""
    fields: Mapping[str, Sequence[tuple[str, str, int]]]
    """Alternatives of (struct, member, size in bytes) by macro; the first one that this kernel has gives the offset. Size 0 is
    a bitfield of one bit, whose mask is the macro with the suffix `_BIT`. An empty struct means a per-CPU variable of the
    kernel and its offset in the per-CPU section; size 0 then accepts any size."""
    programs: Sequence[Program]
    optional: Mapping[str, Sequence[tuple[str, str, int]]] = {}
    """Like `fields`, but a macro without a field is left undefined."""
    constants: Mapping[str, int] = {}
    maps: Sequence[str] = ()
    """Maps of this form in addition to those of the job."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Job of the compiling child: try the forms in order, and keep the first one that the kernel accepts."""

    sources: Sequence[Path]
    """C files of the program, in order; the last one is the probe's own."""
    forms: Sequence[Form]
    maps: Sequence[str]
    constants: Mapping[str, int]
    btf: Path = VMLINUX
    remedy: str = ""
    """Remedy if the kernel accepts no form; empty for the general one."""
    scratch: str = ""


def tracepoint_forms(
    programs: Sequence[Program],
    fields: Mapping[str, Sequence[tuple[str, str, int]]],
    optional: Mapping[str, Sequence[tuple[str, str, int]]] = {},
) -> dict[str, Form]:
    """Return the two forms of programs at tracepoints: `tp_btf`, and `raw_tp` for kernels that refuse it."""
    return {
        name: Form(
            name=name,
            typed=typed,
            fields=fields,
            optional=optional,
            programs=programs,
            constants={"TYPED": 1} if typed else {},
        )
        for name, typed in (("tp_btf", True), ("raw_tp", False))
    }


class MapDescription(msgspec.Struct, frozen=True):
    """Key and value types of a map as BCC read them from the C source."""

    name: str
    key: Any
    leaf: Any


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    form: str = ""
    maps: tuple[MapDescription, ...] = ()
    programs: tuple[str, ...] = ()
    compile_s: float = 0.0
    load_s: float = 0.0
    cache_error: str = ""
    """Why the compiled form could not be kept; empty if it could."""
    refused: tuple[FormRefusal, ...] = ()
    error: str = ""
    detail: str = ""


# Created at import: msgspec crashes the process if two threads use a type for the first time at once.
_ANSWERS = msgspec.json.Decoder(_Answer)


class Loaded:
    """Descriptors of a running probe; `close` removes it from the kernel."""

    def __init__(self, answer: _Answer, descriptors: Sequence[int]) -> None:
        split = len(answer.maps)
        self.form, self.refused = answer.form, answer.refused
        self.compile_s, self.load_s = answer.compile_s, answer.load_s
        self.maps = dict(zip((m.name for m in answer.maps), zip(descriptors, answer.maps, strict=False), strict=True))
        """Descriptor and description of each map by name."""
        self.programs = dict(zip(answer.programs, descriptors[split::2], strict=True))
        """Program descriptor by its name in the kernel."""
        self._links = dict(zip(answer.programs, descriptors[split + 1 :: 2], strict=True))
        self.descriptors = tuple(descriptors)

    def records(self, iterator: str) -> bytes:
        """Run an iterator, given its name in the kernel, over all current objects, and return its output. Raises OSError."""
        fd = bpf.open_iterator(self._links[iterator])
        try:
            return b"".join(iter(lambda: os.read(fd, _ITERATOR_BYTES), b""))
        finally:
            os.close(fd)

    def stats(self) -> dict[str, bpf.ProgramInfo]:
        """Return runs and run time of each program; they grow only while a descriptor of `bpf.enable_stats` is open."""
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
    """Child process that waits for jobs."""

    child: subprocess.Popen[bytes]
    channel: socket.socket
    errors: IO[bytes]
    scratch: str
    owned: contextlib.ExitStack


class _ChildLost(Exception):
    """The child process cannot be used any more."""

    def __init__(self, unavailable: Unavailable) -> None:
        super().__init__(unavailable.reason)
        self.unavailable = unavailable


class Compiler:
    """One compiling child process for several jobs: starting Python and reading the kernel's types costs 0.15 s of CPU time.

    If not `cached`, it compiles every probe, as it does after an update of the kernel or the agent.

    The child is started with the first job, and again with the next job if it was lost. `load` is called from one thread,
    `end` from any.
    """

    def __init__(
        self, python: Path = CHILD_PYTHON, *, nice: int = 0, timeout_s: float = TIMEOUT_S, cached: bool = True
    ) -> None:
        self.python = python
        self._nice, self._timeout_s, self._cached = nice, timeout_s, cached
        self._running: _RunningChild | None = None
        self._ended = False
        self._lock = threading.Lock()

    def load(self, job: Job) -> Loaded:
        """Run one job and take over the loaded probe. Raises Unavailable with reason and remedy."""
        with self._lock:
            if self._ended:
                raise Unavailable("loading of probes was ended", "start the agent again")
            if self._running is None:
                with descriptor_limit_as_unavailable():
                    self._running = _start_child(self.python, self._nice, self._cached)
            running = self._running
        try:
            with descriptor_limit_as_unavailable():
                return _exchange(running, job, self._timeout_s)
        except _ChildLost as lost:
            self._release()
            raise lost.unavailable from None

    def end(self) -> None:
        """Kill the child at once; later jobs are refused."""
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
    """Let every `load` of this thread with the same Python use this child, while the context is open."""
    _thread_local.compiler = compiler
    try:
        yield
    finally:
        del _thread_local.compiler


def load(job: Job, *, child_python: Path = CHILD_PYTHON, timeout_s: float = TIMEOUT_S) -> Loaded:
    """Run the job in the shared child, or in a child of its own. Raises Unavailable with reason and remedy."""
    shared: Compiler | None = getattr(_thread_local, "compiler", None)
    if shared is not None and shared.python == child_python:
        return shared.load(job)
    with Compiler(child_python, timeout_s=timeout_s) as compiler:
        return compiler.load(job)


def _start_child(python: Path, nice: int, cached: bool) -> _RunningChild:
    owned = contextlib.ExitStack()
    try:
        # Fail here if descriptors are exhausted: tempfile would report that no directory is usable.
        os.close(os.open("/", os.O_RDONLY | os.O_CLOEXEC))
        scratch = owned.enter_context(_scratch_directory())
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        owned.enter_context(here)
        with there:
            errors = owned.enter_context(tempfile.TemporaryFile(dir=scratch))  # noqa: SIM115 - closed by `owned`
            child = _spawn(python, there, errors, (str(nice), scratch), cached)
    except BaseException:
        owned.close()
        raise
    owned.callback(child.wait)
    owned.callback(child.kill)
    return _RunningChild(child, here, errors, scratch, owned)


def load_probe(job: Job, make: Callable[[Loaded], T], *, child_python: Path = CHILD_PYTHON) -> T:
    """Return the probe that `make` builds from the loaded descriptors; they are closed if it fails. Raises as `load`."""
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
            f"no temporary directory can be created: {error.strerror}",
            "make /tmp writable (in a pod: mount an emptyDir there) or set TMPDIR",
        ) from error
    try:
        yield directory
    finally:
        # A child that ended between two jobs left the directory empty, and rmdir needs no descriptor: none may be left.
        try:
            Path(directory).rmdir()
        except OSError:
            shutil.rmtree(directory, ignore_errors=True)


def _spawn(
    python: Path, channel: socket.socket, errors: IO[bytes], arguments: tuple[str, str], cached: bool
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            [python, "-s", "-E", _COMPILER, str(channel.fileno()), *arguments],
            pass_fds=[channel.fileno()],
            env=None if cached else os.environ | {"DIOPTASE_CACHE_DIR": ""},
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
        raise _ChildLost(
            CompilerLost(reason, "check whether the node is short of CPU, then start the agent again")
        ) from None
    if not message:
        raise _ChildLost(explain_child_exit(running.child.wait(), running.errors))
    answer = _ANSWERS.decode(message)
    if answer.error:
        raise explain_refusals(answer.error, answer.detail, answer.refused, job.remedy)
    if len(descriptors) != len(answer.maps) + 2 * len(answer.programs):
        for fd in descriptors:
            os.close(fd)
        raise Unavailable(
            f"only {len(descriptors)} of a probe's descriptors were received",
            REMEDIES["files"],
        )
    if answer.cache_error:
        _warn_once(f"compiled probes are not kept, so that each start compiles them again: {answer.cache_error}")
    return Loaded(answer, descriptors)


@functools.cache
def _warn_once(text: str) -> None:
    log.warning(text)


def _receive(channel: socket.socket) -> tuple[bytes, list[int]]:
    """Return a message and its descriptors, close-on-exec from the start; socket.recv_fds (Python 3.11) ignores its flags."""
    fds = array("i")
    space = socket.CMSG_LEN(_MAX_DESCRIPTORS * fds.itemsize)
    message, control, _, _ = channel.recvmsg(1 << 20, space, socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in control:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return message, list(fds)
