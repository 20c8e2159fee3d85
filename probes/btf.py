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
"""Bytes behind a type of that kind, once."""
_PER_ITEM = {STRUCT: 12, UNION: 12, ENUM: 8, FUNC_PROTO: 8, DATASEC: 12, ENUM64: 12}
"""Bytes behind a type of that kind, for each of its members, values or parameters."""
_ALIASES = frozenset({TYPEDEF, VOLATILE, CONST, RESTRICT, TYPE_TAG})
_SIZED = frozenset({INT, STRUCT, UNION, ENUM, FLOAT, ENUM64})
_TAGS = {STRUCT: "struct", UNION: "union", ENUM: "enum", ENUM64: "enum", FWD: "struct"}
_MAX_CHAIN = 64
"""Longest chain of aliases and arrays that is followed; real ones have fewer than ten links."""
_POINTER_BYTES = 8


class BtfError(Exception):
    """The blob is damaged, or this kernel has no such type or field; the text says which."""


class BtfField(NamedTuple):
    """Where a field lies in its struct, in bytes; `size` is None for a type without one (a flexible function type), and
    `parts` tells whether it is a struct or union of its own."""

    offset: int
    size: int | None
    parts: bool = False


class BtfBit(NamedTuple):
    """Where a bitfield of one bit lies: the byte in its struct, and the bit of that byte as a mask."""

    offset: int
    mask: int


class _Member(NamedTuple):
    bits: int
    width: int
    """Of a bitfield; 0 for an ordinary member."""
    number: int
    """Its type."""


class _Type(NamedTuple):
    at: int
    kind: int
    items: int
    kind_flag: bool
    size: int
    """Or the number of the type that this one stands for."""


_VOID = _Type(at=0, kind=0, items=0, kind_flag=False, size=0)


