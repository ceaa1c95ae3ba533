"""Writes a checkpoint as a GGUF file of llama.cpp's form: the reverse of how `checkpoint.py` reads one.

The same tables say which names and keys a family has.  Only what they reverse without loss is written: what was made is
read back, header first, and must be the model that it was made of.  Blocks are encoded by the `gguf` package, whose
results are those of llama.cpp's own reference functions.
"""

from __future__ import annotations

import base64
import contextlib
import io
import itertools
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, GGUFWriter, LlamaFileType, TokenType
from gguf.quants import quantize
from numpy.typing import NDArray

from engine.checkpoint.config_file import read_config
from engine.checkpoint.gguf.checkpoint import expanded, gguf_config, gguf_tensors
from engine.checkpoint.gguf.file import GgufFile
from engine.checkpoint.gguf.tokenizer import PRE_TOKENIZERS, PreTokenizer
from engine.checkpoint.headers import TensorEntry
from engine.checkpoint.shards import read_tensors
from engine.common.errors import EngineError, ErrorCode
from engine.common.untrusted import parse_json, read_record, read_untrusted
from engine.families.gguf import Gguf, Key, Made
from engine.families.gguf.table import gguf_of
from engine.formats.coded import from_bfloat16

Bytes = NDArray[np.uint8]
Metadata = dict[str, Any]
"""By full key: numbers, texts, and lists of either."""

_DTYPES: dict[str, Any] = {"BF16": np.dtype("<u2"), "F16": np.dtype("<f2"), "F32": np.dtype("<f4")}
_ROTARY = {"": 0, "row": 0, "rotary_q": 1, "rotary_k": 2}
"""Arrangements that are reversed here: none, a row without its axis, and the rows of queries or of keys."""
_ROPE_FACTORS = "rope_freqs.weight"
_COMMON = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "vocab_size": "vocab_size",
}
_NO_MATTER = frozenset(("dtype", "bos_token_id", "eos_token_id", "pad_token_id", "attention_bias", "mlp_bias"))
"""Of a configuration: told by the tensors, or by the tokenizer."""
_MOST_TOKENIZER = 256 * 2**20
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_BYTE = re.compile("<0x[0-9A-F]{2}>")
_SAMPLE = (
    "Don't SAY it's I'LL we'Ve; 1234567 89,000.50 x86_64\n\n  def f(a, b):\n\treturn a+b  # ok!\r\n"
    "Größe ÀÉ naïve Straße привет мир 你好，世界。 こんにちは カタカナ 한국어 สวัสดี مرحبا 🙂👍🏽 "
    "HelloWorld iPhone CamelCase3 ...???!!! $100%  <tag>/path/to  \u00a0end   \n"
)


class Quantisation(Enum):
    """The types of the matrices of a file; Q8_0, Q4_0 and Q4_1 scale groups of 32 numbers along a row."""

    BF16 = "BF16"
    Q8_0 = "Q8_0"
    Q4_0 = "Q4_0"
    Q4_1 = "Q4_1"

    @property
    def tensor_type(self) -> GGMLQuantizationType:
        return GGMLQuantizationType[self.value]

    @property
    def file_type(self) -> LlamaFileType:
        return LlamaFileType[f"MOSTLY_{self.value}"]

    def type_for(self, row: int) -> GGMLQuantizationType:
        """The type of a matrix with rows of `row` elements: bfloat16 if groups do not divide it."""
        group, _nbytes = GGML_QUANT_SIZES[self.tensor_type]
        return self.tensor_type if row % group == 0 else GGMLQuantizationType.BF16


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of the GGUF file.

    Attributes:
        name: its name in the file.
        shape: its shape, outermost dimension first.
        sources: the checkpoint's tensors; several are stacked along a new first dimension.
        is_matrix: whether it is quantised; norms and routers stay float32, as llama.cpp requires.
        rotary_heads: how many heads' rows are reordered; 0 for none.
        numbers: what it holds, if no tensor of the checkpoint does.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[TensorEntry, ...]
    is_matrix: bool
    rotary_heads: int = 0
    numbers: NDArray[np.float32] | None = None


