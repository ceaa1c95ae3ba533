"""A model's properties and memory needs, from its config.json and safetensors headers alone."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from engine.checkpoint.config_file import EXPERTS, MAX_CONFIG_BYTES, PER_TOKEN, read_config, read_json, text_part
from engine.checkpoint.gguf import gguf_at
from engine.checkpoint.headers import DTYPE_BITS, TensorEntry
from engine.checkpoint.manifest import read_manifest
from engine.checkpoint.pictures import why_blind
from engine.checkpoint.quantised import quantisation_of
from engine.checkpoint.shards import read_tensors
from engine.common.config import SamplingParams
from engine.common.errors import EngineError
from engine.common.footprint import PAGE_TOKENS, window_pages
from engine.common.paths import resources_dir
from engine.families import family_of
from engine.families.family import KvNumbers
from engine.families.replies.reader import answering_family

_ALWAYS = ("repetition_penalty", "dry_multiplier", "dry_base", "dry_allowed_length", "dry_range", "dry_breakers")
"""What counts for greedy answers too.  The library's own file format has no DRY: these names are ours."""
_IF_SAMPLED = ("top_k", "top_p", "min_p")


def suggested_sampling(directory: Path) -> SamplingParams:
    """The sampling that a checkpoint suggests; greedy if it suggests none, as in transformers.

    What is missing, cannot be read or makes no sense is left out: no reason not to answer.  A starter that was built
    before takes the suggestions of the recipe shipped with the program, as those may have become better.
    """
    raw: dict[str, Any] = {}
    with contextlib.suppress(EngineError):
        gguf = gguf_at(directory)
        if gguf is not None:
            from engine.checkpoint.gguf.checkpoint import gguf_generation  # imports numpy, which others do not need
            from engine.checkpoint.gguf.file import read_gguf

            raw = gguf_generation(read_gguf(gguf))
        else:
            raw = _of_starter(directory) or read_json(directory / "generation_config.json", MAX_CONFIG_BYTES)
    sampling = SamplingParams()
    names = list(_ALWAYS)
    if raw.get("do_sample") is True:
        sampling = SamplingParams(temperature=1.0)
        names += ["temperature", *_IF_SAMPLED]
    kinds = {field.name: type(getattr(sampling, field.name)) for field in fields(sampling)}
    for name in names:
        value = _as(kinds[name], raw.get(name))
        if value is not None:
            with contextlib.suppress(EngineError):
                sampling = replace(sampling, **{name: value})
    return sampling


def _of_starter(directory: Path) -> dict[str, Any] | None:
    manifest = read_manifest(directory)
    if manifest is None or not manifest.source.startswith("recipe "):
        return None
    recipe = read_json(resources_dir() / "starter" / "recipe.json", MAX_CONFIG_BYTES)
    suggested: dict[str, Any] = recipe["generation"]
    return suggested if manifest.source.startswith(f"recipe {recipe['name']} ") else None


def _as(kind: type, value: object) -> Any:
    """A JSON value as a field's type; `None` if it is of another."""
    if kind is tuple:
        return tuple(value) if isinstance(value, list) and all(isinstance(text, str) for text in value) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 2**63:
        return None
    return kind(value)


LAYERS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")
DECODER_LAYERS = ("decoder_layers", "num_decoder_layers")
HIDDEN = ("hidden_size", "d_model", "n_embd")
_HEADS = ("num_attention_heads", "n_heads", "n_head", "decoder_attention_heads", "num_heads")
_KV_HEADS = ("num_key_value_heads", "kv_n_heads")
_HEAD_DIM = ("head_dim", "kv_channels", "d_kv")
_NESTED = ("ffn_config", "moe_config", "attn_config")  # dbrx has its experts and heads there
_COMPRESSED = {"0": "sliding_attention", "4": "compressed_sparse_attention", "128": "heavily_compressed_attention"}
_LETTERS = {"M": "mamba", "*": "attention"}
_POSITIONS = 6
"""An indexed layer stores three 64-bit positions per token: six 32-bit numbers."""


@dataclass(frozen=True, slots=True)
class KvOfModel:
    """What layers hold of a sequence.

    Attributes:
        numbers: cache elements per token of context over all layers, as transformers stores them.
        window_numbers, window_tokens: of these, those of layers with a sliding window, and what these see.
        compresses: whether what lies behind a window is compressed: those of a window are beside `numbers` then.
        state_bytes: of what recurrent layers and short convolutions sum up, at 32 bits.
    """

    numbers: int
    window_numbers: int = 0
    window_tokens: int = 0
    state_bytes: int = 0
    compresses: bool = False

    def fixed_bytes(self, width: int) -> int:
        """What a sequence holds however long it is, with numbers of so many bytes."""
        if not self.compresses:
            return self.state_bytes
        return width * self.window_numbers * window_pages(self.window_tokens) * PAGE_TOKENS


