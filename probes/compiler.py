"""The short child that compiles a probe with BCC, loads it and hands map, program and link descriptors to its parent.

Run by the distribution's Python as a plain script, because that is where python3-bpfcc lives, and in a process of its own,
because BCC keeps 150 MiB that it never gives back. Needs no kernel headers: field offsets come from BTF, and a handful of
stub files satisfies BCC's search for a source tree. Standard library, bcc and this directory only.

Takes JSON jobs from the Unix socket whose descriptor is its first argument (see `loader.Job`), answers each with one JSON
message and the descriptors (SCM_RIGHTS), and exits when the socket's other end closes. Nothing is pinned, and no descriptor
is kept here: when the last copy closes elsewhere, it is gone. The second argument is added to its nice value, the third is
the scratch directory, which is removed at the end: a parent that was killed cannot.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import shutil
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING or __package__:
    from probes import bpf, btf, perf_event
else:
    import bpf
    import btf
    import perf_event

LOG_TAIL_CHARS = 1500
"""Characters of a verifier's or compiler's message that are passed on; the reason stands at the end."""
_TYPES = """#pragma once
typedef signed char __s8, s8;
typedef unsigned char __u8, u8;
typedef short __s16, s16;
typedef unsigned short __u16, u16, __be16, __le16, __sum16;
typedef int __s32, s32, pid_t;
typedef unsigned int __u32, u32, __be32, __le32, __wsum;
typedef long long __s64, s64;
typedef unsigned long long __u64, u64, __be64, __le64;
typedef unsigned long size_t, uintptr_t;
typedef _Bool bool;
enum { false, true };
#define NULL ((void *)0)
#define __always_inline inline __attribute__((always_inline))
#define __aligned_u64 __u64 __attribute__((aligned(8)))
struct pt_regs;
"""
_VERSION = """#pragma once
#define KERNEL_VERSION(a, b, c) (((a) << 16) + ((b) << 8) + (c))
#define LINUX_VERSION_CODE 0
"""
STUBS = {
    "include/linux/kconfig.h": "#pragma once\n#define CONFIG_BPF_SYSCALL 1\n",
    "include/linux/types.h": _TYPES,
    "include/linux/version.h": _VERSION,
    "include/linux/log2.h": "",
    "include/linux/bpf_common.h": "",
    "include/uapi/linux/bpf.h": "",
    "include/uapi/linux/if_packet.h": "",
    "include/asm/page.h": "",
}
"""All that BCC includes from a kernel tree, whatever the architecture."""


class LoadFailure(Exception):
    """Nothing can be loaded; `kind` tells the parent which remedy to name."""

    def __init__(self, kind: str, detail: str, refused: list[dict[str, Any]] | None = None) -> None:
        super().__init__(detail)
        self.kind, self.detail, self.refused = kind, detail, refused or []


class FormRefused(Exception):
    """One form cannot run here; the next one may."""

    def __init__(self, stage: str, reason: str, code: int = 0, log: str = "") -> None:
        super().__init__(reason)
        self.facts = {"stage": stage, "reason": reason, "errno": code, "log": log[-LOG_TAIL_CHARS:]}


class LoadedForm(NamedTuple):
    """What goes back to the parent: the message and the descriptors it describes, in order."""

    message: dict[str, Any]
    descriptors: list[int]
    module: Any
    """BCC's, which owns the maps' descriptors."""


def stub_tree(root: Path) -> None:
    """Write the files that BCC wants to see below BCC_KERNEL_SOURCE."""
    for name, text in STUBS.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def field_offsets(types: btf.Btf, form: dict[str, Any]) -> dict[str, int]:
    """The -D macros that say where this kernel keeps its fields. Raises FormRefused where one that is needed is missing."""
    found: dict[str, int] = {}
    for macro, alternatives in {**form["fields"], **form["optional"]}.items():
        problems = []
        for struct_name, path, size in alternatives:
            try:
                found.update(_field_macros(types, macro, struct_name, path, size))
                break
            except btf.BtfError as error:
                problems.append(str(error))
        if macro not in found and macro not in form["optional"]:
            raise FormRefused("fields", "; ".join(problems), errno.ENOENT)
    return found


def _field_macros(types: btf.Btf, macro: str, struct_name: str, path: str, size: int) -> dict[str, int]:
    """Offset of a field of that size; of a bitfield of one bit, whose size is given as 0, the byte and the mask; place of a
    per-CPU variable, which has no struct."""
    if not struct_name:
        return {macro: types.per_cpu_offset(path, size)}
    if size == 0:
        bit = types.bit(struct_name, path)
        return {macro: bit.offset, f"{macro}_BIT": bit.mask}
    field = types.field(struct_name, path)
    if field.size != size:
        raise btf.BtfError(f"struct {struct_name}: {path} has {field.size} bytes, not {size}")
    if field.parts:
        # Such as kernfs_node.id before Linux 5.5: a number of 64 bits, but not the one that people see.
        raise btf.BtfError(f"struct {struct_name}: {path} is no number but a struct or union of that size")
    return {macro: field.offset}


def load_first_form(job: dict[str, Any]) -> LoadedForm:
    """Compile, load and attach the first form that this kernel takes. Raises LoadFailure when it takes none."""
    _check_permission()
    try:
        types = _types_of(Path(job["btf"]))
    except btf.BtfError as error:
        raise LoadFailure("btf", str(error)) from error
    try:
        from bcc import BPF  # noqa: PLC0415
    except ImportError as error:
        raise LoadFailure("bcc", f"{sys.executable} cannot import BCC: {error}") from error
    stub_tree(Path(job["scratch"]))
    os.environ["BCC_KERNEL_SOURCE"] = job["scratch"]
    try:
        return _first_form(BPF, types, job)
    finally:
        shutil.rmtree(Path(job["scratch"]) / "include", ignore_errors=True)


def _first_form(compiler: Any, types: btf.Btf, job: dict[str, Any]) -> LoadedForm:
    refused: list[dict[str, Any]] = []
    for form in job["forms"]:
        try:
            built = _try_form(compiler, types, job, form)
        except FormRefused as error:
            refused.append({"form": form["name"], **error.facts})
            continue
        built.message["refused"] = refused
        return built
    raise LoadFailure("refused", "the kernel takes no form of this probe", refused)


@functools.lru_cache(maxsize=1)
def _types_of(blob: Path) -> btf.Btf:
    return btf.Btf.read(blob)


def _check_permission() -> None:
    """A map costs nothing to ask for, and BCC hides the reason when it may not make one."""
    try:
        os.close(bpf.create_map(bpf.HASH, 8, 8, 1))
    except OSError as error:
        kinds = {errno.EPERM: "permission", errno.ENOSYS: "no_bpf", errno.EMFILE: "files", errno.ENFILE: "files"}
        kind = kinds.get(error.errno or 0, "no_map")
        raise LoadFailure(kind, f"bpf(BPF_MAP_CREATE): {error.strerror}") from error


def _try_form(compiler: Any, types: btf.Btf, job: dict[str, Any], form: dict[str, Any]) -> LoadedForm:
    macros = {**job["constants"], **form["constants"], **field_offsets(types, form)}
    programs = [program for program in form["programs"] if not program["needs"] or program["needs"] in macros]
    targets = _attach_targets(types, form, programs)
    started = time.monotonic()
    module = _compile(compiler, [Path(source) for source in job["sources"]], macros)
    compiled = time.monotonic()
    descriptors: list[int] = []
    try:
        maps = [_describe(module, name) for name in (*job["maps"], *form["maps"])]
        for program, target in zip(programs, targets, strict=True):
            code = module.dump_func(program["function"].encode())
            descriptors += _load_and_attach(code, program, target, typed=form["typed"])
    except FormRefused:
        for fd in descriptors:
            os.close(fd)
        module.cleanup()
        raise
    message = {
        "form": form["name"],
        "maps": [description for _, description in maps],
        "programs": [program["name"] for program in programs],
        "compile_s": compiled - started,
        "load_s": time.monotonic() - compiled,
    }
    return LoadedForm(message, [fd for fd, _ in maps] + descriptors, module)


def _compile(compiler: Any, sources: list[Path], macros: dict[str, int]) -> Any:
    """BCC's module. What it writes to standard error, a file that the parent gave, becomes part of the refusal.

    The sources become one text, because BCC translates map operations in the main file only; their own #include lines
    find the guard of what is there already. #line keeps names and numbers in messages true.
    """
    text = "".join(f'#line 1 "{source.name}"\n{source.read_text()}\n' for source in sources)
    flags = ["-w", f"-I{sources[0].parent}", *(f"-D{name}={value}" for name, value in macros.items())]
    log_start = os.lseek(2, 0, os.SEEK_END)
    try:
        return compiler(text=text.encode(), cflags=flags)
    except Exception as error:
        log = os.pread(2, 1 << 20, log_start).decode(errors="replace")
        raise FormRefused("compile", str(error), 0, log) from error


def _describe(module: Any, name: str) -> tuple[int, dict[str, Any]]:
    """Descriptor of a map, and its key and leaf as BCC's parser of the C source saw them."""
    from bcc.libbcc import lib  # noqa: PLC0415

    label = name.encode()
    key, leaf = (json.loads(ask(module.module, label)) for ask in (lib.bpf_table_key_desc, lib.bpf_table_leaf_desc))
    return lib.bpf_table_fd(module.module, label), {"name": name, "key": key, "leaf": leaf}


