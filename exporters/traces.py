"""The identity of a round in traces, made from the round itself: whoever shows the round can name its trace."""

from __future__ import annotations

from hashlib import blake2b

from api.samples import Snapshot


def round_ids(snapshot: Snapshot) -> tuple[int, int]:
    """Trace id (128 bits) and span id (64 bits) of the round that this snapshot began; never zero."""
    seed = f"{snapshot.boot_id}/{snapshot.seq}/{snapshot.wall_time_ns}".encode(errors="surrogateescape")
    digest = blake2b(seed, digest_size=24).digest()
    return int.from_bytes(digest[:16]) or 1, int.from_bytes(digest[16:]) or 1


def exemplar_labels(snapshot: Snapshot, *, traced: bool) -> tuple[tuple[str, str], ...]:
    """What an exemplar says of its round; trace and span only where they are sent somewhere. Below 128 characters."""
    own = (("round", str(snapshot.seq)),)
    if not traced:
        return own
    trace_id, span_id = round_ids(snapshot)
    return (("trace_id", f"{trace_id:032x}"), ("span_id", f"{span_id:016x}"), *own)
