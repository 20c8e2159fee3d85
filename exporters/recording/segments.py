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
"""Fastest level of zlib: level 6 makes records a tenth smaller in four times the time."""
MAX_CYCLE_BYTES = 1 << 25
"""Maximum size of a cycle in MessagePack. 4,096 cgroups, the default maximum of an agent, need 12 MB; a malicious file can turn
every byte into 75 bytes of objects."""
MAX_DAMAGED_RATIO = 4
"""Maximum total length of records with a wrong checksum, as a multiple of the segment: more is a malicious file."""
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
    """CLOCK_REALTIME of the first record."""
    record: str = (
        "13 bytes of frame (mark, length, CRC-32, flags), then zlib of MessagePack; flags: 1 names that begin with NUL are "
        "hexadecimal; 2 only what changed since the record before, else a Round"
    )
    fields: Any = None
    """JSON Schema of a cycle."""


class NotARecording(Exception):
    """The path is no recording, or has a version that this program does not support."""


def segment_header(product: str, boot_id: str, began_ns: int) -> bytes:
    """Return the first line of a segment."""
    schema = msgspec.json.schema(Cycle)
    return (
        msgspec.json.encode(SegmentHeader(product=product, boot_id=boot_id, began_ns=began_ns, fields=schema)) + b"\n"
    )


