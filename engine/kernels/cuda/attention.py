"""Attention of single tokens over pages by the kernel in `attention.cu`: one launch, however many tokens each sequence
holds."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch

from engine.kernels.cuda.compiled import Kernel
from engine.kernels.cuda.driver import Launcher, OnCard
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
