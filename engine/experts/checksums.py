"""Checksums of records: 64 bits, computed on every read, so they must be faster than the read.

Measured on one busy core, GB/s: xxh3 6.3, sha256 0.5, blake2b 0.3 to 0.5, crc32 0.8 to 1.1 (and only 32 bits); disks
reach 1 to 7.  So xxh3 is used wherever the `xxhash` package is installed.  A bank stores the name of its checksum, so
banks with any of these can be read.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
from collections.abc import Callable
from typing import Any

Checksum = Callable[[Any], bytes]
"""Any buffer -> 8 bytes.  Releases the GIL for large ones."""

CHECKSUM_BYTES = 8


def _blake2b(data: Any) -> bytes:
    return hashlib.blake2b(data, digest_size=CHECKSUM_BYTES).digest()


def _available() -> dict[str, Checksum]:
    found: dict[str, Checksum] = {}
    with contextlib.suppress(ImportError):
        found["xxh3_64"] = importlib.import_module("xxhash").xxh3_64_digest
    found["blake2b_64"] = _blake2b
    return found


CHECKSUMS = _available()
"""Available checksums by name, fastest first."""

BEST_CHECKSUM = next(iter(CHECKSUMS))
