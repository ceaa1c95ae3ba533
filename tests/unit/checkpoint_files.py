"""Writes checkpoint files byte by byte, so that tests can write broken ones."""

import json
import math
from pathlib import Path
from typing import Any

_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "U8": 1, "I8": 1, "F8_E4M3": 1, "I32": 4, "U32": 4, "I64": 8}


def header_of(tensors: dict[str, tuple[str, list[int]]]) -> dict[str, Any]:
    """A valid header for tensors name -> (dtype, shape), in this order."""
    header, offset = {}, 0
    for name, (dtype, shape) in tensors.items():
        end = offset + _BYTES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    return header


def write_safetensors(file: Path, header: dict[str, Any], *, data_bytes: int | None = None) -> Path:
    """A file with this header, and as many zero bytes of data as it needs, or `data_bytes`."""
    raw = json.dumps(header).encode()
    if data_bytes is None:
        ends = [value["data_offsets"][1] for value in header.values() if "data_offsets" in value]
        data_bytes = max(ends, default=0)
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(data_bytes))
    return file


def write_config(folder: Path, **values: Any) -> None:
    """A config.json."""
    (folder / "config.json").write_text(json.dumps({"model_type": "mixtral", **values}))