def kv_of_model(text: dict[str, Any]) -> KvOfModel:
    """What layers hold of a sequence, by the configuration.

    Multi-head latent attention caches latents, the rotary part of the keys, and the keys of the token index if there is
    one. Linear attention and state-space layers have no growing cache. Sliding-window layers count in full: their cache
    grows until the window is full.
    """
    if isinstance(linear := text.get("linear_attn_config"), dict):  # as Kimi Linear is published
        own_names = {"num_heads": "linear_num_heads", "head_dim": "linear_head_dim"}
        own_names |= {"short_conv_kernel_size": "linear_conv_kernel_dim", "kda_layers": "kda_layers"}
        text = {**{own_names[name]: value for name, value in linear.items() if name in own_names}, **text}
    layers = number_of(text, (*DECODER_LAYERS, *LAYERS))
    kinds = _kinds(text, layers)
    kinds = kinds[: len(kinds) - number_of(text, ("num_kv_shared_layers",))]
    kinds += _looped(text, kinds)
    growing = [(index, kind) for index, kind in enumerate(kinds) if _grows(kind)]
    states = sum(_state_numbers(text, kind) for kind in kinds) if growing else 0
    growing = growing or list(enumerate(kinds))
    by_layer = text.get("per_layer_config")
    own = {key: of for key, of in by_layer.items() if isinstance(of, dict)} if isinstance(by_layer, dict) else {}
    family = family_of(str(text.get("model_type"))).kv
    of_layer = [
        (kind, _of_layer({**text, **own.get(str(index), {})}, kind, family) * family.attentions)
        for index, kind in growing
    ]
    window = number_of(text, ("sliding_window", "sliding_window_size", "attention_chunk_size"))
    in_windows = sum(count for kind, count in of_layer if "sliding" in kind or "chunked" in kind) if window else 0
    if window and any("compressed" in kind for kind in kinds):
        return _compressed(text, kinds, window)
    return KvOfModel(sum(count for _, count in of_layer), in_windows, window if in_windows else 0, 4 * states)


