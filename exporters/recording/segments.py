"""Reads and encodes recordings: directories of bounded segment files that describe themselves.
A segment `00000042.dioptase` is a line of JSON (`SegmentHeader`) and records: 4 bytes mark, 4 bytes payload length
(little-endian), 4 bytes CRC-32, 1 byte flags (bit 0: names in hexadecimal; bit 1: delta to the record before), and
zlib of MessagePack of one cycle. Every `KEY_RECORD_INTERVAL`th record is whole. A damaged record costs itself and
those up to the next whole one; readers report it and continue. Raises NotARecording and OSError.
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

from api.decision import Cycle
from common.files import open_regular_file

log = logging.getLogger(__name__)

RECORDING_FORMAT, VERSION = "dioptase-recording", 1
SUFFIX = ".dioptase"
RECORD_MARK = b"\xd1\x0b\x7a\x5e"
RECORD_FRAME = struct.Struct("<4sIIB")
ZLIB_LEVEL = 1
"""zlib's fastest: 6 makes records a tenth smaller for four times the time."""
MAX_CYCLE_BYTES = 1 << 25
"""Bytes of MessagePack. 4,096 cgroups, the most that an agent looks at unless told otherwise, need 12 MB; whoever means harm
makes 75 bytes of objects of every byte."""
MAX_DAMAGED_RATIO = 4
"""Times the length of a segment that is added up for records whose sum is wrong: whoever wrote them meant to keep us busy."""
FLAG_HEX_NAMES, FLAG_DELTA = 1, 2
KEY_RECORD_INTERVAL = 60
_HEX_MARK = "\0"
CYCLE_PARTS = frozenset({"snapshot", "previous"})
SNAPSHOT_PARTS = frozenset({"node", "cgroups"})
DamageCallback = Callable[[Path, str], None]


def _log_damage(path: Path, what: str) -> None:
    log.warning("%s: %s", path, what)


class SegmentHeader(msgspec.Struct, frozen=True, kw_only=True):
    """First line of a segment."""

    format: str = RECORDING_FORMAT
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


def segment_header(product: str, boot_id: str, began_ns: int) -> bytes:
    """The line that a segment begins with."""
    schema = msgspec.json.schema(Cycle)
    return (
        msgspec.json.encode(SegmentHeader(product=product, boot_id=boot_id, began_ns=began_ns, fields=schema)) + b"\n"
    )


def pack_cycle(finished: Cycle, base: Cycle | None = None) -> bytes:
    """One round as a record, frame included; with a base, which must be the record before it, only what changed.

    Raises OSError (EFBIG) where it is too large to be read back.
    """
    document: Any = msgspec.structs.replace(finished, previous=None)
    flags = 0
    if base is not None:
        document, flags = _delta(base, finished), FLAG_DELTA
    try:
        text = msgspec.msgpack.encode(document)
    except UnicodeEncodeError:
        flags |= FLAG_HEX_NAMES
        text = msgspec.msgpack.encode(_map_text(msgspec.to_builtins(document), _to_hex))
    if len(text) > MAX_CYCLE_BYTES:
        raise OSError(errno.EFBIG, f"a round has {len(text)} bytes, and recordings take {MAX_CYCLE_BYTES}")
    payload = zlib.compress(text, ZLIB_LEVEL)
    return RECORD_FRAME.pack(RECORD_MARK, len(payload), zlib.crc32(payload), flags) + payload


