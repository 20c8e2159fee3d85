"""A recording of rounds: bounded files that describe themselves, written as rounds come, read back exactly.

A recording is a directory of segments, `00000042.dioptase`, the oldest of which goes when the whole grows too large. A
segment is a line of JSON that says what follows (`Header`), and records, each by itself:

    4 bytes   mark, by which a reader finds the next record after a damaged one
    4 bytes   length of the payload, little-endian
    4 bytes   CRC-32 of the payload
    1 byte    bit 0: names are spelled out (`_spelled`), because one of them is not UTF-8; bit 1: only what changed
    payload   zlib of MessagePack of one round, fields by name; the round before it is left out, being the record before

Most facts of most cgroups do not change within a second, so a record holds what differs from the record before it, and
every `KEY_EVERY`th one the whole round. A record that was cut short or damaged costs itself and those up to the next whole
one: readers report that and go on. The writer never continues a file that an earlier agent left.
"""

from __future__ import annotations

import errno
import logging
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from api.decisions import Round
from exporters.regular import open_regular

log = logging.getLogger(__name__)

FORMAT, VERSION = "dioptase-recording", 1
SUFFIX = ".dioptase"
MARK = b"\xd1\x0b\x7a\x5e"
FRAME = struct.Struct("<4sIIB")
LEVEL = 1
"""zlib's fastest: 6 makes records a tenth smaller for four times the time."""
LARGEST_ROUND = 1 << 25
"""Bytes of MessagePack. 4,096 cgroups, the most that an agent looks at unless told otherwise, need 12 MB; whoever means harm
makes 75 bytes of objects of every byte."""
MOST_IN_VAIN = 4
"""Times the length of a segment that is added up for records whose sum is wrong: whoever wrote them meant to keep us busy."""
SPELLED, DELTA = 1, 2
KEY_EVERY = 60
_SPELLED_MARK = "\0"
ROUND_REST = frozenset({"snapshot", "previous"})
SNAPSHOT_REST = frozenset({"node", "cgroups"})
Damage = Callable[[Path, str], None]


def _logged(path: Path, what: str) -> None:
    log.warning("%s: %s", path, what)


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """First line of a segment."""

    format: str = FORMAT
    version: int = VERSION
    product: str
    boot_id: str
    began_ns: int
    """CLOCK_REALTIME."""
    record: str = (
        "13 bytes of frame (mark, length, CRC-32, flags), then zlib of MessagePack; flags: 1 names that begin with NUL are "
        "hexadecimal; 2 only what changed since the record before, else a Round"
    )
    fields: Any = None
    """JSON Schema of a Round."""


class NotARecording(Exception):
    """The path is no recording, or one of a version that this program does not read."""


def header(product: str, boot_id: str, began_ns: int) -> bytes:
    """The line that a segment begins with."""
    schema = msgspec.json.schema(Round)
    return msgspec.json.encode(Header(product=product, boot_id=boot_id, began_ns=began_ns, fields=schema)) + b"\n"


def pack(finished: Round, base: Round | None = None) -> bytes:
    """One round as a record, frame included; with a base, which must be the record before it, only what changed.

    Raises OSError (EFBIG) where it is too large to be read back.
    """
    document: Any = msgspec.structs.replace(finished, previous=None)
    flags = 0
    if base is not None:
        document, flags = _difference(base, finished), DELTA
    try:
        text = msgspec.msgpack.encode(document)
    except UnicodeEncodeError:
        flags |= SPELLED
        text = msgspec.msgpack.encode(_each_text(msgspec.to_builtins(document), _spelled))
    if len(text) > LARGEST_ROUND:
        raise OSError(errno.EFBIG, f"a round has {len(text)} bytes, and recordings take {LARGEST_ROUND}")
    payload = zlib.compress(text, LEVEL)
    return FRAME.pack(MARK, len(payload), zlib.crc32(payload), flags) + payload


