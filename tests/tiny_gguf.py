"""Small GGUF files, as the `gguf` package writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quant_shape_to_byte_shape, quantize
from numpy.typing import NDArray

from engine.checkpoint.headers import TensorEntry


def write_gguf(
    file: Path,
    tensors: Mapping[str, NDArray[Any]],
    *,
    architecture: str = "llama",
    keys: Callable[[GGUFWriter], None] = lambda _writer: None,
    types: Mapping[str, str] | None = None,
    **options: Any,
) -> Path:
    """A GGUF file with these tensors, float32, or of the type in `types` (ggml's name).

    Args:
        keys: adds metadata to the writer.
        options: of the writer (`split_max_tensors`, `endianess`).
    """
    writer = GGUFWriter(file, architecture, **options)
    keys(writer)
    for name, values in tensors.items():
        kind = (types or {}).get(name)
        if kind is None:
            writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
        else:
            theirs = GGMLQuantizationType[kind]
            writer.add_tensor(name, quantize(np.ascontiguousarray(values, np.float32), theirs), raw_dtype=theirs)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def dequantised(entry: TensorEntry) -> NDArray[np.float32]:
    """What the `gguf` package says of a tensor."""
    kind = GGMLQuantizationType[entry.dtype]
    raw = np.fromfile(entry.file, np.uint8, entry.nbytes, offset=entry.offset)
    shape = quant_shape_to_byte_shape(entry.shape, kind)
    return np.asarray(dequantize(raw.reshape(shape), kind).reshape(entry.shape), np.float32)