def pack_cycle(finished: Cycle, base: Cycle | None = None) -> bytes:
    """Return one cycle as a record with its frame; with `base`, which must be the previous record, only the changes.

    Raises OSError (EFBIG) if the cycle is too large to be read back.
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
        raise OSError(errno.EFBIG, f"a cycle has {len(text)} bytes, and recordings allow {MAX_CYCLE_BYTES}")
    payload = zlib.compress(text, ZLIB_LEVEL)
    return RECORD_FRAME.pack(RECORD_MARK, len(payload), zlib.crc32(payload), flags) + payload


class CycleUnpacker:
    """Decodes the records of one segment in order; it keeps the previous record, which most records build on."""

    def __init__(self) -> None:
        self._base: dict[str, Any] | None = None

    def unpack(self, payload: bytes, flags: int) -> Cycle:
        """Return the cycle of a record, without its previous snapshot. Raises ValueError if the record is invalid."""
        try:
            document = msgspec.msgpack.decode(_decompressed(payload), strict=False)
            if flags & FLAG_HEX_NAMES:
                document = _map_text(document, _from_hex)
            if flags & FLAG_DELTA:
                document = _apply_delta(self._base, msgspec.convert(document, CycleDelta))
            finished = msgspec.convert(document, Cycle)
        except (zlib.error, msgspec.DecodeError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(str(error)) from error
        self._base = document
        return finished


def _decompressed(payload: bytes) -> bytes:
    """Decompress with a bound, because a few kilobytes can expand to gigabytes. Raises ValueError and zlib.error."""
    unpacking = zlib.decompressobj()
    text = unpacking.decompress(payload, MAX_CYCLE_BYTES + 1)
    if len(text) > MAX_CYCLE_BYTES:
        raise ValueError(f"it has more than {MAX_CYCLE_BYTES} bytes")
    if not unpacking.eof:
        raise ValueError("it is cut short")
    return text


class CycleDelta(msgspec.Struct, forbid_unknown_fields=True):
    """Content of a delta record: changed fields by name, and new cgroups with all fields."""

    after: int
    """Number (`seq`) of the record that this one builds on."""
    round: dict[str, Any]
    snapshot: dict[str, Any]
    node: dict[str, Any]
    cgroups: dict[str, Any]
    removed: list[str] = msgspec.field(name="gone")


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
        removed=[path for path in before.cgroups if path not in now.cgroups],
    )


def _changed_fields(before: msgspec.Struct, now: msgspec.Struct, rest: frozenset[str] = frozenset()) -> dict[str, Any]:
    return {
        encoded: value
        for name, encoded in zip(now.__struct_fields__, now.__struct_encode_fields__, strict=True)
        if encoded not in rest and (value := getattr(now, name)) != getattr(before, name)
    }


def _apply_delta(base: dict[str, Any] | None, difference: CycleDelta) -> dict[str, Any]:
    if base is None or base["snapshot"]["seq"] != difference.after:
        raise ValueError(f"it builds on cycle {difference.after}, which is missing")
    before = base["snapshot"]
    removed = set(difference.removed)
    cgroups = {path: fields for path, fields in before["cgroups"].items() if path not in removed}
    for path, fields in difference.cgroups.items():
        cgroups[path] = fields if "path" in fields else {**cgroups[path], **fields}
    snapshot = {**before, **difference.snapshot, "node": {**before["node"], **difference.node}, "cgroups": cgroups}
    return {**base, **difference.round, "snapshot": snapshot}


def segment_paths(path: Path) -> list[Path]:
    """Return the files of a recording, oldest first; a single file is returned itself."""
    if not path.is_dir():
        return [path]
    return sorted(
        (file for file in path.iterdir() if segment_number(file) is not None), key=lambda file: int(file.stem)
    )


def segment_number(path: Path) -> int | None:
    """Return the number of a segment by its file name; None for any other file, which is never deleted."""
    digits = path.stem
    named = path.suffix == SUFFIX and digits.isascii() and digits.isdigit() and digits == f"{int(digits):08d}"
    return int(digits) if named else None


def read_recording(path: Path, damage: DamageCallback = _log_damage) -> Iterator[Cycle]:
    """Yield every cycle of a recording, oldest first, each with the previous snapshot if that was recorded.

    `damage` is called with file and reason of every unreadable part, which is logged by default. Raises NotARecording
    and OSError.
    """
    before: Cycle | None = None
    segments = segment_paths(path)
    if not segments:
        raise NotARecording(f"{path}: it contains no recording, which has files such as 00000001{SUFFIX}")
    for segment in segments:
        for finished in _read_segment(segment, damage, alone=len(segments) == 1):
            follows = before is not None and before.snapshot.seq + 1 == finished.snapshot.seq
            same_boot = before is not None and before.snapshot.boot_id == finished.snapshot.boot_id
            previous = before.snapshot if before is not None and follows and same_boot else None
            yield msgspec.structs.replace(finished, previous=previous)
            before = finished


def _read_segment(path: Path, damage: DamageCallback, *, alone: bool) -> Iterator[Cycle]:
    """Yield the cycles of one file. If there are others, an unreadable or deleted file is reported and skipped."""
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
    at, unpacker, damaged_bytes = 0, CycleUnpacker(), 0
    while at < len(text):
        problem, end = "", len(text)
        if text.startswith(RECORD_MARK, at) and len(text) - at >= RECORD_FRAME.size:
            _, length, checksum, flags = RECORD_FRAME.unpack_from(text, at)
            begin = at + RECORD_FRAME.size
            end = begin + length
            if end > len(text):
                problem = "the last record is cut short"
            elif damaged_bytes > MAX_DAMAGED_RATIO * len(text):
                damage(path, f"too many damaged records; {len(text) - at} bytes at {start + at} are skipped")
                return
            elif zlib.crc32(memoryview(text)[begin:end]) != checksum:
                problem, damaged_bytes = "a record is damaged", damaged_bytes + length
            else:
                try:
                    yield unpacker.unpack(text[begin:end], flags)
                except ValueError as error:
                    problem = f"a record is complete but contains no cycle: {error}"
        else:
            problem = "data that is no record"
        if problem:
            end = text.find(RECORD_MARK, at + 1)
            end = len(text) if end < 0 else end
            damage(path, f"{problem}; {end - at} bytes at {start + at} are skipped")
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
    """Encode a name in hexadecimal if it is no valid UTF-8, which Python represents by lone surrogates."""
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
