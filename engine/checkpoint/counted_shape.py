"""A model's shape counted from its configuration and the headers of its tensors, without reading weights."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine.checkpoint.config_file import text_part
from engine.checkpoint.headers import TensorEntry
from engine.checkpoint.model_shape import AttentionShape, ModelShape
from engine.checkpoint.packed import is_blocks
from engine.checkpoint.pictures import is_of_tower, usual_gflops, why_blind
from engine.checkpoint.profile import is_expert_key, number_of, profile_of
from engine.checkpoint.stored import (
    StoredWeights,
    beside,
    common_format,
    in_columns,
    in_rows,
    is_in_gguf,
    linear_format,
    mixed_rows,
    pieces_of,
    precisions_of,
    type_of,
)
from engine.formats import BF16, GGML, SMALLEST, STORED, WeightFormat, format_of, is_router
from engine.formats.int8 import INT8

_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h|block)\.(\d+)\.")
_NOT_TEXT = re.compile(
    r"(^|\.)(vision|visual|vision_tower|vision_model|audio|audio_tower|audio_encoder|multi_modal_projector|mm_projector|"
    r"embed_vision|embed_audio|image_newline|mtp)(\.|$|_)"
)
_TABLE = re.compile(r"(^|\.)(ngram_embedding\.(shard_\d+\.)?|embed_tokens_per_layer\.)weight$")
_HEAD = re.compile(r"(^|\.)(lm_head|output|embed_out)\.weight$")
_BIAS = re.compile(r"(\.|_)bias$")
_GATE = re.compile(r"gate_up|gate_proj|\.w3\.|\.w3$|\.v1$|linear_v|input_linear|wi_1")
_DOWN = re.compile(r"down_proj|\.w2(\.|$)|output_linear")
_UNKNOWN_CONTEXT = 32_768


def shape_of(name: str, config: dict[str, Any], tensors: Iterable[TensorEntry], hub_id: str = "") -> ModelShape:
    """The shape of a model with this configuration and these tensors.

    Sizes are counted from the headers instead of derived. Parts for images, sound or multi-token prediction are left
    out, as in the engine. A dense model gets one expert of minimal width.
    """
    text = text_part(config)
    found, tensors = profile_of(config, []), list(tensors)
    mine = [entry for entry in tensors if _is_mine(entry.key, found.layers)]
    sees = not why_blind(config, (entry.key for entry in tensors))
    tower = sum(entry.numel for entry in tensors if is_of_tower(entry.key)) if sees else 0
    profile = profile_of(config, mine)
    moe_layers = len({_layer(entry.key) for entry in mine if is_expert_key(entry.key)}) if profile.experts else 0
    kept = [entry for entry in mine if is_expert_key(entry.key)] if moe_layers else []
    hidden, layers = max(profile.hidden, 1), max(profile.layers, 1)
    biases = sum(entry.numel for entry in kept if _BIAS.search(entry.key))
    tables = [entry for entry in mine if _TABLE.search(entry.key)]
    matrices = 3 if any(_GATE.search(entry.key) for entry in kept) or not kept else 2
    each = (profile.expert_parameters - biases) / max(moe_layers * profile.experts, 1)
    shape = ModelShape(
        name=name,
        hub_id=hub_id,
        licence="",
        source="config.json and the headers of its tensors",
        layers=layers,
        dense_layers=layers - moe_layers if moe_layers else 0,
        full_attention_layers=_full_attention(text, layers),
        hidden=hidden,
        vocabulary=max(number_of(text, ("vocab_size",)), 1),
        experts=max(profile.experts, 1),
        experts_per_token=max(min(profile.experts_per_token, profile.experts), 1),
        expert_width=max(round(each / (matrices * hidden)), 1),
        shared_width=0,
        dense_width=0,
        attention=_attention(text, hidden),
        context_tokens=profile.context_tokens or _UNKNOWN_CONTEXT,
        parameters=float(profile.parameters),
        tied_embeddings=not any(_HEAD.search(entry.key) for entry in mine),
        expert_matrices=matrices,
        expert_biases=biases > 0,
        other_weights=max(profile.parameters - profile.expert_parameters, 1),
        kv_numbers=profile.kv.numbers,
        window_numbers=profile.kv.window_numbers,
        window_tokens=profile.kv.window_tokens,
        state_bytes=profile.kv.state_bytes,
        compresses=profile.kv.compresses,
        table_weights=sum(entry.numel for entry in tables),
        table_rows=_rows_of_token(text, tables),
        table_columns=max((entry.shape[-1] for entry in tables), default=0),
        sees=sees,
        tower_weights=tower,
        picture_gflops=usual_gflops(config, tower) if sees else 0,
    )
    return replace(shape, stored=_stored(shape, mine, kept))


_BY_LABEL = (
    (re.compile(r"IQ1_S"), "IQ1_S", "IQ2_XXS"),
    (re.compile(r"IQ1"), "IQ1_M", "IQ2_XXS"),
    (re.compile(r"IQ2_XXS"), "IQ2_XXS", "Q2_K"),
    (re.compile(r"IQ2_M"), "IQ2_S", "IQ3_S"),
    (re.compile(r"IQ2"), "IQ2_XS", "Q2_K"),
    (re.compile(r"IQ3_XXS"), "IQ3_XXS", "Q3_K"),
    (re.compile(r"IQ3_XS"), "IQ3_XXS", "IQ3_S"),
    (re.compile(r"IQ3_M"), "IQ3_S", "Q4_K"),
    (re.compile(r"IQ3"), "IQ3_S", "IQ3_S"),
    (re.compile(r"IQ4_XS"), "IQ4_XS", "IQ4_XS"),
    (re.compile(r"IQ4"), "IQ4_NL", "IQ4_NL"),
    (re.compile(r"Q5_K_[MLX]"), "Q5_K", "Q6_K"),
    (re.compile(r"Q5"), "Q5_K", "Q5_K"),
    (re.compile(r"Q3_K"), "Q3_K", "Q4_K"),
    (re.compile(r"Q2_K"), "Q2_K", "Q3_K"),
    (re.compile(r"Q4_K_[MLX]"), "Q4_K", "Q6_K"),
    (re.compile(r"Q4_K"), "Q4_K", "Q4_K"),
    (re.compile(r"Q4|4-BIT"), "Q4_0", "Q4_0"),
)
"""Label of a quantisation -> the types of gate and up, and of every other down matrix; the rest is as gate and up.
Others that are called as a type have all in that."""


def as_quantised(shape: ModelShape, label: str) -> ModelShape:
    """What a model is in a quantisation of which only the label is known; else unchanged.

    A file's header says it exactly (`shape_of`); this is for a choice among models without a network.

    Args:
        shape: of the model in 16 bits.
        label: `Q4_K_M`, say.
    """
    named = [each.name for each in GGML.values() if each.is_blocks and each.name in label.upper()]
    mixes = (each[1:] for each in _BY_LABEL if each[0].search(label.upper()))
    in_file, half_in_file = next(mixes, (named[-1], named[-1]) if named else ("", ""))
    if not in_file:
        return shape
    most, finer = (GGML[name].kept_in or INT8 for name in (in_file, half_in_file))
    half = max(most, finer, key=lambda each: each.bits)
    head, layers = shape.vocabulary * shape.hidden, shape.matrix_weights

    def stored(most: WeightFormat, half: WeightFormat, of_head: WeightFormat, table: float) -> StoredWeights:
        return StoredWeights(
            precisions=(STORED,),
            formats=tuple(sorted({most.name, half.name, of_head.name})),
            experts=tuple((most.name, (half if layer % 2 else most).name) for layer in range(shape.moe_layers)),
            dense_bytes=round((layers + shape.table_weights) * most.bytes_per_weight + head * table),
            layers=(round(layers * most.bytes_per_weight / shape.layers),) * shape.layers,
            layer_bytes_per_weight=most.bytes_per_weight,
            head_bytes_per_weight=of_head.bytes_per_weight,
            tables=round(shape.table_weights * most.bytes_per_weight)
            + (0 if shape.tied_embeddings else round(head * (table - of_head.bytes_per_weight))),
            is_repacked=True,
        )

    as_it_lies = GGML[in_file]
    of_head = max(as_it_lies, GGML["Q6_K"], key=lambda each: each.bits)
    # A tied head is its embedding; one of its own comes beside it.
    table = of_head.bytes_per_weight + (0.0 if shape.tied_embeddings else as_it_lies.bytes_per_weight)
    in_place = stored(as_it_lies, GGML[half_in_file], of_head, table)
    return replace(shape, stored=replace(stored(most, half, INT8, INT8.bytes_per_weight + 2.0), in_place=in_place))


@dataclass
class _Dense:
    """Bytes of what is no routed expert, by where it is, and the weights in each format."""

    layers: list[int]
    formats: Counter[str] = field(default_factory=Counter)
    head: int = 0
    embeddings: int = 0
    tables: int = 0
    others: int = 0

    def add(self, entry: TensorEntry, nbytes: int, plain: int) -> None:
        """Counts a tensor as `nbytes`, but a table, and an embedding, as `plain`."""
        layer = _layer(entry.key)
        if _HEAD.search(entry.key):
            self.head += nbytes
        elif _TABLE.search(entry.key):
            self.tables += plain
        elif layer < 0 and len(entry.shape) == 2:
            self.embeddings += plain
        elif 0 <= layer < len(self.layers):
            self.layers[layer] += nbytes
        else:
            self.others += nbytes

    def stored(
        self, shape: ModelShape, precisions: tuple[str, ...], experts: Sequence[tuple[str, ...]], usual: str, head: int
    ) -> StoredWeights:
        used = {*(name for name in self.formats if name != BF16.name), *(name for each in experts for name in each)}
        return StoredWeights(
            precisions=precisions,
            formats=tuple(sorted(used or {usual})),
            experts=tuple(experts),
            dense_bytes=sum(self.layers) + self.others + self.head + self.embeddings + self.tables,
            layers=tuple(self.layers),
            layer_bytes_per_weight=(sum(self.layers) + self.others) / max(shape.matrix_weights, 1),
            head_bytes_per_weight=head / (shape.vocabulary * shape.hidden) or 2.0,
            tables=self.tables + (0 if shape.tied_embeddings else self.embeddings),
            is_repacked=True,
        )


def _stored(shape: ModelShape, mine: list[TensorEntry], experts: list[TensorEntry]) -> StoredWeights | None:
    """What a model's tensors, those of routed experts among them, become; `None` if `auto` will not keep them."""
    precisions = precisions_of(mine, round(shape.parameters))
    if STORED not in precisions:
        return None
    of_experts, dense = set(map(id, experts)), _Dense([0] * shape.layers)
    for entry in (entry for entry in mine if id(entry) not in of_experts):
        is_small = entry.numel < SMALLEST or is_router(entry.key.removesuffix(".weight"))
        plain, kept = 2 * entry.numel, None if is_small else linear_format(entry)
        tiled = plain if kept is None else sum(kept.part_bytes(*entry.shape))
        is_embedding = _layer(entry.key) < 0 and len(entry.shape) == 2 and not _HEAD.search(entry.key)
        dense.add(entry, tiled, plain)
        if is_embedding and not _TABLE.search(entry.key) and shape.tied_embeddings and kept is not None:
            dense.head += tiled if entry.shape[1] == shape.hidden else 0  # it is quantised only as a tied head
        dense.formats[kept.name if kept is not None else BF16.name] += entry.numel
    matrices = [entry for entry in experts if not _BIAS.search(entry.key)]
    usual = dense.formats.most_common(1)[0][0]
    by_layer = _expert_formats(matrices) or [(usual, usual)] * shape.moe_layers
    return replace(
        dense.stored(shape, precisions, by_layer, usual, dense.head),
        is_repacked=all(type_of(piece) is not None for entry in matrices for piece in pieces_of(entry)),
        in_place=_in_place(shape, mine, matrices, precisions),
    )


