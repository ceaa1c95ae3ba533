"""Products with plain row-major matrices in records: like `kernels_tiled`, for bf16, fp16 and fp32."""

# mypy: ignore-errors
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.gpu.kernels_activation import activate


@triton.jit
def _row_of(output, rows, PAIRING: tl.constexpr, UP: tl.constexpr):
    """The matrix row of an output's gate (or up); without pairing, outputs are rows."""
    if PAIRING == 1:
        return output + rows // 2 if UP else output
    if PAIRING == 2:
        return 2 * output + 1 if UP else 2 * output
    return output


@triton.jit
def plain_by_visit(
    x,
    ids,
    table,
    base,
    out,
    weights_at,
    bias_at,
    experts,
    columns,
    rows,
    width,
    limit,
    alpha,
    PAIRING: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KIND: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """Few visits: one program for each visit and N outputs; arguments as in `kernels_tiled.tiled_by_visit`.

    Elements of the records are of x's type.
    """
    visit = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * N + tl.arange(0, N)
    is_paired: tl.constexpr = PAIRING != 0
    outputs = rows // 2 if is_paired else rows
    is_output = output < outputs
    slot = tl.load(ids + visit)
    gate = tl.zeros([N], dtype=tl.float32)
    up = tl.zeros([N], dtype=tl.float32)
    is_expert = (slot >= 0) & (slot < experts)
    if is_expert:
        record = base + tl.multiple_of(tl.load(table + slot), 64)
        weights = (record + weights_at).to(tl.pointer_type(x.dtype.element_ty), bitcast=True)
        biases = (record + bias_at).to(tl.pointer_type(x.dtype.element_ty), bitcast=True)
        x_row = x + (visit // width) * columns
        gate_row = _row_of(output, rows, PAIRING, False)
        up_row = _row_of(output, rows, PAIRING, True)
        gates = tl.zeros([N, K], dtype=tl.float32)
        ups = tl.zeros([N, K], dtype=tl.float32)
        for begin in range(0, columns, K):
            column = begin + tl.arange(0, K)
            mask = is_output[:, None] & (column < columns)[None, :]
            xs = tl.load(x_row + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
            at = gate_row.to(tl.int64)[:, None] * columns + column[None, :]
            gates += tl.load(weights + at, mask=mask, other=0.0).to(tl.float32) * xs
            if is_paired:
                at = up_row.to(tl.int64)[:, None] * columns + column[None, :]
                ups += tl.load(weights + at, mask=mask, other=0.0).to(tl.float32) * xs
        gate = tl.sum(gates, 1)
        up = tl.sum(ups, 1)
        if HAS_BIAS:
            gate += tl.load(biases + gate_row, mask=is_output, other=0.0).to(tl.float32)
            if is_paired:
                up += tl.load(biases + up_row, mask=is_output, other=0.0).to(tl.float32)
        if KIND >= 0:
            gate = activate(gate, up, KIND, is_paired, HAS_LIMIT, limit, alpha)
    tl.store(out + visit * outputs + output, gate.to(out.dtype.element_ty), mask=is_output)


@triton.jit
def plain_by_group(
    x,
    order,
    block_expert,
    block_begin,
    group_end,
    table,
    base,
    out,
    weights_at,
    bias_at,
    experts,
    columns,
    rows,
    width,
    limit,
    alpha,
    PAIRING: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KIND: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    DOT: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """Many visits, sorted by expert: M visits of one expert and N outputs; arguments as in `tiled_by_group`."""
    program = tl.program_id(0)
    slot = tl.load(block_expert + program)
    if slot < experts:
        is_paired: tl.constexpr = PAIRING != 0
        outputs = rows // 2 if is_paired else rows
        output = tl.program_id(1) * N + tl.arange(0, N)
        is_output = output < outputs
        place = tl.load(block_begin + program) + tl.arange(0, M)
        is_visit = place < tl.load(group_end + slot)
        visit = tl.load(order + place, mask=is_visit, other=0)
        x_rows = x + (visit // width)[:, None] * columns
        record = base + tl.multiple_of(tl.load(table + slot), 64)
        weights = (record + weights_at).to(tl.pointer_type(x.dtype.element_ty), bitcast=True)
        biases = (record + bias_at).to(tl.pointer_type(x.dtype.element_ty), bitcast=True)
        gate_row = _row_of(output, rows, PAIRING, False)
        up_row = _row_of(output, rows, PAIRING, True)
        gate = tl.zeros([M, N], dtype=tl.float32)
        up = tl.zeros([M, N], dtype=tl.float32)
        for begin in range(0, columns, K):
            column = begin + tl.arange(0, K)
            is_column = column < columns
            x_mask = is_visit[:, None] & is_column[None, :]
            xs = tl.load(x_rows + column[None, :], mask=x_mask, other=0.0).to(DOT)
            mask = is_column[:, None] & is_output[None, :]
            at = gate_row.to(tl.int64)[None, :] * columns + column[:, None]
            gate = tl.dot(xs, tl.load(weights + at, mask=mask, other=0.0).to(DOT), gate, input_precision="ieee")
            if is_paired:
                at = up_row.to(tl.int64)[None, :] * columns + column[:, None]
                up = tl.dot(xs, tl.load(weights + at, mask=mask, other=0.0).to(DOT), up, input_precision="ieee")
        if HAS_BIAS:
            gate += tl.load(biases + gate_row, mask=is_output, other=0.0).to(tl.float32)[None, :]
            if is_paired:
                up += tl.load(biases + up_row, mask=is_output, other=0.0).to(tl.float32)[None, :]
        if KIND >= 0:
            gate = activate(gate, up, KIND, is_paired, HAS_LIMIT, limit, alpha)
        target = out + visit[:, None] * outputs + output[None, :]
        tl.store(target, gate.to(out.dtype.element_ty), mask=is_visit[:, None] & is_output[None, :])
