"""A GGUF file as a checkpoint: what would be its config.json and generation_config.json, and its tensors' names.

A family says which keys and names it has (`engine.families.gguf`); what every architecture has is here. Whatever a
model needs and a file lacks, and whatever a file has and nothing here knows, is an error: nothing is guessed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.checkpoint.gguf.arrangements import ARRANGEMENTS, damaged, expert_rows, rows_of
from engine.checkpoint.gguf.file import WHOLE, GgufFile, Strings
from engine.checkpoint.headers import TensorEntry
from engine.common.errors import EngineError, ErrorCode
from engine.common.plain_text import plain_line
from engine.common.untrusted import reason
from engine.families import family_of
from engine.families.family import DraftHead
from engine.families.gguf import ARRAY, DRAFT_HEAD, HEAD_DIM, REQUIRED, Gguf, Key, Made
from engine.families.gguf.table import GGUF, REFUSED
from engine.families.known import nearest
from engine.formats.ggml import GGML

_MOST_LAYERS, _MOST_READ = 4096, 2**20
_EMBEDDING, _HEAD, _ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
_ROPE = (_ROPE_FACTORS, "rope_factors_long.weight", "rope_factors_short.weight")
_FACTORS = (".scale", ".input_scale")
"""How the names of factors end that NVFP4 has for whole tensors or experts."""
_CHANGES_ANSWERS = (
    "attention.clamp_kqv", "attention.max_alibi_bias", "attention.scale", "attention.output_scale",
    "attn_logit_softcapping", "router_logit_softcapping", "final_logit_softcapping", "logit_scale", "residual_scale",
    "embedding_scale", "expert_group_count", "swiglu_clamp_exp", "swiglu_clamp_shexp",
    "attention.temperature_scale", "attention.value_scale", "attention.indexer.top_k", "attention.compress_ratios",
    "hyper_connection.count", "ple.layers",
)  # fmt: skip
"""Keys that change what is computed: one that has a value is refused unless the family asks for it."""
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
             "penalty_repeat": "repetition_penalty"}  # fmt: skip
_TOKENS = "tokenizer.ggml.tokens"
_VALUES = "attention.value_length"


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """What would be the model's config.json.

    Raises:
        EngineError: `MODEL_UNSUPPORTED` for an architecture that is not read, or values that the library cannot
            compute with; `CHECKPOINT_DAMAGED` if a key is missing or makes no sense.
    """
    family, file = _opened(file)
    keys = _Keys(file)
    config: dict[str, Any] = {
        "model_type": family.model_type,
        "dtype": "bfloat16",
        **_common(keys, family),
        **family.constants,
    }
    for name, key in family.config.items():
        found = keys.value(key if isinstance(key, Key) else Key(key))
        if isinstance(found, list):
            raise keys.unsupported(key.name if isinstance(key, Key) else key, found)
        config[name] = found
    with _sensible(file):
        for computed in family.computed:
            config.update(computed(keys, config))
    _check_fixed(keys, family)
    return config


def gguf_tensors(file: GgufFile, *, guesses: bool = False) -> dict[str, TensorEntry]:
    """The model's tensors by the names that a checkpoint has for them.

    Args:
        guesses: with those of the layer behind the last that guesses tokens, where the file has one.

    Raises:
        EngineError: as `gguf_config`; `MODEL_UNSUPPORTED` if the file has a tensor that nothing here knows.
    """
    config = gguf_config(file)
    family, file = _opened(file)
    layers = int(config["num_hidden_layers"])
    head = family_of(family.model_type).draft_head if guesses else None
    further = list(_of_head(family, head, layers)) if head is not None else []
    left = dict.fromkeys(name for name in file.tensors if not _predicts_further(name, layers))
    tensors: dict[str, TensorEntry] = {}
    prefix = f"{file.architecture}."
    arrays = {f"{ARRAY}{key.removeprefix(prefix)}": entry for key, entry in file.arrays.items()}
    stored = {**file.tensors, **arrays}
    for name, ways in (*expanded(family, range(layers)), *further):
        made = next(
            (made for made in ways if all(source.replace("{e}", "0") in stored for source in made.sources)), None
        )
        if made is None:
            continue
        if any("{e}" in source for source in made.sources):
            tensors.update(_one_by_one(file, name, made, left))
            continue
        for source in made.sources:
            left.pop(source, None)
        arrange = ARRANGEMENTS[made.how]
        sources = [stored[source] for source in made.sources]
        if made.how not in ("table", "first") and any(source.dtype == WHOLE.name for source in sources):
            raise damaged(sources[0], "is no matrix of weights")
        with _sensible(file):
            if "{e}" not in name:
                tensors[name] = replace(arrange(sources, config), key=name)
                continue
            for expert, rows in enumerate(zip(*map(expert_rows, sources), strict=True)):
                own = name.replace("{e}", str(expert))
                tensors[own] = replace(arrange(rows, config), key=own)
    strange = next((name for name in left if name not in (*family.unused, *_ROPE)), None)
    if strange is not None:
        is_factor = strange.endswith(_FACTORS)
        raise EngineError(
            ErrorCode.MODEL_UNSUPPORTED,
            f"{file.path.name} holds a factor of weights beside them, {strange}, which Switchyard does not read: "
            "use the model's safetensors version, or a file of another type than NVFP4."
            if is_factor
            else f"{file.path.name} holds {strange}, which Switchyard does not know how to use: its answers would be "
            "wrong.",
        )
    return tensors


def _of_head(family: Gguf, head: DraftHead, layers: int) -> Iterator[tuple[str, list[Made]]]:
    """As `expanded`, of the layer that guesses tokens, by the names that checkpoints of the family have."""
    own: dict[str, Any] = dict(DRAFT_HEAD)
    last = family.tensors.get("model.norm.weight")
    if isinstance(last, Made):  # norms are stored in another way
        own |= {name: Made(last.how, source) for name, source in own.items() if name.endswith("norm.weight")}
    names = {"enorm": head.embedding_norm, "hnorm": head.hidden_norm, "eh_proj": head.projection}
    names["shared_head.norm"] = head.norm
    begins, prefix = f"model.layers.{layers}.", head.prefix.format(layers=layers)
    for name, ways in expanded(replace(family, tensors={**family.tensors, **own}), range(layers, layers + 1)):
        if name.startswith(begins):
            module, _, kind = name.removeprefix(begins).rpartition(".")
            yield f"{prefix}{names.get(module, head.layer + module)}.{kind}", ways


def _one_by_one(file: GgufFile, name: str, made: Made, left: dict[str, None]) -> Iterator[tuple[str, TensorEntry]]:
    """The tensors of experts that a file has one by one; what is used is taken from `left`."""
    (source,) = made.sources
    for expert in itertools.count():
        theirs, ours = (each.replace("{e}", str(expert)) for each in (source, name))
        if theirs not in file.tensors:
            return
        left.pop(theirs, None)
        yield ours, replace(file.tensors[theirs], key=ours)


@contextmanager
def _sensible(file: GgufFile) -> Iterator[None]:
    """Metadata of wrong types, or numbers that do not fit together, break a family's arithmetic: that is an error."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise EngineError(
            ErrorCode.CHECKPOINT_DAMAGED,
            f"The metadata of {file.path.name} do not fit together ({type(error).__name__}): "
            "get another version of the file.",
        ) from error


