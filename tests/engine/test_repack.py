"""Blocks of GGUF files become tiles: codes kept, natively and in torch the same, and as near as they are said to be."""

import dataclasses
from collections.abc import Iterator

import gguf
import numpy as np
import pytest
import torch

from engine.checkpoint.quantised.packings import Arrangement, Codes
from engine.formats import FORMATS, TiledFormat
from engine.formats.coded import CodedMatrix, codes_of
from engine.formats.ggml import BLOCK_TYPES, GGML, BlockType
from engine.formats.int4 import INT4
from engine.formats.int8 import INT8
from engine.formats.lut4 import LUT4
from engine.formats.tiles import Pairing, TiledMatrix, TiledShape, dequantise, keep_codes, store_codes
from engine.kernels.native.library import Isa, NativeKernels
from engine.kernels.repack import Blocks, repack, unpack_into
from tests.engine.ggml_blocks import made_up_blocks
from tests.engine.native_isas import isas, kernels_of

pytestmark = pytest.mark.every_combination

_ISAS = isas()
_KEPT = [kind for kind in GGML.values() if kind.kept_in]
every_type = pytest.mark.parametrize("kind", BLOCK_TYPES.values(), ids=lambda kind: kind.name)
every_kept = pytest.mark.parametrize("kind", _KEPT, ids=lambda kind: kind.name)
TILED = [each for each in FORMATS.values() if isinstance(each, TiledFormat)]


@pytest.fixture(scope="module", params=[_ISAS[0], _ISAS[-1]], ids=lambda isa: isa.name)
def kernels(request: pytest.FixtureRequest) -> Iterator[NativeKernels]:
    isa: Isa = request.param
    with kernels_of(isa, threads=2) as held_back:
        yield held_back


def dirty(shape: TiledShape) -> TiledMatrix:
    """A target whose every byte has to be written."""
    target = TiledMatrix.empty(shape)
    for part in target.parts.values():
        part.view(torch.uint8).fill_(77)
    return target


def made(sources: tuple[Blocks | Codes, ...], shape: TiledShape, kernels: NativeKernels | None) -> TiledMatrix:
    target = dirty(shape)
    repack([(sources, target)], kernels)
    return target


