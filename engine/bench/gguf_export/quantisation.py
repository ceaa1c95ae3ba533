"""Matrix types of GGUF files, and conversion of checkpoint tensors.

Formats: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and `ggml-quants.c`; encoded by the `gguf` package,
whose results are those of llama.cpp's own reference functions.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType
from gguf.quants import quantize
from numpy.typing import NDArray

from engine.checkpoint.headers import TensorEntry
from engine.checkpoint.safetensors_numpy import from_bfloat16
from engine.common.errors import EngineError, ErrorCode

Bytes = NDArray[np.uint8]

_DTYPES: dict[str, Any] = {"BF16": np.dtype("<u2"), "F16": np.dtype("<f2"), "F32": np.dtype("<f4")}


class Quantisation(Enum):
    """The types of the matrices of a file; Q8_0, Q4_0 and Q4_1 scale groups of 32 numbers along a row."""

    BF16 = "BF16"
    Q8_0 = "Q8_0"
    Q4_0 = "Q4_0"
    Q4_1 = "Q4_1"

    @property
    def tensor_type(self) -> GGMLQuantizationType:
        """The type of one tensor in a GGUF file."""
        return GGMLQuantizationType[self.value]

    @property
    def file_type(self) -> LlamaFileType:
        """The type of the file as a whole."""
        return LlamaFileType[f"MOSTLY_{self.value}"]

    def type_for(self, row: int) -> GGMLQuantizationType:
        """The type of a matrix with rows of `row` elements: bfloat16 if groups do not divide it."""
        group, _nbytes = GGML_QUANT_SIZES[self.tensor_type]
        return self.tensor_type if row % group == 0 else GGMLQuantizationType.BF16


def byte_shape(shape: tuple[int, ...], kind: GGMLQuantizationType) -> tuple[int, ...]:
    """The shape of the encoded bytes of a tensor of `shape`."""
    group, nbytes = GGML_QUANT_SIZES[kind]
    return (*shape[:-1], shape[-1] // group * nbytes)


def encoded(entry: TensorEntry, kind: GGMLQuantizationType, rotary_heads: int = 0) -> Bytes:
    """A tensor of a checkpoint, uint8 [.., bytes of a row].

    Args:
        rotary_heads: if not 0, the rows of each of these heads are reordered from transformers' rotary layout (first
            half against second) to that of llama.cpp's "llama" architecture (adjacent pairs).

    Raises:
        EngineError: `MODEL_UNSUPPORTED` if the tensor is neither bfloat16 nor float16 nor float32.
    """
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
        raise EngineError(
            ErrorCode.MODEL_UNSUPPORTED,
            f"{entry.key} is {entry.dtype}, which is not written to GGUF: use a bf16 model.",
        )
    values: NDArray[Any] = np.memmap(entry.file, dtype, "r", entry.offset, entry.shape)
    if rotary_heads:
        rows = entry.shape[0]
        halves = values.reshape(rotary_heads, 2, rows // rotary_heads // 2, *entry.shape[1:])
        values = halves.swapaxes(1, 2).reshape(entry.shape)
    if entry.dtype == "BF16":
        if kind is GGMLQuantizationType.BF16:
            return np.ascontiguousarray(values).view(np.uint8)
        values = from_bfloat16(values)
    numbers = np.ascontiguousarray(values, dtype=np.float32)
    return np.ascontiguousarray(quantize(numbers, kind)).view(np.uint8)
