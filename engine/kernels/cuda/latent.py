"""Multi-head latent attention of single tokens by three kernels: queries of latents, attention to them, values."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from engine.formats import FORMATS
from engine.formats.tiles import Pairing, TiledMatrix
from engine.kernels.cuda.attention import Splits
from engine.kernels.cuda.compiled import STATES, Kernel
from engine.kernels.cuda.driver import Launcher
from engine.kernels.cuda.products import PLAIN, TILED, pointer
from engine.kernels.gpu.pages import PageTable
from engine.kernels.native.paged_attention import KvType

_THREADS, _WARPS = 128, 4
_TILE = 32
"""Rows and columns that a warp reads at a time."""
_MOST_RANK, _MOST_ROPE, _PIECE = 512, 64, 8
_HEADS = 4
"""That share a reading of latents."""
_BLOCKS_PER_MULTIPROCESSOR = 2
_ALIGNMENT = 16
_KEPT = {KvType.BF16: "KvBf16", KvType.FP16: "KvFp16", KvType.FP32: "KvFp32"}


class _Tiles(ctypes.Structure):
    """`TileRows` in formats.h."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("weights", "scales", "zeros", "table"))


class LatentQueries(ctypes.Structure):
    _fields_ = (
        ("matrix", _Tiles),
        *((name, ctypes.c_void_p) for name in ("queries", "latents", "norm", "cosines", "sines", "out")),
        *((name, ctypes.c_void_p) for name in ("held", "table")),
        *((name, ctypes.c_int64) for name in ("table_step", "part_step", "angle_row_step")),
        *((name, ctypes.c_int) for name in ("heads", "rank", "rope", "key_dim", "value_dim", "angle_step")),
        *((name, ctypes.c_int) for name in ("takes_pairs", "makes_pairs", "rounds_once", "norm_rounds_once")),
        *((name, ctypes.c_int) for name in ("states", "weight_states", "angle_states", "kept_states")),
        *((name, ctypes.c_float) for name in ("epsilon", "offset")),
    )


class LatentAttention(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("queries", "out", "held", "table", "parts", "arrived")),
        *((name, ctypes.c_int64) for name in ("table_step", "part_step")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("heads", "value_dim", "rope", "window", "splits")),
    )


class LatentValues(ctypes.Structure):
    _fields_ = (
        ("matrix", _Tiles),
        *((name, ctypes.c_void_p) for name in ("mixed", "out")),
        *((name, ctypes.c_int) for name in ("heads", "rank", "key_dim", "value_dim", "states")),
    )


def latent_kernels() -> list[Kernel]:
    """All that may be asked for."""
    formats = [TILED[each.name] for each in FORMATS.values() if each.on_card and each.is_tiled]
    names = (*formats, *PLAIN.values())
    expanding = [_kernel(part, "FORMAT", name) for part in ("queries", "values") for name in names]
    return [*expanding, *(_kernel("attention", "KV", name) for name in _KEPT.values())]