def _predicts_further(name: str, layers: int) -> bool:
    """Whether a tensor is of the layers behind the last, which predict further tokens; they may hold anything."""
    place = name.split(".")
    return place[0] == "blk" and len(place) > 1 and place[1].isdecimal() and int(place[1]) >= layers


def gguf_generation(file: GgufFile) -> dict[str, Any]:
    """What would be the model's generation_config.json, but for the tokens that end an answer."""
    found: dict[str, Any] = {name: value for name, value in _special_tokens(file).items() if value is not None}
    for theirs, ours in _SAMPLING.items():
        value = file.metadata.get(f"general.sampling.{theirs}")
        if isinstance(value, int | float) and math.isfinite(value):
            found[ours] = value
    if found.get("temperature", 1) > 0 and any(name in found for name in _SAMPLING.values()):
        found["do_sample"] = True
    return found


def _family(file: GgufFile) -> Gguf:
    said = {key: value if isinstance(value, str | int | float) else None for key, value in file.metadata.items()}
    for family in GGUF.get(file.architecture, ()):
        if family.when is None or family.when(said):
            return family
    name = plain_line(file.architecture)[:60]
    holds = f"{file.path.name} holds a model of the architecture {name!r}, which Switchyard does not"
    if file.architecture in REFUSED:
        raise EngineError(ErrorCode.MODEL_UNSUPPORTED, f"{holds} run: it {REFUSED[file.architecture]}.")
    raise EngineError(
        ErrorCode.MODEL_UNSUPPORTED,
        f"{holds} read from GGUF files{nearest(name, GGUF)}: use the model's safetensors version.",
    )