def _rows_of_token(text: dict[str, Any], tables: list[TensorEntry]) -> int:
    hashed = {_layer(entry.key) for entry in tables if "ngram" in entry.key}
    orders = number_of(text, ("ngram_size",)) or 3
    heads = (orders - 1) * (number_of(text, ("heads_per_ngram",)) or 8)
    return len(hashed) * heads + sum("ngram" not in entry.key for entry in tables)


def _in_place(
    shape: ModelShape, mine: list[TensorEntry], matrices: list[TensorEntry], precisions: tuple[str, ...]
) -> StoredWeights | None:
    """What the same takes where it lies; `None` if an expert is in anything else than rows of ggml's types, or nothing
    is in them."""
    by_layer: dict[int, tuple[Counter[str], Counter[str]]] = {}
    for entry in matrices:
        for piece in pieces_of(entry):
            if not isinstance(piece, TensorEntry) or not _is_read(piece):
                return None
            first, down = by_layer.setdefault(_layer(entry.key), (Counter(), Counter()))
            (down if _DOWN.search(entry.key) else first)[piece.dtype] += piece.numel
    experts, dense = set(map(id, matrices)), _Dense([0] * shape.layers)
    for entry in (entry for entry in mine if id(entry) not in experts):
        stored = in_rows(entry) if len(entry.shape) == 2 else None
        if stored is not None and not (
            is_blocks(stored.dtype)
            or (_is_read(stored) and entry.shape[0] > 1 and not is_router(entry.key.removesuffix(".weight")))
        ):
            stored = None
        if (turned := in_columns(entry)) is not None:
            stored, _ = turned
        elif (mixed := mixed_rows(entry)) is not None:
            (stored, *_), _ = mixed
        nbytes = entry.nbytes if stored is not None else 2 * entry.numel
        if stored is not None:
            dense.formats[stored.dtype] += entry.numel
        dense.add(entry, nbytes, nbytes)
    if not by_layer and not dense.formats:
        return None
    usual = dense.formats.most_common(1)[0][0] if dense.formats else BF16.name

    def kept(weights: Counter[str], matrices: int) -> list[str]:
        """The type of each matrix, where as many weights are in one as in the other; else the largest."""
        types = sorted(weights, key=lambda name: format_of(name).bits) or [usual]
        return types if len(types) == matrices and len(set(weights.values())) == 1 else types[-1:]

    up = shape.expert_matrices - 1
    kinds = [(*kept(first, up), *kept(down, 1)) for _, (first, down) in sorted(by_layer.items())]
    kinds = kinds or [(usual, usual)] * shape.moe_layers
    return dense.stored(shape, precisions, kinds, usual, dense.head or dense.embeddings)