def _kernel(part: str, kind: str, value: str) -> Kernel:
    return Kernel(f"latent_{part}.cu", f"latent_{part}_kernel", _THREADS, ((f"SWITCHYARD_{kind}", value),))


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Sizes of such an attention.

    Attributes:
        rank: of a latent.
        rope: elements of a key, and of each head's query, that are rotated.
        key_dim, value_dim: of each head, without what is rotated.
    """

    heads: int
    rank: int
    rope: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class LatentForm:
    """What a family means by the rotation.

    Attributes:
        takes_pairs, makes_pairs: pairs are neighbours before and after, not half of the rotated ones apart.
        angle_step: from a pair's angle to the next one's.
        rounds_once: whether only the result is rounded to the states' type, not each product.
    """

    takes_pairs: bool
    makes_pairs: bool
    angle_step: int
    rounds_once: bool


@dataclass(frozen=True, slots=True)
class LatentNorm:
    """The norm of a latent: see `CudaNorm`; the weight is [rank], contiguous."""

    weight: torch.Tensor
    epsilon: float
    offset: float
    rounds_once: bool


class CudaLatents:
    """Such attention on one card.  A step's calls must come one after the other: those over a table share counters."""

    def __init__(self, card: Launcher) -> None:
        self._card = card
        self._splits = Splits(card, _BLOCKS_PER_MULTIPROCESSOR)

    @staticmethod
    def takes(shape: LatentShape, matrix: TiledMatrix | torch.Tensor) -> bool:
        """Whether there are kernels for these sizes, and for what makes keys and values of latents.

        Args:
            matrix: [heads x (key_dim + value_dim), rank].
        """
        rows = shape.heads * (shape.key_dim + shape.value_dim)
        if isinstance(matrix, torch.Tensor):
            is_known = matrix.dtype in PLAIN and matrix.shape == (rows, shape.rank)
            parts = [matrix]
        else:
            of = matrix.shape
            is_known = (
                of.format.name in TILED and of.pairing is Pairing.PLAIN and (of.rows, of.columns) == (rows, shape.rank)
            )
            parts = list(matrix.parts.values())
        return (
            is_known
            and all(part.is_contiguous() and part.data_ptr() % _ALIGNMENT == 0 for part in parts)
            and shape.rank <= _MOST_RANK
            and shape.rank % _PIECE == 0
            and 0 < shape.rope <= _MOST_ROPE
            and shape.rope % 2 == 0
        )

    @staticmethod
    def keeps(table: PageTable) -> bool:
        """Whether latents are held in a type that a kernel reads."""
        return table.kv_type in _KEPT

    def attend(
        self,
        table: PageTable,
        shape: LatentShape,
        matrix: TiledMatrix | torch.Tensor,
        queries: torch.Tensor,
        latents: torch.Tensor,
        norm: LatentNorm,
        angles: tuple[torch.Tensor, torch.Tensor],
        form: LatentForm,
        held: torch.Tensor,
        *,
        scale: float,
        window: int = 0,
    ) -> torch.Tensor:
        """Stores a token's latent of each sequence in its pages and attends to what it sees.

        Args:
            table: whose parts are latents [1, rows, rank] and rotated keys [1, rows, rope].
            matrix: that `takes` says yes to.
            queries: [sequences, heads, key_dim + rope] of a type in `STATES`.
            latents: [sequences, rank + rope], of the same type: a latent before its norm, a key before its rotation.
            angles: cosines and sines, [sequences or 1, n] of one type with the same strides.
            held: int64 [sequences] on the card, tokens before.
            window: tokens seen, itself included; 0: all.

        Returns:
            [sequences, heads, value_dim], of the queries' type.
        """
        queries, latents = queries.contiguous(), latents.contiguous()
        sequences, entries, (cosines, sines) = len(queries), table.entries, angles
        heads, rank, of_matrix, name = shape.heads, shape.rank, _tiles(matrix), _name(matrix)
        asked = queries.new_empty(sequences, heads, rank + shape.rope, dtype=torch.float32)
        sizes = {"heads": heads, "rank": rank, "key_dim": shape.key_dim, "value_dim": shape.value_dim}
        first = LatentQueries(
            matrix=of_matrix, queries=queries.data_ptr(), latents=latents.data_ptr(), norm=norm.weight.data_ptr(),
            cosines=cosines.data_ptr(), sines=sines.data_ptr(), out=asked.data_ptr(), held=held.data_ptr(),
            table=entries.data_ptr(), table_step=entries.stride(0), part_step=entries.stride(1),
            angle_row_step=cosines.stride(0) if len(cosines) > 1 else 0, rope=shape.rope, angle_step=form.angle_step,
            takes_pairs=form.takes_pairs, makes_pairs=form.makes_pairs, rounds_once=form.rounds_once,
            norm_rounds_once=norm.rounds_once, states=STATES[queries.dtype], weight_states=STATES[norm.weight.dtype],
            angle_states=STATES[cosines.dtype],
            kept_states=STATES[table.kv_type.dtype], epsilon=norm.epsilon, offset=norm.offset, **sizes,
        )  # fmt: skip
        blocks = -(-heads * -(-rank // _TILE) // _WARPS) + 1
        self._card.launch(_kernel("queries", "FORMAT", name), (blocks, sequences, 1), first)

        mixed = self._attend(table, shape, asked, held, scale, window)
        out = queries.new_empty(sequences, heads, shape.value_dim)
        last = LatentValues(
            matrix=of_matrix, mixed=mixed.data_ptr(), out=out.data_ptr(), states=STATES[out.dtype], **sizes
        )
        starts = [head * (shape.key_dim + shape.value_dim) + shape.key_dim for head in range(heads)]
        most = max((start + shape.value_dim - 1) // _TILE - start // _TILE + 1 for start in starts)
        self._card.launch(_kernel("values", "FORMAT", name), (heads * most, sequences, 1), last)
        return out

    def _attend(
        self, table: PageTable, shape: LatentShape, asked: torch.Tensor, held: torch.Tensor, scale: float, window: int
    ) -> torch.Tensor:
        sequences, heads, rank, entries = len(asked), shape.heads, shape.rank, table.entries
        runs = -(-heads // _HEADS)
        splits = self._splits.count(runs * sequences)
        mixed = asked.new_empty(sequences, heads, rank)
        parts = asked.new_empty(sequences * heads * splits * (2 + rank))
        arguments = LatentAttention(
            queries=asked.data_ptr(), out=mixed.data_ptr(), held=held.data_ptr(), table=entries.data_ptr(),
            parts=parts.data_ptr(), arrived=self._splits.arrived(table, runs * sequences).data_ptr(),
            table_step=entries.stride(0), part_step=entries.stride(1), scale=scale, heads=heads, value_dim=rank,
            rope=shape.rope, window=window, splits=splits,
        )  # fmt: skip
        self._card.launch(_kernel("attention", "KV", _KEPT[table.kv_type]), (splits, runs, sequences), arguments)
        return mixed


def _name(matrix: TiledMatrix | torch.Tensor) -> str:
    return PLAIN[matrix.dtype] if isinstance(matrix, torch.Tensor) else TILED[matrix.shape.format.name]


def _tiles(matrix: TiledMatrix | torch.Tensor) -> _Tiles:
    if isinstance(matrix, torch.Tensor):
        return _Tiles(weights=matrix.data_ptr())
    return _Tiles(*(pointer(part) for part in (matrix.weights, matrix.scales, matrix.zeros, matrix.table)))
