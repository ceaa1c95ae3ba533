"""Linear layers and embeddings on a card, their weights in tiles or in blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard, cast

import torch

from engine.families.library import take_over
from engine.formats import TiledFormat
from engine.formats.ggml import BlockType
from engine.formats.tiles import TiledMatrix, rows_of
from engine.formats.weight_format import TILE_ROWS
from engine.kernels.gpu.proof import kernels_of
from engine.kernels.gpu.stored import CardKernels, RecordTable, matrix_in, part_in, store
from engine.kernels.native.linear import Formats, MatrixOf
from engine.kernels.repack import Blocks, unpacked

_FEW_TOKENS = 16
"""Up to this many tokens, reading the weights per token from the card's cache is faster than unpacking them."""
_ROWS_OF_HEAD = 8192


class CardLinear:
    """The `forward` of one linear layer in tiles or blocks; replaces its weight.

    Few tokens use them directly, if there are kernels; otherwise each call unpacks.

    Args:
        matrix: on any device; copied to `device`.
        kernels: of the card, if it runs them.
        is_head: its outputs are logits: float32, as one near 20 in bf16 is rounded to an eighth.

    Attributes:
        matrix: on `device`, within `record`.
    """

    def __init__(
        self,
        matrix: TiledMatrix | Blocks,
        bias: torch.Tensor | None,
        device: torch.device,
        kernels: CardKernels | None,
        *,
        is_head: bool = False,
    ) -> None:
        self._is_head = is_head
        self.record, self._stored = store(matrix, bias, device)
        self._kernels = kernels
        self._table = RecordTable([self.record])
        self.matrix = matrix_in(self.record[0], self._stored, matrix)
        self._bias = part_in(self.record[0], self._stored.bias_at, bias) if bias is not None else None

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """[.., columns] -> [.., rows]."""
        if self._kernels is None or not self.is_for_few(input):
            return self.rows(input, 0, self._stored.rows)
        rows = input.reshape(-1, self._stored.columns).to(torch.bfloat16).contiguous()
        out = self._kernels.few.multiply_visits(self._stored, self._table, rows, None, 1, floats=self._is_head)
        return self._as_asked(out.view(*input.shape[:-1], self._stored.rows), input)

    def is_for_few(self, input: torch.Tensor) -> bool:
        """Whether they are read directly for so many tokens, if there are kernels."""
        return 0 < input.numel() <= _FEW_TOKENS * self._stored.columns

    def rows(self, input: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """[.., columns] -> [.., end - begin], with weights unpacked.

        Args:
            begin, end: rows of the matrix; of tiles, where a block of 32 begins, and where one or the matrix ends.
        """
        tokens = input.reshape(-1, self._stored.columns).to(torch.bfloat16).contiguous()
        unpack = self._kernels.unpack if self._kernels is not None else unpacked
        bias = self._bias[begin:end] if self._bias is not None else None
        whole = self.matrix
        some = (
            rows_of(whole, begin, end) if isinstance(whole, TiledMatrix) else Blocks(whole.kind, whole.raw[begin:end])
        )
        weights = unpack(some)
        product = _unrounded if self._is_head else torch.nn.functional.linear
        out = product(tokens, weights, bias)
        return self._as_asked(out.view(*input.shape[:-1], end - begin), input)

    def _as_asked(self, out: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
        return out if self._is_head else out.to(input.dtype)


def _unrounded(tokens: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """tokens x weights in float32, the weights unpacked some rows at a time: as floats they are twice as large."""
    out = tokens.new_empty(len(tokens), len(weights), dtype=torch.float32)
    for begin in range(0, len(weights), _ROWS_OF_HEAD):
        some = slice(begin, begin + _ROWS_OF_HEAD)
        torch.matmul(tokens.float(), weights[some].float().mT, out=out[:, some])
    return out if bias is None else out + bias.float()


class CardEmbedding:
    """The `forward` of an embedding in blocks: rows are unpacked as they are looked up.

    Args:
        table: [vocabulary, hidden], on the card; an output layer may share it.
        scale: of rows.
    """

    def __init__(self, table: Blocks, kernels: CardKernels, scale: float = 1.0) -> None:
        self.table, self._unpack, self._scale = table, kernels.unpack, scale

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """ids [..] -> bf16 [.., hidden]."""
        rows = self.table.raw.index_select(0, input.reshape(-1))
        found = self._unpack(Blocks(self.table.kind, rows)).view(*input.shape, -1)
        return found if self._scale == 1 else found * self._scale


SIBLINGS = (("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa"), ("gate_proj", "up_proj"))
"""Modules that transformers' attention and MLPs call with the same tensor, one after the other."""


Matrices = Sequence[TiledMatrix] | Sequence[Blocks]


def can_join(matrices: Sequence[TiledMatrix | Blocks]) -> TypeGuard[Matrices]:
    """Whether matrices are of one format and width, and end where a block of tiles does."""
    first = matrices[0]
    if len(matrices) < 2 or any(type(each) is not type(first) for each in matrices):
        return False
    if isinstance(first, Blocks):
        return all(isinstance(each, Blocks) and _kind(each) == _kind(first) for each in matrices)
    return all(isinstance(each, TiledMatrix) and _go_together(first, each) for each in matrices)


def _kind(blocks: Blocks) -> tuple[str, int]:
    return blocks.kind.name, blocks.columns


def _go_together(first: TiledMatrix, each: TiledMatrix) -> bool:
    return (
        each.shape.format is first.shape.format
        and each.shape.columns == first.shape.columns
        and each.shape.pairing is first.shape.pairing
        and each.shape.rows % TILE_ROWS == 0
        and (each.table is None or first.table is None or torch.equal(each.table, first.table))
    )


def _joined(matrices: Matrices) -> TiledMatrix | Blocks:
    if isinstance(matrices[0], Blocks):
        return Blocks(matrices[0].kind, torch.cat([each.in_order for each in cast("Sequence[Blocks]", matrices)]))
    tiles = cast("Sequence[TiledMatrix]", matrices)
    first = tiles[0]
    return TiledMatrix(
        replace(first.shape, rows=sum(each.shape.rows for each in tiles)),
        torch.cat([each.weights for each in tiles]),
        torch.cat([each.scales for each in tiles]),
        torch.cat([each.zeros for each in tiles if each.zeros is not None]) if first.zeros is not None else None,
        first.table,
    )


class JoinedLinears:
    """The forwards of some linear layers in tiles or blocks with the same input, as one product.

    A card starts one launch instead of three, and a projection to a few hundred rows no longer leaves most of it idle.

    Args:
        matrices: that `can_join`, on any device; copied to `device`.
        biases: of each, if any.

    Attributes:
        record: all of them, uint8 [1, bytes].
        forwards: of each layer.
    """

    def __init__(
        self,
        matrices: Matrices,
        biases: Sequence[torch.Tensor | None],
        device: torch.device,
        kernels: CardKernels,
    ) -> None:
        rows = [each.rows if isinstance(each, Blocks) else each.shape.rows for each in matrices]
        joined = _joined(matrices)
        bias = None
        if any(each is not None for each in biases):
            one = next(each for each in biases if each is not None)
            bias = torch.cat([b if b is not None else one.new_zeros(n) for b, n in zip(biases, rows, strict=True)])
        self._linear = CardLinear(joined, bias, device, kernels)
        self.record = self._linear.record
        ends = torch.tensor(rows).cumsum(0).tolist()
        spans = list(zip([0, *ends[:-1]], ends, strict=True))
        self.forwards: list[Callable[[torch.Tensor], torch.Tensor]] = [
            _One(self, number, begin, end) for number, (begin, end) in enumerate(spans)
        ]
        self._input: torch.Tensor | None = None
        self._output: torch.Tensor | None = None
        self._waiting: set[int] = set()

    def part(self, number: int, begin: int, end: int, input: torch.Tensor) -> torch.Tensor:
        """[.., columns] -> [.., end - begin]: the first layer that is asked computes all for a few tokens."""
        if not self._linear.is_for_few(input):
            return self._linear.rows(input, begin, end)
        if self._input is not input or number not in self._waiting:
            self._input, self._output = input, self._linear(input)
            self._waiting = set(range(len(self.forwards)))
        self._waiting.discard(number)
        assert self._output is not None
        mine = self._output[..., begin:end].contiguous()
        if not self._waiting:  # nobody else will ask: the next tensor may have the same place
            self._input = self._output = None
        return mine


class _One:
    """The `forward` of one of them."""

    def __init__(self, joined: JoinedLinears, number: int, begin: int, end: int) -> None:
        self._joined, self._mine = joined, (number, begin, end)

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        return self._joined.part(*self._mine, input)


def is_held_quantised(device: torch.device) -> bool:
    """Whether linear layers on a device have quantised weights, quantised while loading."""
    return device.type == "cuda"


def quantised_sizes(model: Any, formats: Formats, sizes: Mapping[str, int]) -> dict[str, int]:
    """Bytes of tensors by name once linear layers are in these formats.

    Args:
        model: on any device, including the meta device.
        sizes: the sizes before; without tied weights, which are stored a second time.
    """
    result = dict(sizes)
    for name, of_this in formats.items():
        module = model.get_submodule(name)
        if not _is_shared(model, module.weight):
            result.pop(f"{name}.weight", None)
        result[f"{name}.tiles"] = sum(of_this.part_bytes(module.out_features, module.in_features))
    return result


def quantise_on_cards(model: Any, formats: Formats, matrix: MatrixOf, place_of: Callable[[str], torch.device]) -> None:
    """Moves linear layers of a model in RAM to cards, in tiles or blocks, one by one.

    The parameter `weight` becomes empty; the tiles or blocks are a buffer of the module. A weight shared with an
    embedding stays. Everything else is unchanged.

    Args:
        place_of: module name -> its card.
    """
    modules = {name: model.get_submodule(name) for name in formats}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for names in _together(formats):
        matrices = [matrix(name) for name in names]
        biases = [each.bias.detach() if each.bias is not None else None for each in (modules[name] for name in names)]
        place = place_of(names[0])
        on_card = kernels_of(place) if all(_is_read(formats[name]) for name in names) else None
        if on_card is not None and can_join(matrices):
            joined = JoinedLinears(matrices, biases, place, on_card)
            made_of = [(forward, joined.record) for forward in joined.forwards]
        else:
            alone = [
                CardLinear(
                    made,
                    bias,
                    place,
                    kernels_of(place) if _is_read(formats[name]) else None,
                    is_head=modules[name] is head,
                )
                for name, made, bias in zip(names, matrices, biases, strict=True)
            ]
            made_of = [(forward, forward.record) for forward in alone]
        for name, (forward, record) in zip(names, made_of, strict=True):
            module = modules[name]
            module.weight = torch.nn.Parameter(module.weight.new_empty(0), requires_grad=False)
            module.register_buffer("tiles", record, persistent=False)  # registered only to be counted
            take_over([(module, forward)])


def _is_read(of_weights: TiledFormat | BlockType) -> bool:
    """Whether the card's kernels read a format, where there are any; blocks would not be there otherwise."""
    return isinstance(of_weights, BlockType) or of_weights.on_card


def _together(formats: Formats) -> Iterator[list[str]]:
    """Names of layers in their order, those together that get the same input and are of one format."""
    left = dict.fromkeys(formats)
    for name in formats:
        if name not in left:
            continue
        parent, _, own = name.rpartition(".")
        family = next((each for each in SIBLINGS if own in each), (own,))
        all_of_them = (f"{parent}.{each}" if parent else each for each in family)
        mine = [full for full in all_of_them if full in left and formats[full] is formats[name]]
        for each in mine:
            del left[each]
        yield mine


def _is_shared(model: Any, weight: torch.Tensor) -> bool:
    embeddings = model.get_input_embeddings()
    return embeddings is not None and getattr(embeddings, "weight", None) is weight
