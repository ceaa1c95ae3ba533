"""The structs of switchyard_kernels.h: `SwitchyardPiece` is a `PieceStruct`."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from engine.formats import BF16

if TYPE_CHECKING:
    import torch

    from engine.formats.tiles import TiledMatrix


IN_BLOCKS = 4
"""`SWITCHYARD_BLOCKS`: rows of blocks, as GGUF files have them."""


class MatrixStruct(ctypes.Structure):
    _fields_ = (
        ("weights", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("zeros", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("format", ctypes.c_int32),
        ("pairing", ctypes.c_int32),
        ("second", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("type", ctypes.c_int32),
        ("second_type", ctypes.c_int32),
    )


class RecordPartStruct(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("weights", "second", "scales", "zeros", "table", "bias")),
        *((name, ctypes.c_int64) for name in ("step", "second_step", "bias_step")),
        *((name, ctypes.c_int32) for name in ("format", "type", "second_type", "has_bias")),
    )


class ExpertsStruct(ctypes.Structure):
    _fields_ = (
        ("records", ctypes.c_void_p),
        ("first", RecordPartStruct),
        ("down", RecordPartStruct),
        *((name, ctypes.c_int32) for name in ("count", "hidden", "inner", "pairing", "activation")),
        ("limit", ctypes.c_float),
        ("alpha", ctypes.c_float),
        ("scattered", ctypes.c_void_p),
    )


class RouterStruct(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "bias", "correction")),
        *((name, ctypes.c_int32) for name in ("top_k", "scoring", "groups", "kept_groups")),
        *((name, ctypes.c_int32) for name in ("bf16_logits", "normalise", "bf16_shares")),
        ("scale", ctypes.c_float),
        ("is_exact", ctypes.c_int32),
        ("least", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("norm", "multiples", "table", "ids")),
    )


class CardExpertsStruct(ctypes.Structure):
    _fields_ = (("exchange", ctypes.c_void_p), ("slots", ctypes.c_void_p), ("layer", ctypes.c_int32))


class ExchangeShapeStruct(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int32) for name in ("layers", "experts", "hidden", "most", "rows", "depth"))


class ExchangeLayoutStruct(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "answer", "records")),
        ("tables", ctypes.c_int64 * 2),
    )


class SparseBlockStruct(ctypes.Structure):
    _fields_ = (
        ("norm", ctypes.c_void_p),
        ("router", RouterStruct),
        ("experts", ExpertsStruct),
        *((name, MatrixStruct) for name in ("shared_gate_proj", "shared_up_proj", "shared_down_proj")),
        *((name, ctypes.c_void_p) for name in ("shared_gate", "card", "after_norm")),
        ("epsilon", ctypes.c_float),
        ("norm_offset", ctypes.c_float),
        ("shared_activation", ctypes.c_int32),
        *((name, ctypes.c_float) for name in ("shared_limit", "shared_alpha", "multiple", "whole_multiple")),
        *((name, ctypes.c_void_p) for name in ("experts_norm", "experts_after", "shared_after", "wide_norm")),
    )


class AttentionStruct(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("norm", "q_norm", "k_norm")),
        *((name, ctypes.c_void_p) for name in ("q_bias", "k_bias", "v_bias", "o_bias", "sinks", "after_norm")),
        *((name, MatrixStruct) for name in ("q", "k", "v", "o")),
        ("epsilon", ctypes.c_float),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("hidden", "heads", "kv_heads", "head_dim")),
        *((name, ctypes.c_int32) for name in ("norms_span_heads", "norms_come_last", "rotated", "rotation")),
        ("norm_offset", ctypes.c_float),
        ("is_gated", ctypes.c_int32),
        ("index", ctypes.c_void_p),
        ("multiple", ctypes.c_float),
        ("norms_values", ctypes.c_int32),
    )


class BlockIndexStruct(ctypes.Structure):
    _fields_ = (
        *((name, MatrixStruct) for name in ("q", "k")),
        *((name, ctypes.c_void_p) for name in ("q_norm", "k_norm")),
        *((name, ctypes.c_int32) for name in ("dim", "block_tokens", "most", "local")),
    )


class LatentAttentionStruct(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("norm", "q_a_norm", "kv_norm", "q_a_bias", "kv_a_bias", "o_bias")),
        *((name, MatrixStruct) for name in ("q_a", "q", "kv_a", "kv_b", "k_b", "v_b", "o")),
        *((name, ctypes.c_float) for name in ("epsilon", "q_a_epsilon", "kv_epsilon", "scale")),
        *((name, ctypes.c_int32) for name in ("hidden", "heads", "nope", "rope", "rank", "value_dim", "rotation")),
        ("index", ctypes.c_void_p),
    )


class IndexStruct(ctypes.Structure):
    _fields_ = (
        *((name, MatrixStruct) for name in ("q", "k", "weights")),
        *((name, ctypes.c_void_p) for name in ("k_norm", "k_bias", "chosen")),
        *((name, ctypes.c_float) for name in ("epsilon", "scale")),
        *((name, ctypes.c_int32) for name in ("heads", "dim", "most", "rotation")),
    )


class DeltaStruct(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("norm", "taps", "rate", "rate_bias", "out_norm")),
        *((name, MatrixStruct) for name in ("mixed", "k", "v", "z", "b", "a", "o")),
        ("o_heads", ctypes.c_void_p),
        *((name, MatrixStruct) for name in ("z_first", "a_first")),
        *((name, ctypes.c_float) for name in ("epsilon", "out_epsilon", "norm_offset")),
        *((name, ctypes.c_int32) for name in ("hidden", "key_heads", "value_heads", "key_dim", "value_dim", "kernel")),
        *((name, ctypes.c_int32) for name in ("decays_keys", "gates_once", "rule")),
        ("multiple", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("tap_bias", "skip")),
    )


class CompressorStruct(ctypes.Structure):
    _fields_ = (
        *((name, MatrixStruct) for name in ("kv", "gate")),
        *((name, ctypes.c_void_p) for name in ("bias", "norm")),
        ("dim", ctypes.c_int32),
    )


class CompressedAttentionStruct(ctypes.Structure):
    _fields_ = (
        *((name, MatrixStruct) for name in ("q_a", "q_b", "kv", "o_a", "o_b", "index_q", "index_weights")),
        *((name, ctypes.c_void_p) for name in ("norm", "q_a_norm", "kv_norm", "sinks", "frequencies")),
        *((name, ctypes.c_void_p) for name in ("compressor", "index")),
        *((name, ctypes.c_float) for name in ("epsilon", "scale", "index_scale", "angle_scale")),
        *((name, ctypes.c_int32) for name in ("hidden", "heads", "head_dim", "rope", "groups", "rate")),
        *((name, ctypes.c_int32) for name in ("index_heads", "most")),
    )


class StreamsStruct(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("mix", "base")),
        ("scale", ctypes.c_float * 3),
        *((name, ctypes.c_float) for name in ("norm_epsilon", "epsilon")),
        *((name, ctypes.c_int32) for name in ("streams", "rounds")),
    )


class PagesStruct(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "values", "key_scales", "value_scales")),
        ("page_tokens", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("type", "window", "kept")),
        *((name, ctypes.c_void_p) for name in ("index_keys", "entries", "entry_keys")),
        *((name, ctypes.c_int64) for name in ("entry_step", "entry_key_step", "run")),
    )


class PieceStruct(ctypes.Structure):
    _fields_ = (
        ("pages", ctypes.c_void_p),
        ("held", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("tokens", "first", "state", "next_state")),
        ("entry_pages", ctypes.c_void_p),
    )


class LayerStruct(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("attention", "latent", "delta", "block")),
        ("held", PagesStruct),
        *((name, ctypes.c_void_p) for name in ("pieces", "chosen", "shares")),
        ("angles", ctypes.c_int32),
        ("compressed", ctypes.c_void_p),
        ("streams", ctypes.c_void_p * 2),
    )


class AnglesStruct(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("cos", "sin")),
        ("angle_step", ctypes.c_int32),
        ("token_step", ctypes.c_int64),
    )


class ModelStruct(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("layers", "norm", "bias")),
        ("head", MatrixStruct),
        ("epsilon", ctypes.c_float),
        ("count", ctypes.c_int32),
        ("norm_offset", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("wide_norm", "streams")),
    )


class CodesStruct(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("words", "scales", "zeros", "added")),
        *((name, ctypes.c_int64) for name in ("stride", "group")),
        *((name, ctypes.c_int32) for name in ("arrangement", "bits", "flipped")),
    )


class BlocksStruct(ctypes.Structure):
    _fields_ = (
        ("blocks", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("type", ctypes.c_int32),
        ("codes", ctypes.c_void_p),
    )


class StampCountsStruct(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("written", "dropped", "chosen")),
        ("ended_ns", ctypes.c_int64),
        ("taken", ctypes.c_uint64),
    )


class RepackStruct(ctypes.Structure):
    _fields_ = (("target", MatrixStruct), ("first", BlocksStruct), ("second", BlocksStruct))


def matrix_struct(matrix: TiledMatrix) -> MatrixStruct:
    """A tiled matrix in RAM; the struct points into it."""
    shape = matrix.shape
    return MatrixStruct(
        matrix.weights.data_ptr(),
        matrix.scales.data_ptr(),
        matrix.zeros.data_ptr() if matrix.zeros is not None else None,
        matrix.table.data_ptr() if matrix.table is not None else None,
        shape.rows,
        shape.columns,
        shape.format.native,
        int(shape.pairing),
    )


def plain_struct(weight: torch.Tensor) -> MatrixStruct:
    """A contiguous bf16 matrix in RAM; the struct points into it."""
    return MatrixStruct(weight.data_ptr(), None, None, None, *weight.shape, BF16.native, 0)