def same(one: TiledMatrix, other: TiledMatrix) -> bool:
    pairs = zip(one.parts.values(), other.parts.values(), strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


@every_type
@pytest.mark.parametrize("strange", [0.0, 0.3])
def test_blocks_are_unpacked_to_the_reference(kind: BlockType, strange: float, kernels: NativeKernels) -> None:
    blocks = made_up_blocks(kind, 45, 3 if kind.elements > 1 else 75, 1, strange)
    wanted = torch.from_numpy(kind.dequantise(blocks.raw.numpy()))
    for dtype in (torch.float32, torch.bfloat16):
        found = torch.empty(blocks.rows, blocks.columns, dtype=dtype)
        unpack_into(blocks, found, kernels)
        assert equal(found, wanted.to(dtype))


@every_kept
@pytest.mark.parametrize("rows", [1, 32, 77])
def test_kept_codes_are_the_same_natively(kind: BlockType, rows: int, kernels: NativeKernels) -> None:
    target = kind.kept_in
    blocks = made_up_blocks(kind, rows, 2, rows)
    shape = TiledShape(blocks.rows, blocks.columns, target)
    natively = made((blocks,), shape, kernels)
    assert same(natively, made((blocks,), shape, None))
    values, found = torch.from_numpy(kind.dequantise(blocks.raw.numpy())), dequantise(natively, torch.float32)
    step = values.view(rows, -1, 32).abs().amax(-1, keepdim=True).expand(-1, -1, 32).reshape(values.shape)
    assert ((found - values).abs() <= step * (2**-6 if target is INT4 else 2**-8)).all()


@every_kept
def test_codes_of_odd_scales_are_the_same_natively(kind: BlockType, kernels: NativeKernels) -> None:
    """Scales that are zero, infinite or no number; zeros that no record holds, whose groups are fitted again."""
    blocks = made_up_blocks(kind, 64, 4, 3, strange=0.4)
    shape = TiledShape(blocks.rows, blocks.columns, kind.kept_in)
    natively, reference = (dequantise(made((blocks,), shape, each), torch.float32) for each in (kernels, None))
    assert torch.equal(natively.isfinite(), reference.isfinite())
    one, other = natively.nan_to_num(0), reference.nan_to_num(0)
    difference = (one - other).view(64, -1, 32).abs().amax(-1)
    # A fit may choose another of nearly equal scales.
    assert (difference <= 0.02 * other.view(64, -1, 32).abs().amax(-1)).float().mean() > 0.99


@pytest.mark.parametrize("pairing", [Pairing.HALVES, Pairing.ALTERNATING], ids=lambda each: each.name)
@pytest.mark.parametrize("names", [("Q4_K", "Q4_K"), ("Q8_0", "Q6_K"), ("MXFP4", "MXFP4"), ("Q4_0", "Q4_K")])
def test_gate_and_up_may_be_apart(names: tuple[str, str], pairing: Pairing, kernels: NativeKernels) -> None:
    gate, up = (made_up_blocks(GGML[name], 40, 512 // GGML[name].elements, 5) for name in names)
    target = GGML[names[0]].in_tiles
    assert target is not None
    shape = TiledShape(80, 512, target, pairing)
    natively = made((gate, up), shape, kernels)
    apart = [dequantise(made((each,), TiledShape(40, 512, target), kernels)) for each in (gate, up)]
    together = torch.stack(apart, 1) if pairing is Pairing.ALTERNATING else torch.stack(apart)
    assert torch.equal(dequantise(natively), together.flatten(0, 1))
    reference = made((gate, up), shape, None)
    assert (dequantise(natively).float() - dequantise(reference).float()).abs().max() <= 0.02 * together.abs().max()


def test_one_matrix_of_gate_and_up_rows_is_paired(kernels: NativeKernels) -> None:
    blocks = made_up_blocks(GGML["Q4_K"], 70, 1, 9)
    plain = dequantise(made((blocks,), TiledShape(70, 256, INT4), kernels))
    for pairing in Pairing:
        assert torch.equal(dequantise(made((blocks,), TiledShape(70, 256, INT4, pairing), kernels)), plain)


@every_type
def test_rows_come_in_the_order_that_is_asked_for(kind: BlockType, kernels: NativeKernels) -> None:
    stored = made_up_blocks(kind, 40, 256 // kind.elements, 2)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))[:33].contiguous()
    wanted = Blocks(kind, stored.raw[order].contiguous())
    ordered = Blocks(kind, stored.raw, order)
    shape = TiledShape(33, 256, kind.in_tiles or INT8)
    assert same(made((ordered,), shape, kernels), made((wanted,), shape, kernels))
    found = torch.empty(33, 256)
    unpack_into(ordered, found, kernels)
    assert torch.equal(found, torch.from_numpy(kind.dequantise(wanted.raw.numpy())))


@pytest.mark.parametrize("target", TILED, ids=lambda each: each.name)
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q3_K", "F16"])
def test_other_formats_are_fitted_to_the_exact_values(target: TiledFormat, name: str, kernels: NativeKernels) -> None:
    kind = GGML[name]
    blocks = made_up_blocks(kind, 50, 256 // kind.elements, 4)
    values = torch.from_numpy(kind.dequantise(blocks.raw.numpy()))
    error, other = (
        (dequantise(made((blocks,), TiledShape(50, 256, target), each), torch.float32) - values).square().sum()
        for each in (kernels, None)
    )
    assert error <= 1.02 * other + 1e-12
    assert other <= 1.02 * error + 1e-12


@pytest.mark.parametrize(
    ("name", "most"), [("Q4_0", 1.01), ("Q4_1", 1.01), ("Q5_0", 1.0), ("Q8_0", 1.0), ("MXFP4", 1.0), ("Q5_1", 1.01)]
)
def test_a_record_is_as_near_as_the_file(name: str, most: float, kernels: NativeKernels) -> None:
    """Its error against the weights, in errors of the file."""
    weights = np.random.default_rng(7).standard_normal((64, 1024), np.float32)
    raw = gguf.quants.quantize(weights, gguf.GGMLQuantizationType[name])
    own = GGML[name].dequantise(raw)
    target = GGML[name].in_tiles
    assert target is not None
    blocks = Blocks(GGML[name], torch.from_numpy(raw))
    found = dequantise(made((blocks,), TiledShape(64, 1024, target), kernels), torch.float32).numpy()
    assert np.square(found - weights).sum() <= most**2 * np.square(own - weights).sum() * (1 + 1e-6)


def test_codes_of_scales_beyond_fp16_are_fitted() -> None:
    """Of matrices whose scales are floats: too large ones, and such that would lie between two of fp16's smallest."""
    rng = np.random.default_rng(3)
    codes = rng.integers(-127, 128, (8, 64), np.int8)
    scales = np.array([1e5, 0.1, 1e-4, 1e-5, 1.5 * 2**-24, 2**-24, 1e-9, 0], np.float32)[:, None].repeat(2, 1)
    matrix = CodedMatrix(INT8, codes, scales)
    found, stored, _ = keep_codes(matrix)
    kept = (found.flatten(1) == torch.from_numpy(codes)).all(-1)
    assert kept.tolist() == [False, True, True, True, False, True, False, True]
    off = (found.float() * stored.float()[..., None]).flatten(1) - torch.from_numpy(matrix.values())
    assert (off[1:].abs() <= torch.from_numpy(scales[1:, :1]) + 2**-24).all()
    assert stored.isfinite().all()


def test_zeros_that_a_record_has_are_exact() -> None:
    """Whole ones, as GPTQ's and AWQ's: only the scale is rounded."""
    rng = np.random.default_rng(2)
    codes, zeros = rng.integers(0, 16, (8, 64), np.uint8), rng.integers(0, 16, (8, 2)).astype(np.float32)
    matrix = CodedMatrix(INT4, codes, np.full((8, 2), 0.25, np.float32), zeros)
    target = TiledMatrix.empty(TiledShape(8, 64, INT4))
    store_codes([keep_codes(matrix)], target)
    assert torch.equal(dequantise(target, torch.float32), torch.from_numpy(matrix.values()))


CODES = {
    "GPTQ": (Arrangement.COLUMNS, 4, "zeros"), "GPTQ, 2 bits": (Arrangement.COLUMNS, 2, "zeros"),
    "GPTQ, 8 bits": (Arrangement.COLUMNS, 8, "zeros"), "AWQ": (Arrangement.AWQ, 4, "zeros"),
    "packed": (Arrangement.ROWS, 4, "zeros"), "packed, 8 bits": (Arrangement.ROWS, 8, "zeros"),
    "int8": (Arrangement.APART, 8, ""), "MLX": (Arrangement.ROWS, 4, "added"),
    "MLX, 2 bits": (Arrangement.ROWS, 2, "added"),
}  # fmt: skip
every_codes = pytest.mark.parametrize("kind", CODES)


def made_up_codes(kind: str, rows: int, columns: int, group: int, seed: int) -> Codes:
    """Some scales are 0, infinite or beyond fp16, some zeros beyond what a record has, where these are not fixed."""
    arrangement, bits, other = CODES[kind]
    rng = np.random.default_rng(seed)
    shape = {
        Arrangement.ROWS: (rows, columns * bits // 32),
        Arrangement.COLUMNS: (columns * bits // 32, rows),
        Arrangement.AWQ: (columns, rows // 8),
        Arrangement.APART: (rows, columns),
    }[arrangement]
    words = rng.integers(-(2**31), 2**31, shape).astype(np.int32)
    of_groups = (rows, columns // group)
    scales = rng.uniform(0.01, 0.02, of_groups).astype(np.float32)
    scales[rng.random(of_groups) < 0.1] = 0
    scales[0, 0] = np.inf
    scales[1:3, 0] = (6.6e4, 1.4e-7) if bits == 8 else 0.01
    zeros = rng.integers(0, 18, of_groups) if bits < 8 else np.full(of_groups, 128)
    added = rng.uniform(-0.16, 0.01, of_groups).astype(np.float32) if other == "added" else None
    return Codes(
        words.astype(np.int8) if arrangement is Arrangement.APART else words,
        *(arrangement, bits, columns, scales),
        zeros=zeros.astype(np.float32) if other == "zeros" else None,
        added=added,
    )


@every_codes
@pytest.mark.parametrize(("rows", "group"), [(8, 32), (80, 192)])
def test_codes_of_safetensors_are_the_same_natively(kind: str, rows: int, group: int, kernels: NativeKernels) -> None:
    codes = made_up_codes(kind, rows, 192, group, rows)
    target = codes.kept_in
    assert target is (INT8 if CODES[kind][1] == 8 else INT4)
    natively, reference = (made((codes,), TiledShape(rows, 192, target), each) for each in (kernels, None))
    one, other = (dequantise(each, torch.float32) for each in (natively, reference))
    assert torch.equal(one.isfinite(), other.isfinite())
    apart = (one - other).nan_to_num(0).view(rows, -1, 32).abs().amax(-1)
    # Groups that no record holds are fitted, perhaps to another of nearly equal scales.
    assert (apart <= 0.02 * other.nan_to_num(0).view(rows, -1, 32).abs().amax(-1)).float().mean() > 0.99
    assert (apart == 0).float().mean() > 0.8
    coded = codes.coded()
    exact = torch.from_numpy(coded.values()).nan_to_num(0, 0, 0)
    assert (one.nan_to_num(0, 0, 0) - exact).norm() <= 0.02 * exact.norm()


@pytest.mark.parametrize("pairing", [Pairing.HALVES, Pairing.ALTERNATING], ids=lambda each: each.name)
@pytest.mark.parametrize("kinds", [("GPTQ", "AWQ"), ("int8", "packed, 8 bits"), ("GPTQ", "int8")])
def test_gate_and_up_codes_may_be_apart(kinds: tuple[str, str], pairing: Pairing, kernels: NativeKernels) -> None:
    """Also where only one of them is kept: both are fitted then."""
    gate, up = (made_up_codes(kind, 40, 64, 32, 3) for kind in kinds)
    target = gate.kept_in
    assert target is not None
    shape = TiledShape(80, 64, target, pairing)
    found, other = (
        dequantise(made((gate, up), shape, each), torch.float32).nan_to_num(0, 0, 0) for each in (kernels, None)
    )
    assert (found - other).norm() <= (0.02 if gate.kept_in is up.kept_in else 0.1) * other.norm()


def test_codes_that_no_record_keeps_are_fitted(kernels: NativeKernels) -> None:
    """Groups that are not of neighbours, or not of whole 32 columns."""
    codes = made_up_codes("GPTQ", 40, 96, 96, 2)
    codes.scales[0, 0] = 0.01
    mixed = dataclasses.replace(codes, group_of=np.zeros(96, np.intp))
    narrow = dataclasses.replace(codes, columns=80, words=codes.words[:10])
    for each in (mixed, narrow):
        assert each.kept_in is None
        values = torch.from_numpy(each.values())
        shape = TiledShape(*values.shape, INT8)
        for found in (made((each,), shape, kernels), made((each,), shape, None)):
            assert (dequantise(found, torch.float32) - values).norm() <= 0.01 * values.norm()


def test_a_table_goes_with_its_codes() -> None:
    gate, up = made_up_blocks(GGML["MXFP4"], 16, 1, 0), made_up_blocks(GGML["IQ4_NL"], 16, 1, 0)
    coded = codes_of(gate.kind, gate.raw.numpy())
    table = made((gate,), TiledShape(16, 32, LUT4), None).table
    assert tuple(table.tolist()) == coded.table
    with pytest.raises(ValueError, match="tables"):
        made((gate, up), TiledShape(32, 32, LUT4, Pairing.HALVES), None)


def test_only_what_fits_is_repacked(kernels: NativeKernels) -> None:
    kind = GGML["Q4_K"]
    blocks = made_up_blocks(kind, 8, 1, 0)
    for shape in (TiledShape(9, 256, INT4), TiledShape(8, 512, INT4), TiledShape(16, 256, INT4)):
        with pytest.raises(ValueError, match=r"rows|columns"):
            made((blocks,), shape, kernels)
    with pytest.raises(ValueError, match="rows"):
        made((blocks, blocks), TiledShape(16, 256, INT4), kernels)  # not paired
    with pytest.raises(ValueError, match="order"):
        Blocks(kind, blocks.raw, torch.tensor([0, 8]))
    with pytest.raises(ValueError, match="blocks"):
        Blocks(kind, blocks.raw[:, :-1].contiguous())
    with pytest.raises(ValueError, match="into"):
        unpack_into(blocks, torch.empty(8, 255), kernels)
