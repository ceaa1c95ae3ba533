"""Writes one GGUF file, tensor by tensor: with at most one layer's experts of one kind in memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

from engine.bench.gguf_export.families import GgufTensor, add_hyperparameters, family_of, gguf_tensors
from engine.bench.gguf_export.quantisation import Bytes, Quantisation, byte_shape, encoded
from engine.checkpoint.config_file import read_config
from engine.checkpoint.shards import read_tensors


def write_gguf(
    checkpoint: Path,
    target: Path,
    quantisation: Quantisation,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> None:
    """Writes the checkpoint directory's weights to `target`, not atomic, but flushed: the caller renames it.

    All matrices have the same type, including embedding and head; norms and routers are float32.

    Args:
        on_progress: called with bytes written and total bytes.

    Raises:
        EngineError: `MODEL_UNSUPPORTED`, `CHECKPOINT_DAMAGED`.
        OSError: if the file cannot be written.
    """
    config = read_config(checkpoint)
    family = family_of(config)
    tensors = list(gguf_tensors(family, config, read_tensors(checkpoint)))
    types = [_type_of(tensor, quantisation) for tensor in tensors]
    writer = GGUFWriter(target, family.architecture)
    with contextlib.closing(writer):
        writer.add_file_type(quantisation.file_type)
        writer.add_quantization_version(2)
        add_hyperparameters(writer, family, config)
        total = 0
        for tensor, kind in zip(tensors, types, strict=True):
            shape = byte_shape(tensor.shape, kind)
            nbytes = int(np.prod(shape))
            writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), nbytes, kind)
            total += nbytes
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        done = 0
        for tensor, kind in zip(tensors, types, strict=True):
            content = _content(tensor, kind)
            writer.write_tensor_data(content)
            done += content.nbytes
            on_progress(done, total)
        writer.flush()
    with target.open("r+b") as file:
        os.fsync(file.fileno())


def _type_of(tensor: GgufTensor, quantisation: Quantisation) -> GGMLQuantizationType:
    return quantisation.type_for(tensor.shape[-1]) if tensor.is_matrix else GGMLQuantizationType.F32


def _content(tensor: GgufTensor, kind: GGMLQuantizationType) -> Bytes:
    if len(tensor.shape) == len(tensor.sources[0].shape):
        return encoded(tensor.sources[0], kind, tensor.rotary_heads)
    stack = np.empty(byte_shape(tensor.shape, kind), np.uint8)
    for place, source in zip(stack, tensor.sources, strict=True):
        place[...] = encoded(source, kind)
    return stack
