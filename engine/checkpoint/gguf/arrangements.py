"""How tensors of a checkpoint are made of those in a GGUF file, where llama.cpp's converter rearranges them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.checkpoint.headers import TensorEntry
from engine.checkpoint.packed import Changed, LatentHeads, PackedEntry, Packing, RotaryRows, Rows
from engine.common.errors import EngineError, ErrorCode

_MOST_EXPERTS = 4096

Arrangement = Callable[[Sequence[TensorEntry], Mapping[str, Any]], TensorEntry]
"""The tensors in the file and the configuration -> the tensor that the model has."""


def packed(shape: tuple[int, ...], sources: Sequence[TensorEntry], packing: Packing) -> PackedEntry:
    _check_size(shape, sources)
    return PackedEntry.of(sources[0].key, shape, sources, packing)


def _check_size(shape: tuple[int, ...], sources: Sequence[TensorEntry]) -> None:
    if math.prod(shape) != sum(source.numel for source in sources):
        raise damaged(sources[0], f"has the shape {sources[0].shape}, which does not fit the model")


def damaged(entry: TensorEntry, what: str) -> EngineError:
    return EngineError(
        ErrorCode.CHECKPOINT_DAMAGED, f"{entry.key} in {entry.file} {what}: get another version of the file."
    )


def expert_rows(entry: TensorEntry) -> Iterator[TensorEntry]:
    """What a stack of experts holds for each: its part of the bytes."""
    experts = entry.shape[0]
    if len(entry.shape) < 2 or experts > _MOST_EXPERTS:
        raise damaged(entry, f"is no stack of experts ({entry.shape})")
    yield from map(entry.below, range(experts))


def rows_of(entry: TensorEntry, counts: Sequence[int]) -> Iterator[TensorEntry]:
    """So many rows of a tensor, and then so many more: its parts from the first row to the last."""
    if not entry.shape or sum(counts) != entry.shape[0] or min(counts) < 0:
        raise damaged(entry, f"has the shape {entry.shape}, which does not fit the number of heads")
    yield from map(entry.rows, accumulate(counts, initial=0), counts)


def _rotary(heads: str) -> Arrangement:
    def arrange(sources: Sequence[TensorEntry], config: Mapping[str, Any]) -> TensorEntry:
        (source,) = sources
        if source.shape[0] != config[heads] * config["head_dim"] or config["head_dim"] % 2:
            raise damaged(source, "does not fit the number of heads")
        return packed(source.shape, sources, RotaryRows(config[heads]))

    return arrange


def _of_heads(order: Callable[[int, Mapping[str, Any]], NDArray[np.intp]], third: int | None = None) -> Arrangement:
    """Rows of queries or keys of which each head has its own in another order.

    Args:
        order: the width of a head and the configuration -> for each of its rows the place in the file.
        third: which of three equal parts of the file's tensor they are.
    """

    def arrange(sources: Sequence[TensorEntry], config: Mapping[str, Any]) -> TensorEntry:
        (source,) = sources
        if third is not None:
            source = list(rows_of(source, (source.shape[0] // 3,) * 3))[third]
        heads = config["num_attention_heads"]
        width = config.get("head_dim") or source.shape[0] // heads
        if not width or source.shape[0] % width or len(source.shape) > 2:
            raise damaged(source, "does not fit the number of heads")
        own = order(width, config)
        if len(own) != width:
            raise damaged(source, "does not fit the width of heads")
        rows = np.arange(0, source.shape[0], width)[:, None] + own
        return packed(source.shape, [source], Rows(rows.reshape(-1), -len(source.shape)))

    return arrange


def _halves(axes: int) -> Callable[[int, Mapping[str, Any]], NDArray[np.intp]]:
    """Of so many axes, each with pairs -> first parts of pairs of all axes in turn, then second parts."""
    return lambda width, _: np.arange(width - width % (2 * axes)).reshape(axes, -1, 2).T.reshape(-1)


def _halves_of_three(width: int, _config: Mapping[str, Any]) -> NDArray[np.intp]:
    """Of three axes, each with two halves, and a rest -> first halves of all axes, then second halves, and the rest."""
    turned = 6 * (width // 6)
    return np.concatenate((np.arange(turned).reshape(3, 2, -1).swapaxes(0, 1).reshape(-1), np.arange(turned, width)))


def _pairs(width: int, config: Mapping[str, Any]) -> NDArray[np.intp]:
    """Of halves of what is rotated -> pairs."""
    turned = int(width * config["rope_parameters"].get("partial_rotary_factor", 1.0)) // 2 * 2
    return np.concatenate((np.arange(turned).reshape(2, -1).T.reshape(-1), np.arange(turned, width)))


def _shaped(shape: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Arrangement:
    def arrange(sources: Sequence[TensorEntry], _config: Mapping[str, Any]) -> TensorEntry:
        (source,) = sources
        made = shape(source.shape)
        _check_size(made, sources)
        return replace(source, shape=made)

    return arrange


def _flat(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape))


def _half(which: int) -> Arrangement:
    def arrange(sources: Sequence[TensorEntry], _config: Mapping[str, Any]) -> TensorEntry:
        (source,) = sources
        return list(rows_of(source, (source.shape[0] // 2,) * 2))[which]

    return arrange


def _but(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    at = len(shape) + axis
    return shape if at < 0 else (*shape[:at], *shape[at + 1 :])


def _joined(*, axis: int = -2, transposed: bool = False, alternating: bool = False) -> Arrangement:
    def arrange(sources: Sequence[TensorEntry], _config: Mapping[str, Any]) -> TensorEntry:
        shape = list(sources[0].shape)
        each = [source.shape[axis] for source in sources if len(source.shape) >= -axis]
        fits = len({_but(source.shape, axis) for source in sources}) == 1 and len(each) == len(sources)
        if not fits or (alternating and len(set(each)) > 1):
            raise damaged(sources[0], "does not fit the tensors beside it")
        shape[axis] = sum(each)
        if transposed:
            shape[-1], shape[-2] = shape[-2], shape[-1]
        return packed(tuple(shape), sources, Rows(None, axis, transposed, alternating))

    return arrange


def _expert_below_expert(sources: Sequence[TensorEntry], _config: Mapping[str, Any]) -> TensorEntry:
    """[E, out, in] -> [E * in, out]: each expert's matrix transposed, one below the other."""
    (source,) = sources
    if len(source.shape) != 3:
        raise damaged(source, "is no stack of experts")
    experts, rows, columns = source.shape
    return packed((experts * columns, rows), sources, Rows(transposed=True))


