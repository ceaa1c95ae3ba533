"""Models of a published model's shape with random weights: speed can be measured without a download.

`synthetic:NAME?layers=4` on a bench's command line: the checkpoint is made once, then found again. Its tokenizer maps
any text to ids byte by byte, and every id has a text. The weights are made quickly: windows of blocks of normal
numbers, scaled so that a model of any depth behaves: activations stay finite over long contexts, other tokens choose
other experts, and some experts are chosen more often than others, as in trained models (a cache would otherwise have
nothing to learn).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.checkpoint.importing import put_in_place, staging_folder
from engine.checkpoint.packed import write_safetensors
from engine.common.errors import EngineError, ErrorCode
from engine.common.files import disk_errors_explained, require_space
from engine.common.paths import cache_dir
from engine.formats.coded import to_bfloat16


class Role(Enum):
    MATRIX = "matrix"
    EMBEDDING = "embedding"
    ROUTER = "router"
    RESIDUAL = "residual"  # writes to the residual stream
    ONES = "ones"
    ZEROS = "zeros"
    FINAL_NORM = "final norm"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a checkpoint; `fan_in`: inputs per output."""

    name: str
    shape: tuple[int, ...]
    role: Role = Role.MATRIX
    fan_in: int = 1


@dataclass(frozen=True, slots=True)
class Shape:
    """Dimensions of one model.  `family` is transformers' `model_type`; `source`: origin of the dimensions."""

    family: str
    source: str
    layers: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    rope_theta: float
    dense_intermediate: int = 0

    def changed(self, **options: int) -> Shape:
        """The same with other `layers`, `vocab` or `experts`."""
        return replace(self, **options)  # type: ignore[arg-type]


SHAPES: dict[str, Shape] = {
    "qwen3-30b-a3b": Shape(
        "qwen3_moe", "Qwen/Qwen3-30B-A3B", 48, 2048, 768, 128, 8, 32, 4, 128, 151936, 40960, 1e6, 6144
    ),
    "olmoe-1b-7b": Shape("olmoe", "allenai/OLMoE-1B-7B-0924", 16, 2048, 1024, 64, 8, 16, 16, 128, 50304, 4096, 1e4),
    "mixtral-8x7b": Shape(
        "mixtral", "mistralai/Mixtral-8x7B-v0.1", 32, 4096, 14336, 8, 2, 32, 8, 128, 32000, 32768, 1e6
    ),
    "gpt-oss-20b": Shape("gpt_oss", "openai/gpt-oss-20b", 24, 2880, 2880, 32, 4, 64, 8, 64, 201088, 131072, 1.5e5),
    "deepseek-v2-lite": Shape(
        "deepseek_v2", "deepseek-ai/DeepSeek-V2-Lite", 27, 2048, 1408, 64, 6, 16, 16, 192, 102400, 32768, 1e4, 10944
    ),
    "mixtral-eighth": Shape("mixtral", "", 8, 512, 1792, 8, 2, 8, 2, 64, 4096, 32768, 1e6),
    "qwen3-moe-small": Shape("qwen3_moe", "", 8, 512, 256, 128, 8, 8, 2, 64, 8192, 40960, 1e6, 1024),
    "qwen3-moe-tiny": Shape("qwen3_moe", "", 2, 64, 32, 16, 4, 4, 2, 16, 512, 4096, 1e6, 128),
}
"""Of Mixtral with an eighth of its width each matrix has a 64th of the weights; the last two are like Qwen3-30B-A3B,
reduced for quick runs and tests."""