def write_gguf(
    checkpoint: Path,
    target: Path,
    quantisation: Quantisation,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
    vocabulary: Metadata | None = None,
) -> None:
    """Writes the checkpoint directory's weights to `target`, not atomic, but flushed: the caller renames it.

    All matrices have the same type, including embedding and head; norms and routers are float32.

    Args:
        vocabulary: the tokenizer's keys; else there are ids without texts.
        on_progress: called with bytes written and total bytes.

    Raises:
        EngineError: `MODEL_UNSUPPORTED`, `CHECKPOINT_DAMAGED`.
        OSError: if the file cannot be written.
    """
    family, metadata, tensors = described(checkpoint, quantisation)
    types = [_type_of(tensor, quantisation) for tensor in tensors]
    writer = GGUFWriter(target, family.architecture)
    with contextlib.closing(writer):
        for key, value in {**metadata, **(vocabulary or {"tokenizer.ggml.model": "no_vocab"})}.items():
            _add(writer, key, value)
        total = 0
        for tensor, kind in zip(tensors, types, strict=True):
            shape = byte_shape(tensor.shape, kind)
            nbytes = int(np.prod(shape))
            writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), nbytes, kind)
            total += nbytes
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        done = 0
        for tensor, kind in zip(tensors, types, strict=True):
            content = _content(tensor, kind)
            writer.write_tensor_data(content)
            done += content.nbytes
            on_progress(done, total)
        writer.flush()
    with target.open("r+b") as file:
        os.fsync(file.fileno())


def described(checkpoint: Path, quantisation: Quantisation) -> tuple[Gguf, Metadata, list[GgufTensor]]:
    """What the file will say, but for its tokenizer, and hold.

    Raises:
        EngineError: `MODEL_UNSUPPORTED`: llama.cpp has no form for this model, or would compute something else.
    """
    config = read_config(checkpoint)
    family = gguf_of(config["model_type"])
    if family is None or not {"num_hidden_layers", "hidden_size", "num_attention_heads"} <= config.keys():
        raise _unsupported(f"models of the type {config['model_type']} are not written to GGUF")
    if family.unwritten:
        raise _unsupported(family.unwritten)
    entries = read_tensors(checkpoint)
    tensors = list(_tensors(family, config, entries))
    metadata = {
        "general.name": checkpoint.name,
        "general.file_type": int(quantisation.file_type),
        "general.quantization_version": 2,
        **{f"{family.architecture}.{key}": value for key, value in _keys(family, config).items()},
    }
    factors = next((tensor.numbers for tensor in tensors if tensor.numbers is not None), None)
    _check(config, entries, _as_read(family, metadata, tensors, factors, checkpoint))
    return family, metadata, tensors


def read_back(checkpoint: Path, quantisation: Quantisation = Quantisation.BF16) -> dict[str, Any]:
    """The configuration of the file that would be written, as it will be read.

    Raises:
        EngineError: as `described`.
    """
    family, metadata, tensors = described(checkpoint, quantisation)
    factors = next((tensor.numbers for tensor in tensors if tensor.numbers is not None), None)
    return gguf_config(_as_read(family, metadata, tensors, factors, checkpoint))


