"""Read and write safetensors files with numpy alone, including bfloat16.

numpy has no bfloat16: it is the upper half of a float32, kept as uint16.
Format: https://github.com/huggingface/safetensors (8 bytes of header length, JSON header, then the tensors).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import deserialize

Float32 = NDArray[np.float32]
BFloat16Bits = NDArray[np.uint16]


def to_bfloat16(values: Float32) -> BFloat16Bits:
    """Round to nearest, ties to even, as torch does.  Any shape; finite values only (weights)."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    return (rounded >> np.uint32(16)).astype(np.uint16)


def from_bfloat16(bits: BFloat16Bits) -> Float32:
    """Exact.  Any shape."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


_DTYPES: dict[str, Any] = {
    "BF16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "I16": np.dtype("<i2"),
    "U8": np.dtype("u1"),
}
_NAMES = {np.dtype("<u2"): "BF16", np.dtype("<f4"): "F32"}
_ALIGNMENT = 64

Tensors = dict[str, NDArray[Any]]


def read_safetensors(path: Path) -> Tensors:
    """Every tensor of a small file, in memory; bfloat16 as uint16 bits.

    Raises:
        safetensors.SafetensorError, KeyError: if the file is damaged or holds another type.
    """
    return {
        name: np.frombuffer(tensor["data"], _DTYPES[tensor["dtype"]]).reshape(tensor["shape"])
        for name, tensor in deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
    }


def write_safetensors(
    path: Path,
    tensors: Mapping[str, NDArray[Any]],
    on_bytes: Callable[[int], None] = lambda *_: None,
) -> None:
    """Writes uint16 arrays as bfloat16 and float32 arrays unchanged, flushed to disk.

    `on_bytes` is called with each tensor's bytes.  Not atomic: the caller moves the file to its place.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    # Spaces pad the header (the format allows it) so that the data starts aligned for the kernels that map it.
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor).data)
            on_bytes(tensor.nbytes)
        file.flush()
        os.fsync(file.fileno())