def config_of(shape: Shape) -> dict[str, Any]:
    common: dict[str, Any] = {
        "model_type": shape.family,
        "dtype": "bfloat16",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "num_experts_per_tok": shape.top_k,
        "max_position_embeddings": shape.context,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return common | _FAMILIES[shape.family].config(shape)


def tensors_of(shape: Shape) -> Iterator[list[TensorSpec]]:
    """The tensors of each file of the checkpoint: embedding, one file per layer, head."""
    hidden = shape.hidden
    yield [TensorSpec("model.embed_tokens.weight", (shape.vocab, hidden), Role.EMBEDDING)]
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        norms = [
            TensorSpec(f"{prefix}{name}.weight", (hidden,), Role.ONES)
            for name in ("input_layernorm", "post_attention_layernorm")
        ]
        yield [*norms, *_FAMILIES[shape.family].layer(shape, prefix, layer)]
    yield [
        TensorSpec("model.norm.weight", (hidden,), Role.FINAL_NORM),
        TensorSpec("lm_head.weight", (shape.vocab, hidden), Role.MATRIX, hidden),
    ]


@dataclass(frozen=True, slots=True)
class _Family:
    """A family's part of the configuration, and its tensors of layer i except the two norms."""

    config: Callable[[Shape], dict[str, Any]]
    layer: Callable[[Shape, str, int], Iterator[TensorSpec]]


def _linear(name: str, outputs: int, inputs: int, role: Role = Role.MATRIX) -> TensorSpec:
    return TensorSpec(f"{name}.weight", (outputs, inputs), role, inputs)


def _attention(shape: Shape, prefix: str) -> Iterator[TensorSpec]:
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield _linear(f"{prefix}self_attn.q_proj", queries, shape.hidden)
    yield _linear(f"{prefix}self_attn.k_proj", keys, shape.hidden)
    yield _linear(f"{prefix}self_attn.v_proj", keys, shape.hidden)
    yield _linear(f"{prefix}self_attn.o_proj", shape.hidden, queries, Role.RESIDUAL)


def _mlp(prefix: str, hidden: int, intermediate: int, names: tuple[str, str, str]) -> Iterator[TensorSpec]:
    gate, up, down = names
    yield _linear(f"{prefix}{gate}", intermediate, hidden)
    yield _linear(f"{prefix}{up}", intermediate, hidden)
    yield _linear(f"{prefix}{down}", hidden, intermediate, Role.RESIDUAL)


_USUAL = ("gate_proj", "up_proj", "down_proj")


def _experts(shape: Shape, block: str, names: tuple[str, str, str] = _USUAL) -> Iterator[TensorSpec]:
    yield _linear(f"{block}.gate", shape.experts, shape.hidden, Role.ROUTER)
    for expert in range(shape.experts):
        yield from _mlp(f"{block}.experts.{expert}.", shape.hidden, shape.intermediate, names)


def _qwen3_config(shape: Shape) -> dict[str, Any]:
    return {
        "head_dim": shape.head_dim,
        "num_experts": shape.experts,
        "moe_intermediate_size": shape.intermediate,
        "intermediate_size": shape.dense_intermediate,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen3_layer(shape: Shape, prefix: str, _layer: int) -> Iterator[TensorSpec]:
    yield from _attention(shape, prefix)
    for name in ("q_norm", "k_norm"):
        yield TensorSpec(f"{prefix}self_attn.{name}.weight", (shape.head_dim,), Role.ONES)
    yield from _experts(shape, f"{prefix}mlp")


def _olmoe_config(shape: Shape) -> dict[str, Any]:
    return {"num_experts": shape.experts, "intermediate_size": shape.intermediate, "norm_topk_prob": False}


def _olmoe_layer(shape: Shape, prefix: str, _layer: int) -> Iterator[TensorSpec]:
    yield from _attention(shape, prefix)
    for name, heads in (("q_norm", shape.heads), ("k_norm", shape.kv_heads)):
        yield TensorSpec(f"{prefix}self_attn.{name}.weight", (heads * shape.head_dim,), Role.ONES)
    yield from _experts(shape, f"{prefix}mlp")


def _mixtral_config(shape: Shape) -> dict[str, Any]:
    return {"num_local_experts": shape.experts, "intermediate_size": shape.intermediate, "sliding_window": None}


def _mixtral_layer(shape: Shape, prefix: str, _layer: int) -> Iterator[TensorSpec]:
    yield from _attention(shape, prefix)
    yield from _experts(shape, f"{prefix}block_sparse_moe", ("w1", "w3", "w2"))


def _gpt_oss_config(shape: Shape) -> dict[str, Any]:
    rope = {"rope_type": "yarn", "rope_theta": shape.rope_theta, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
    return {
        "head_dim": shape.head_dim,
        "num_local_experts": shape.experts,
        "intermediate_size": shape.intermediate,
        "sliding_window": 128,
        "layer_types": [("full_attention" if i % 2 else "sliding_attention") for i in range(shape.layers)],
        "swiglu_limit": 7.0,
        "attention_bias": True,
        "rope_parameters": {**rope, "truncate": False, "original_max_position_embeddings": 4096},
    }


def _gpt_oss_layer(shape: Shape, prefix: str, _layer: int) -> Iterator[TensorSpec]:
    for spec in _attention(shape, prefix):
        yield spec
        yield TensorSpec(spec.name.removesuffix("weight") + "bias", spec.shape[:1], Role.ZEROS)
    yield TensorSpec(f"{prefix}self_attn.sinks", (shape.heads,), Role.ZEROS)
    experts, hidden, inner = shape.experts, shape.hidden, shape.intermediate
    yield _linear(f"{prefix}mlp.router", experts, hidden, Role.ROUTER)
    yield TensorSpec(f"{prefix}mlp.router.bias", (experts,), Role.ZEROS)
    # Inputs first, gate and up interleaved, all experts in one tensor: as in the family's bf16 files.
    fused = f"{prefix}mlp.experts."
    yield TensorSpec(f"{fused}gate_up_proj", (experts, hidden, 2 * inner), Role.MATRIX, hidden)
    yield TensorSpec(f"{fused}gate_up_proj_bias", (experts, 2 * inner), Role.ZEROS)
    yield TensorSpec(f"{fused}down_proj", (experts, inner, hidden), Role.RESIDUAL, inner)
    yield TensorSpec(f"{fused}down_proj_bias", (experts, hidden), Role.ZEROS)


_LATENT, _NOPE, _ROPE, _VALUE, _SHARED = 512, 128, 64, 128, 2


def _deepseek_config(shape: Shape) -> dict[str, Any]:
    return {
        "n_routed_experts": shape.experts,
        "n_shared_experts": _SHARED,
        "moe_intermediate_size": shape.intermediate,
        "intermediate_size": shape.dense_intermediate,
        "first_k_dense_replace": 1,
        "kv_lora_rank": _LATENT,
        "q_lora_rank": None,
        "qk_nope_head_dim": _NOPE,
        "qk_rope_head_dim": _ROPE,
        "v_head_dim": _VALUE,
        "head_dim": _ROPE,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
    }


def _deepseek_layer(shape: Shape, prefix: str, layer: int) -> Iterator[TensorSpec]:
    attention, hidden = f"{prefix}self_attn.", shape.hidden
    yield _linear(f"{attention}q_proj", shape.heads * (_NOPE + _ROPE), hidden)
    yield _linear(f"{attention}kv_a_proj_with_mqa", _LATENT + _ROPE, hidden)
    yield TensorSpec(f"{attention}kv_a_layernorm.weight", (_LATENT,), Role.ONES)
    yield _linear(f"{attention}kv_b_proj", shape.heads * (_NOPE + _VALUE), _LATENT)
    yield _linear(f"{attention}o_proj", hidden, shape.heads * _VALUE, Role.RESIDUAL)
    if layer == 0:  # the family's first layer is dense
        yield from _mlp(f"{prefix}mlp.", hidden, shape.dense_intermediate, _USUAL)
        return
    yield from _mlp(f"{prefix}mlp.shared_experts.", hidden, _SHARED * shape.intermediate, _USUAL)
    yield from _experts(shape, f"{prefix}mlp")


_FAMILIES = {
    "qwen3_moe": _Family(_qwen3_config, _qwen3_layer),
    "olmoe": _Family(_olmoe_config, _olmoe_layer),
    "mixtral": _Family(_mixtral_config, _mixtral_layer),
    "gpt_oss": _Family(_gpt_oss_config, _gpt_oss_layer),
    "deepseek_v2": _Family(_deepseek_config, _deepseek_layer),
}


_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json` with `vocabulary` (at least 259) ids: 0 is padding, 1 begins
    and 2 ends a turn, then come the bytes and made-up words that only the model says.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    if vocabulary < len(tokens):
        raise ValueError(f"a byte-level tokenizer has at least {len(tokens)} tokens")
    tokens += [f"\u0120w{index}" for index in range(vocabulary - len(tokens))]  # U+0120 is the byte-level space
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": _SPECIAL[0],
        "bos_token": _SPECIAL[1],
        "eos_token": _SPECIAL[2],
        "chat_template": _TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


_LARGEST_BLOCK = 2**23
_SPARE = 8
"""One part in so many of a block is spare: so many places a window may begin at, and matrices that share numbers do not
share rows."""
_COMMON_CHANNELS = 16
"""One channel in so many holds the same value for every token: what routers read there is an expert's popularity."""
_SKEW = 0.7
"""Spread of the experts' popularity, over that of what a router makes of the token itself."""
_ROUTER_SPREAD = 1.5
"""Standard deviation of router logits."""
_RESIDUAL_GAIN = 0.1
"""Of what a layer adds to the residual stream, so that tokens stay themselves over many layers."""
_COMMON_VALUE = _SKEW * math.sqrt(_COMMON_CHANNELS - 1)

Bits = NDArray[np.uint16]


class RandomWeights:
    """Fills tensors; the same order of calls give the same weights.

    Args:
        largest: elements of the largest tensor; smaller models need smaller blocks.
    """

    def __init__(self, largest: int) -> None:
        self._random = np.random.default_rng(0)
        self._blocks: dict[float, Bits] = {}
        self._block = min(_LARGEST_BLOCK, max(largest, 2**12))
        self._spare = self._block // _SPARE

    def fill(self, spec: TensorSpec) -> Bits:
        """bfloat16 bits of the spec's shape; perhaps a view that other tensors share, so not to be changed."""
        if spec.role is Role.ONES:
            return to_bfloat16(np.ones(spec.shape, np.float32))
        if spec.role is Role.ZEROS:
            return np.zeros(spec.shape, np.uint16)
        if spec.role is Role.FINAL_NORM:
            # The head sees no common channels, or a few words would win whatever the token.
            norm = np.ones(spec.shape, np.float32)
            norm[_common(spec.shape[0])] = 0
            return to_bfloat16(norm)
        if spec.role is Role.EMBEDDING:
            table = self._window(1.0, math.prod(spec.shape)).reshape(spec.shape).copy()
            table[:, _common(spec.shape[1])] = to_bfloat16(np.array([_COMMON_VALUE], np.float32))[0]
            return table
        gain = {Role.ROUTER: _ROUTER_SPREAD, Role.RESIDUAL: _RESIDUAL_GAIN}.get(spec.role, 1.0)
        return self._window(gain / math.sqrt(spec.fan_in), math.prod(spec.shape)).reshape(spec.shape)

    def _window(self, deviation: float, count: int) -> Bits:
        """`count` normal numbers of this deviation, from some place of a block on; tensors beyond it repeat it."""
        block = self._blocks.get(deviation)
        if block is None:
            numbers: NDArray[Any] = self._random.standard_normal(self._block + self._spare, dtype=np.float32)
            block = self._blocks[deviation] = to_bfloat16(numbers * np.float32(deviation))
        begin = int(self._random.integers(self._spare // 2)) * 2 + 1
        if count <= self._block - 1:
            return block[begin : begin + count]
        # An odd length: no two rows of a matrix of even width begin at the same place before all places are used.
        return np.resize(block[begin : begin + (self._block - 1 | 1)], count)


def _common(hidden: int) -> slice:
    return slice(0, max(1, hidden // _COMMON_CHANNELS))


_PREFIX = "synthetic:"
_FORMAT = 2
"""Part of the folder's name: increase it when the weights of a shape change."""
_SMALLEST = {"layers": 1, "vocab": 259, "experts": 1}
_LARGEST = {"layers": 1000, "vocab": 2**20, "experts": 4096}


def is_synthetic(model: str) -> bool:
    return model.startswith(_PREFIX)


def make_synthetic(model: str, say: Callable[[str], None] = lambda _text: None) -> Path:
    """The checkpoint directory of `synthetic:NAME`, created if missing.

    Args:
        model: `synthetic:NAME?option=number&...`; the options are `layers`, `vocab` and `experts`.
        say: called with progress messages.

    Raises:
        EngineError: `MODEL_NOT_FOUND` if no such shape is known, `INVALID_REQUEST` for an option that makes no sense,
            `DISK_FULL`.
    """
    name, shape = parse(model)
    folder = cache_dir() / "synthetic" / f"{name}-v{_FORMAT}"
    if (folder / "config.json").is_file():
        return folder
    nbytes = plain_nbytes(shape)
    say(f"making {name} with random weights in {folder.parent}: {nbytes / 1e9:.1f} GB, cached")
    with disk_errors_explained(folder.parent), staging_folder(folder.parent) as staged:
        require_space(folder.parent, nbytes)
        write_checkpoint(staged, shape)
        if not folder.exists():  # another process may have created it meanwhile
            put_in_place(staged, folder)
    return folder


def parse(model: str) -> tuple[str, Shape]:
    """The folder's name, and the shape.

    Raises:
        EngineError: as `make_synthetic`.
    """
    name, options = options_of(model, SHAPES)
    shape = SHAPES[name].changed(**options)
    if shape.experts < shape.top_k:
        raise EngineError(
            ErrorCode.INVALID_REQUEST, f"A token of {name} uses {shape.top_k} experts, so it needs at least that many."
        )
    return "-".join([name, *(f"{key}{value}" for key, value in sorted(options.items()))]), shape


def options_of(model: str, known: Iterable[str]) -> tuple[str, dict[str, int]]:
    """The name of the shape, one of those known, and the options.

    Raises:
        EngineError: as `make_synthetic`.
    """
    name, _, query = model.removeprefix(_PREFIX).partition("?")
    if name not in known:
        raise EngineError(
            ErrorCode.MODEL_NOT_FOUND, f"There is no synthetic model {name!r}: use one of {', '.join(known)}."
        )
    options: dict[str, int] = {}
    for part in filter(None, query.split("&")):
        key, _, value = part.partition("=")
        usable = key in _SMALLEST and value.isascii() and value.isdecimal() and len(value) < 10
        if not usable or not _SMALLEST[key] <= int(value) <= _LARGEST[key]:
            raise EngineError(
                ErrorCode.INVALID_REQUEST,
                f"{part!r} is not an option of a synthetic model: use for example {_PREFIX}{name}?layers=4&vocab=8192.",
            )
        options[key] = int(value)
    return name, options


def plain_nbytes(shape: Shape) -> int:
    return 2 * sum(math.prod(spec.shape) for specs in tensors_of(shape) for spec in specs)


def write_checkpoint(folder: Path, shape: Shape) -> None:
    largest = max(math.prod(spec.shape) for specs in tensors_of(shape) for spec in specs)
    weights, files = RandomWeights(largest), shape.layers + 2
    weight_map: dict[str, str] = {}
    for number, specs in enumerate(tensors_of(shape), start=1):
        file = f"model-{number:05}-of-{files:05}.safetensors"
        write_safetensors(folder / file, {spec.name: weights.fill(spec) for spec in specs})
        weight_map |= dict.fromkeys((spec.name for spec in specs), file)
    index = {"metadata": {"total_size": plain_nbytes(shape)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    write_tokenizer(folder, shape.vocab)
    (folder / "config.json").write_text(json.dumps(config_of(shape), indent=2) + "\n", encoding="utf-8")
