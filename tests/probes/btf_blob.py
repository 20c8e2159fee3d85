"""Builds small BTF blobs type by type, for tests of the reader."""

from __future__ import annotations

import struct

from probes import btf


class Blob:
    """A blob whose types are numbered from 1 in the order of their addition; every method returns the type's number."""

    def __init__(self) -> None:
        self._types: list[bytes] = []
        self._text = b"\0"

    def _name(self, name: str) -> int:
        if not name:
            return 0
        offset = len(self._text)
        self._text += name.encode() + b"\0"
        return offset

    def add(self, kind: int, name: str, size: int, extra: bytes = b"", *, items: int = 0, flag: bool = False) -> int:
        info = items | kind << 24 | int(flag) << 31
        self._types.append(struct.pack("=III", self._name(name), info, size) + extra)
        return len(self._types)

    def integer(self, name: str, size: int, bits: int | None = None, *, signed: bool = False) -> int:
        encoding = int(signed) << 24 | (size * 8 if bits is None else bits)
        return self.add(btf.INT, name, size, struct.pack("=I", encoding))

    def alias(self, kind: int, name: str, target: int) -> int:
        return self.add(kind, name, target)

    def array(self, element: int, length: int) -> int:
        return self.add(btf.ARRAY, "", 0, struct.pack("=III", element, element, length))

    def function(self, parameters: list[int]) -> int:
        """Add a function type without a result."""
        extra = b"".join(struct.pack("=II", 0, number) for number in parameters)
        return self.add(btf.FUNC_PROTO, "", 0, extra, items=len(parameters))

    def variable(self, name: str, target: int) -> int:
        return self.add(btf.VAR, name, target, struct.pack("=I", 1))

    def section(self, name: str, variables: list[tuple[int, int, int]]) -> int:
        """Add a section; variables are (number, offset, size)."""
        extra = b"".join(struct.pack("=III", *variable) for variable in variables)
        return self.add(btf.DATASEC, name, 0, extra, items=len(variables))

    def struct(
        self, name: str, size: int, members: list[tuple[str, int, int]], *, flag: bool = False, kind: int = btf.STRUCT
    ) -> int:
        """Add a struct; members are (name, type, offset in bits), with `flag` the offset's top byte is a bitfield's width."""
        extra = b"".join(struct.pack("=III", self._name(label), number, where) for label, number, where in members)
        return self.add(kind, name, size, extra, items=len(members), flag=flag)

    def bytes(self) -> bytes:
        types = b"".join(self._types)
        header = struct.pack("=HBBIIIII", btf.MAGIC, 1, 0, 24, 0, len(types), len(types), len(self._text))
        return header + types + self._text


def sample() -> bytes:
    """Return a blob with `struct task`: a nested struct, an anonymous union, bitfields of both encodings, qualifiers."""
    blob = Blob()
    u64, u32 = blob.integer("u64", 8), blob.integer("u32", 4)
    tag = blob.alias(btf.TYPE_TAG, "rcu", u64)
    const = blob.alias(btf.CONST, "", tag)
    volatile = blob.alias(btf.VOLATILE, "", const)
    stamp = blob.alias(btf.TYPEDEF, "stamp_t", volatile)
    restrict = blob.alias(btf.RESTRICT, "", stamp)
    info = blob.struct("sched_info", 16, [("runs", u64, 0), ("queued", restrict, 64)])
    info_t = blob.alias(btf.TYPEDEF, "info_t", info)
    inner = blob.struct("", 8, [("left", u32, 0), ("right", u32, 32)])
    either = blob.struct("", 8, [("", inner, 0), ("whole", u64, 0)], kind=btf.UNION)
    pointer = blob.alias(btf.PTR, "", info)
    name = blob.array(u32, 4)
    narrow = blob.integer("u32", 4, bits=3)
    blob.struct("old", 4, [("flag", narrow, 0), ("plain", u32, 0)])
    members = [
        ("info", info_t, 64), ("", either, 192), ("next", pointer, 256), ("name", name, 320),
        ("bits", u32, 448 | 3 << 24), ("after", u32, 480),
    ]  # fmt: skip
    blob.struct("task", 64, members, flag=True)
    blob.struct("rq", 8, [("nothing", u64, 0)])
    blob.struct("rq", 16, [("nothing", u64, 0), ("clock", u64, 64)])
    blob.alias(btf.TYPEDEF, "btf_trace_switch", pointer)
    proto = blob.function([pointer, u32, pointer])
    blob.alias(btf.TYPEDEF, "btf_trace_wakeup", blob.alias(btf.PTR, "", proto))
    blob.alias(btf.FUNC, "bpf_iter_task", proto)
    depth, hot = blob.variable("depth", u32), blob.variable("hot", info)
    blob.variable("lonely", u32)
    blob.section(".data..percpu", [(depth, 0x40, 4), (hot, 0x180, 16)])
    return blob.bytes()