class CycleUnpacker:
    """Turns the records of one segment into rounds, in order; it remembers the record before, which most build on."""

    def __init__(self) -> None:
        self._whole: dict[str, Any] | None = None

    def unpack(self, payload: bytes, flags: int) -> Cycle:
        """The round in a record, without the one before it. Raises ValueError where it is none."""
        try:
            document = msgspec.msgpack.decode(_decompressed(payload), strict=False)
            if flags & FLAG_HEX_NAMES:
                document = _map_text(document, _from_hex)
            if flags & FLAG_DELTA:
                document = _apply_delta(self._whole, msgspec.convert(document, CycleDelta))
            finished = msgspec.convert(document, Cycle)
        except (zlib.error, msgspec.DecodeError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(str(error)) from error
        self._whole = document
        return finished


def _decompressed(payload: bytes) -> bytes:
    """Raises ValueError and zlib.error; a few kilobytes may claim to be gigabytes."""
    unpacking = zlib.decompressobj()
    text = unpacking.decompress(payload, MAX_CYCLE_BYTES + 1)
    if len(text) > MAX_CYCLE_BYTES:
        raise ValueError(f"it has more than {MAX_CYCLE_BYTES} bytes")
    if not unpacking.eof:
        raise ValueError("it is cut short")
    return text


class CycleDelta(msgspec.Struct, forbid_unknown_fields=True):
    """What a record holds that is not whole: fields by name where they changed, and cgroups that are new as a whole."""

    after: int
    """`seq` of the record that this one builds on."""
    round: dict[str, Any]
    snapshot: dict[str, Any]
    node: dict[str, Any]
    cgroups: dict[str, Any]
    gone: list[str]


def _delta(base: Cycle, finished: Cycle) -> CycleDelta:
    before, now = base.snapshot, finished.snapshot
    cgroups: dict[str, Any] = {}
    for path, sample in now.cgroups.items():
        earlier = before.cgroups.get(path)
        if earlier is None or earlier.id != sample.id or earlier.path != sample.path:
            cgroups[path] = sample
        elif changes := _changed_fields(earlier, sample):
            cgroups[path] = changes
    return CycleDelta(
        after=before.seq,
        round=_changed_fields(base, finished, CYCLE_PARTS),
        snapshot=_changed_fields(before, now, SNAPSHOT_PARTS),
        node=_changed_fields(before.node, now.node),
        cgroups=cgroups,
        gone=[path for path in before.cgroups if path not in now.cgroups],
    )


def _changed_fields(before: msgspec.Struct, now: msgspec.Struct, rest: frozenset[str] = frozenset()) -> dict[str, Any]:
    return {
        encoded: value
        for name, encoded in zip(now.__struct_fields__, now.__struct_encode_fields__, strict=True)
        if encoded not in rest and (value := getattr(now, name)) != getattr(before, name)
    }


def _apply_delta(whole: dict[str, Any] | None, difference: CycleDelta) -> dict[str, Any]:
    if whole is None or whole["snapshot"]["seq"] != difference.after:
        raise ValueError(f"it builds on round {difference.after}, which is missing")
    before = whole["snapshot"]
    gone = set(difference.gone)
    cgroups = {path: fields for path, fields in before["cgroups"].items() if path not in gone}
    for path, fields in difference.cgroups.items():
        cgroups[path] = fields if "path" in fields else {**cgroups[path], **fields}
    snapshot = {**before, **difference.snapshot, "node": {**before["node"], **difference.node}, "cgroups": cgroups}
    return {**whole, **difference.round, "snapshot": snapshot}


def segment_paths(path: Path) -> list[Path]:
    """The files of a recording, oldest first; of a single file that file."""
    if not path.is_dir():
        return [path]
    return sorted(
        (file for file in path.iterdir() if segment_number(file) is not None), key=lambda file: int(file.stem)
    )


def segment_number(path: Path) -> int | None:
    """Of a segment by its name, which is also what may be deleted to make room; None of anything else."""
    digits = path.stem
    named = path.suffix == SUFFIX and digits.isascii() and digits.isdigit() and digits == f"{int(digits):08d}"
    return int(digits) if named else None


def read_recording(path: Path, damage: DamageCallback = _log_damage) -> Iterator[Cycle]:
    """Every round of a recording, oldest first, each with the one before it where that was recorded too.

    `damage` is told of every place that could not be read, file and reason; else it is logged. Raises NotARecording and
    OSError.
    """
    before: Cycle | None = None
    found = segment_paths(path)
    if not found:
        raise NotARecording(f"{path}: no recording is there: it would have files such as 00000001{SUFFIX}")
    for segment in found:
        for finished in _read_segment(segment, damage, alone=len(found) == 1):
            follows = before is not None and before.snapshot.seq + 1 == finished.snapshot.seq
            same_boot = before is not None and before.snapshot.boot_id == finished.snapshot.boot_id
            previous = before.snapshot if before is not None and follows and same_boot else None
            yield msgspec.structs.replace(finished, previous=previous)
            before = finished


def _read_segment(path: Path, damage: DamageCallback, *, alone: bool) -> Iterator[Cycle]:
    """Rounds of one file; one of many that cannot be read, or was rotated away meanwhile, keeps nobody from the others."""
    try:
        with open_regular_file(path) as file:
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
        described = msgspec.json.decode(line, type=SegmentHeader)
    except msgspec.DecodeError:
        raise NotARecording(f"{path}: not a recording of this product") from None
    if (described.format, described.version) != (RECORDING_FORMAT, VERSION):
        raise NotARecording(f"{path}: {described.format} of version {described.version}; this program reads {VERSION}")


def _records(text: bytes, start: int, path: Path, damage: DamageCallback) -> Iterator[Cycle]:
    at, unpacker, in_vain = 0, CycleUnpacker(), 0
    while at < len(text):
        problem, end = "", len(text)
        if text.startswith(RECORD_MARK, at) and len(text) - at >= RECORD_FRAME.size:
            _, length, checksum, flags = RECORD_FRAME.unpack_from(text, at)
            begin = at + RECORD_FRAME.size
            end = begin + length
            if end > len(text):
                problem = "the last record is cut short"
            elif in_vain > MAX_DAMAGED_RATIO * len(text):
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
            end = text.find(RECORD_MARK, at + 1)
            end = len(text) if end < 0 else end
            damage(path, f"{problem}; {end - at} bytes at {start + at} are left out")
        at = end


def _map_text(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_map_text(key, change): _map_text(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_text(item, change) for item in value]
    return value


def _to_hex(text: str) -> str:
    """Bytes that are no UTF-8 stand as lone surrogates in Python's names; the whole name then goes as hexadecimal."""
    if text.isascii() and not text.startswith(_HEX_MARK):
        return text
    raw = text.encode(errors="surrogatepass")
    try:
        raw.decode()
    except UnicodeDecodeError:
        return _HEX_MARK + raw.hex()
    return _HEX_MARK + raw.hex() if text.startswith(_HEX_MARK) else text


def _from_hex(text: str) -> str:
    if not text.startswith(_HEX_MARK):
        return text
    return bytes.fromhex(text[1:]).decode(errors="surrogatepass")