def _opened(file: GgufFile) -> tuple[Gguf, GgufFile]:
    """As `_family`, and the file with its queries, keys and values apart where a converter has joined them."""
    family = _family(file)
    if any("attn_qkv" in source for ways in _ways(family) for made in ways for source in made.sources):
        return family, file  # the model has them joined, too, or means something else by it
    tensors: dict[str, TensorEntry] = {}
    for name, entry in file.tensors.items():
        place = name.split(".")
        if len(place) == 4 and place[0] == "blk" and place[2] == "attn_qkv" and place[1].isdecimal():
            with _sensible(file):
                parts = rows_of(entry, _attention_rows(file, int(place[1]), entry.shape[0]))
                tensors.update(zip((name.replace("qkv", part) for part in "qkv"), parts, strict=True))
        else:
            tensors[name] = entry
    return family, replace(file, tensors=tensors)


def _attention_rows(file: GgufFile, layer: int, rows: int) -> tuple[int, int, int]:
    """How many rows of `rows` are of queries, keys and values, heads being equally wide."""

    def count(key: str) -> int:
        found = file.value(f"attention.{key}")
        return int(found[layer] if isinstance(found, np.ndarray) else found)  # type: ignore[arg-type]

    heads = count("head_count")
    key_heads = heads if file.value("attention.head_count_kv") is None else count("head_count_kv")
    width = rows // (heads + 2 * key_heads)
    return heads * width, key_heads * width, key_heads * width


class _Keys:
    """The metadata of one architecture, checked."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.asked: set[str] = set()

    def value(self, key: Key) -> Any:
        """A scalar or a list of them; its default if the file lacks it."""
        self.asked.add(key.name)
        found = self.file.value(key.name)
        if found is None:
            if key.default is REQUIRED:
                raise self._lacks(key.name)
            return key.default
        if isinstance(found, Strings):
            raise self._senseless(key.name, "texts")
        if isinstance(found, np.ndarray):
            numbers = found.tolist()
            return numbers[0] if numbers and numbers.count(numbers[0]) == len(numbers) else numbers
        return found

    def whole(self, name: str, default: Any = REQUIRED, *, first: bool = False) -> int:
        """A number of at least one, below 2**31.

        Args:
            first: of a list, the first that is not 0.
        """
        value = self.value(Key(name, default))
        if first and isinstance(value, list):
            value = next(filter(None, value), 0)
        if type(value) is not int or not 0 < value < 2**31:
            raise self._senseless(name, value)
        return value

    def real(self, name: str, default: Any = REQUIRED) -> float:
        value = self.value(Key(name, default))
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self._senseless(name, value)
        return float(value)

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors

    def shape(self, tensor: str) -> tuple[int, ...]:
        return self._entry(tensor).shape

    def numbers(self, tensor: str) -> list[float]:
        values: list[float] = _read(self.file, self._entry(tensor)).reshape(-1).tolist()
        return values

    def _entry(self, tensor: str) -> TensorEntry:
        entry = self.file.tensors.get(tensor)
        if entry is None:
            raise _lacks_tensor(self.file, tensor)
        return entry

    def rope(self, rotated: int = 0) -> dict[str, Any]:
        return _rope(self, rotated or self.value(Key("rope.dimension_count", 0)))

    def _lacks(self, name: str) -> EngineError:
        return EngineError(
            ErrorCode.CHECKPOINT_DAMAGED,
            f"{self.file.path.name} does not say {self.file.architecture}.{name}, without which its model cannot be "
            "run: get another version of the file.",
        )

    def _senseless(self, name: str, value: object) -> EngineError:
        return EngineError(
            ErrorCode.CHECKPOINT_DAMAGED,
            f"{self._says(name, value)}, which makes no sense: get another version of the file.",
        )

    def unsupported(self, name: str, value: object) -> EngineError:
        """The error for a value that the library's code cannot compute with."""
        return EngineError(
            ErrorCode.MODEL_UNSUPPORTED,
            f"{self._says(name, value)}, which Switchyard cannot run: use the model's safetensors version.",
        )

    def _says(self, name: str, value: object) -> str:
        return f"{self.file.path.name} gives {self.file.architecture}.{name} as {plain_line(str(value))[:60]}"


