"""Spans and steps as numpy records, and their text encoding for the pipe.

Times are nanoseconds of the worker's `time.perf_counter_ns`.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.common.errors import EngineError, ErrorCode

SPAN = np.dtype(
    [
        ("start_ns", "<i8"),
        ("end_ns", "<i8"),
        ("nbytes", "<i8"),
        ("request", "<i4"),
        ("step", "<i4"),
        ("layer", "<i2"),
        ("expert", "<i2"),
        ("count", "<i4"),
        ("lane", "i1"),
        ("device", "i1"),
        ("name", "<i2"),
    ]
)
"""One unit of work.

lane, name: see `engine.telemetry.lanes`. request, step: its owner; -1 for none. layer: of the decoder, expert: of the
layer; -1 if not applicable. count: experts, or tokens of a phase. nbytes: payload of a copy or read. device: index.
"""

COUNTERS = (
    "hits",
    "late",
    "fetched",
    "on_cpu",
    "hits_on_cpu",
    "recomputed",
    "evictions",
    "post_fetches",
    "prefetched",
    "prefetches_used",
    "prefetches_wasted",
    "prefill_hits",
    "prefill_fetched",
    "prefill_on_cpu",
    "ram_hits",
    "ram_late",
    "ram_misses",
    "ram_evictions",
    "ram_prefetched",
    "ram_prefetches_used",
    "ram_prefetches_wasted",
    "h2d_bytes",
    "d2h_bytes",
    "small_copy_bytes",
    "disk_bytes",
)
"""Counters of every step: experts in device memory (as in `VramCounters`; on_cpu and prefill_on_cpu also without a
device; those named prefill_ are of all steps with more than a few tokens, including batches), experts in RAM over disk
(as in `RamCounters`), and payload bytes. small_copy_bytes are part of the previous two."""

STEP = np.dtype(
    [
        ("start_ns", "<i8"),
        ("end_ns", "<i8"),
        ("request", "<i4"),
        ("step", "<i4"),
        ("name", "<i4"),
        ("tokens", "<i4"),
        *((name, "<i8") for name in COUNTERS),
    ]
)
"""One phase and its counters; later-ending work counts in the step in which it ends. name: see
`engine.telemetry.lanes`."""

Records = NDArray[np.void]
"""Of `SPAN` or of `STEP`."""

MAX_PACKED_RECORDS = 2**20


def pack(records: NDArray[Any]) -> str:
    """Records as text: byte-transposed (first bytes of all records, then second bytes, ...), deflated, base64.

    Most bytes equal those of the previous record, so this order deflates in half the time to a third of the size.
    """
    rows = np.ascontiguousarray(records).reshape(-1).view(np.uint8).reshape(-1, records.dtype.itemsize)
    return base64.b64encode(zlib.compress(rows.T.tobytes(), 1)).decode("ascii")


def unpack(text: str, dtype: np.dtype[Any], most: int = MAX_PACKED_RECORDS) -> NDArray[Any]:
    """Decodes `pack`ed records of this dtype, [n], read-only."""
    limit = most * dtype.itemsize
    try:
        inflate = zlib.decompressobj()
        data = inflate.decompress(base64.b64decode(text, validate=True), limit)
        if not inflate.eof or len(data) % dtype.itemsize:
            raise ValueError("cut short, or too long")
    except (ValueError, zlib.error, binascii.Error) as error:
        raise EngineError(
            ErrorCode.PROTOCOL, f"{len(text)} characters of telemetry are not records ({type(error).__name__})."
        ) from None
    return np.frombuffer(np.frombuffer(data, np.uint8).reshape(dtype.itemsize, -1).T.tobytes(), dtype)


def no_spans() -> Records:
    return np.empty(0, SPAN)


def no_steps() -> Records:
    return np.empty(0, STEP)


def union(starts: NDArray[np.int64], ends: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The union of intervals as sorted, disjoint intervals."""
    if not len(starts):
        return starts, ends
    order = np.argsort(starts, kind="stable")
    starts, furthest = starts[order], np.maximum.accumulate(ends[order])
    first = np.concatenate(([True], starts[1:] > furthest[:-1]))
    last = np.concatenate((np.flatnonzero(first)[1:] - 1, [len(starts) - 1]))
    return starts[first], furthest[last]