def _compressed(text: dict[str, Any], kinds: list[str], window: int) -> KvOfModel:
    """What DeepSeek-V4 has in pages: entries in those of all tokens, keys and what entries are made of in a window's.

    See `engine.kernels.native.paged_attention.CompressedPages`.
    """
    keys, index = number_of(text, _HEAD_DIM), number_of(text, ("index_head_dim",))
    given = text.get("compress_rates")
    in_all = in_windows = 0
    for kind in kinds:
        if "compressed" not in kind:
            in_windows += 2 * keys
            continue
        overlaps = "sparse" in kind
        rate = number_of(given, (kind,)) if isinstance(given, dict) else 0
        rate = rate or (4 if overlaps else 128)
        own = (keys, index) if overlaps else (keys,)
        in_windows += keys + (4 if overlaps else 2) * sum(own)
        in_all += sum(-(-(-(-PAGE_TOKENS // rate) * width) // PAGE_TOKENS) for width in own)
        window = max(window, 2 * rate if overlaps else rate)
    return KvOfModel(in_all, in_windows, window, compresses=True)


def _state_numbers(text: dict[str, Any], kind: str) -> int:
    """Numbers that a layer of this kind sums up: of its short convolutions, and its recurrent state."""
    if kind == "conv":
        return number_of(text, ("conv_L_cache",)) * number_of(text, HIDDEN)
    if kind not in ("linear_attention", "state", "mamba"):
        return 0
    kernel, heads = number_of(text, ("linear_conv_kernel_dim",)), number_of(text, ("linear_num_heads",))
    if kernel and heads:  # decays key by key
        width = number_of(text, ("linear_head_dim",))
        return 3 * heads * width * kernel + heads * width**2
    if kernel:  # a gated delta net
        heads, values = number_of(text, ("linear_num_key_heads",)), number_of(text, ("linear_num_value_heads",))
        keys, width = number_of(text, ("linear_key_head_dim",)), number_of(text, ("linear_value_head_dim",))
        return (2 * heads * keys + values * width) * kernel + values * keys * width
    state, kernel = (
        number_of(text, ("mamba_d_state", "ssm_state_size")),
        number_of(text, ("mamba_d_conv", "conv_kernel")),
    )
    if heads := number_of(text, ("mamba_n_heads", "mamba_num_heads")):  # Mamba 2
        inner = heads * number_of(text, ("mamba_d_head", "mamba_head_dim"))
        groups = number_of(text, ("mamba_n_groups", "n_groups")) or 1
        return (inner + 2 * groups * state) * kernel + inner * state
    if state:
        return (number_of(text, ("mamba_expand",)) or 2) * number_of(text, HIDDEN) * (kernel + state)
    heads = number_of(text, _HEADS)  # lightning attention
    return heads * (number_of(text, _HEAD_DIM) or number_of(text, HIDDEN) // max(heads, 1)) ** 2


def number_of(config: dict[str, Any], names: Iterable[str]) -> int:
    """The first positive number under one of these names, at the top level or nested; 0 if there is none."""
    places = [config, *(nested for key in _NESTED if isinstance(nested := config.get(key), dict))]
    for place in places:
        for name in names:
            value = place.get(name)
            if isinstance(value, list) and value:  # one number per layer
                value = max((item for item in value if isinstance(item, int)), default=0)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return 0


def _kinds(text: dict[str, Any], layers: int) -> list[str]:
    types = text.get("layer_types") or text.get("layers_block_type")
    if isinstance(types, list) and types:
        return [str(kind) for kind in types]
    ratios = text.get("compress_ratios")
    if isinstance(ratios, list) and ratios:  # as DeepSeek-V4 is published
        return [_COMPRESSED.get(str(ratio), "attention") for ratio in ratios[:layers]]
    if isinstance(pattern := text.get("hybrid_override_pattern"), str) and pattern:  # as Nemotron-H is published
        return [_LETTERS.get(letter, "mlp") for letter in pattern]
    period = number_of(text, ("attn_layer_period",))
    if period:  # state-space layers with an attention layer every `period`
        offset = number_of(text, ("attn_layer_offset",))
        return ["attention" if layer % period == offset else "state" for layer in range(layers)]
    if isinstance(linear := text.get("kda_layers"), list):  # counted from one
        return ["linear_attention" if layer + 1 in linear else "attention" for layer in range(layers)]
    for name, others in (
        ("full_attention_interval", "linear_attention"),
        ("sliding_window_pattern", "sliding_attention"),
    ):
        if every := number_of(text, (name,)):
            return [others if (layer + 1) % every else "attention" for layer in range(layers)]
    return ["attention"] * layers


def _looped(text: dict[str, Any], kinds: list[str]) -> list[str]:
    """Layers that a token goes through again, each time with keys and values of their own."""
    start, end, passes = (
        number_of(text, (f"loop_{name}",)) for name in ("layer_index_start", "layer_index_end", "num_passes")
    )
    return kinds[start:end] * (passes - 1)


def _grows(kind: str) -> bool:
    return ("attention" in kind or kind.startswith("hybrid") or _chooses_blocks(kind)) and "linear" not in kind


def _chooses_blocks(kind: str) -> bool:
    return kind.endswith("_sparse")


def _of_layer(text: dict[str, Any], kind: str, family: KvNumbers) -> int:
    latent = number_of(text, ("kv_lora_rank",))
    if latent:
        index = (
            number_of(text, ("index_head_dim",)) if number_of(text, ("index_topk",)) and "sliding" not in kind else 0
        )
        if index and number_of(text, ("index_kpool",)):
            index = 2 * index + 1  # keys, pooling weights, and their sum
        return latent + number_of(text, ("qk_rope_head_dim",)) + index
    heads = number_of(text, _HEADS)
    kv_heads = number_of(text, _KV_HEADS) or heads
    keys = number_of(text, _HEAD_DIM) or (number_of(text, HIDDEN) // heads if heads else 0)
    values = number_of(text, ("v_head_dim",)) or keys
    if family.keys_are_values and "sliding" not in kind:
        return keys
    if "sliding" in kind:
        kv_heads = number_of(text, ("swa_num_key_value_heads",)) or kv_heads * family.window_heads
        own = number_of(text, ("swa_head_dim",))
        keys, values = own or keys, own or values
    found = kv_heads * (keys + values)
    if _chooses_blocks(kind):
        found += number_of(text, ("index_head_dim",))
    if "indexed" in kind:
        index = number_of(text, ("indexer_kv_heads",)) * number_of(text, ("indexer_head_dim",))
        found += index + _POSITIONS
    return found


# The families' names for the same value; the first positive number counts.
_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")

_EXPERT_KEY = re.compile(r"(\.|^)(experts|chunk_experts|expert_mlp|input_linear|output_linear)\b|\.experts?_\d+\.")
_SHARED_KEY = re.compile(r"shared_(expert|mlp)")
_SCALE_KEY = re.compile(r"(_scale|_scale_inv|_scales|\.scale|\.qscale_weight)$")


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """A model as its files describe it.

    Attributes:
        family: transformers' `model_type`; of models round a text part of any family (InternVL) that of the text part.
        experts, experts_per_token: per MoE layer; 0 for a dense model.
        parameters, expert_parameters: in elements, unpacked, without scales.
        context_tokens: longest supported context; 0 if unknown.
        trained_tokens: context length of the training, if the rotary embedding extends it.
        dtype: from config.json, e.g. `bfloat16`; empty if unknown.
        quantization: `fp8`, `gptq`, ...; empty for plain weights; of a GGUF file the type of most of them (`q4_k`).
    """

    family: str
    layers: int
    hidden: int
    experts: int
    experts_per_token: int
    parameters: int
    expert_parameters: int
    bytes: int
    expert_bytes: int
    context_tokens: int
    trained_tokens: int
    kv: KvOfModel
    dtype: str
    quantization: str
    sees: bool = False


def read_profile(directory: Path) -> ModelProfile:
    """The profile of the checkpoint in a directory.

    Raises:
        EngineError: the checkpoint is damaged, unsafe or of an unknown format.
    """
    return profile_of(read_config(directory), read_tensors(directory).values())


def profile_of(config: dict[str, Any], tensors: Iterable[TensorEntry]) -> ModelProfile:
    text = text_part(config)
    tensors = list(tensors)
    experts = [entry for entry in tensors if is_expert_key(entry.key)]
    count = number_of(text, EXPERTS)
    per_token = number_of(text, PER_TOKEN) or family_of(str(config["model_type"])).experts_per_token
    trained = number_of(text, _CONTEXT)
    return ModelProfile(
        family=answering_family(str(config["model_type"]), str(text.get("model_type"))),
        layers=_layers(text),
        hidden=number_of(text, HIDDEN),
        experts=count if count > 1 else 0,
        experts_per_token=per_token if count > 1 else 0,
        parameters=sum(map(parameters_of, tensors)),
        expert_parameters=sum(map(parameters_of, experts)) if count > 1 else 0,
        bytes=sum(entry.nbytes for entry in tensors),
        expert_bytes=sum(entry.nbytes for entry in experts) if count > 1 else 0,
        context_tokens=stretched_context(text, trained),
        trained_tokens=trained,
        kv=kv_of_model(text),
        dtype=str(
            text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype") or ""
        ),
        quantization=_blocks(tensors) or str(quantisation_of(config).get("quant_method", "")),
        sees=not why_blind(config, (entry.key for entry in tensors)),
    )


def _blocks(tensors: list[TensorEntry]) -> str:
    """ggml's type of most bytes of a GGUF file; empty for anything else."""
    held = Counter[str]()
    for entry in tensors:
        held[entry.dtype] += entry.nbytes if entry.dtype not in DTYPE_BITS else 0
    return held.most_common(1)[0][0].lower() if held.total() else ""


def stretched_context(text: dict[str, Any], trained: int) -> int:
    """The longest context of a model trained on `trained` tokens, as extended by its rotary embedding.

    A dynamic one (NTK) grows with the context, up to `factor` times the training length. YaRN and LongRoPE give their
    original length, and may allow more than `max_position_embeddings` (Qwen's do). `linear` and `llama3` also have a
    factor, but it is often already included in that number: nothing is added. If layer types differ, those without a
    window decide.
    """
    ropes = text.get("rope_parameters") or text.get("rope_scaling")
    if not isinstance(ropes, dict) or not trained:
        return trained
    by_layer = [rope for name, rope in ropes.items() if isinstance(rope, dict) and "sliding" not in name]
    own = text.get("original_max_position_embeddings")
    return min((_stretched(rope, trained, own) for rope in by_layer or [ropes]), default=trained)


def _stretched(rope: dict[str, Any], trained: int, own: object) -> int:
    kind, factor = rope.get("rope_type") or rope.get("type"), rope.get("factor")
    if not isinstance(factor, int | float) or isinstance(factor, bool) or not 0 < factor < 2**31:
        return trained
    if kind == "dynamic":
        start: object = None if rope.get("alpha") else trained  # HunYuan's has a fixed base and gives its length
    elif kind in ("yarn", "longrope"):
        start = own or rope.get("original_max_position_embeddings") or trained
    else:
        return trained
    if not isinstance(start, int) or not 0 < start <= trained:  # inconsistent
        return trained
    return max(trained, int(start * factor))


def _layers(text: dict[str, Any]) -> int:
    if text.get("is_encoder_decoder"):
        return number_of(text, ("encoder_layers", *LAYERS)) + number_of(text, DECODER_LAYERS)
    types = text.get("layers_block_type") or text.get("layer_types")
    return number_of(text, LAYERS) or (len(types) if isinstance(types, list) else 0)


def is_expert_key(key: str) -> bool:
    return _EXPERT_KEY.search(key) is not None and _SHARED_KEY.search(key) is None


def parameters_of(entry: TensorEntry) -> int:
    """Unpacked elements of a tensor; 0 if it only holds another tensor's scales."""
    if _SCALE_KEY.search(entry.key):
        return 0
    packed = entry.dtype in ("U8", "I8") and entry.key.endswith("_blocks")
    return entry.numel * 2 if packed else entry.numel
