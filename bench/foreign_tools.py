"""The run-queue tools of bcc and bpftrace, as Debian ships them, made to run on a kernel without header packages."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from probes.btf import Btf
from probes.compiler import stub_tree

BPFTRACE_TOOL = Path("/usr/sbin/runqlat.bt")
BCC_TOOL = "runqlat-bpfcc"
_SCHED_H = """#pragma once
#include <linux/types.h>
#define TASK_RUNNING 0
enum {{ PIDTYPE_PID }};
struct rq;
struct ns_common {{ char before_inum[{ns_common_inum}]; unsigned int inum; }};
struct pid_namespace {{ char before_ns[{pid_namespace_ns}]; struct ns_common ns; }};
struct upid {{ int nr; struct pid_namespace *ns; }};
struct pid {{
  union {{
    struct {{ char before_level[{pid_level}]; unsigned int level; }};
    struct {{ char before_numbers[{pid_numbers}]; struct upid numbers[1]; }};
  }};
}};
struct task_struct {{
  union {{
    struct {{ char before_pid[{task_struct_pid}]; int pid; }};
    struct {{ char before_tgid[{task_struct_tgid}]; int tgid; }};
    struct {{ char before_state[{task_struct___state}]; unsigned int __state; }};
    struct {{ char before_thread_pid[{task_struct_thread_pid}]; struct pid *thread_pid; }};
  }};
}};
"""
_FIELDS = (
    ("ns_common", "inum"), ("pid_namespace", "ns"), ("pid", "level"), ("pid", "numbers"),
    ("task_struct", "pid"), ("task_struct", "tgid"), ("task_struct", "__state"), ("task_struct", "thread_pid"),
)  # fmt: skip


def bcc_headers(root: Path) -> Path:
    """A header tree with the few structs that bcc's runqlat uses, laid out as in the running kernel."""
    types = Btf.read()
    stub_tree(root)
    for name in ("linux/nsproxy.h", "linux/pid_namespace.h", "linux/init_task.h", "uapi/linux/ptrace.h"):
        (root / "include" / name).write_text("")
    offsets = {f"{struct}_{member}": types.field(struct, member).offset for struct, member in _FIELDS}
    (root / "include/linux/sched.h").write_text(_SCHED_H.format(**offsets))
    return root


def bpftrace_program(path: Path) -> Path:
    """bpftrace's runqlat.bt without the header that defines TASK_RUNNING, which is 0."""
    if not BPFTRACE_TOOL.exists() or shutil.which(BCC_TOOL) is None:
        raise SystemExit("the tools to compare with are missing: apt-get install bpftrace bpfcc-tools")
    path.write_text(BPFTRACE_TOOL.read_text().replace("#include <linux/sched.h>", "#define TASK_RUNNING 0"))
    return path


def without_headers() -> str:
    """What bcc's tool says when it is run as it is."""
    env = {name: value for name, value in os.environ.items() if name != "BCC_KERNEL_SOURCE"}
    command = [BCC_TOOL, "1", "1"]
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, env=env)
    said = [line for line in run.stdout.splitlines() if "kernel headers" in line]
    return said[0].split(". ")[0] + "." if said else "it runs."


def tool_versions() -> str:
    """Debian's versions of both tools."""
    query = ["dpkg-query", "--show", "--showformat=${Package} ${Version}, ", "bpfcc-tools", "bpftrace"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.rstrip(", ")