def _load_and_attach(code: bytes, program: dict[str, Any], target: int, *, typed: bool) -> list[int]:
    """Descriptors of the loaded program and of the link that runs it. Raises FormRefused with the verifier's reason."""
    event, name = program["tracepoint"], program["name"]
    try:
        loaded = bpf.load_program(code=code, name=name, btf_id=target, **_program_type(program, typed=typed))
    except bpf.ProgramRefused as error:
        raise FormRefused(f"load {name}", error.strerror or "", error.errno or 0, error.log) from error
    try:
        return [loaded, _attach(loaded, program, typed=typed)]
    except OSError as error:
        os.close(loaded)
        raise FormRefused(f"attach {name} to {event}", error.strerror or "", error.errno or 0) from error


def _attach_targets(types: btf.Btf, form: dict[str, Any], programs: list[dict[str, Any]]) -> list[int]:
    """Of each program, before anything is compiled. Raises FormRefused where this kernel lacks one, or passes it others."""
    try:
        return [_attach_target(types, program, typed=form["typed"]) for program in programs]
    except btf.BtfError as error:
        raise FormRefused("fields", str(error), errno.ENOENT) from error


def _program_type(program: dict[str, Any], *, typed: bool) -> dict[str, int]:
    if program["iterator"]:
        return {"kind": bpf.TRACING, "attach_type": bpf.TRACE_ITER}
    if not program["at"]:
        return {"kind": bpf.TRACING if typed else bpf.RAW_TRACEPOINT}
    if not typed:
        return {"kind": bpf.KPROBE}
    return {"kind": bpf.TRACING, "attach_type": bpf.TRACE_FEXIT if program["at"] == "return" else bpf.TRACE_FENTRY}