def _colours_last(sources: Sequence[TensorEntry], _config: Mapping[str, Any]) -> TensorEntry:
    """[width, colours, rows, columns] of patches -> [width, rows * columns * colours]."""
    width, *inner = sources[0].shape
    order = np.arange(_flat(tuple(inner))).reshape(inner[0], -1).T.reshape(-1)
    shaped = replace(sources[0], shape=(width, len(order)))
    return packed(shaped.shape, [shaped], Rows(order, -1))


def _logarithm(shape: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Arrangement:
    """Of the numbers without their signs, in this shape."""

    def arrange(sources: Sequence[TensorEntry], _config: Mapping[str, Any]) -> TensorEntry:
        shaped = replace(sources[0], shape=shape(sources[0].shape))
        return packed(shaped.shape, [shaped], Changed("logarithm"))

    return arrange


def _latent_heads(sources: Sequence[TensorEntry], _config: Mapping[str, Any]) -> TensorEntry:
    keys, values = sources
    if len(keys.shape) != 3 or len(values.shape) != 3 or keys.shape[0] != values.shape[0]:
        raise damaged(keys, "does not fit the number of heads")
    heads, latent, width = keys.shape
    if values.shape[2] != latent:
        raise damaged(values, "does not fit the keys' matrices")
    return packed((heads * (width + values.shape[1]), latent), sources, LatentHeads())


def _delta(part: str) -> Arrangement:
    """A tensor of linear attention (gated delta rule) whose value heads are in llama.cpp's order."""

    def arrange(sources: Sequence[TensorEntry], config: Mapping[str, Any]) -> TensorEntry:
        (source,) = sources
        width = config["linear_value_head_dim"]
        width = width if part in ("qkv", "rows", "columns", "convolution") else 1
        before = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
        before = before if part in ("qkv", "convolution") else 0
        rows = _flat(source.shape) if part in ("numbers", "logarithm") else source.shape[-1 if part == "columns" else 0]
        if rows != before + config["linear_num_value_heads"] * width:
            raise damaged(source, "does not fit the number of heads")
        # llama.cpp has the value heads of all key heads in turn, transformers those of each key head together.
        keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
        heads = np.arange(values * width).reshape(values // keys, keys, width).swapaxes(0, 1).reshape(-1)
        order = np.concatenate((np.arange(before), before + heads))
        if part == "logarithm":
            return packed((_flat(source.shape),), sources, Changed("logarithm", order))
        if part == "numbers":
            return packed((_flat(source.shape),), sources, Rows(order, -1))
        if part == "convolution":
            shaped = replace(source, shape=(source.shape[0], 1, source.shape[-1]))
            return packed(shaped.shape, [shaped], Rows(order, -3))
        return packed(source.shape, sources, Rows(order, -1 if part == "columns" else -2))

    return arrange


def _by_key_head(sources: Sequence[TensorEntry], config: Mapping[str, Any]) -> TensorEntry:
    """Queries, keys, values and gates of linear attention, each of all heads -> for each key head all four."""
    both, gate = sources
    heads, key_width = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] // heads * config["linear_value_head_dim"]
    counts = (key_width, key_width, values, values)
    if both.shape[0] + gate.shape[0] != heads * sum(counts) or both.shape[1:] != gate.shape[1:]:
        raise damaged(both, "does not fit the number of heads")
    begins = np.cumsum([0, *(heads * count for count in counts[:-1])])
    order = np.concatenate(
        [
            np.arange(begin + head * count, begin + (head + 1) * count)
            for head in range(heads)
            for begin, count in zip(begins, counts, strict=True)
        ]
    )
    return packed((len(order), both.shape[1]), sources, Rows(order))


def _no_correction(sources: Sequence[TensorEntry], _config: Mapping[str, Any]) -> TensorEntry:
    """Zeros for each of a router's experts."""
    (router,) = sources
    first = replace(router, shape=router.shape[:1], nbytes=router.nbytes // max(router.shape[-1], 1))
    if len(router.shape) != 2 or router.dtype not in ("F32", "F16", "BF16"):
        raise damaged(router, "is no router")
    return packed((1, router.shape[0]), [first], Changed("nothing"))


ARRANGEMENTS: dict[str, Arrangement] = {
    "": lambda sources, _config: sources[0],
    "rotary_q": _rotary("num_attention_heads"),
    "rotary_k": _rotary("num_key_value_heads"),
    "pairwise": _of_heads(_pairs),
    "third_v": lambda sources, _config: list(rows_of(sources[0], (sources[0].shape[0] // 3,) * 3))[2],
    **{f"kimi_{each}": _of_heads(_halves(2), at) for at, each in enumerate("qk")},
    **{f"pairs_{each}": _of_heads(_halves(1), at) for at, each in enumerate("qk")},
    "three_axes": _of_heads(_halves_of_three),
    "square": _shaped(lambda shape: (math.isqrt(shape[0]), math.isqrt(shape[0]), *shape[1:])),
    "row": _shaped(lambda shape: (1, _flat(shape))),
    "flat": _shaped(lambda shape: (_flat(shape),)),
    "convolution": _shaped(lambda shape: (_flat(shape[:-1]), 1, shape[-1])),
    "below": _shaped(lambda shape: (_flat(shape[:-1]), shape[-1])),
    "below_transposed": _expert_below_expert,
    "lowered": lambda sources, _config: packed(sources[0].shape, sources, Changed("lowered")),
    "table": lambda sources, _config: sources[0],
    "first": lambda sources, _config: sources[0],
    "lowered_flat": lambda sources, _config: packed(
        (_flat(sources[0].shape),), [replace(sources[0], shape=(_flat(sources[0].shape),))], Changed("lowered")
    ),
    "no_correction": _no_correction,
    "logarithm": _logarithm(lambda shape: (_flat(shape),)),
    "logarithms": _logarithm(lambda shape: shape),
    "logarithm_of_heads": _logarithm(lambda shape: (1, 1, _flat(shape), 1)),
    "first_half": _half(0),
    "second_half": _half(1),
    "joined": _joined(),
    "joined_numbers": _joined(axis=-1),
    "frames": lambda sources, config: _joined(axis=-3)(
        [replace(each, shape=(*each.shape[:-2], 1, *each.shape[-2:])) for each in sources], config
    ),
    "joined_transposed": _joined(transposed=True),
    "scalar": _shaped(lambda _shape: ()),
    "colours_last": _colours_last,
    "alternating_transposed": _joined(transposed=True, alternating=True),
    "alternating_numbers": _joined(axis=-1, alternating=True),
    "latent_heads": _latent_heads,
    # Without the factor of what is normalised, which the model applies itself.
    "latent_norm": lambda sources, config: packed(
        sources[0].shape,
        sources,
        Changed("scaled", factor=math.sqrt(sources[0].shape[0] / config["hidden_size"])),
    ),
    "by_key_head": _by_key_head,
    **{f"delta_{part}": _delta(part) for part in ("qkv", "rows", "columns", "convolution", "numbers", "logarithm")},
    "delta_heads": _delta("heads"),
}
"""By the name that a family gives as `Made.how`."""
