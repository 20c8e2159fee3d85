"""Reads the layout of the running kernel's types from its own BTF, so that no header package is needed.
Standard library only: the compiling child uses it too. The format is Documentation/bpf/btf.rst; a distribution kernel
has about 130,000 types and takes 90 ms. Every walk is bounded: a damaged blob raises BtfError.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

VMLINUX = Path("/sys/kernel/btf/vmlinux")
MAGIC = 0xEB9F
INT, PTR, ARRAY, STRUCT, UNION, ENUM, FWD, TYPEDEF, VOLATILE, CONST, RESTRICT = range(1, 12)
FUNC, FUNC_PROTO, VAR, DATASEC, FLOAT, DECL_TAG, TYPE_TAG, ENUM64 = range(12, 20)
_TRAILER = {INT: 4, ARRAY: 12, VAR: 4, DECL_TAG: 4}
"""Bytes after a type of that kind, once."""
_PER_ITEM = {STRUCT: 12, UNION: 12, ENUM: 8, FUNC_PROTO: 8, DATASEC: 12, ENUM64: 12}
"""Bytes after a type of that kind, for each of its members, values or parameters."""
_ALIASES = frozenset({TYPEDEF, VOLATILE, CONST, RESTRICT, TYPE_TAG})
_SIZED = frozenset({INT, STRUCT, UNION, ENUM, FLOAT, ENUM64})
_TAGS = {STRUCT: "struct", UNION: "union", ENUM: "enum", ENUM64: "enum", FWD: "struct"}
_MAX_CHAIN = 64
"""Maximum length of a chain of aliases and arrays; real ones have fewer than ten links."""
_POINTER_BYTES = 8


class BtfError(Exception):
    """The blob is damaged, or this kernel lacks a type or field; the text says which."""


class BtfField(NamedTuple):
    """Offset and size of a field in bytes; `size` is None for a type without a size, `parts` is true for structs and unions."""

    offset: int
    size: int | None
    parts: bool = False


class BtfBit(NamedTuple):
    """Byte offset of a bitfield of one bit in its struct, and its mask in that byte."""

    offset: int
    mask: int


class _Member(NamedTuple):
    bits: int
    width: int
    """Width of a bitfield in bits; 0 for an ordinary member."""
    number: int
    """Id of the type."""


class _Type(NamedTuple):
    at: int
    kind: int
    items: int
    kind_flag: bool
    size: int
    """Size in bytes, or the id of the type that this one refers to."""


_VOID = _Type(at=0, kind=0, items=0, kind_flag=False, size=0)


class Btf:
    """One parsed blob. Only positions are stored; types are decoded on demand."""

    def __init__(self, blob: bytes) -> None:
        self._blob = blob
        if len(blob) < 24:
            raise BtfError(f"BTF of {len(blob)} bytes is shorter than its header")
        magic, _, _, header, type_off, type_len, text_off, text_len = struct.unpack_from("=HBBIIIII", blob)
        if magic != MAGIC:
            raise BtfError(f"BTF begins with {magic:#06x}, not with {MAGIC:#06x}: not BTF, or of the other byte order")
        self._text, self._text_end = header + text_off, header + text_off + text_len
        types_end = header + type_off + type_len
        if header < 24 or self._text_end > len(blob) or types_end > len(blob):
            raise BtfError(f"BTF header describes more than the {len(blob)} bytes of the blob")
        self._positions = array("L", [0])
        self._named: dict[tuple[int, int], list[int]] = {}
        self._index(header + type_off, types_end)

    @classmethod
    def read(cls, path: Path = VMLINUX) -> Btf:
        """Read the kernel's own types. Raises BtfError if the file is missing or damaged."""
        try:
            return cls(path.read_bytes())
        except OSError as error:
            raise BtfError(f"{path}: {error.strerror}") from error

    def _index(self, at: int, end: int) -> None:
        unpack, blob, named, positions = struct.Struct("=II").unpack_from, self._blob, self._named, self._positions
        while at < end:
            if at + 12 > end:
                raise BtfError(f"BTF type {len(positions)} at byte {at} is cut off")
            name, info = unpack(blob, at)
            kind = info >> 24 & 0x1F
            if not INT <= kind <= ENUM64:
                raise BtfError(f"BTF type {len(positions)} at byte {at} has the unknown kind {kind}")
            if name and kind in (STRUCT, UNION, TYPEDEF):
                named.setdefault((kind, name), []).append(len(positions))
            positions.append(at)
            at += 12 + (_TRAILER.get(kind) or _PER_ITEM.get(kind, 0) * (info & 0xFFFF))
        if at > end:
            raise BtfError(f"BTF type {len(positions) - 1} is cut off")

    def type_ids(self, kind: int, name: str) -> list[int]:
        """Return the ids of types by kind (STRUCT, UNION or TYPEDEF) and name; several if compilation units differ."""
        return [number for label in self._labels(name) for number in self._named.get((kind, label), [])]

    def _labels(self, name: str) -> Iterator[int]:
        """Yield the offsets of this name in the string section."""
        needle = b"\0" + name.encode() + b"\0"
        at = self._blob.find(needle, self._text, self._text_end)
        while at >= 0:
            yield at + 1 - self._text
            at = self._blob.find(needle, at + 1, self._text_end)

    def typedef_id(self, name: str) -> int:
        """Return the id of a typedef, such as `btf_trace_sched_switch`. Raises BtfError if the kernel has none."""
        for number in self.type_ids(TYPEDEF, name):
            return number
        raise BtfError(f"this kernel's BTF has no typedef {name}")

    def function_id(self, name: str) -> int:
        """Return the id of a function, such as `bpf_iter_task`. Raises BtfError if the kernel has none."""
        for number, _ in self._scan(FUNC, name):
            return number
        raise BtfError(f"this kernel's BTF has no function {name}")

    def per_cpu_offset(self, name: str, size: int = 0) -> int:
        """Return the offset of a per-CPU variable of `size` bytes (0: any size) in the per-CPU section.

        The distance between two variables is the same on every CPU. Raises BtfError if this kernel has none.
        """
        variables = {number for number, target in self._scan(VAR, name) if self._size(target) == size or not size}
        for number, _ in self._scan(DATASEC, ".data..percpu"):
            section = self._type(number)
            start = section.at + 12
            for variable, offset, _ in struct.iter_unpack("=III", self._blob[start : start + 12 * section.items]):
                if variable in variables:
                    return int(offset)
        raise BtfError(f"this kernel's BTF has no per-CPU variable {name}" + (f" of {size} bytes" if size else ""))

    def _scan(self, kind: int, name: str) -> Iterator[tuple[int, int]]:
        """Yield ids of types of a rarely requested kind, and the ids that they refer to.

        An index is not worth its memory: every second type is a function.
        """
        labels = set(self._labels(name))
        unpack, blob = struct.Struct("=III").unpack_from, self._blob
        for number in range(1, len(self._positions)):
            label, info, target = unpack(blob, self._positions[number])
            if label in labels and info >> 24 & 0x1F == kind:
                yield number, target

    def arguments(self, tracepoint: str) -> tuple[str, ...]:
        """Return the argument types of a tracepoint without typedefs and qualifiers: `s32`, `u64`, `struct task_struct *`.

        Raises BtfError if this kernel has no such tracepoint.
        """
        pointer = self._type(self._strip(self.typedef_id(f"btf_trace_{tracepoint}")))
        function = self._type(self._strip(pointer.size)) if pointer.kind == PTR else _VOID
        if function.kind != FUNC_PROTO:
            raise BtfError(f"btf_trace_{tracepoint} of this kernel's BTF is not a pointer to a function")
        return self._parameters(function)[1:]  # the first is the data pointer of the registered callback

    def parameters(self, function: str) -> tuple[str, ...]:
        """Return the parameter types of a kernel function, as `arguments`. Raises BtfError if the kernel has none."""
        prototype = self._type(self._strip(self._type(self.function_id(function)).size))
        if prototype.kind != FUNC_PROTO:
            raise BtfError(f"{function} of this kernel's BTF is no function")
        return self._parameters(prototype)

    def _parameters(self, function: _Type) -> tuple[str, ...]:
        start = function.at + 12
        numbers = [number for _, number in struct.iter_unpack("=II", self._blob[start : start + 8 * function.items])]
        return tuple(self._type_text(number) for number in numbers)

    def _type_text(self, number: int) -> str:
        stars = ""
        for _ in range(_MAX_CHAIN):
            target = self._type(self._strip(number))
            if target.kind != PTR:
                return self._base_name(target) + (f" {stars}" if stars else "")
            number, stars = target.size, stars + "*"
        raise BtfError(f"BTF type {number} is a chain without an end")

    def _base_name(self, target: _Type) -> str:
        if target.kind == INT:
            encoding = int(struct.unpack_from("=I", self._blob, target.at + 12)[0])
            return f"{'s' if encoding >> 24 & 1 else 'u'}{target.size * 8}"
        if target.kind not in _TAGS:
            return "void" if target.kind == 0 else f"kind {target.kind}"
        return f"{_TAGS[target.kind]} {self._string(struct.unpack_from('=I', self._blob, target.at)[0])}"

    def field(self, struct_name: str, path: str) -> BtfField:
        """Return offset and size of a member, with dots for nested ones: `field("task_struct", "se.cfs_rq")`.

        Members of anonymous structs and unions are found as in C. Raises BtfError for a bitfield, which has no byte offset,
        and if this kernel lacks the struct or member.
        """
        member = self._find(struct_name, path, bitfield=False)
        kind = self._type(self._strip(member.number)).kind
        return BtfField(member.bits // 8, self._size(member.number), kind in (STRUCT, UNION))

    def bit(self, struct_name: str, path: str) -> BtfBit:
        """Return byte and mask of a bitfield of one bit. Raises BtfError if it is missing, or wider."""
        member = self._find(struct_name, path, bitfield=True)
        offset, bit = divmod(member.bits, 8)
        return BtfBit(offset, 1 << bit if sys.byteorder == "little" else 0x80 >> bit)

    def _find(self, struct_name: str, path: str, *, bitfield: bool) -> _Member:
        ids = self.type_ids(STRUCT, struct_name) + self.type_ids(UNION, struct_name)
        if not ids:
            raise BtfError(f"this kernel's BTF has no struct {struct_name}")
        problem = BtfError("")
        for number in ids:
            try:
                member = self._resolve(number, struct_name, path)
            except BtfError as error:
                problem = error
                continue
            if bitfield and member.width != 1:
                problem = BtfError(f"struct {struct_name}: {path} is no bitfield of one bit")
            elif not bitfield and (member.width or member.bits % 8):
                problem = BtfError(f"struct {struct_name}: {path} is a bitfield and has no offset in bytes")
            else:
                return member
        raise problem

    def _resolve(self, number: int, struct_name: str, path: str) -> _Member:
        bits, width = 0, 0
        for part in path.split("."):
            hit = self._member(self._strip(number), part)
            if hit is None:
                raise BtfError(f"struct {struct_name} of this kernel has no member {path}")
            number, offset, width = hit.number, hit.bits, hit.width
            bits += offset
        return _Member(bits, width, number)

    def _member(self, number: int, name: str) -> _Member | None:
        """Return a member with its offset in bits; None if there is no such member."""
        visited, todo = {number}, [(number, 0)]
        while todo:
            number, base = todo.pop()
            outer = self._type(number)
            if outer.kind not in (STRUCT, UNION):
                continue
            for at in range(outer.at + 12, outer.at + 12 + 12 * outer.items, 12):
                label, inner, where = struct.unpack_from("=III", self._blob, at)
                offset, width = (where & 0xFFFFFF, where >> 24) if outer.kind_flag else (where, None)
                if label and self._string(label) == name:
                    return _Member(base + offset, self._old_width(inner) if width is None else width, inner)
                if not label and (inner := self._strip(inner)) not in visited:
                    visited.add(inner)
                    todo.append((inner, base + offset))
        return None

    def _old_width(self, number: int) -> int:
        """Return the width of a bitfield in the old encoding, whose integer type is narrow; 0 for an ordinary member."""
        kind = self._type(self._strip(number))
        if kind.kind != INT:
            return 0
        encoding = int(struct.unpack_from("=I", self._blob, kind.at + 12)[0])
        bits = encoding & 0xFF
        return bits if bits != kind.size * 8 or encoding >> 16 & 0xFF else 0

    def _size(self, number: int) -> int | None:
        elements = 1
        for _ in range(_MAX_CHAIN):
            target = self._type(number)
            if target.kind == PTR:
                return elements * _POINTER_BYTES
            if target.kind in _SIZED:
                return elements * target.size
            if target.kind == ARRAY:
                number, _, length = struct.unpack_from("=III", self._blob, target.at + 12)
                elements *= length
            elif target.kind in _ALIASES:
                number = target.size
            else:
                return None
        raise BtfError(f"BTF type {number} is a chain without an end")

    def _strip(self, number: int) -> int:
        """Return the type without typedef, const, volatile, restrict and type tags."""
        for _ in range(_MAX_CHAIN):
            target = self._type(number)
            if target.kind not in _ALIASES:
                return number
            number = target.size
        raise BtfError(f"BTF type {number} is a chain without an end")

    def _type(self, number: int) -> _Type:
        if number == 0:
            return _VOID
        if number >= len(self._positions):
            raise BtfError(f"BTF refers to type {number} of {len(self._positions) - 1}")
        at = self._positions[number]
        _, info, size = struct.unpack_from("=III", self._blob, at)
        return _Type(at, info >> 24 & 0x1F, info & 0xFFFF, bool(info >> 31), size)

    def _string(self, offset: int) -> str:
        start = self._text + offset
        end = self._blob.find(b"\0", start, self._text_end)
        if start >= self._text_end or end < 0:
            raise BtfError(f"BTF name at {offset} lies outside its string section")
        return self._blob[start:end].decode(errors="replace")
