"""Attention of single tokens over pages: by the kernel in `attention.cu`, one launch however many tokens each sequence
holds; and multi-head latent attention by three kernels: queries of latents, attention to them, values.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from weakref import WeakKeyDictionary

import torch

from engine.formats import FORMATS
from engine.formats.tiles import Pairing, TiledMatrix
from engine.kernels.cuda.compiled import Kernel
from engine.kernels.cuda.driver import Launcher, OnCard
from engine.kernels.cuda.products import PLAIN, TILED, tile_rows
from engine.kernels.gpu.pages import PageTable
from engine.kernels.native.paged_attention import AttentionTerms, KvShape, KvType

_MOST = 64


class Splits:
    """Of one kernel.

    Args:
        blocks: that a multiprocessor holds of it.
    """

    def __init__(self, card: Launcher, blocks: int) -> None:
        self._card, self._blocks = card, blocks
        self._arrived: WeakKeyDictionary[PageTable, torch.Tensor] = WeakKeyDictionary()

    def count(self, runs: int) -> int:
        """Into how many parts each context is divided, so that so many runs over contexts keep the card busy."""
        return max(1, min(-(-self._blocks * self._card.multiprocessors // runs), _MOST))

    def arrived(self, table: PageTable, runs: int) -> torch.Tensor:
        """int32 [runs or more] on the card, zero between launches; the same ones again, as graphs hold their place."""
        known = self._arrived.get(table)
        if known is None or len(known) < runs:
            known = self._arrived[table] = torch.zeros(runs, dtype=torch.int32, device=table.entries.device)
        return known


_PIECE = 8
"""Elements of a key or value that a thread reads."""
_WIDTHS = (64, 128, 256)
_ROWS = (1, 4, 8)
"""Heads of queries that share a reading of keys, as kernels are compiled."""
_BLOCKS_PER_MULTIPROCESSOR = 3
_TYPES = {KvType.BF16: "KvBf16", KvType.FP16: "KvFp16", KvType.INT8: "KvInt8", KvType.FP32: "KvFp32"}


def attention_kernels() -> list[Kernel]:
    """All that may be asked for."""
    return [_kernel(kv_type, width, rows) for kv_type in _TYPES for width in _WIDTHS for rows in _ROWS]


def _kernel(kv_type: KvType, width: int, rows: int) -> Kernel:
    defines = (("SWITCHYARD_KV", _TYPES[kv_type]), ("SWITCHYARD_WIDTH", str(width)), ("SWITCHYARD_ROWS", str(rows)))
    return Kernel("attention.cu", defines)


class CudaAttention(OnCard):
    """Attention on one card.  A step's calls must come one after the other: those over a table share counters."""

    def __init__(self, card: Launcher) -> None:
        super().__init__(card)
        self._splits = Splits(card, _BLOCKS_PER_MULTIPROCESSOR)

    @staticmethod
    def takes(shape: KvShape) -> bool:
        """Whether heads are of a width that a kernel is there for."""
        dims = (shape.key_dim, shape.value_dim)
        return max(dims) <= _WIDTHS[-1] and all(dim % _PIECE == 0 for dim in dims)

    def attend(
        self,
        table: PageTable,
        terms: AttentionTerms,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        held: torch.Tensor,
        *,
        are_stored: bool = False,
    ) -> torch.Tensor:
        """Stores a token of each sequence in its pages and attends to what it sees.

        `engine.kernels.reference.attend_in_torch` is the definition.

        Args:
            terms: sinks are on the card.
            queries, keys, values: [sequences, heads, dim] of one type: bf16, fp16 or fp32.
            held: int64 [sequences] on the card, tokens before.
            are_stored: whether the tokens are in their pages already.

        Returns:
            [sequences, heads, value_dim], of the same type.
        """
        queries, keys, values = queries.contiguous(), keys.contiguous(), values.contiguous()
        sequences, heads, key_dim = queries.shape
        kv_heads, value_dim = values.shape[1:]
        group = heads // kv_heads
        rows = next((each for each in _ROWS if each >= group), _ROWS[-1])
        runs = kv_heads * -(-group // rows)
        splits = self._splits.count(runs * sequences)
        out = values.new_empty(sequences, heads, value_dim)
        parts = out.new_empty(sequences * heads * splits * (2 + value_dim), dtype=torch.float32)
        width = next(each for each in _WIDTHS if each >= max(key_dim, value_dim))
        self.start(
            _kernel(table.kv_type, width, rows), (splits, runs, sequences), queries=queries,
            keys=None if are_stored else keys, values=None if are_stored else values, out=out, held=held, parts=parts,
            arrived=self._splits.arrived(table, runs * sequences), heads=heads, kv_heads=kv_heads, key_dim=key_dim,
            value_dim=value_dim, splits=splits, states=queries.dtype, scale=terms.scale, window=terms.window,
            kept=terms.kept, softcap=terms.softcap, sinks=terms.sinks, **table.arguments,
        )  # fmt: skip
        return out


# --- latents ----------------------------------------------------------------------------------------------------------

_WARPS = 4
_TILE = 32
"""Rows and columns that a warp reads at a time."""
_MOST_RANK, _MOST_ROPE = 512, 64
_HEADS = 4
"""That share a reading of latents."""
_LATENT_BLOCKS = 2
_ALIGNMENT = 16
_KEPT = {KvType.BF16: "KvBf16", KvType.FP16: "KvFp16", KvType.FP32: "KvFp32"}


def latent_kernels() -> list[Kernel]:
    """All that may be asked for."""
    formats = [TILED[each.name] for each in FORMATS.values() if each.on_card and each.is_tiled]
    names = (*formats, *PLAIN.values())
    expanding = [_latent_kernel(part, "FORMAT", name) for part in ("queries", "values") for name in names]
    return [*expanding, *(_latent_kernel("attention", "KV", name) for name in _KEPT.values())]


def _latent_kernel(part: str, kind: str, value: str) -> Kernel:
    return Kernel(f"latent_{part}.cu", ((f"SWITCHYARD_{kind}", value),))


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


class CudaLatents(OnCard):
    """Such attention on one card.  A step's calls must come one after the other: those over a table share counters."""

    def __init__(self, card: Launcher) -> None:
        super().__init__(card)
        self._splits = Splits(card, _LATENT_BLOCKS)

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
        sequences, (cosines, sines), heads, rank = len(queries), angles, shape.heads, shape.rank
        of_matrix, name = tile_rows(matrix), _format_name(matrix)
        asked = queries.new_empty(sequences, heads, rank + shape.rope, dtype=torch.float32)
        sizes = {"heads": heads, "rank": rank, "key_dim": shape.key_dim, "value_dim": shape.value_dim}
        self.start(
            _latent_kernel("queries", "FORMAT", name), (-(-heads * -(-rank // _TILE) // _WARPS) + 1, sequences, 1),
            matrix=of_matrix, queries=queries, latents=latents, norm=norm.weight, cosines=cosines, sines=sines,
            out=asked, held=held, angle_row_step=cosines.stride(0) if len(cosines) > 1 else 0, rope=shape.rope,
            norm_rounds_once=norm.rounds_once, states=queries.dtype, weight_states=norm.weight.dtype,
            angle_states=cosines.dtype, kept_states=table.kv_type.dtype, epsilon=norm.epsilon, offset=norm.offset,
            **asdict(form), **table.arguments, **sizes,
        )  # fmt: skip

        mixed = self._attend(table, shape, asked, held, scale, window)
        out = queries.new_empty(sequences, heads, shape.value_dim)
        starts = [head * (shape.key_dim + shape.value_dim) + shape.key_dim for head in range(heads)]
        most = max((start + shape.value_dim - 1) // _TILE - start // _TILE + 1 for start in starts)
        kernel, grid = _latent_kernel("values", "FORMAT", name), (heads * most, sequences, 1)
        self.start(kernel, grid, matrix=of_matrix, mixed=mixed, out=out, states=out.dtype, **sizes)
        return out

    def _attend(
        self, table: PageTable, shape: LatentShape, asked: torch.Tensor, held: torch.Tensor, scale: float, window: int
    ) -> torch.Tensor:
        sequences, heads, rank = len(asked), shape.heads, shape.rank
        runs = -(-heads // _HEADS)
        splits = self._splits.count(runs * sequences)
        mixed = asked.new_empty(sequences, heads, rank)
        parts = asked.new_empty(sequences * heads * splits * (2 + rank))
        self.start(
            _latent_kernel("attention", "KV", _KEPT[table.kv_type]), (splits, runs, sequences), queries=asked,
            out=mixed, held=held, parts=parts, arrived=self._splits.arrived(table, runs * sequences), scale=scale,
            heads=heads, value_dim=rank, rope=shape.rope, window=window, splits=splits, **table.arguments,
        )  # fmt: skip
        return mixed


def _format_name(matrix: TiledMatrix | torch.Tensor) -> str:
    return PLAIN[matrix.dtype] if isinstance(matrix, torch.Tensor) else TILED[matrix.shape.format.name]
