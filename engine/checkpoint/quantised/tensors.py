"""The tensors of a checkpoint that is quantised: each weight under its plain name, made of those that are stored.

Which tensors there are decides, not what config.json lists as left out: a module either has a weight or the parts of a
quantised one. Sizes of groups and numbers of bits follow from shapes where they do, and must agree with config.json.
Whatever is left of a quantised module that nothing here knows is an error: its answers would be wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.checkpoint.headers import TensorEntry
from engine.checkpoint.packed import PackedEntry, Packing
from engine.checkpoint.quantised import MLX
from engine.checkpoint.quantised.packings import Affine, Awq, Gptq, Nvfp4, PackedIntegers, Scaled, damaged
from engine.common.errors import EngineError, ErrorCode
from engine.common.plain_text import plain_line, quoted
from engine.families import family_of

_BITS = (2, 4, 8)
_NUMBERS = ("F16", "BF16", "F32")
_IGNORED = ("input_scale", "input_global_scale", "input_zero_point", "output_scale", "k_scale", "v_scale")
"""Last parts of names that may stand beside a quantised weight: only quantised activations need them."""
_PARTS = ("qweight", "qzeros", "g_idx", "weight_packed", "weight_scale", "weight_scale_2", "weight_zero_point",
          "weight_global_scale", "weight_shape", "weight_g_idx", "pre_quant_scale", "absmax", "quant_map")  # fmt: skip
"""Last parts of names that nothing but a quantised weight has."""
_MOST_EXPERTS = 4096
_MLX_EXPERTS = ("gate_proj", "up_proj", "down_proj")


@dataclass
class _Checkpoint:
    name: str
    stored: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]
    made: dict[str, TensorEntry] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def modules(self, suffix: str) -> Iterator[str]:
        for key in self.tensors:
            module, _, last = key.rpartition(".")
            if last == suffix and module:
                yield module

    def has(self, module: str, suffix: str) -> bool:
        return f"{module}.{suffix}" in self.tensors

    def part(self, module: str, suffix: str, *dtypes: str) -> TensorEntry:
        """One of the tensors that make the weight of a module, of one of these types."""
        entry = self.tensors.get(f"{module}.{suffix}")
        if entry is None:
            raise EngineError(
                ErrorCode.CHECKPOINT_DAMAGED,
                f"{self.name} lacks {quoted(f'{module}.{suffix}')}, without which a weight cannot be unpacked: "
                "download or copy the model again.",
            )
        if entry.dtype not in dtypes:
            raise self.unsupported(f"{entry.key} is stored as {entry.dtype}")
        if 0 in entry.shape:
            raise damaged(entry, f"has the shape {entry.shape}, so it is empty")
        self.used.add(entry.key)
        return entry

    def make(self, module: str, shape: tuple[int, int], sources: list[TensorEntry], packing: Packing) -> None:
        key = f"{module}.weight"
        if key in self.tensors and key not in self.used:
            raise damaged(self.tensors[key], "is there twice, quantised and not")
        self.made[key] = PackedEntry.of(key, shape, sources, packing)

    def unsupported(self, what: str) -> EngineError:
        return EngineError(
            ErrorCode.MODEL_UNSUPPORTED,
            f"{self.name} is quantised in a way that Switchyard does not read ({plain_line(what)[:200]}): use another "
            "version of the model.",
        )

    def all(self) -> dict[str, TensorEntry]:
        if not self.made:
            raise EngineError(
                ErrorCode.CHECKPOINT_DAMAGED,
                f"{self.name} says that it is quantised ({plain_line(str(self.stored.get('quant_method')))[:60]}), but "
                "holds no such tensors: download or copy the model again.",
            )
        modules = {key.rpartition(".")[0] for key in self.used}
        plain = {}
        for key, entry in self.tensors.items():
            if key in self.used:
                continue
            module, _, last = key.rpartition(".")
            is_beside = module in modules and last != "bias"
            if is_beside and last in _IGNORED:
                continue
            if is_beside or last in _PARTS:
                raise self.unsupported(f"it holds {key}")
            plain[key] = entry
        return {**plain, **self.made}


def quantised_tensors(
    name: str, model_type: str, stored: Mapping[str, Any], tensors: Mapping[str, TensorEntry]
) -> dict[str, TensorEntry]:
    """The model's tensors by their plain names; those that are quantised are `PackedEntry`.

    Raises:
        EngineError: `CHECKPOINT_DAMAGED` if tensors are missing or do not fit together or config.json;
            `MODEL_UNSUPPORTED` for a variant that is not read.
    """
    checkpoint = _Checkpoint(name, stored, tensors)
    method = stored["quant_method"]
    if method == MLX:
        _read_mlx(checkpoint, model_type)
    else:
        {"gptq": _read_gptq, "awq": _read_awq, "compressed-tensors": _read_compressed, "modelopt": _read_modelopt}[
            method
        ](checkpoint)
    return checkpoint.all()


def _matrix(entry: TensorEntry) -> tuple[int, int]:
    if len(entry.shape) != 2 or 0 in entry.shape:
        raise damaged(entry, f"has the shape {entry.shape}, which is no matrix's")
    return entry.shape[0], entry.shape[1]


def _fit(entry: TensorEntry, fits: bool) -> None:
    if not fits:
        raise damaged(entry, f"has the shape {entry.shape}, which does not fit the tensors beside it")


def _codes_zeros_scales(checkpoint: _Checkpoint, module: str) -> tuple[TensorEntry, TensorEntry, TensorEntry]:
    codes, zeros = (checkpoint.part(module, name, "I32") for name in ("qweight", "qzeros"))
    return codes, zeros, checkpoint.part(module, "scales", *_NUMBERS)


def _read_gptq(checkpoint: _Checkpoint) -> None:
    stored = checkpoint.stored
    kind = stored.get("checkpoint_format") or stored.get("format") or "gptq"
    if kind not in ("gptq", "gptq_v2") or stored.get("is_marlin_format"):
        raise checkpoint.unsupported(f"GPTQ as {kind if kind != 'gptq' else 'marlin'}")
    for module in checkpoint.modules("qweight"):
        codes, zeros, scales = _codes_zeros_scales(checkpoint, module)
        (words, rows), (groups, zero_words) = _matrix(codes), _matrix(zeros)
        _fit(scales, scales.shape == (groups, rows))
        if zero_words * 32 % rows or zero_words * 32 // rows not in range(1, 9):
            raise damaged(zeros, f"has the shape {zeros.shape}, which does not fit the tensors beside it")
        bits = _known_bits(checkpoint, zeros, zero_words * 32 // rows)
        columns, sources = words * 32 // bits, [codes, zeros, scales]
        if checkpoint.has(module, "g_idx"):
            sources.append(checkpoint.part(module, "g_idx", "I32", "I64"))
            _fit(sources[-1], sources[-1].shape == (columns,))
        else:
            _fit(scales, columns % groups == 0)
        regular = not stored.get("desc_act") and (bits < 8 or stored.get("sym") is True)
        checkpoint.make(module, (rows, columns), sources, Gptq(bits, kind == "gptq", regular))


def _known_bits(checkpoint: _Checkpoint, entry: TensorEntry, bits: int) -> int:
    """The number that follows from shapes, if codes of so many bits are read and config.json says the same."""
    if bits not in _BITS:
        raise checkpoint.unsupported(f"{bits}-bit codes")
    said = checkpoint.stored.get("bits", checkpoint.stored.get("w_bit", bits))
    if said != bits and not checkpoint.stored.get("dynamic") and not checkpoint.stored.get("extra_config"):
        raise damaged(entry, f"holds codes of {bits} bits, where config.json says {plain_line(str(said))[:20]}")
    return bits


def _read_awq(checkpoint: _Checkpoint) -> None:
    version = str(checkpoint.stored.get("version", "gemm")).lower()
    if version != "gemm":
        raise checkpoint.unsupported(f"AWQ as {version}")
    bits = checkpoint.stored.get("bits", checkpoint.stored.get("w_bit", 4))
    if bits != 4:
        raise checkpoint.unsupported(f"AWQ with {bits} bits")
    for module in checkpoint.modules("qweight"):
        codes, zeros, scales = _codes_zeros_scales(checkpoint, module)
        (columns, words), (groups, _) = _matrix(codes), _matrix(zeros)
        _fit(zeros, zeros.shape == (groups, words) and columns % groups == 0)
        _fit(scales, scales.shape == (groups, words * 8))
        checkpoint.make(module, (words * 8, columns), [codes, zeros, scales], Awq())


@dataclass(frozen=True, slots=True)
class _Scheme:
    """How compressed-tensors says that weights are quantised: `group` is 0 for a scale per row or for all."""

    bits: int
    kind: str
    group: int
    symmetric: bool
    block: tuple[int, int] | None


_READ_FORMATS = ("dense", "pack-quantized", "int-quantized", "naive-quantized", "float-quantized",
                 "nvfp4-pack-quantized", "mixed-precision")  # fmt: skip


def _schemes(checkpoint: _Checkpoint) -> list[_Scheme]:
    stored = checkpoint.stored
    groups = stored.get("config_groups")
    sparsity = stored.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        raise checkpoint.unsupported(f"compressed-tensors with {sparsity.get('format')}")
    transforms = stored.get("transform_config")
    if isinstance(transforms, dict) and transforms.get("config_groups"):
        raise checkpoint.unsupported("compressed-tensors with transforms of activations")
    found = []
    for group in [stored, *(groups.values() if isinstance(groups, dict) else ())]:
        if not isinstance(group, dict):
            continue
        kind = group.get("format")
        if kind is not None and kind not in _READ_FORMATS:
            raise checkpoint.unsupported(f"compressed-tensors as {kind}")
        weights = group.get("weights")
        if not isinstance(weights, dict):
            continue
        bits, size, block = weights.get("num_bits"), weights.get("group_size"), weights.get("block_structure")
        if not (isinstance(block, list) and [type(each) for each in block] == [int, int] and min(block) > 0):
            block = None
        found.append(
            _Scheme(
                bits if type(bits) is int else 0,
                str(weights.get("type", "int")),
                size if type(size) is int and size > 0 else 0,
                weights.get("symmetric", True) is not False,
                (block[0], block[1]) if block else None,
            )
        )
    return found


def _read_compressed(checkpoint: _Checkpoint) -> None:
    schemes = _schemes(checkpoint)
    for module in checkpoint.modules("weight_packed"):
        codes = checkpoint.part(module, "weight_packed", "I32", "U8")
        if codes.dtype == "U8":
            _make_nvfp4(checkpoint, module, codes, "weight_global_scale", divides=True)
        else:
            _make_integers(checkpoint, module, codes, schemes)
    for module in checkpoint.modules("weight_scale"):
        if not checkpoint.has(module, "weight_packed"):
            _make_scaled(checkpoint, module, {scheme.block for scheme in schemes if scheme.block})


def _make_integers(checkpoint: _Checkpoint, module: str, codes: TensorEntry, schemes: list[_Scheme]) -> None:
    scales = checkpoint.part(module, "weight_scale", *_NUMBERS)
    shape = checkpoint.part(module, "weight_shape", "I64", "I32")
    _fit(shape, shape.shape == (2,))
    rows, words = _matrix(codes)
    groups = 1 if scales.numel == 1 else math.prod(scales.shape[1:])
    _fit(scales, scales.numel in (1, rows * groups) and (scales.numel == 1 or scales.shape[0] == rows))
    ways: dict[tuple[int, int], list[_Scheme]] = {}
    for scheme in schemes:
        columns = groups * scheme.group if scheme.group else words * 32 // max(scheme.bits, 1)
        whole = scheme.group or groups == 1
        if scheme.kind == "int" and whole and scheme.bits and -(-columns * scheme.bits // 32) == words:
            ways.setdefault((scheme.bits, columns), []).append(scheme)
    if len(ways) != 1:
        raise checkpoint.unsupported(
            f"compressed-tensors with {codes.key} of the shape {codes.shape} and scales of {scales.shape}, "
            f"{'several groups' if ways else 'no group'} of its configuration being so"
        )
    ((bits, columns),) = ways
    if bits not in _BITS:
        raise checkpoint.unsupported(f"compressed-tensors with {bits} bits")
    sources, has_zeros = [codes, scales, shape], checkpoint.has(module, "weight_zero_point")
    if has_zeros or not any(scheme.symmetric for scheme in ways[bits, columns]):
        zeros = checkpoint.part(module, "weight_zero_point", "I32", "I8")
        packed = (-(-rows * bits // 32), groups)
        _fit(zeros, zeros.shape == packed if zeros.dtype == "I32" else zeros.numel == rows * groups)
        sources.append(zeros)
        has_zeros = True
    if checkpoint.has(module, "weight_g_idx"):
        sources.append(checkpoint.part(module, "weight_g_idx", "I32", "I64"))
        _fit(sources[-1], sources[-1].shape == (columns,))
    checkpoint.make(module, (rows, columns), sources, PackedIntegers(bits, columns, has_zeros))


def _make_scaled(checkpoint: _Checkpoint, module: str, blocks: set[tuple[int, int]]) -> None:
    weight = checkpoint.part(module, "weight", "I8", "F8_E4M3")
    scales = checkpoint.part(module, "weight_scale", *_NUMBERS)
    rows, columns = _matrix(weight)
    sources = [weight, scales]
    if checkpoint.has(module, "weight_zero_point"):
        sources.append(checkpoint.part(module, "weight_zero_point", "I8", *_NUMBERS))
        _fit(sources[-1], sources[-1].shape == scales.shape)
    of_blocks = [(high, wide) for high, wide in blocks if scales.shape == (-(-rows // high), -(-columns // wide))]
    by_row = scales.numel == 1 or (scales.shape[0] == rows and columns % math.prod(scales.shape[1:]) == 0)
    _fit(scales, by_row or len(of_blocks) == 1)
    checkpoint.make(module, (rows, columns), sources, Scaled(None if by_row else of_blocks[0]))


def _make_nvfp4(checkpoint: _Checkpoint, module: str, codes: TensorEntry, whole: str, *, divides: bool) -> None:
    scales = checkpoint.part(module, "weight_scale", "F8_E4M3")
    in_all = checkpoint.part(module, whole, "F32")
    rows, nbytes = _matrix(codes)
    _fit(scales, nbytes % 8 == 0 and scales.shape == (rows, nbytes // 8))
    _fit(in_all, in_all.numel == 1)
    checkpoint.make(module, (rows, nbytes * 2), [codes, scales, in_all], Nvfp4(divides))


def _read_modelopt(checkpoint: _Checkpoint) -> None:
    for module in checkpoint.modules("weight_scale"):
        weight = checkpoint.part(module, "weight", "U8", "F8_E4M3")
        if weight.dtype == "U8":
            _make_nvfp4(checkpoint, module, weight, "weight_scale_2", divides=False)
        else:
            _make_scaled(checkpoint, module, set())


def _read_mlx(checkpoint: _Checkpoint, model_type: str) -> None:
    stored = checkpoint.stored
    names = family_of(model_type).mlx_experts
    if names is None:
        raise checkpoint.unsupported(f"MLX with a model of the kind {quoted(model_type)}")
    for module in checkpoint.modules("scales"):
        own = stored.get(module)
        settings = own if isinstance(own, dict) else stored
        mode, bits = settings.get("mode", stored.get("mode", "affine")), settings.get("bits", stored.get("bits"))
        if mode != "affine" or bits not in _BITS:
            raise checkpoint.unsupported(f"MLX's {mode} with {bits} bits")
        parts = [
            checkpoint.part(module, "weight", "U32"),
            checkpoint.part(module, "scales", *_NUMBERS),
            checkpoint.part(module, "biases", *_NUMBERS),
        ]
        shape, size = parts[0].shape, settings.get("group_size", stored.get("group_size"))
        place, _, last = module.rpartition(".switch_mlp.")
        is_stack = len(shape) == 3 and last in _MLX_EXPERTS and shape[0] <= _MOST_EXPERTS
        if not is_stack and len(shape) != 2:
            raise checkpoint.unsupported(f"MLX with {parts[0].key} of the shape {shape}")
        columns = shape[-1] * 32 // bits
        whole = type(size) is int and size > 0 and 0 not in shape and columns % size == 0
        for each in parts[1:]:
            _fit(each, whole and each.shape == (*shape[:-1], columns // size))
        made = [(module, parts)]
        if is_stack:
            own_names = [f"{place}.experts.{expert}.{names.get(last, last)}" for expert in range(shape[0])]
            made = [(name, [part.below(expert) for part in parts]) for expert, name in enumerate(own_names)]
        for name, sources in made:
            checkpoint.make(name, (shape[-2], columns), sources, Affine(bits))