class Unpacker:
    """Turns the records of one segment into rounds, in order; it remembers the record before, which most build on."""

    def __init__(self) -> None:
        self._whole: dict[str, Any] | None = None

    def unpack(self, payload: bytes, flags: int) -> Round:
        """The round in a record, without the one before it. Raises ValueError where it is none."""
        try:
            document = msgspec.msgpack.decode(_decompressed(payload), strict=False)
            if flags & SPELLED:
                document = _each_text(document, _as_it_was)
            if flags & DELTA:
                document = _together(self._whole, msgspec.convert(document, Difference))
            finished = msgspec.convert(document, Round)
        except (zlib.error, msgspec.DecodeError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(str(error)) from error
        self._whole = document
        return finished


def _decompressed(payload: bytes) -> bytes:
    """Raises ValueError and zlib.error; a few kilobytes may claim to be gigabytes."""
    unpacking = zlib.decompressobj()
    text = unpacking.decompress(payload, LARGEST_ROUND + 1)
    if len(text) > LARGEST_ROUND:
        raise ValueError(f"it has more than {LARGEST_ROUND} bytes")
    if not unpacking.eof:
        raise ValueError("it is cut short")
    return text


class Difference(msgspec.Struct, forbid_unknown_fields=True):
    """What a record holds that is not whole: fields by name where they changed, and cgroups that are new as a whole."""

    after: int
    """`seq` of the record that this one builds on."""
    round: dict[str, Any]
    snapshot: dict[str, Any]
    node: dict[str, Any]
    cgroups: dict[str, Any]
    gone: list[str]


def _difference(base: Round, finished: Round) -> Difference:
    before, now = base.snapshot, finished.snapshot
    cgroups: dict[str, Any] = {}
    for path, sample in now.cgroups.items():
        earlier = before.cgroups.get(path)
        if earlier is None or earlier.id != sample.id or earlier.path != sample.path:
            cgroups[path] = sample
        elif changes := _changed(earlier, sample):
            cgroups[path] = changes
    return Difference(
        after=before.seq,
        round=_changed(base, finished, ROUND_REST),
        snapshot=_changed(before, now, SNAPSHOT_REST),
        node=_changed(before.node, now.node),
        cgroups=cgroups,
        gone=[path for path in before.cgroups if path not in now.cgroups],
    )


def _changed(before: msgspec.Struct, now: msgspec.Struct, rest: frozenset[str] = frozenset()) -> dict[str, Any]:
    return {
        name: value
        for name in now.__struct_fields__
        if name not in rest and (value := getattr(now, name)) != getattr(before, name)
    }


def _together(whole: dict[str, Any] | None, difference: Difference) -> dict[str, Any]:
    if whole is None or whole["snapshot"]["seq"] != difference.after:
        raise ValueError(f"it builds on round {difference.after}, which is missing")
    before = whole["snapshot"]
    gone = set(difference.gone)
    cgroups = {path: fields for path, fields in before["cgroups"].items() if path not in gone}
    for path, fields in difference.cgroups.items():
        cgroups[path] = fields if "path" in fields else {**cgroups[path], **fields}
    snapshot = {**before, **difference.snapshot, "node": {**before["node"], **difference.node}, "cgroups": cgroups}
    return {**whole, **difference.round, "snapshot": snapshot}


def segments(path: Path) -> list[Path]:
    """The files of a recording, oldest first; of a single file that file."""
    if not path.is_dir():
        return [path]
    return sorted((file for file in path.iterdir() if number_of(file) is not None), key=lambda file: int(file.stem))


def number_of(path: Path) -> int | None:
    """Of a segment by its name, which is also what may be deleted to make room; None of anything else."""
    digits = path.stem
    named = path.suffix == SUFFIX and digits.isascii() and digits.isdigit() and digits == f"{int(digits):08d}"
    return int(digits) if named else None


def read(path: Path, damage: Damage = _logged) -> Iterator[Round]:
    """Every round of a recording, oldest first, each with the one before it where that was recorded too.

    `damage` is told of every place that could not be read, file and reason; else it is logged. Raises NotARecording and
    OSError.
    """
    before: Round | None = None
    found = segments(path)
    if not found:
        raise NotARecording(f"{path}: no recording is there: it would have files such as 00000001{SUFFIX}")
    for segment in found:
        for finished in _read_segment(segment, damage, alone=len(found) == 1):
            follows = before is not None and before.snapshot.seq + 1 == finished.snapshot.seq
            same_boot = before is not None and before.snapshot.boot_id == finished.snapshot.boot_id
            previous = before.snapshot if before is not None and follows and same_boot else None
            yield msgspec.structs.replace(finished, previous=previous)
            before = finished


def _read_segment(path: Path, damage: Damage, *, alone: bool) -> Iterator[Round]:
    """Rounds of one file; one of many that cannot be read, or was rotated away meanwhile, keeps nobody from the others."""
    try:
        with open_regular(path) as file:
            line = file.readline(1 << 20)
            _check_header(path, line)
            text = file.read()
    except (NotARecording, OSError) as error:
        if alone:
            raise
        damage(path, str(error))
        return
    yield from _records(text, len(line), path, damage)


def _check_header(path: Path, line: bytes) -> None:
    try:
        described = msgspec.json.decode(line, type=Header)
    except msgspec.DecodeError:
        raise NotARecording(f"{path}: not a recording of this product") from None
    if (described.format, described.version) != (FORMAT, VERSION):
        raise NotARecording(f"{path}: {described.format} of version {described.version}; this program reads {VERSION}")


def _records(text: bytes, start: int, path: Path, damage: Damage) -> Iterator[Round]:
    at, unpacker, in_vain = 0, Unpacker(), 0
    while at < len(text):
        problem, end = "", len(text)
        if text.startswith(MARK, at) and len(text) - at >= FRAME.size:
            _, length, checksum, flags = FRAME.unpack_from(text, at)
            begin = at + FRAME.size
            end = begin + length
            if end > len(text):
                problem = "the last record is cut short"
            elif in_vain > MOST_IN_VAIN * len(text):
                damage(path, f"damaged all over; {len(text) - at} bytes at {start + at} are left out")
                return
            elif zlib.crc32(memoryview(text)[begin:end]) != checksum:
                problem, in_vain = "a record is damaged", in_vain + length
            else:
                try:
                    yield unpacker.unpack(text[begin:end], flags)
                except ValueError as error:
                    problem = f"a record is whole, and no round comes of it: {error}"
        else:
            problem = "something that is no record"
        if problem:
            end = text.find(MARK, at + 1)
            end = len(text) if end < 0 else end
            damage(path, f"{problem}; {end - at} bytes at {start + at} are left out")
        at = end


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_each_text(key, change): _each_text(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_each_text(item, change) for item in value]
    return value


def _spelled(text: str) -> str:
    """Bytes that are no UTF-8 stand as lone surrogates in Python's names; the whole name then goes as hexadecimal."""
    if text.isascii() and not text.startswith(_SPELLED_MARK):
        return text
    raw = text.encode(errors="surrogatepass")
    try:
        raw.decode()
    except UnicodeDecodeError:
        return _SPELLED_MARK + raw.hex()
    return _SPELLED_MARK + raw.hex() if text.startswith(_SPELLED_MARK) else text


def _as_it_was(text: str) -> str:
    if not text.startswith(_SPELLED_MARK):
        return text
    return bytes.fromhex(text[1:]).decode(errors="surrogatepass")