class Btf:
    """One parsed blob. Only positions are kept; types are decoded when asked for."""

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
            raise BtfError(f"BTF header promises more than the {len(blob)} bytes that are there")
        self._positions = array("L", [0])
        self._named: dict[tuple[int, int], list[int]] = {}
        self._index(header + type_off, types_end)

    @classmethod
    def read(cls, path: Path = VMLINUX) -> Btf:
        """The kernel's own types. Raises BtfError where the file is missing or damaged."""
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
                raise BtfError(f"BTF type {len(positions)} at byte {at} is of kind {kind}, which is not known")
            if name and kind in (STRUCT, UNION, TYPEDEF):
                named.setdefault((kind, name), []).append(len(positions))
            positions.append(at)
            at += 12 + (_TRAILER.get(kind) or _PER_ITEM.get(kind, 0) * (info & 0xFFFF))
        if at > end:
            raise BtfError(f"BTF type {len(positions) - 1} is cut off")

    def type_ids(self, kind: int, name: str) -> list[int]:
        """Numbers of the types of that kind (STRUCT, UNION or TYPEDEF) and name; several where compilation units differ."""
        return [number for label in self._labels(name) for number in self._named.get((kind, label), [])]

    def _labels(self, name: str) -> Iterator[int]:
        """Where the string section has this name."""
        wanted = b"\0" + name.encode() + b"\0"
        at = self._blob.find(wanted, self._text, self._text_end)
        while at >= 0:
            yield at + 1 - self._text
            at = self._blob.find(wanted, at + 1, self._text_end)

    def typedef_id(self, name: str) -> int:
        """Number of a typedef, such as `btf_trace_sched_switch`. Raises BtfError where the kernel has none."""
        for number in self.type_ids(TYPEDEF, name):
            return number
        raise BtfError(f"this kernel's BTF has no typedef {name}")

    def function_id(self, name: str) -> int:
        """Number of a function, such as `bpf_iter_task`. Raises BtfError where the kernel has none."""
        for number, _ in self._looked_through(FUNC, name):
            return number
        raise BtfError(f"this kernel's BTF has no function {name}")

    def per_cpu_offset(self, name: str, size: int = 0) -> int:
        """Where a variable of that many bytes, or of any size for 0, lies among those that every CPU has a copy of: the
        distance between two of them is the same on every CPU. Raises BtfError where this kernel has none."""
        variables = {
            number for number, target in self._looked_through(VAR, name) if self._size(target) == size or not size
        }
        for number, _ in self._looked_through(DATASEC, ".data..percpu"):
            section = self._type(number)
            start = section.at + 12
            for variable, offset, _ in struct.iter_unpack("=III", self._blob[start : start + 12 * section.items]):
                if variable in variables:
                    return int(offset)
        raise BtfError(f"this kernel's BTF has no per-CPU variable {name}" + (f" of {size} bytes" if size else ""))

    def _looked_through(self, kind: int, name: str) -> Iterator[tuple[int, int]]:
        """Types of a kind that is hardly ever asked for, which is not worth an index (functions are every second type):
        their numbers, and those of the types that they refer to."""
        labels = set(self._labels(name))
        unpack, blob = struct.Struct("=III").unpack_from, self._blob
        for number in range(1, len(self._positions)):
            label, info, target = unpack(blob, self._positions[number])
            if label in labels and info >> 24 & 0x1F == kind:
                yield number, target

    def arguments(self, tracepoint: str) -> tuple[str, ...]:
        """What a tracepoint passes: `s32`, `u64`, `struct task_struct *`, behind typedefs and qualifiers.

        Raises BtfError where this kernel has no such tracepoint.
        """
        pointer = self._type(self._strip(self.typedef_id(f"btf_trace_{tracepoint}")))
        function = self._type(self._strip(pointer.size)) if pointer.kind == PTR else _VOID
        if function.kind != FUNC_PROTO:
            raise BtfError(f"btf_trace_{tracepoint} of this kernel's BTF is not a pointer to a function")
        return self._parameters(function)[1:]  # the first is whatever the program registered

    def parameters(self, function: str) -> tuple[str, ...]:
        """What a function of the kernel is passed, spelled as `arguments` does. Raises BtfError where the kernel has none."""
        found = self._type(self._strip(self._type(self.function_id(function)).size))
        if found.kind != FUNC_PROTO:
            raise BtfError(f"{function} of this kernel's BTF is no function")
        return self._parameters(found)

    def _parameters(self, function: _Type) -> tuple[str, ...]:
        start = function.at + 12
        numbers = [number for _, number in struct.iter_unpack("=II", self._blob[start : start + 8 * function.items])]
        return tuple(self._spelled(number) for number in numbers)

    def _spelled(self, number: int) -> str:
        stars = ""
        for _ in range(_MAX_CHAIN):
            found = self._type(self._strip(number))
            if found.kind != PTR:
                return self._base_name(found) + (f" {stars}" if stars else "")
            number, stars = found.size, stars + "*"
        raise BtfError(f"BTF type {number} is a chain without an end")

    def _base_name(self, found: _Type) -> str:
        if found.kind == INT:
            encoding = int(struct.unpack_from("=I", self._blob, found.at + 12)[0])
            return f"{'s' if encoding >> 24 & 1 else 'u'}{found.size * 8}"
        if found.kind not in _TAGS:
            return "void" if found.kind == 0 else f"kind {found.kind}"
        return f"{_TAGS[found.kind]} {self._string(struct.unpack_from('=I', self._blob, found.at)[0])}"

    def field(self, struct_name: str, path: str) -> BtfField:
        """Offset and size of a member, nested ones with dots: `field("task_struct", "se.cfs_rq")`.

        Members of anonymous structs and unions are found as C finds them. Raises BtfError for a bitfield, which has no
        byte offset, and where this kernel has no such struct or member.
        """
        found = self._found(struct_name, path, bitfield=False)
        kind = self._type(self._strip(found.number)).kind
        return BtfField(found.bits // 8, self._size(found.number), kind in (STRUCT, UNION))

    def bit(self, struct_name: str, path: str) -> BtfBit:
        """Place of a bitfield of one bit. Raises BtfError where this kernel has no such struct or member, or a wider one."""
        found = self._found(struct_name, path, bitfield=True)
        offset, bit = divmod(found.bits, 8)
        return BtfBit(offset, 1 << bit if sys.byteorder == "little" else 0x80 >> bit)

    def _found(self, struct_name: str, path: str, *, bitfield: bool) -> _Member:
        ids = self.type_ids(STRUCT, struct_name) + self.type_ids(UNION, struct_name)
        if not ids:
            raise BtfError(f"this kernel's BTF has no struct {struct_name}")
        problem = BtfError("")
        for number in ids:
            try:
                found = self._resolve(number, struct_name, path)
            except BtfError as error:
                problem = error
                continue
            if bitfield and found.width != 1:
                problem = BtfError(f"struct {struct_name}: {path} is no bitfield of one bit")
            elif not bitfield and (found.width or found.bits % 8):
                problem = BtfError(f"struct {struct_name}: {path} is a bitfield and has no offset in bytes")
            else:
                return found
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
        """A member and its place in bits; None where there is no such member."""
        seen, todo = {number}, [(number, 0)]
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
                if not label and (inner := self._strip(inner)) not in seen:
                    seen.add(inner)
                    todo.append((inner, base + offset))
        return None

    def _old_width(self, number: int) -> int:
        """Bits of a bitfield of the old encoding, where the integer type itself is narrow; 0 for an ordinary member."""
        kind = self._type(self._strip(number))
        if kind.kind != INT:
            return 0
        encoding = int(struct.unpack_from("=I", self._blob, kind.at + 12)[0])
        bits = encoding & 0xFF
        return bits if bits != kind.size * 8 or encoding >> 16 & 0xFF else 0

    def _size(self, number: int) -> int | None:
        elements = 1
        for _ in range(_MAX_CHAIN):
            found = self._type(number)
            if found.kind == PTR:
                return elements * _POINTER_BYTES
            if found.kind in _SIZED:
                return elements * found.size
            if found.kind == ARRAY:
                number, _, length = struct.unpack_from("=III", self._blob, found.at + 12)
                elements *= length
            elif found.kind in _ALIASES:
                number = found.size
            else:
                return None
        raise BtfError(f"BTF type {number} is a chain without an end")

    def _strip(self, number: int) -> int:
        """The type behind typedef, const, volatile, restrict and type tags."""
        for _ in range(_MAX_CHAIN):
            found = self._type(number)
            if found.kind not in _ALIASES:
                return number
            number = found.size
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