def _common(keys: _Keys, family: Gguf) -> dict[str, Any]:
    file = keys.file
    embedding = file.tensors.get(_EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise _lacks_tensor(file, _EMBEDDING)
    layers = keys.whole("block_count")
    further = keys.value(Key("nextn_predict_layers", 0))  # llama.cpp counts them among the blocks
    if layers > _MOST_LAYERS or type(further) is not int or not 0 <= further < layers:
        raise keys._senseless("block_count", layers)
    hidden, heads = keys.whole("embedding_length"), keys.whole("attention.head_count", first=family.layered)
    head_dim = keys.whole(family.head_dim, _width_of_keys(file) or max(hidden // heads, 1))
    own = family.head_dim != HEAD_DIM or _VALUES in family.config.values()
    if not own and keys.whole(_VALUES, head_dim) != head_dim:
        raise keys.unsupported(_VALUES, file.value(_VALUES))
    if embedding.shape[1] != hidden:
        raise keys._senseless("embedding_length", hidden)
    _check_vocabulary(file, embedding.shape[0])
    # A file may lack it where no layer is dense.
    fallback = keys.value(Key("expert_feed_forward_length", None)) or REQUIRED
    rope: dict[str, Any] = {}
    if not family.own_rope:
        rope, rotated = _rope(keys, head_dim), keys.whole("rope.dimension_count", head_dim)
        if rotated != head_dim and (not family.partial_rotary or rotated > head_dim):
            raise keys.unsupported("rope.dimension_count", rotated)
        if rotated != head_dim:
            rope["partial_rotary_factor"] = rotated / head_dim
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": layers - further,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if family.layered else keys.whole("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": keys.whole("feed_forward_length", fallback, first=family.layered),
        "rms_norm_eps": keys.real(family.eps),
        "max_position_embeddings": keys.whole("context_length"),
        "rope_parameters": rope,
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "tie_word_embeddings": _HEAD not in file.tensors,
        **_special_tokens(file),
    }


def _width_of_keys(file: GgufFile) -> int:
    """Of a head, from the first matrix that makes keys; 0 if there is none.

    Queries have as wide heads, but some models' have gates among them.
    """
    for layer in range(_MOST_LAYERS):
        keys = file.tensors.get(f"blk.{layer}.attn_k.weight")
        if keys is not None and keys.shape:
            found = file.value("attention.head_count_kv")
            if found is None:
                found = file.value("attention.head_count")
            heads: Any = found
            if isinstance(found, np.ndarray):
                heads = found[layer].item() if layer < len(found) else 0
            is_sensible = type(heads) is int and heads > 0 and keys.shape[0] % heads == 0
            return int(keys.shape[0] // heads) if is_sensible else 0
    return 0


def _special_tokens(file: GgufFile) -> dict[str, int | None]:
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    found = {ours: file.metadata.get(f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in names.items()}
    return {f"{name}_token_id": value if type(value) is int else None for name, value in found.items()}


def _check_vocabulary(file: GgufFile, rows: int) -> None:
    tokens = file.metadata.get(_TOKENS)
    if isinstance(tokens, Strings) and len(tokens) != rows:
        raise EngineError(
            ErrorCode.CHECKPOINT_DAMAGED,
            f"{file.path.name} has {len(tokens):,} tokens but embeddings for {rows:,}: get another version of it.",
        )


def _rope(keys: _Keys, head_dim: int) -> dict[str, Any]:
    """`rope_parameters`: llama.cpp's defaults hold for what a file leaves out."""
    theta, context = keys.real("rope.freq_base", 10_000.0), keys.whole("context_length")
    kind = keys.value(Key("rope.scaling.type", "linear"))
    place = next((name for name in ("rope.scaling.factor", "rope.scale_linear") if keys.value(Key(name, None))), None)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    factors = keys.file.tensors.get(_ROPE_FACTORS)
    if factors is not None:
        return {**rope, **_llama3_scaling(keys.file, _read(keys.file, factors), theta, head_dim)}
    if kind == "none" or place is None or keys.real(place) == 1:
        return rope
    if kind not in ("linear", "yarn"):
        raise keys.unsupported("rope.scaling.type", kind)
    rope = {**rope, "rope_type": kind, "factor": keys.real(place)}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = keys.whole("rope.scaling.original_context_length", context)
        rope["beta_fast"] = keys.real("rope.scaling.yarn_beta_fast", 32.0)
        rope["beta_slow"] = keys.real("rope.scaling.yarn_beta_slow", 1.0)
        scale = keys.real("rope.scaling.attn_factor", 1.0)
        name = "rope.scaling.yarn_log_multiplier"
        most = keys.real(name) if keys.value(Key(name, None)) else 0.0
        growth = 0.1 * math.log(rope["factor"])
        rope["attention_factor"] = scale * (growth + 1.0) / (growth * most + 1.0)
    return rope


def _llama3_scaling(file: GgufFile, factors: NDArray[np.float32], theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3's scaling, from the factors that llama.cpp's converter made of it, one per frequency.

    transformers computes them from four numbers: frequencies below one bound are divided by `factor`, those above
    another stay, and between them the share is linear in the frequency (Llama 3.1, `apply_scaling`). Two of the numbers
    are the two ends of that line; one of the four only scales another, and is taken as 1.
    """
    factors, beyond = np.split(factors, [head_dim // 2])
    if len(factors) != head_dim // 2 or not np.isfinite(factors).all() or factors.min() <= 0 or np.any(beyond != 1):
        raise _odd_factors(file)
    if np.all(factors == 1):
        return {}
    frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    factor = float(factors.max())
    kept = (1 / factors.astype(np.float64) - 1 / factor) / (1 - 1 / factor)
    between = (kept > 1e-4) & (kept < 1 - 1e-4)
    if between.sum() >= 2:
        slope, start = np.polyfit(frequencies[between], kept[between], 1)
    else:  # too few to see: the numbers that every published model has
        slope, start = 8192 / (2 * math.pi * 3), -1 / 3
    if start >= 0 or slope <= 0:
        raise _odd_factors(file)
    high = 1 - 1 / start
    original = slope * 2 * math.pi * (high - 1)
    share = np.clip(slope * frequencies + start, 0, 1)
    if not np.allclose(1 / ((1 - share) / factor + share), factors, rtol=1e-3):
        raise _odd_factors(file)
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": float(high),
        "original_max_position_embeddings": round(original),
    }


def _odd_factors(file: GgufFile) -> EngineError:
    return EngineError(
        ErrorCode.MODEL_UNSUPPORTED,
        f"{file.path.name} scales its rotary embedding ({_ROPE_FACTORS}) in a way that Switchyard does not know: use "
        "the model's safetensors version.",
    )


def _lacks_tensor(file: GgufFile, name: str) -> EngineError:
    return EngineError(
        ErrorCode.CHECKPOINT_DAMAGED,
        f"{file.path.name} has no {name}, so it is not a whole model: get another version of the file.",
    )


def _read(file: GgufFile, entry: TensorEntry) -> NDArray[np.float32]:
    if entry.numel > _MOST_READ:
        raise damaged(entry, "is too large")
    try:
        with file.open_file(entry.file) as stream:
            stream.seek(entry.offset)
            raw = stream.read(entry.nbytes)
    except OSError as error:
        raise damaged(entry, f"cannot be read ({reason(error)})") from error
    if len(raw) != entry.nbytes:
        raise damaged(entry, "is cut short")
    return GGML[entry.dtype].dequantise(np.frombuffer(raw, np.uint8))


def _check_fixed(keys: _Keys, family: Gguf) -> None:
    """Raises `MODEL_UNSUPPORTED` for a file that wants something else computed than the library's code does."""
    for name, expected in family.fixed.items():
        value = keys.value(Key(name, None))
        if name == "expert_weights_scale" and not value:
            continue  # llama.cpp takes 0 as none
        if value is not None and not _same(value, expected):
            raise keys.unsupported(name, value)
    if "attention.causal" not in family.fixed and keys.value(Key("attention.causal", True)) is False:
        raise keys.unsupported("attention.causal", False)
    for name in _CHANGES_ANSWERS:
        if name not in keys.asked and (value := keys.value(Key(name, None))) and value != 1:
            raise keys.unsupported(name, value)


def _same(value: Any, expected: Any) -> bool:
    """Whether a value is this, but for the rounding to 32 bits."""
    if isinstance(value, float) and isinstance(expected, float):
        return math.isclose(value, expected, rel_tol=1e-6)
    return bool(value == expected)


def expanded(family: Gguf, layers: range) -> Iterator[tuple[str, list[Made]]]:
    """The names of all tensors that a model with these layers may have, and what each may be made of."""
    for name, ways in zip(family.tensors, _ways(family), strict=True):
        if "{n}" not in name:
            yield name, ways
            continue
        for layer in layers:
            number = str(layer)
            yield (
                name.replace("{n}", number),
                [Made(way.how, *(each.replace("{n}", number) for each in way.sources)) for way in ways],
            )


def _ways(family: Gguf) -> Iterator[list[Made]]:
    for sources in family.tensors.values():
        ways = sources if isinstance(sources, tuple) else (sources,)
        yield [way if isinstance(way, Made) else Made("", way) for way in ways]