def _attach(loaded: int, program: dict[str, Any], *, typed: bool) -> int:
    """Descriptor of what runs the program as long as it is open. Raises OSError."""
    if program["iterator"]:
        return bpf.attach_iterator(loaded)
    if program["at"] and not typed:
        return perf_event.attach_to_function(loaded, program["tracepoint"], returning=program["at"] == "return")
    return bpf.attach(loaded, None if typed else program["tracepoint"])


def _attach_target(types: btf.Btf, program: dict[str, Any], *, typed: bool) -> int:
    """What a typed program is written for, by its number; 0 for an untyped one, whose tracepoint is named on attaching.

    Raises BtfError where this kernel has no such thing, or one that passes other arguments than the source reads.
    """
    event, wanted, at = program["tracepoint"], tuple(program["arguments"]), program["at"]
    if program["iterator"]:
        return types.function_id(f"bpf_iter_{event}")
    passed = (types.parameters if at else types.arguments)(event) if wanted else ()
    # What a function returns is found behind all of its parameters.
    if wanted != (passed if at == "return" else passed[: len(wanted)]):
        raise btf.BtfError(f"{event} of this kernel passes ({', '.join(passed)}), not ({', '.join(wanted)}, ...)")
    if not typed:
        return 0
    return types.function_id(event) if at else types.typedef_id(f"btf_trace_{event}")


def answer_job(parent: socket.socket, job: dict[str, Any]) -> None:
    """Do one job, send what came of it, and let go of it here."""
    try:
        built = load_first_form(job)
    except LoadFailure as error:
        message = {"error": error.kind, "detail": error.detail, "refused": error.refused}
        parent.send(json.dumps(message).encode())
        return
    socket.send_fds(parent, [json.dumps(built.message).encode()], built.descriptors)
    for fd in built.descriptors[len(built.message["maps"]) :]:
        os.close(fd)
    built.module.cleanup()


def main(descriptor: int, nice: int, scratch: str) -> None:
    """Jobs in, answers out, until nobody asks any more."""
    os.nice(nice)
    try:
        with socket.socket(fileno=descriptor) as parent:
            while request := parent.recv(1 << 20):
                answer_job(parent, json.loads(request))
    except (BrokenPipeError, ConnectionResetError):
        pass  # nobody waits for the answer any more
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    os._exit(0)  # BCC's exit handlers take longer than closing what the kernel closes anyway
