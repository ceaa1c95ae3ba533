"""Spans and steps as numpy records, and packed into text for the pipe.

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
"""One thing that was done.

lane, name: see `engine.telemetry.lanes`.  request, step: whose; -1 of none.  layer: of the decoder, expert: of the
layer; -1 where that means nothing.  count: experts, or tokens of a phase.  nbytes: of a copy or a read, its payload.
device: which of several.
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
"""What is counted for every step: experts in the memory of devices (as `VramCounters` counts; on_cpu and prefill_on_cpu
also without a device; those named prefill_ are of all steps of more than a few tokens, also of a batch), experts in RAM
over disk (as `RamCounters`), payload bytes.  small_copy_bytes are part of the two before."""

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
"""One phase and what was counted in it; what ends later counts in the step in which it ends.  name: see
`engine.telemetry.lanes`."""

Records = NDArray[np.void]
"""Of `SPAN` or of `STEP`."""

MAX_PACKED_RECORDS = 2**20


def pack(records: NDArray[Any]) -> str:
    """Records as text: the first bytes of all of them, then all second ones and so on, deflated, in base64.

    Most bytes of a record are those of the record before, so that order is deflated in half the time to a third.
    """
    rows = np.ascontiguousarray(records).reshape(-1).view(np.uint8).reshape(-1, records.dtype.itemsize)
    return base64.b64encode(zlib.compress(rows.T.tobytes(), 1)).decode("ascii")


def unpack(text: str, dtype: np.dtype[Any], most: int = MAX_PACKED_RECORDS) -> NDArray[Any]:
    """What `pack` packed, of this dtype and one dimension; it cannot be written to.

    Raises:
        EngineError: `PROTOCOL`, if it is anything else, or more than `most` records.
    """
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
    """An empty array of `SPAN`."""
    return np.empty(0, SPAN)


def no_steps() -> Records:
    """An empty array of `STEP`."""
    return np.empty(0, STEP)
