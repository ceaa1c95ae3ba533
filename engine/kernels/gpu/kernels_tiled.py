"""Products with tiled matrices (`engine.formats.tiles`), read directly from records.

The 4 bytes of a row within a vector of a tile form one 32-bit word, and the words of 16 rows are adjacent: a warp reads
whole lines, and each word covers 4 columns (8 of 4-bit codes), without moving bytes within the card.

What a format is: NIBBLES, codes of 4 bits rather than of 8; ZEROS, a zero point beside each scale; TABLE, codes that
are indices of 16 int8 values at `values_at` of the record; SCALES, the type of the scales. A table's values stay in the
L1 cache: one load per code is cheaper than selecting among registers.

A record is addressed by its distance in bytes from `base`, so that one launch serves slots in any number of memory
segments. A visit is a pair of a row of `x` and an expert; ids that are no expert give zeros.
"""

# mypy: ignore-errors
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.gpu.kernels_activation import activate


@triton.jit
def _columns_of(word, c: tl.constexpr, NIBBLES: tl.constexpr):
    """Of byte `c` of the words of vectors [n]: its (low nibble's) column."""
    if NIBBLES:
        return (word // 4) * 32 + (word % 4) * 4 + c
    return word * 4 + c


@triton.jit
def _vector(x, x_row, word, c: tl.constexpr, columns, NIBBLES: tl.constexpr, HIGH: tl.constexpr):
    """Elements of one row of x that are multiplied with byte `c` of each word, in fp32."""
    column = _columns_of(word, c, NIBBLES) + (16 if HIGH else 0)
    return tl.load(x + x_row * columns + column, mask=column < columns, other=0.0).to(tl.float32)


@triton.jit
def _meant(words, c: tl.constexpr, HIGH: tl.constexpr, values, NIBBLES: tl.constexpr, TABLE: tl.constexpr):
    """What byte `c` (its high or low nibble) of words stands for, without scale and zero point, in fp32."""
    if not NIBBLES:
        return ((words << (24 - 8 * c)) >> 24).to(tl.float32)
    codes = (words >> (8 * c + (4 if HIGH else 0))) & 15
    if TABLE:
        return tl.load(values + codes).to(tl.float32)
    return codes.to(tl.float32)


@triton.jit
def _dot_words(words, low, high, c: tl.constexpr, values, NIBBLES: tl.constexpr, TABLE: tl.constexpr):
    """Byte `c` of [n, 16] words times [n] elements of x."""
    dot = _meant(words, c, False, values, NIBBLES, TABLE) * low[:, None]
    if NIBBLES:
        dot += _meant(words, c, True, values, NIBBLES, TABLE) * high[:, None]
    return dot


@triton.jit
def tiled_by_visit(
    x,
    ids,
    table,
    base,
    out,
    weights_at,
    scales_at,
    zeros_at,
    bias_at,
    values_at,
    experts,
    groups,
    columns,
    rows,
    width,
    limit,
    alpha,
    NIBBLES: tl.constexpr,
    ZEROS: tl.constexpr,
    TABLE: tl.constexpr,
    SCALES: tl.constexpr,
    PAIRING: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KIND: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Few visits: one program per visit and block of 32 rows of the matrix.

    Args:
        x: [T, columns]; visit v uses row v // width.
        ids: int64 [visits].
        table: int64 [experts], distances of records.
        out: [visits, rows], or [visits, rows / 2] if gate and up are paired.
        PAIRING: 0 plain, 1 halves, 2 alternating: layout of biases, and whether the halves of a tile are multiplied.
        KIND: of the activation, or -1.
        WORDS: vectors of a tile read at a time.
    """
    visit = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    slot = tl.load(ids + visit)
    row16 = tl.arange(0, 16)
    is_paired: tl.constexpr = PAIRING != 0
    upper = tl.zeros([16], dtype=tl.float32)
    lower = tl.zeros([16], dtype=tl.float32)
    is_expert = (slot >= 0) & (slot < experts)
    if is_expert:
        per_group: tl.constexpr = 4 if NIBBLES else 8
        record = base + tl.multiple_of(tl.load(table + slot), 64)
        words = (record + weights_at).to(tl.pointer_type(tl.int32), bitcast=True)
        scales = (record + scales_at).to(tl.pointer_type(SCALES), bitcast=True)
        zeros = record + zeros_at
        biases = (record + bias_at).to(tl.pointer_type(tl.bfloat16), bitcast=True)
        values = (record + values_at).to(tl.pointer_type(tl.int8), bitcast=True)
        x_row = visit // width
        # Accumulate per vector of words; reduce over them at the end.
        upper_sums = tl.zeros([WORDS, 16], dtype=tl.float32)
        lower_sums = tl.zeros([WORDS, 16], dtype=tl.float32)
        first_group = block.to(tl.int64) * groups
        for begin in range(0, groups * per_group, WORDS):
            vector = begin + tl.arange(0, WORDS)
            is_there = (vector < groups * per_group)[:, None]
            tile = first_group + vector // per_group
            at = (tile * (per_group * 32) + (vector % per_group) * 16)[:, None] + row16[None, :]
            scale_at = (tile * 32)[:, None] + row16[None, :]
            upper_words = tl.load(words + at, mask=is_there, other=0)
            lower_words = tl.load(words + at + per_group * 16, mask=is_there, other=0)
            upper_scale = tl.load(scales + scale_at, mask=is_there, other=0.0).to(tl.float32)
            lower_scale = tl.load(scales + scale_at + 16, mask=is_there, other=0.0).to(tl.float32)
            upper_part = tl.zeros([WORDS, 16], dtype=tl.float32)
            lower_part = tl.zeros([WORDS, 16], dtype=tl.float32)
            x_sum = tl.zeros([WORDS], dtype=tl.float32)
            for c in tl.static_range(4):
                low = _vector(x, x_row, vector, c, columns, NIBBLES, False)
                high = low
                if NIBBLES:
                    high = _vector(x, x_row, vector, c, columns, NIBBLES, True)
                if ZEROS:
                    x_sum += low + high
                upper_part += _dot_words(upper_words, low, high, c, values, NIBBLES, TABLE)
                lower_part += _dot_words(lower_words, low, high, c, values, NIBBLES, TABLE)
            if ZEROS:
                upper_zero = tl.load(zeros + scale_at, mask=is_there, other=0).to(tl.float32) * 0.0625
                lower_zero = tl.load(zeros + scale_at + 16, mask=is_there, other=0).to(tl.float32) * 0.0625
                upper_part -= upper_zero * x_sum[:, None]
                lower_part -= lower_zero * x_sum[:, None]
            upper_sums += upper_part * upper_scale
            lower_sums += lower_part * lower_scale
        upper = tl.sum(upper_sums, 0)
        lower = tl.sum(lower_sums, 0)
        if is_paired:
            pair = block * 16 + row16
            if HAS_BIAS:
                gate_at = pair if PAIRING == 1 else 2 * pair
                up_at = rows // 2 + pair if PAIRING == 1 else 2 * pair + 1
                upper += tl.load(biases + gate_at, mask=pair < rows // 2, other=0.0).to(tl.float32)
                lower += tl.load(biases + up_at, mask=pair < rows // 2, other=0.0).to(tl.float32)
            upper = activate(upper, lower, KIND, True, HAS_LIMIT, limit, alpha)
        else:
            row = block * 32 + row16
            if HAS_BIAS:
                upper += tl.load(biases + row, mask=row < rows, other=0.0).to(tl.float32)
                lower += tl.load(biases + row + 16, mask=row + 16 < rows, other=0.0).to(tl.float32)
            if KIND >= 0:
                upper = activate(upper, upper, KIND, False, HAS_LIMIT, limit, alpha)
                lower = activate(lower, lower, KIND, False, HAS_LIMIT, limit, alpha)
    if is_paired:
        pair = block * 16 + row16
        target = out + visit * (rows // 2) + pair
        tl.store(target, upper.to(out.dtype.element_ty), mask=pair < rows // 2)
    else:
        row = block * 32 + row16
        target = out + visit * rows + row
        tl.store(target, upper.to(out.dtype.element_ty), mask=row < rows)
        tl.store(target + 16, lower.to(out.dtype.element_ty), mask=row + 16 < rows)


@triton.jit
def tiled_by_group(
    x,
    order,
    block_expert,
    block_begin,
    group_end,
    table,
    base,
    out,
    weights_at,
    scales_at,
    zeros_at,
    bias_at,
    values_at,
    experts,
    groups,
    columns,
    rows,
    width,
    limit,
    alpha,
    NIBBLES: tl.constexpr,
    ZEROS: tl.constexpr,
    TABLE: tl.constexpr,
    SCALES: tl.constexpr,
    PAIRING: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KIND: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    DOT: tl.constexpr,
    M: tl.constexpr,
    BLOCKS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Many visits, sorted by expert: one program for M visits of one expert and BLOCKS blocks of 32 rows.

    Args:
        x: [T, columns].
        order: int64 [visits], sorted by expert; visit v uses row v // width of x.
        block_expert: int64 [grid 0], expert of each program; `experts` if there is nothing to do.
        block_begin: int64 [grid 0], start of its visits in `order`.
        group_end: int64 [experts], end of an expert's visits in `order`.
        DOT: type of the products' operands.
    """
    program = tl.program_id(0)
    slot = tl.load(block_expert + program)
    if slot < experts:
        is_paired: tl.constexpr = PAIRING != 0
        per_group: tl.constexpr = 4 if NIBBLES else 8
        n: tl.constexpr = BLOCKS * 16
        place = tl.load(block_begin + program) + tl.arange(0, M)
        is_visit = place < tl.load(group_end + slot)
        visit = tl.load(order + place, mask=is_visit, other=0)
        x_rows = x + (visit // width)[:, None] * columns
        record = base + tl.multiple_of(tl.load(table + slot), 64)
        words = (record + weights_at).to(tl.pointer_type(tl.int32), bitcast=True)
        scales = (record + scales_at).to(tl.pointer_type(SCALES), bitcast=True)
        zeros = record + zeros_at
        biases = (record + bias_at).to(tl.pointer_type(tl.bfloat16), bitcast=True)
        values = (record + values_at).to(tl.pointer_type(tl.int8), bitcast=True)
        column16 = tl.arange(0, n)
        block = tl.program_id(1) * BLOCKS + column16 // 16
        is_block = block < tl.cdiv(rows, 32)
        row16 = column16 % 16
        upper = tl.zeros([M, n], dtype=tl.float32)
        lower = tl.zeros([M, n], dtype=tl.float32)
        for begin in range(0, groups * per_group, WORDS):
            vector = begin + tl.arange(0, WORDS)
            is_there = (vector < groups * per_group)[:, None] & is_block[None, :]
            tile = block.to(tl.int64)[None, :] * groups + (vector // per_group)[:, None]
            at = tile * (per_group * 32) + (vector % per_group)[:, None] * 16 + row16[None, :]
            scale_at = tile * 32 + row16[None, :]
            upper_words = tl.load(words + at, mask=is_there, other=0)
            lower_words = tl.load(words + at + per_group * 16, mask=is_there, other=0)
            upper_scale = tl.load(scales + scale_at, mask=is_there, other=0.0).to(tl.float32)
            lower_scale = tl.load(scales + scale_at + 16, mask=is_there, other=0.0).to(tl.float32)
            upper_zero = tl.zeros([WORDS, n], dtype=tl.float32)
            lower_zero = upper_zero
            if ZEROS:
                upper_zero = tl.load(zeros + scale_at, mask=is_there, other=0).to(tl.float32) * 0.0625
                lower_zero = tl.load(zeros + scale_at + 16, mask=is_there, other=0).to(tl.float32) * 0.0625
            for c in tl.static_range(4):
                for half in tl.static_range(2 if NIBBLES else 1):
                    column = _columns_of(vector, c, NIBBLES) + 16 * half
                    x_mask = is_visit[:, None] & (column < columns)[None, :]
                    xs = tl.load(x_rows + column[None, :], mask=x_mask, other=0.0).to(DOT)
                    up_w = _meant(upper_words, c, half == 1, values, NIBBLES, TABLE)
                    low_w = _meant(lower_words, c, half == 1, values, NIBBLES, TABLE)
                    if ZEROS:
                        up_w -= upper_zero
                        low_w -= lower_zero
                    upper = tl.dot(xs, (up_w * upper_scale).to(tl.bfloat16).to(DOT), upper)
                    lower = tl.dot(xs, (low_w * lower_scale).to(tl.bfloat16).to(DOT), lower)
        if is_paired:
            pair = block * 16 + row16
            is_pair = pair < rows // 2
            if HAS_BIAS:
                gate_at = pair if PAIRING == 1 else 2 * pair
                up_at = rows // 2 + pair if PAIRING == 1 else 2 * pair + 1
                upper += tl.load(biases + gate_at, mask=is_pair, other=0.0).to(tl.float32)[None, :]
                lower += tl.load(biases + up_at, mask=is_pair, other=0.0).to(tl.float32)[None, :]
            upper = activate(upper, lower, KIND, True, HAS_LIMIT, limit, alpha)
            target = out + visit[:, None] * (rows // 2) + pair[None, :]
            tl.store(target, upper.to(out.dtype.element_ty), mask=is_visit[:, None] & is_pair[None, :])
        else:
            row = block * 32 + row16
            if HAS_BIAS:
                upper += tl.load(biases + row, mask=row < rows, other=0.0).to(tl.float32)[None, :]
                lower += tl.load(biases + row + 16, mask=row + 16 < rows, other=0.0).to(tl.float32)[None, :]
            if KIND >= 0:
                upper = activate(upper, upper, KIND, False, HAS_LIMIT, limit, alpha)
                lower = activate(lower, lower, KIND, False, HAS_LIMIT, limit, alpha)
            target = out + visit[:, None] * rows + row[None, :]
            element = out.dtype.element_ty
            tl.store(target, upper.to(element), mask=is_visit[:, None] & (row < rows)[None, :])
            tl.store(target + 16, lower.to(element), mask=is_visit[:, None] & (row + 16 < rows)[None, :])
