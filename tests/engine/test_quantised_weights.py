"""Weights in tiles: their form, how near they are, and that torch and native code make and read the same."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.formats import FORMATS, TiledFormat
from engine.formats.int4 import INT4
from engine.formats.int8 import INT8
from engine.formats.lut4 import LUT4, MXFP4_TABLE
from engine.formats.tiles import Pairing, TiledMatrix, TiledShape, dequantise, quantise_in_torch
from engine.kernels.native.library import Isa, NativeKernels
from engine.kernels.repack import dequantise_natively, quantise, quantise_natively
from tests.engine.native_isas import isas, kernels_of

pytestmark = pytest.mark.every_combination

_ISAS = isas()
TILED = [each for each in FORMATS.values() if isinstance(each, TiledFormat)]
every_format = pytest.mark.parametrize("tiled", TILED, ids=lambda each: each.name)


@pytest.fixture(scope="module", params=_ISAS, ids=lambda isa: isa.name)
def kernels(request: pytest.FixtureRequest) -> Iterator[NativeKernels]:
    isa: Isa = request.param
    with kernels_of(isa, threads=2) as held_back:
        yield held_back


SHAPES = st.tuples(st.integers(1, 100), st.integers(1, 140))
PAIRINGS = st.sampled_from(list(Pairing))


def _weight(shape: tuple[int, int], pairing: Pairing, seed: int, spread: float = 0.05) -> torch.Tensor:
    rows, columns = shape
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows if pairing is Pairing.PLAIN else 2 * rows, columns, generator=generator) * spread


def _group_ranges(weight: torch.Tensor) -> torch.Tensor:
    """The largest value of each weight's group, and the group's range with 0: both [rows, columns]."""
    rows, columns = weight.shape
    groups = torch.nn.functional.pad(weight, (0, -columns % 32)).view(rows, -1, 32)
    size = groups.abs().amax(-1)
    span = groups.amax(-1).clamp(min=0) - groups.amin(-1).clamp(max=0)
    return torch.stack([t[..., None].expand_as(groups).flatten(1)[:, :columns] for t in (size, span)])


@settings(max_examples=40)
@given(SHAPES, PAIRINGS, st.integers(0, 2**31))
def test_int8_is_within_half_a_step(shape: tuple[int, int], pairing: Pairing, seed: int) -> None:
    weight = _weight(shape, pairing, seed)
    near = dequantise(quantise(weight, INT8, pairing), torch.float32)
    size, _ = _group_ranges(weight)
    # A scale is at most 16 steps of 1/128 above what it would be.
    assert ((near - weight).abs() <= 0.5 / 127 * size * (1 + 16 * 2**-7) + 1e-9).all()


def test_int8_scales_are_chosen() -> None:
    """Well below what a scale that the largest weight alone determines gives, and nothing where that is possible."""
    groups = torch.randn(500, 32, generator=torch.Generator().manual_seed(5))
    q, scales = INT8.fit(groups, 16)[:2]
    error = (q.float() * scales.float()[:, None] - groups).square().sum()
    plain = groups.abs().amax(-1, keepdim=True) / 127
    assert error < 0.85 * ((groups / plain).round() * plain - groups).square().sum()
    whole = torch.randint(-120, 121, (50, 32)).float()
    whole[:, 0] = 120  # a scale of 1 is within reach, and exact
    q, scales = INT8.fit(whole, 16)[:2]
    assert torch.equal(q.float() * scales.float()[:, None], whole)


@settings(max_examples=40)
@given(SHAPES, PAIRINGS, st.integers(0, 2**31))
def test_plain_int4_is_within_a_step(shape: tuple[int, int], pairing: Pairing, seed: int) -> None:
    weight = _weight(shape, pairing, seed)
    target = TiledMatrix.empty(TiledShape(*weight.shape, INT4, pairing))
    quantise_in_torch(weight, target, rounds=0)
    _, span = _group_ranges(weight)
    # Half a step, and what the zero's and the scale's rounding make of the outermost ones.
    assert ((dequantise(target, torch.float32) - weight).abs() <= 0.65 / 15 * span + 1e-9).all()


@settings(max_examples=30)
@given(st.integers(0, 2**31), st.sampled_from([0.0, 0.02, 1.0]), st.sampled_from([1e-12, 0.01, 1e6]))
def test_optimised_int4_is_never_worse_than_min_max(seed: int, shift: float, spread: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    groups = (torch.randn(40, 32, generator=generator) + shift) * spread

    def error(rounds: int) -> torch.Tensor:
        q, scales, zeros = INT4.fit(groups, rounds)
        near = (q.float() - zeros.float()[..., None] / 16) * scales.float()[..., None]
        return (near - groups).square().sum(-1)

    plain, optimised = error(0), error(16)
    assert (optimised <= plain * (1 + 1e-5)).all()
    if shift == 0:
        assert optimised.sum() < 0.98 * plain.sum()


@pytest.mark.takes_turns(3)
@every_format
@settings(max_examples=4)
@given(shape=SHAPES, pairing=PAIRINGS, seed=st.integers(0, 2**31))
def test_native_code_reads_and_makes_the_same(
    kernels: NativeKernels, tiled: TiledFormat, shape: tuple[int, int], pairing: Pairing, seed: int
) -> None:
    weight = _weight(shape, pairing, seed).bfloat16()
    in_torch = quantise(weight, tiled, pairing)
    natively = TiledMatrix.empty(in_torch.shape)
    quantise_natively(weight, natively, kernels)
    # Sums in another order may choose another of nearly equal fits.
    error, other = ((dequantise(matrix, torch.float32) - weight).square().sum() for matrix in (natively, in_torch))
    assert error <= 1.02 * other + 1e-12
    assert other <= 1.02 * error + 1e-12
    out = torch.empty_like(weight)
    dequantise_natively(natively, 0, natively.shape.blocks, out, kernels)
    assert torch.equal(out, dequantise(natively))


@every_format
def test_a_piece_is_that_part_of_the_whole(kernels: NativeKernels, tiled: TiledFormat) -> None:
    weight = _weight((50, 40), Pairing.HALVES, 3).bfloat16()  # 50 gate rows, 50 up rows: 4 blocks, the last not full
    matrix = quantise(weight, tiled, Pairing.HALVES)
    whole = dequantise(matrix)
    for begin, end, rows in [(0, 2, (0, 32)), (1, 3, (16, 48)), (2, 4, (32, 50))]:
        piece = torch.empty(2 * (rows[1] - rows[0]), 40, dtype=torch.bfloat16)
        dequantise_natively(matrix, begin, end, piece, kernels)
        gate, up = piece.chunk(2)
        assert torch.equal(gate, whole[rows[0] : rows[1]])
        assert torch.equal(up, whole[50 + rows[0] : 50 + rows[1]])


@every_format
@pytest.mark.parametrize("strange", [float("inf"), float("-inf"), float("nan")])
def test_a_weight_that_is_no_number_is_not_hidden(kernels: NativeKernels, tiled: TiledFormat, strange: float) -> None:
    weight = _weight((4, 64), Pairing.PLAIN, 1).bfloat16()
    weight[2, 40] = strange
    natively = TiledMatrix.empty(TiledShape(4, 64, tiled))
    quantise_natively(weight, natively, kernels)
    for matrix in (natively, quantise(weight, tiled)):
        finite = dequantise(matrix).isfinite()
        assert not finite[2, 32:].any()
        assert finite.sum() == 4 * 64 - 32


@pytest.mark.takes_turns(5)
@every_format
@pytest.mark.parametrize("value", [0.0, 1e-38, 1e-45, 1e6, 1e16])
def test_no_weight_is_too_small_or_too_large(kernels: NativeKernels, tiled: TiledFormat, value: float) -> None:
    weight = torch.full((2, 40), value).bfloat16()
    weight[1] *= -1
    natively = TiledMatrix.empty(TiledShape(2, 40, tiled))
    quantise_natively(weight, natively, kernels)
    for matrix in (natively, quantise(weight, tiled)):
        near = dequantise(matrix, torch.float32)
        assert near.isfinite().all()
        most = 127 * 65504 if tiled is INT8 else torch.inf  # its scales are in fp16
        torch.testing.assert_close(near, weight.float().clamp(-most, most), rtol=0.01, atol=1e-30)


@pytest.mark.parametrize("spread", [3e-4, 1e-5, 1e-7])
def test_int8_of_small_weights(kernels: NativeKernels, spread: float) -> None:
    """Their scales are so small that fp16 has only steps of 2^-24: the next one above is as good as can be."""
    weight = _weight((64, 96), Pairing.PLAIN, 4, spread).bfloat16()
    natively = TiledMatrix.empty(TiledShape(64, 96, INT8))
    quantise_natively(weight, natively, kernels)
    size, _ = _group_ranges(weight.float())
    for matrix in (natively, quantise(weight, INT8)):
        off = (dequantise(matrix, torch.float32) - weight.float()).abs()
        assert (off <= 0.5 * (size / 127 * (1 + 16 * 2**-7) + 16 * 2**-24)).all()
        assert off.square().sum() <= (0.01 * weight.float()).square().sum() + off.numel() * (2**-25) ** 2


def test_sizes_are_those_promised() -> None:
    weight = torch.randn(64, 96)
    assert quantise(weight, INT8).nbytes * 8 == 8.5 * weight.numel()
    assert quantise(weight, INT4).nbytes * 8 == 4.75 * weight.numel()
    assert (quantise(weight, LUT4).nbytes - 16) * 8 == 4.5 * weight.numel()


@settings(max_examples=30)
@given(st.integers(0, 2**31), st.sampled_from([1e-6, 0.01, 100.0]))
def test_a_table_is_fitted_better_than_its_largest_value_alone_would_have_it(seed: int, spread: float) -> None:
    groups = torch.randn(40, 32, generator=torch.Generator().manual_seed(seed)) * spread
    values = torch.tensor(LUT4.table, dtype=torch.float32)
    codes, scales, _ = LUT4.fit(groups, 0)
    error = (values[codes.long()] * scales.float()[:, None] - groups).square().sum(-1)
    plain = (groups.abs().amax(-1) / 127).bfloat16().float()[:, None]
    nearest = (groups[..., None] - plain[..., None] * values).abs().amin(-1)
    assert (error <= nearest.square().sum(-1) * (1 + 1e-5)).all()


@pytest.mark.parametrize("isa", _ISAS, ids=lambda isa: isa.name)
def test_what_a_table_means_is_kept_exactly(isa: Isa) -> None:
    """MXFP4: its own table and scales that are powers of two come back bit for bit, in torch and natively."""
    generator = torch.Generator().manual_seed(7)
    mxfp4 = dataclasses.replace(LUT4, table=MXFP4_TABLE)
    codes = torch.randint(0, 16, (64, 96), generator=generator)
    scales = torch.randint(-20, 3, (64, 3), generator=generator).float().exp2()
    meant = torch.tensor(MXFP4_TABLE, dtype=torch.float32)[codes] * scales.repeat_interleave(32, dim=1)
    matrix = quantise(meant, mxfp4)
    assert torch.equal(dequantise(matrix, torch.float32), meant)
    out = torch.empty(64, 96, dtype=torch.bfloat16)
    natively = TiledMatrix.empty(matrix.shape)
    with kernels_of(isa, threads=1) as kernels:
        quantise_natively(meant.bfloat16(), natively, kernels)
        dequantise_natively(natively, 0, natively.shape.blocks, out, kernels)
    assert torch.equal(out, meant.bfloat16())