def _keys(family: Gguf, config: Mapping[str, Any]) -> Metadata:
    """The metadata of the architecture, by key without its name."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    found: Metadata = {key: config.get(name) for key, name in _COMMON.items()}
    found["attention.head_count_kv"] = config.get("num_key_value_heads") or heads
    found |= {family.head_dim: head_dim, "attention.value_length": head_dim, family.eps: config.get("rms_norm_eps")}
    found |= {key: value for key, value in family.fixed.items() if value is not None}
    for name, key in family.config.items():
        if config.get(name) is not None:
            found[key.name if isinstance(key, Key) else key] = config[name]
    if "expert_count" in (key.name if isinstance(key, Key) else key for key in family.config.values()):
        found.setdefault("expert_count", _experts_in(family, config) or None)
    rope = _rope(config)
    found["rope.dimension_count"] = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    found["rope.freq_base"] = float(rope.get("rope_theta") or 10_000.0)
    if rope["rope_type"] in ("linear", "yarn") and "factor" in rope:
        found |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
        if "original_max_position_embeddings" in rope:
            found["rope.scaling.original_context_length"] = int(rope["original_max_position_embeddings"])
    return {key: value for key, value in found.items() if value is not None}


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters`, also of older configurations."""
    older = {"rope_theta": config.get("rope_theta"), **(config.get("rope_scaling") or {})}
    rope = dict(config.get("rope_parameters") or older)
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    return {name: value for name, value in rope.items() if value is not None}


def _llama3_factors(rope: Mapping[str, Any], head_dim: int) -> NDArray[np.float32]:
    """What each frequency is divided by (Llama 3.1, `apply_scaling`)."""
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    frequencies = float(rope["rope_theta"]) ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    turns = float(rope["original_max_position_embeddings"]) * frequencies / (2 * math.pi)
    share = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - share) / float(rope["factor"]) + share)).astype(np.float32)