def _is_read(entry: TensorEntry) -> bool:
    return is_blocks(entry.dtype) or (entry.dtype in GGML and is_in_gguf(entry))


def _expert_formats(matrices: list[TensorEntry]) -> list[tuple[str, str]]:
    layers: dict[int, tuple[list[TensorEntry], list[TensorEntry]]] = {}
    for entry in matrices:
        layers.setdefault(_layer(entry.key), ([], []))[bool(_DOWN.search(entry.key))].append(entry)
    found = (beside(map(common_format, layers[layer])) for layer in sorted(layers))
    return [((most or BF16).name, (down or BF16).name) for most, down in found]


def _is_mine(key: str, layers: int) -> bool:
    layer = _LAYER.search(key)
    return not _NOT_TEXT.search(key) and (layer is None or not layers or int(layer[1]) < layers)


def _layer(key: str) -> int:
    found = _LAYER.search(key)
    return int(found[1]) if found else -1


def _full_attention(text: dict[str, Any], layers: int) -> int:
    types = text.get("layer_types")
    if not isinstance(types, list) or not types:
        return layers
    return max(sum(1 for kind in types if str(kind) in ("full_attention", "attention")), 1)


def _attention(text: dict[str, Any], hidden: int) -> AttentionShape:
    heads = number_of(text, ("num_attention_heads", "n_heads", "n_head", "num_heads")) or 1
    rotary = number_of(text, ("qk_rope_head_dim",))
    latent = number_of(text, ("kv_lora_rank",))
    head_dim = number_of(text, ("v_head_dim",) if latent else ("head_dim", "kv_channels"))
    return AttentionShape(
        heads=heads,
        kv_heads=number_of(text, ("num_key_value_heads", "kv_n_heads", "num_key_value_groups")) or heads,
        head_dim=head_dim or max(hidden // heads, 1),
        latent=latent + rotary if latent else 0,
        query_latent=number_of(text, ("q_lora_rank",)),
    )