def _tensors(family: Gguf, config: Mapping[str, Any], checkpoint: Mapping[str, TensorEntry]) -> Iterator[GgufTensor]:
    """Every tensor of the file.

    Raises:
        EngineError: `MODEL_UNSUPPORTED` if one of the checkpoint has no place in it.
    """
    left = dict(checkpoint)
    heads = (0, config["num_attention_heads"], config.get("num_key_value_heads") or config["num_attention_heads"])
    if config.get("tie_word_embeddings"):
        left.pop("lm_head.weight", None)
    layers, experts = range(config["num_hidden_layers"]), _experts_in(family, config)
    for layer in layers:
        if not any(f"layers.{layer}." in name for name in checkpoint):
            raise _unsupported(f"the checkpoint has nothing of model.layers.{layer}.")
    for name, ways in expanded(family, layers):
        way = next((way for way in ways if way.how in _ROTARY and len(way.sources) == 1 and _is_one(way)), None)
        if "{e}" not in name:
            entry = left.pop(name, None)
            if entry is None:
                continue
            if way is None:
                raise _unsupported(f"{name} has another form there, which is not written")
            if way.how == "row":
                entry = replace(entry, shape=(entry.numel,))
            is_matrix = len(entry.shape) > 1 and not way.sources[0].endswith(("ffn_gate_inp.weight", "_shexp.bias"))
            yield GgufTensor(way.sources[0], entry.shape, (entry,), is_matrix, heads[_ROTARY[way.how]])
            continue
        stack: list[TensorEntry] = []
        for expert in itertools.count():
            own = left.pop(name.replace("{e}", str(expert)), None)
            if own is None:
                break
            stack.append(own)
        if stack and len(stack) != experts:
            raise _unsupported(f"{name.replace('{e}', str(min(experts, len(stack))))} is one too many or missing")
        if stack and way is not None:
            yield GgufTensor(way.sources[0], (len(stack), *stack[0].shape), tuple(stack), is_matrix=True)
    rope = _rope(config)
    if rope["rope_type"] == "llama3":
        factors = _llama3_factors(rope, config.get("head_dim") or config["hidden_size"] // heads[1])
        yield GgufTensor(_ROPE_FACTORS, factors.shape, (), is_matrix=False, numbers=factors)
    if left:
        raise _unsupported(f"{min(left)} has no place in a file of this family")


def _experts_in(family: Gguf, config: Mapping[str, Any]) -> int:
    """How many a layer has; 0 if that is not said."""
    for name, key in family.config.items():
        if (key.name if isinstance(key, Key) else key) == "expert_count":
            return int(config.get(name) or config.get("num_local_experts") or config.get("num_experts") or 0)
    return 0


def _is_one(way: Made) -> bool:
    return "{e}" not in way.sources[0]


def _as_read(
    family: Gguf,
    metadata: Metadata,
    tensors: list[GgufTensor],
    factors: NDArray[np.float32] | None,
    checkpoint: Path,
) -> GgufFile:
    path = checkpoint.with_suffix(".gguf")
    entries = {
        each.name: TensorEntry(path, each.name, "F32", each.shape, 0, 4 * math.prod(each.shape)) for each in tensors
    }
    content = factors.tobytes() if factors is not None else b""
    said = {"general.architecture": family.architecture, **metadata}
    return GgufFile(path, (path,), said, entries, "", lambda _path: io.BytesIO(content))


def _check(config: Mapping[str, Any], checkpoint: Mapping[str, TensorEntry], file: GgufFile) -> None:
    """That what is written is what it is made of.

    Raises:
        EngineError: `MODEL_UNSUPPORTED`.
    """
    read = gguf_config(file)
    wanted = {**config, "rope_parameters": _rope(config)}
    for name, value in read.items():
        if name in _NO_MATTER or name not in wanted or wanted[name] is None:
            continue
        theirs = {"rope_type": value.get("rope_type"), **value} if name == "rope_parameters" else value
        if not _alike(wanted[name], theirs):
            odd = "rope_type" if name == "rope_parameters" else name
            raise _unsupported(f"it would have another {odd} there ({value} instead of {wanted[name]})")
    for name, off in {"clip_qkv": None, "sliding_window": None}.items():
        is_used = config.get("use_sliding_window", True) or name != "sliding_window"
        if name not in read and config.get(name) is not off and is_used:
            raise _unsupported(f"it has no {name} there")
    lost = {name for name in checkpoint if name not in gguf_tensors(file)} - {"lm_head.weight"}
    if lost:
        raise _unsupported(f"the first of its tensors that would be lost is {min(lost)}")


def _alike(wanted: Any, found: Any) -> bool:
    """Whether two values are one, but for rounding; what one of two tables does not say is its default."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        return all(_alike(wanted[key], found[key]) for key in wanted.keys() & found.keys()) and (
            found["rope_type"] == wanted["rope_type"]
        )
    if isinstance(wanted, int | float) and isinstance(found, int | float):
        return math.isclose(wanted, found, rel_tol=1e-3 if isinstance(found, float) else 0)
    return bool(wanted == found)


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bytes):
        writer.add_key_value(key, value, GGUFValueType.ARRAY, GGUFValueType.UINT8)
    elif isinstance(value, list):
        inner = GGUFValueType.INT32 if value and isinstance(value[0], int) else GGUFValueType.get_type(value[0])
        writer.add_key_value(key, value, GGUFValueType.ARRAY, inner)
    elif isinstance(value, int) and not isinstance(value, bool):
        writer.add_key_value(key, value, GGUFValueType.UINT32)
    else:
        writer.add_key_value(key, value, GGUFValueType.get_type(value))


def byte_shape(shape: tuple[int, ...], kind: GGMLQuantizationType) -> tuple[int, ...]:
    group, nbytes = GGML_QUANT_SIZES[kind]
    return (*shape[:-1], shape[-1] // group * nbytes)


def encoded(entry: TensorEntry, kind: GGMLQuantizationType, rotary_heads: int = 0) -> Bytes:
    """A tensor of a checkpoint, uint8 [.., bytes of a row].

    Args:
        rotary_heads: if not 0, the rows of each of these heads are reordered from transformers' rotary layout (first
            half against second) to that of llama.cpp's "llama" architecture (adjacent pairs).

    Raises:
        EngineError: `MODEL_UNSUPPORTED` if the tensor is neither bfloat16 nor float16 nor float32.
    """
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
        raise _unsupported(f"{entry.key} is {entry.dtype}, which is not written: take a bf16 model")
    values: NDArray[Any] = np.memmap(entry.file, dtype, "r", entry.offset, entry.shape)
    if rotary_heads:
        rows = entry.shape[0]
        halves = values.reshape(rotary_heads, 2, rows // rotary_heads // 2, *entry.shape[1:])
        values = halves.swapaxes(1, 2).reshape(entry.shape)
    if entry.dtype == "BF16":
        if kind is GGMLQuantizationType.BF16:
            return np.ascontiguousarray(values).view(np.uint8)
        values = from_bfloat16(values)
    numbers = np.ascontiguousarray(values, dtype=np.float32)
    return np.ascontiguousarray(quantize(numbers, kind)).view(np.uint8)


def _type_of(tensor: GgufTensor, quantisation: Quantisation) -> GGMLQuantizationType:
    return quantisation.type_for(tensor.shape[-1]) if tensor.is_matrix else GGMLQuantizationType.F32


def _content(tensor: GgufTensor, kind: GGMLQuantizationType) -> Bytes:
    if tensor.numbers is not None:
        return tensor.numbers.view(np.uint8)
    if len(tensor.shape) == len(tensor.sources[0].shape):
        return encoded(tensor.sources[0], kind, tensor.rotary_heads)
    stack = np.empty(byte_shape(tensor.shape, kind), np.uint8)
    for place, source in zip(stack, tensor.sources, strict=True):
        place[...] = encoded(source, kind)
    return stack


# --- the tokenizer ----------------------------------------------------------------------------------


def vocabulary_of(checkpoint: Path) -> Metadata:
    """The tokenizer's keys of a checkpoint, from its tokenizer.json, and its chat template.

    Raises:
        EngineError: `MODEL_UNSUPPORTED`: its tokenizer is of a kind that llama.cpp has no form for, or splits text in a
            way that no name of llama.cpp's stands for.
    """
    from tokenizers import Tokenizer

    try:
        text = read_untrusted(checkpoint / "tokenizer.json", _MOST_TOKENIZER).decode()
        content = parse_json(text)
        own = Tokenizer.from_str(text)
    except (OSError, ValueError) as error:
        raise _unsupported("it has no tokenizer.json that can be read") from error
    model, said = content["model"], read_record(checkpoint / "tokenizer_config.json", _MOST_TOKENIZER)
    pieces: list[str] = [piece for piece, _ in model["vocab"]] if model["type"] == "Unigram" else list(model["vocab"])
    added = {token["id"]: token for token in content["added_tokens"]}
    named = {
        **(
            dict(enumerate(pieces))
            if model["type"] == "Unigram"
            else {at: token for token, at in model["vocab"].items()}
        ),
        **{at: each["content"] for at, each in added.items()},
    }
    rows = read_config(checkpoint).get("vocab_size") or max(named) + 1
    tokens = [named.get(at, f"[PAD{at}]") for at in range(max(rows, max(named) + 1))]
    kinds = [
        TokenType.UNUSED
        if at not in named
        else TokenType.NORMAL
        if at not in added
        else TokenType.CONTROL
        if added[at]["special"]
        else TokenType.USER_DEFINED
        for at in range(len(tokens))
    ]
    before, alone = (own.encode("a", add_special_tokens=each).ids for each in (True, False))
    found: Metadata = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.add_bos_token": before[:1] != alone[:1],
        "tokenizer.ggml.add_eos_token": before[-1:] != alone[-1:],
    }
    unknown = model.get("unk_token")
    if model["type"] == "Unigram":
        unknown = pieces[model["unk_id"]] if model.get("unk_id") is not None else None
        found |= _of_unigrams(content, tokens)
    elif model["type"] != "BPE":
        raise _unsupported(f"its tokenizer is a {model['type']}, which is not written")
    elif model.get("byte_fallback"):
        found |= _of_sentence_piece(model["merges"], tokens)
    else:
        found |= {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": _name_of(own, ignore_merges=bool(model.get("ignore_merges"))),
            "tokenizer.ggml.merges": [each if isinstance(each, str) else " ".join(each) for each in model["merges"]],
        }
    if found["tokenizer.ggml.model"] != "gpt2":
        found["tokenizer.ggml.add_space_prefix"] = (
            own.encode("a", add_special_tokens=False).tokens[0].startswith(_SPACE)
        )
        for at, token in named.items():
            if at not in added or token == unknown:
                kinds[at] = (
                    TokenType.UNKNOWN if token == unknown else TokenType.BYTE if _BYTE.fullmatch(token) else kinds[at]
                )
    found["tokenizer.ggml.token_type"] = list(map(int, kinds))
    ends = read_record(checkpoint / "generation_config.json", _MOST_TOKENIZER).get("eos_token_id")
    for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        token = said.get(f"{role}_token") or (unknown if role == "unk" else None)
        token = token.get("content") if isinstance(token, dict) else token
        if token in tokens:
            found[f"tokenizer.ggml.{key}_token_id"] = tokens.index(token)
    if isinstance(ends, int) or (isinstance(ends, list) and ends):
        found["tokenizer.ggml.eos_token_id"] = ends if isinstance(ends, int) else ends[0]
    template = checkpoint / "chat_template.jinja"
    chat = read_untrusted(template, _MOST_TOKENIZER).decode() if template.is_file() else said.get("chat_template")
    if isinstance(chat, str) and chat:
        found["tokenizer.chat_template"] = chat
    return found


def _of_sentence_piece(merges: list[Any], tokens: list[str]) -> Metadata:
    """Neighbours merged in the order of the scores of what they make: the earlier a token's first merge, the higher its
    score.  What no merge makes has the lowest."""
    made = ("".join(each.split(" ", 1) if isinstance(each, str) else each) for each in merges)
    order = {token: float(-rank) for rank, token in enumerate(dict.fromkeys(made))}
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": [order.get(token, float(-len(order))) for token in tokens],
    }


def _of_unigrams(content: Mapping[str, Any], tokens: list[str]) -> Metadata:
    """The most probable division into tokens."""
    scores = dict(content["model"]["vocab"])
    found: Metadata = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": [float(scores.get(token, 0.0)) for token in tokens],
    }
    steps = content.get("normalizer") or {}
    for step in steps.get("normalizers", [steps]):
        if step.get("type") == "Precompiled":
            found["tokenizer.ggml.precompiled_charsmap"] = base64.b64decode(step["precompiled_charsmap"])
        if step.get("type") == "Replace" and step["pattern"].get("Regex") == " {2,}":
            found["tokenizer.ggml.remove_extra_whitespaces"] = True
    return found


def _name_of(own: Any, *, ignore_merges: bool) -> str:
    """llama.cpp's name of how a tokenizer splits text: that of the first which splits a sample alike."""
    wanted = _pieces(own.pre_tokenizer)
    tried: dict[PreTokenizer, bool] = {}
    for name, pre in PRE_TOKENIZERS.items():
        if not pre.bytes_as_characters or pre.ignore_merges != ignore_merges or name == "default":
            continue
        if pre not in tried:
            tried[pre] = _pieces(_splitter(pre)) == wanted
        if tried[pre]:
            return name
    raise _unsupported("its tokenizer splits text in a way that llama.cpp has no name for")


def _splitter(pre: PreTokenizer) -> Any:
    from tokenizers import Regex, pre_tokenizers

    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _pieces(splitter: Any) -> list[str]:
    return [piece for piece, _ in splitter.pre_tokenize_str(_SAMPLE)] if splitter is not None else []


def same_tokens(checkpoint: Path, files: Mapping[str, str]) -> bool:
    from tokenizers import Tokenizer

    own = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    again = Tokenizer.from_str(files["tokenizer.json"])
    texts = [_SAMPLE, *re.split(r"(?<=\s)", _SAMPLE)]
    return all(own.encode(text).ids == again.encode(text).ids for text in texts)


def _unsupported(why: str) -> EngineError:
    return EngineError(ErrorCode.MODEL_UNSUPPORTED, f"This model cannot be written as llama.cpp has it: {why}.")
